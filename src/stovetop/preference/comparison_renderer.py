"""How a comparison is put to a model that judges: as a chat that shows both answers, and asks for one token.

Shape suffixes: `N` tokens of one example.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from stovetop.arguments import is_local
from stovetop.errors import InvalidRequest
from stovetop.model_families import recommended_renderer_name
from stovetop.model_store import find_model
from stovetop.preference.types import LABELS, Comparison, Label, LabeledComparison
from stovetop.renderers import get_renderer
from stovetop.renderers.base import Renderer, SupervisedExample, TrainOnWhat
from stovetop.renderers.messages import Message, ensure_list
from stovetop.tokenizer import get_tokenizer
from stovetop.types import ModelInput

_ANY = Comparison(
    [Message(role="user", content="q")],
    [Message(role="assistant", content="a")],
    [Message(role="assistant", content="b")],
)


class ComparisonRenderer(Protocol):
    """The language in which a judge reads comparisons and answers with one token."""

    @property
    def label_of_token(self) -> Mapping[int, Label]:
        """What each token that is an answer says."""
        ...

    def build_generation_prompt(self, comparison: Comparison) -> ModelInput:
        """Both answers, and the question which is better."""
        ...

    def to_model_input_weights(self, labeled: LabeledComparison) -> SupervisedExample:
        """The prompt and the token that answers it, which alone has a weight: 1."""
        ...


@dataclass(frozen=True, slots=True)
class ComparisonRendererFromChatRenderer:
    """A ComparisonRenderer that writes a chat: the prompt, each completion after a system message that announces it,
    and a last one that asks. The assistant then answers "A", "B" or "Tie"; of that only the first token is trained and
    read. The model must be able to read text and system messages anywhere in a chat."""

    renderer: Renderer
    label_of_token: Mapping[int, Label] = field(init=False)

    def __post_init__(self) -> None:
        tokens = {label: self.to_model_input_weights(LabeledComparison(_ANY, label)).model_input for label in LABELS}
        label_of_token = {tokens[label].to_ints()[-1]: label for label in LABELS}
        if len(label_of_token) < len(LABELS):
            raise InvalidRequest(
                f"the renderer begins the answers {', '.join(LABELS)} with the same token, so one token cannot tell "
                f"them apart; use another renderer: {type(self.renderer).__name__}"
            )
        object.__setattr__(self, "label_of_token", label_of_token)

    def build_generation_prompt(self, comparison: Comparison) -> ModelInput:
        return self.renderer.build_generation_prompt(_chat(comparison))

    def to_model_input_weights(self, labeled: LabeledComparison) -> SupervisedExample:
        chat = [*_chat(labeled.comparison), Message(role="assistant", content=labeled.label)]
        example = self.renderer.build_supervised_example(chat, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
        end = int(np.flatnonzero(example.weights)[0]) + 1
        return SupervisedExample(ModelInput.from_ints(example.model_input.to_ints()[:end]), example.weights[:end])


def _chat(comparison: Comparison) -> list[Message]:
    chat: list[Message] = [
        *comparison.prompt_conversation,
        Message(role="system", content="==== Completion A ===="),
        *comparison.completion_A,
        Message(role="system", content="==== Completion B ===="),
        *comparison.completion_B,
        Message(role="system", content="==== Preference ===="),
    ]
    for message in chat:
        if any(part["type"] == "image" for part in ensure_list(message["content"])):
            raise InvalidRequest(f"a comparison is judged as text and cannot hold an image; remove it: {message}")
    return chat


def check_judge(base_url: str | None, model_name: str, renderer_name: str | None) -> None:
    """Refuses a model that would begin all judgements alike, as `ComparisonRendererFromChatRenderer` does, where it is
    on this machine and would be trained here; else that is known when it is loaded."""
    if is_local(base_url) and find_model(model_name) is not None:
        tokenizer = get_tokenizer(model_name)
        renderer = get_renderer(renderer_name or recommended_renderer_name(tokenizer), tokenizer)
        ComparisonRendererFromChatRenderer(renderer)
