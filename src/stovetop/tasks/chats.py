"""Public data sets of chats, by name: `dataset=no_robots`, `tulu3`, `openthoughts3[:100000]`, or chats of your own.
What else a config can name, and several at once, is said in `named_data.load_data`. `sample:no_robots` and the others,
which the package ships, have rows of the same form: a few, for tests and demonstrations.
"""

from typing import cast

from stovetop.datasets import Row, Split, chat_of_row
from stovetop.errors import InvalidRequest
from stovetop.kitchen.stage import stage
from stovetop.named_data import LeftOut, Published, PublishedRows, Table
from stovetop.renderers.messages import Message, Role, messages_from_json
from stovetop.runs import Run

PlacedChat = tuple[int, list[Message]]  # a chat, and its index in its source

_SENDERS: dict[object, Role] = {"system": "system", "human": "user", "gpt": "assistant", "assistant": "assistant"}


@stage(writes="chats")
def load_named_chats(
    dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0, seed: int = 0
) -> Split[PlacedChat]:
    """The chats to train on, of a named data set or of a file, and those held out."""
    loaded = load(dataset, test_dataset, test_size, seed, run.revisions)
    run.record_data(dataset, loaded)
    return loaded.placed()


# ---- rows ------------------------------------------------------------------------------------------------------------


def parse_messages(row: Row) -> list[Message] | LeftOut:
    """`messages` of a role and a content each, as in No Robots and Tulu 3."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return LeftOut("it has no messages")
    try:
        chat = messages_from_json(cast(list[object], messages), "chat")
    except InvalidRequest:
        return LeftOut("a message has no role that is known, or no content")
    return _with_an_answer(chat)


def parse_openthoughts3(row: Row) -> list[Message] | LeftOut:
    """`conversations` of a sender (`from`) and a text (`value`) each; the sender is "human" or "gpt"."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        return LeftOut("it has no conversations")
    chat: list[Message] = []
    for turn in turns:
        role = _SENDERS.get(turn.get("from")) if isinstance(turn, dict) else None
        text = turn.get("value") if isinstance(turn, dict) else None
        if role is None or not isinstance(text, str):
            return LeftOut("a turn has no sender that is known, or no text")
        chat.append(Message(role=role, content=text))
    return _with_an_answer(chat)


def _with_an_answer(chat: list[Message]) -> list[Message] | LeftOut:
    if not any(message["role"] == "assistant" for message in chat):
        return LeftOut("it has no answer")
    if not any(message["content"] for message in chat if message["role"] == "assistant"):
        return LeftOut("its answer is empty")
    return chat


# ---- the data sets ---------------------------------------------------------------------------------------------------

CHATS: dict[str, Published[list[Message]]] = {
    # Instructions and answers written by people: 9,500 chats, and 500 held out.
    "no_robots": Published(
        train=(PublishedRows("HuggingFaceH4/no_robots"),),
        test=(PublishedRows("HuggingFaceH4/no_robots", "test"),),
        parse=parse_messages,
        schema="the card of the data set on the hub, as a search index has it: prompt, prompt_id, messages, category",
    ),
    # The supervised part of Tulu 3 (Lambert et al. 2024, arXiv:2411.15124): 939,343 chats of many sources.
    "tulu3": Published(
        train=(PublishedRows("allenai/tulu-3-sft-mixture"),),
        test_size=1024,
        parse=parse_messages,
        schema="the card of the data set on the hub, as a search index has it: id, messages, source",
    ),
    # Long reasoning of QwQ-32B (Guha et al. 2025, arXiv:2506.04178): 1.2 million chats, sixteen to each question.
    "openthoughts3": Published(
        train=(PublishedRows("open-thoughts/OpenThoughts3-1.2M"),),
        parse=parse_openthoughts3,
        needs_limit="has 1.2 million long chats, some 60 GB",
        schema="cards of copies of the data set, and programs that read it: difficulty, source, domain, conversations",
    ),
}

# The chats that a config names, to train on and held out.
load = Table(chat_of_row, CHATS).load
