"""The words of preference learning, as values: two answers to one prompt, and which of them is better. Where they come
from is in datasets, how one becomes tokens in comparison_renderer.

Glossary. A *comparison* is a prompt with two *completions*, A and B: each is the messages that answer the prompt, most
often one. Its *label* says which is better. The better one is *chosen*, the other *rejected*. A *tie* has neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.messages import Message, Role, messages_from_json

if TYPE_CHECKING:
    from stovetop.datasets import Row

Label = Literal["A", "B", "Tie"]
LABELS: tuple[Label, ...] = get_args(Label)

_SWAPPED: dict[Label, Label] = {"A": "B", "B": "A", "Tie": "Tie"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt."""

    prompt_conversation: Sequence[Message]
    completion_A: Sequence[Message]
    completion_B: Sequence[Message]

    def __post_init__(self) -> None:
        for name, completion in (("completion_A", self.completion_A), ("completion_B", self.completion_B)):
            if not completion or completion[-1]["role"] != "assistant":
                raise InvalidRequest(
                    f"{name} must end with an assistant message; roles: {[message['role'] for message in completion]}"
                )

    def swap(self) -> "Comparison":
        """The same two answers in the other order."""
        return Comparison(self.prompt_conversation, self.completion_B, self.completion_A)


class Answers(NamedTuple):
    """The two answers of a comparison that is not a tie."""

    chosen: Sequence[Message]
    rejected: Sequence[Message]


@dataclass(frozen=True, slots=True)
class LabeledComparison:
    """A comparison, and which answer is the better one."""

    comparison: Comparison
    label: Label

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise UnknownName("label of a comparison", str(self.label), LABELS)

    def swap(self) -> "LabeledComparison":
        """The same judgement with the answers in the other order: A becomes B, a tie stays one."""
        return LabeledComparison(self.comparison.swap(), _SWAPPED[self.label])

    def answers(self) -> Answers | None:
        """The better and the worse answer; None for a tie."""
        match self.label:
            case "A":
                return Answers(self.comparison.completion_A, self.comparison.completion_B)
            case "B":
                return Answers(self.comparison.completion_B, self.comparison.completion_A)
            case "Tie":
                return None


# ---- JSON --------------------------------------------------------------------------------------------------------


def labeled_comparison_to_json(labeled: LabeledComparison) -> "Row":
    """`{"comparison": {"prompt_conversation": [...], "completion_A": [...], "completion_B": [...]}, "label": "A"}`."""
    return asdict(labeled)


def labeled_comparison_from_json(row: Mapping[str, object], where: str = "row") -> LabeledComparison:
    """The opposite of `labeled_comparison_to_json`; or a row with `chosen` and `rejected`, as `chosen_and_rejected` has
    it. `where` names the row in errors."""
    if "comparison" not in row and "chosen" in row and "rejected" in row:
        return chosen_and_rejected(row, where)
    comparison, label = row.get("comparison"), row.get("label")
    if not isinstance(comparison, Mapping) or label not in LABELS:
        raise InvalidRequest(
            f"{where} needs 'comparison', an object, and 'label', one of {', '.join(LABELS)}, or 'chosen' and "
            f"'rejected', and 'prompt'; it has {sorted(row)} and label {label!r}"
        )
    fields = cast(Mapping[str, object], comparison)
    return LabeledComparison(
        Comparison(
            _messages(fields, "prompt_conversation", where),
            _messages(fields, "completion_A", where),
            _messages(fields, "completion_B", where),
        ),
        label,
    )


def chosen_and_rejected(row: Mapping[str, object], where: str = "row") -> LabeledComparison:
    """A row as most published sets have it: `chosen` and `rejected`, and `prompt`; each is a string, or a list of
    messages. Answers that are lists may begin with the prompt; without a `prompt` it is what both begin with. Two
    answers that are the same are a tie."""
    chosen, rejected = (_as_messages(row[name], "assistant", f"{where}: {name}") for name in ("chosen", "rejected"))
    if row.get("prompt") is None:
        alike = [one == other for one, other in zip(chosen[:-1], rejected[:-1], strict=False)]
        prompt = chosen[: alike.index(False) if False in alike else len(alike)]
    else:
        prompt = _as_messages(row["prompt"], "user", f"{where}: prompt")
    if not prompt:
        raise InvalidRequest(f"{where} needs a prompt: a string, messages, or the beginning of both answers")
    answers = [answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer for answer in (chosen, rejected)]
    return LabeledComparison(Comparison(prompt, *answers), "Tie" if answers[0] == answers[1] else "A")


def _as_messages(said: object, role: Role, where: str) -> list[Message]:
    if isinstance(said, str):
        return [Message(role=role, content=said)]
    if not isinstance(said, list) or not said:
        raise InvalidRequest(f"{where} must be a string or a list of messages: {said!r:.200}")
    return messages_from_json(cast(list[object], said), where)


def _messages(comparison: Mapping[str, object], name: str, where: str) -> list[Message]:
    messages = comparison.get(name)
    if not isinstance(messages, list):
        raise InvalidRequest(f"{where}: a comparison needs {name!r}, a list of messages: {messages!r}")
    return messages_from_json(cast(list[object], messages), f"{where}: {name}")
