"""Prompts of public data sets, by name: `dataset=deepmath`, `tulu3`, or questions of your own. What else a config can
name, and several at once, is said in `named_data.load_data`. `sample:deepmath` and `sample:tulu3`, which the package
ships, have rows of the same form: a few, for tests and demonstrations.
"""

from stovetop.datasets import Row, Split, text_of
from stovetop.distillation.datasets import prompt_of_row
from stovetop.kitchen.stage import stage
from stovetop.named_data import LeftOut, Published, Table
from stovetop.renderers.messages import Message
from stovetop.runs import Run
from stovetop.tasks.chats import CHATS
from stovetop.tasks.problems import PROBLEMS


@stage(writes="prompts")
def load_named_prompts(
    dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0, seed: int = 0
) -> Split[list[Message]]:
    """Questions of a named data set or of a file, to train on and held out."""
    loaded = load(dataset, test_dataset, test_size, seed, run.revisions)
    run.record_data(dataset, loaded)
    return Split(loaded.train, loaded.test)


# ---- rows ------------------------------------------------------------------------------------------------------------


def parse_tulu3(row: Row) -> list[Message] | LeftOut:
    """The first message of the user."""
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and message.get("role") == "user":
            content = text_of(message, "content")
            if content is not None:
                return [Message(role="user", content=content)]
    return LeftOut("it has no message of a user")


def parse_deepmath(row: Row) -> list[Message] | LeftOut:
    """`question`."""
    question = text_of(row, "question")
    return LeftOut("it has no question") if question is None else [Message(role="user", content=question)]


# ---- the data sets: where they lie is said in `chats.py` and `problems.py` -------------------------------------------

PROMPTS: dict[str, Published[list[Message]]] = {
    "tulu3": Published(train=CHATS["tulu3"].train, parse=parse_tulu3, schema=CHATS["tulu3"].schema),
    "deepmath": Published(train=PROBLEMS["deepmath"].train, parse=parse_deepmath, schema=PROBLEMS["deepmath"].schema),
}

# The prompts that a config names, to train on and held out.
load = Table(prompt_of_row, PROMPTS).load
