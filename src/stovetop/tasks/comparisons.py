"""Three public datasets of comparisons, and how their rows are read. `sample:hhh`, `sample:helpsteer3` and
`sample:ultrafeedback`, which the package ships, have rows of the same form: a few, for tests and demonstrations.

A parser returns None for a row that is no comparison; it is then left out and counted.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from stovetop.datasets import Row, published, sample_names
from stovetop.preference.datasets import ComparisonDatasetBuilderFromRows, comparisons_from_jsonl
from stovetop.preference.types import Comparison, Label, LabeledComparison
from stovetop.renderers.messages import Message, Role

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}


def hhh(source: str = "Anthropic/hh-rlhf", *, test_size: int = 1024) -> ComparisonDatasetBuilderFromRows:
    """Helpful and harmless answers to people (Bai et al. 2022, arXiv:2204.05862)."""
    return ComparisonDatasetBuilderFromRows(
        source=source, example_to_labeled_comparison=parse_hhh, test_size=test_size, shuffle_seed=0
    )


def helpsteer3(source: str = "nvidia/HelpSteer3", *, test_size: int = 0) -> ComparisonDatasetBuilderFromRows:
    """Preferences of people in many domains and languages (Wang et al. 2025, arXiv:2505.11475). On the hub it has a
    validation split to test on; `test_size` is for other sources."""
    return ComparisonDatasetBuilderFromRows(
        source=source,
        example_to_labeled_comparison=parse_helpsteer3,
        test_split="validation" if source == "nvidia/HelpSteer3" else None,
        test_size=test_size,
        shuffle_seed=0,
    )


def ultrafeedback(
    source: str = "argilla/ultrafeedback-binarized-preferences", *, test_size: int = 1024
) -> ComparisonDatasetBuilderFromRows:
    """Answers of many models, compared by a model (Cui et al. 2023, arXiv:2310.01377)."""
    return ComparisonDatasetBuilderFromRows(
        source=source, example_to_labeled_comparison=parse_ultrafeedback, test_size=test_size, shuffle_seed=0
    )


COMPARISONS: dict[str, Callable[..., ComparisonDatasetBuilderFromRows]] = {
    "hhh": hhh,
    "helpsteer3": helpsteer3,
    "ultrafeedback": ultrafeedback,
}


def comparisons_of(dataset: str, test_dataset: str | None, test_size: int) -> ComparisonDatasetBuilderFromRows:
    """A data set of the table by its name, its sample (`sample:hhh`), or rows of `prompt`, `chosen` and `rejected`.
    Held out are those of `test_dataset`, whose rows have the same form; or of a test split that a published data set
    has; or `test_size`."""
    samples = {f"sample:{name}": builder for name, builder in COMPARISONS.items() if name in sample_names()}
    named = published(dataset, COMPARISONS | samples)
    if named is None:
        return comparisons_from_jsonl(dataset, test_dataset, test_size=test_size)
    sources = (dataset,) if dataset in samples else ()
    builder = named(*sources, test_size=test_size)
    return builder if test_dataset is None else replace(builder, test_source=test_dataset, test_split=None)


# ---- rows --------------------------------------------------------------------------------------------------------


def parse_hhh(row: Row) -> LabeledComparison | None:
    """`chosen` and `rejected` are transcripts, "\\n\\nHuman: ...\\n\\nAssistant: ...". Only those count that differ in
    the last answer alone."""
    chosen, rejected = _transcript(row.get("chosen")), _transcript(row.get("rejected"))
    if not chosen or not rejected or chosen[:-1] != rejected[:-1] or chosen[-1] == rejected[-1]:
        return None
    return _labeled(chosen[:-1], chosen[-1]["content"], rejected[-1]["content"], "A")


def parse_helpsteer3(row: Row) -> LabeledComparison | None:
    """`overall_preference` is below 0 where `response1` is better, above 0 where `response2` is, and 0 where neither
    is: such a row says nothing."""
    context, preference = row.get("context"), row.get("overall_preference")
    if not isinstance(context, list) or not isinstance(preference, int | float) or preference == 0:
        return None
    prompt: list[Message] = []
    for turn in context:
        message = _message(turn.get("role"), turn.get("content")) if isinstance(turn, dict) else None
        if message is None:
            return None
        prompt.append(message)
    return _labeled(prompt, row.get("response1"), row.get("response2"), "A" if preference < 0 else "B")


def parse_ultrafeedback(row: Row) -> LabeledComparison | None:
    """`instruction`, `chosen_response`, `rejected_response`: one turn."""
    question = _message("user", row.get("instruction"))
    if question is None:
        return None
    return _labeled([question], row.get("chosen_response"), row.get("rejected_response"), "A")


def _labeled(prompt: Sequence[Message], first: object, second: object, label: Label) -> LabeledComparison | None:
    """A comparison of two answers that differ and are not empty."""
    answers = [_message("assistant", answer) for answer in (first, second)]
    if not prompt or None in answers or answers[0] == answers[1]:
        return None
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
