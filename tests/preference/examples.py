"""Comparisons and judges for the tests of this package."""

from dataclasses import dataclass, field

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.preference.types import Comparison, Label, LabeledComparison
from stovetop.renderers.messages import Message, get_text_content
from stovetop.renderers.template import ChatTemplateRenderer

RENDERER = ChatTemplateRenderer(ByteTokenizer())


def said(role: str, text: str) -> Message:
    return Message(role=role, content=text)


def comparison(question: str = "q", a: str = "first", b: str = "second") -> Comparison:
    return Comparison([said("user", question)], [said("assistant", a)], [said("assistant", b)])


def labeled(label: Label = "A", question: str = "q", a: str = "first", b: str = "second") -> LabeledComparison:
    return LabeledComparison(comparison(question, a, b), label)


def texts(one: Comparison) -> tuple[str, str]:
    """The last words of A and of B."""
    return get_text_content(one.completion_A[-1]), get_text_content(one.completion_B[-1])


@dataclass
class Judge:
    """Looks its scores up by the texts of A and B, and keeps what it was asked."""

    scores: dict[tuple[str, str], float]
    asked: list[tuple[str, str]] = field(default_factory=list)

    async def __call__(self, one: Comparison) -> float:
        self.asked.append(texts(one))
        return self.scores[texts(one)]
