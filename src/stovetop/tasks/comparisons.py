"""Public data sets of comparisons, by name: `dataset=hhh`, `helpsteer3`, `ultrafeedback`, or comparisons of your own.
What else a config can name, and several at once, is said in `named_data.load_data`. `sample:hhh` and the others, which
the package ships, have rows of the same form: a few, for tests and demonstrations.
"""

import re
from collections.abc import Sequence

from stovetop.datasets import Row
from stovetop.kitchen.stage import stage
from stovetop.named_data import LeftOut, Published, PublishedRows, Table
from stovetop.preference.datasets import LabeledComparisons
from stovetop.preference.types import Comparison, Label, LabeledComparison, labeled_comparison_from_json
from stovetop.renderers.messages import Message, Role
from stovetop.runs import Run

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}


@stage(writes="comparisons")
def load_named_comparisons(
    dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0
) -> LabeledComparisons:
    """The comparisons to train on, of a named data set or of a file, and those held out."""
    loaded = load(dataset, test_dataset, test_size, revisions=run.revisions)
    run.record_data(dataset, loaded)
    return LabeledComparisons(loaded.train, loaded.test, loaded.num_left_out)


# ---- rows --------------------------------------------------------------------------------------------------------


def parse_hhh(row: Row) -> LabeledComparison | LeftOut:
    """`chosen` and `rejected` are transcripts, "\\n\\nHuman: ...\\n\\nAssistant: ...". Only those count that differ in
    the last answer alone."""
    chosen, rejected = _transcript(row.get("chosen")), _transcript(row.get("rejected"))
    if not chosen or not rejected:
        return LeftOut("it is no pair of transcripts in which people and assistant take turns")
    if chosen[:-1] != rejected[:-1]:
        return LeftOut("its transcripts differ before the last answer")
    return _labeled(chosen[:-1], chosen[-1]["content"], rejected[-1]["content"], "A")


def parse_helpsteer3(row: Row) -> LabeledComparison | LeftOut:
    """`overall_preference` is below 0 where `response1` is better, above 0 where `response2` is, and 0 where neither
    is: such a row says nothing."""
    context, preference = row.get("context"), row.get("overall_preference")
    if not isinstance(context, list) or not isinstance(preference, int | float) or isinstance(preference, bool):
        return LeftOut("it has no context or no preference")
    if preference == 0:
        return LeftOut("neither answer is preferred")
    prompt: list[Message] = []
    for turn in context:
        message = _message(turn.get("role"), turn.get("content")) if isinstance(turn, dict) else None
        if message is None:
            return LeftOut("a turn has no role that is known, or no text")
        prompt.append(message)
    return _labeled(prompt, row.get("response1"), row.get("response2"), "A" if preference < 0 else "B")


def parse_ultrafeedback(row: Row) -> LabeledComparison | LeftOut:
    """`instruction`, `chosen_response`, `rejected_response`: one turn."""
    question = _message("user", row.get("instruction"))
    if question is None:
        return LeftOut("it has no instruction")
    return _labeled([question], row.get("chosen_response"), row.get("rejected_response"), "A")


def _labeled(prompt: Sequence[Message], first: object, second: object, label: Label) -> LabeledComparison | LeftOut:
    """A comparison of two answers that differ and are not empty."""
    answers = [_message("assistant", answer) for answer in (first, second)]
    if not prompt or None in answers:
        return LeftOut("it has no prompt, or an answer is empty")
    if answers[0] == answers[1]:
        return LeftOut("its answers are the same")
    completion_a, completion_b = ([answer] for answer in answers if answer is not None)
    return LabeledComparison(Comparison(prompt, completion_a, completion_b), label)


def _message(role: object, content: object) -> Message | None:
    if role not in ("system", "user", "assistant") or not isinstance(content, str) or not content.strip():
        return None
    return Message(role=role, content=content)


def _transcript(text: object) -> list[Message] | None:
    """Turns in alternation, from a person's to the assistant's; None for anything else."""
    if not isinstance(text, str):
        return None
    before, *rest = _TURN.split(text)
    names, contents = rest[0::2], rest[1::2]
    turns = [_message(_ROLES[name], content.strip()) for name, content in zip(names, contents, strict=True)]
    messages = [turn for turn in turns if turn is not None]
    alternating = names == ["Human", "Assistant"] * (len(names) // 2)
    return messages if alternating and not before.strip() and len(messages) == len(turns) else None


# ---- the data sets ---------------------------------------------------------------------------------------------------

COMPARISONS: dict[str, Published[LabeledComparison]] = {
    # Helpful and harmless answers to people (Bai et al. 2022, arXiv:2204.05862): 160,800 pairs, and 8,552 to test on.
    "hhh": Published(
        train=(PublishedRows("Anthropic/hh-rlhf"),),
        test=(PublishedRows("Anthropic/hh-rlhf", "test"),),
        test_size=1024,
        parse=parse_hhh,
        schema="programs that read it: chosen, rejected",
    ),
    # Preferences of people in many domains and languages (Wang et al. 2025, arXiv:2505.11475): 38,459.
    "helpsteer3": Published(
        train=(PublishedRows("nvidia/HelpSteer3", "train", "preference"),),
        test=(PublishedRows("nvidia/HelpSteer3", "validation", "preference"),),
        test_size=1024,
        parse=parse_helpsteer3,
        schema="cards of copies of the data set: domain, language, context, response1, response2, overall_preference",
    ),
    # Answers of many models, compared by a model (Cui et al. 2023, arXiv:2310.01377): 63,619.
    "ultrafeedback": Published(
        train=(PublishedRows("argilla/ultrafeedback-binarized-preferences"),),
        test_size=1024,
        parse=parse_ultrafeedback,
        schema="the card of the data set on the hub, as a search index has it: source, instruction, chosen_response, "
        "rejected_response and more",
    ),
}

# The comparisons that a config names, to train on and held out, of these at most half. Rows of your own have `prompt`,
# `chosen` and `rejected`.
load = Table(labeled_comparison_from_json, COMPARISONS, half_at_most=True).load
