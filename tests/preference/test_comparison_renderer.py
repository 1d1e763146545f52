import numpy as np
import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest
from stovetop.preference.comparison_renderer import ComparisonRendererFromChatRenderer
from stovetop.preference.types import Comparison
from stovetop.renderers.messages import Message
from stovetop.renderers.role_colon import RoleColonRenderer

from .examples import RENDERER, comparison, labeled, said

JUDGED = ComparisonRendererFromChatRenderer(RENDERER)
SHOWN = (
    "<|im_start|>user\nq<|im_end|>\n"
    "<|im_start|>system\n==== Completion A ====<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n"
    "<|im_start|>system\n==== Completion B ====<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n"
    "<|im_start|>system\n==== Preference ====<|im_end|>\n<|im_start|>assistant\n"
)


def test_a_judge_sees_the_prompt_both_answers_and_the_question():
    assert ByteTokenizer().decode(JUDGED.build_generation_prompt(comparison()).to_ints()) == SHOWN


@pytest.mark.parametrize(("label", "first_token"), [("A", "A"), ("B", "B"), ("Tie", "T")])
def test_only_the_first_token_of_the_label_is_trained_and_it_is_the_last(label, first_token):
    example = JUDGED.to_model_input_weights(labeled(label))
    assert ByteTokenizer().decode(example.model_input.to_ints()) == SHOWN + first_token
    assert np.flatnonzero(example.weights).tolist() == [example.model_input.length - 1]
    assert example.weights[-1] == 1


def test_what_is_trained_continues_what_is_sampled_from():
    prompt = JUDGED.build_generation_prompt(comparison()).to_ints()
    assert JUDGED.to_model_input_weights(labeled()).model_input.to_ints()[:-1] == prompt


def test_the_labels_are_told_apart_by_their_first_token():
    assert JUDGED.label_of_token == {ord("A"): "A", ord("B"): "B", ord("T"): "Tie"}


def test_a_renderer_that_begins_all_labels_alike_is_refused():
    with pytest.raises(InvalidRequest, match="begins the answers A, B, Tie with the same token"):
        ComparisonRendererFromChatRenderer(RoleColonRenderer(ByteTokenizer()))  # a byte after the colon is a space


def test_an_image_in_a_comparison_is_refused_in_words():
    image = Message(role="user", content=[{"type": "image", "image": "data:image/png;base64,"}])
    with pytest.raises(InvalidRequest, match="judged as text and cannot hold an image"):
        JUDGED.build_generation_prompt(Comparison([image], [said("assistant", "a")], [said("assistant", "b")]))
