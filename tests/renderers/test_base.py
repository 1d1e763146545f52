import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers.languages import chat, chatml
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.base import (
    ParseTermination,
    RenderContext,
    RenderedMessage,
    Span,
    TrainOnWhat,
    encode_pieces,
    generation_prompt,
    parse_response_for_stop_token,
    render_messages,
    supervised_example,
    tokens_weights_from_strings_weights,
    trained_messages,
    weigh,
)
from stovetop.renderers.messages import Message, ensure_text
from stovetop.tokenizer import SafeEncoder
from stovetop.types import EncodedTextChunk, ImageChunk

BYTES = ByteTokenizer()
STOP = BYTES.eos_token_id
TOOL = Message(role="tool", content="7")
ROUNDS = [*chat("u", "a", "u", "a", system="s"), TOOL, Message(role="assistant", content="a")]


@pytest.mark.parametrize(
    ("train_on_what", "trained"),
    [
        (TrainOnWhat.LAST_ASSISTANT_MESSAGE, [6]),
        (TrainOnWhat.LAST_ASSISTANT_TURN, [4, 6]),
        (TrainOnWhat.ALL_ASSISTANT_MESSAGES, [2, 4, 6]),
        (TrainOnWhat.ALL_MESSAGES, [0, 1, 2, 3, 4, 5, 6]),
        (TrainOnWhat.ALL_TOKENS, [0, 1, 2, 3, 4, 5, 6]),
        (TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES, [0, 1, 3]),
    ],
)
def test_which_messages_each_mode_trains(train_on_what: TrainOnWhat, trained: list[int]) -> None:
    assert [index for index, yes in enumerate(trained_messages(ROUNDS, train_on_what)) if yes] == trained


def test_customized_needs_a_flag_on_every_message_and_nothing_else_takes_one() -> None:
    flagged: list[Message] = [{**message, "trainable": message["content"] == "u"} for message in ROUNDS]
    assert trained_messages(flagged, TrainOnWhat.CUSTOMIZED) == [False, True, False, True, False, False, False]
    with pytest.raises(InvalidRequest, match=r"customized needs trainable=True or False on message 2"):
        trained_messages([*flagged[:2], *ROUNDS[2:]], TrainOnWhat.CUSTOMIZED)
    with pytest.raises(
        InvalidRequest, match=r"message 0 has trainable=False, which only train_on_what=customized reads"
    ):
        trained_messages(flagged, TrainOnWhat.ALL_MESSAGES)


def test_the_last_message_must_be_the_assistants_to_be_trained_on_as_such() -> None:
    with pytest.raises(InvalidRequest, match="its roles are: user, assistant, user"):
        trained_messages(chat("u", "a", "u"), TrainOnWhat.LAST_ASSISTANT_MESSAGE)


def test_a_misspelt_mode_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'all_assistant_messages'"):
        TrainOnWhat("all_assistants_messages")


def test_a_termination_refuses_to_be_a_truth_value() -> None:
    assert ParseTermination.EOS.is_clean
    assert not ParseTermination.EOS.is_stop_sequence
    assert not ParseTermination.MALFORMED.is_clean
    with pytest.raises(TypeError, match=r"ask \.is_clean"):
        bool(ParseTermination.MALFORMED)


# ---- rendered text to tokens -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(" \nathe<|", max_size=6), st.sampled_from([0.0, 1.0]))))
def test_weights_stay_with_their_text_however_it_is_cut(texts: list[tuple[str, float]]) -> None:
    encoder = SafeEncoder.of(chatml())
    example = weigh(encoder, [Span((text,), weight) for text, weight in texts])
    tokens = example.model_input.to_ints()
    assert len(example.weights) == len(tokens)
    trained = [token for token, weight in zip(tokens, example.weights, strict=True) if weight]
    assert chatml().decode(trained) == "".join(text for text, weight in texts if weight)
    assert chatml().decode(tokens) == "".join(text for text, _ in texts)


def test_text_of_one_weight_is_encoded_in_one_piece() -> None:
    encoder = SafeEncoder.of(chatml())
    example = weigh(encoder, [Span(("\n",), 0.0), Span(("\n", "the"), 0.0)])
    assert example.model_input.to_ints() == chatml().encode("\n\nthe")
    assert len(example.model_input.to_ints()) < 3  # the two line breaks are one token


def test_an_image_keeps_its_place_and_has_no_weight() -> None:
    image = ImageChunk(b"", "png", expected_tokens=3)
    example = weigh(SafeEncoder.of(BYTES), [Span(("ab", image, "c"), 1.0), Span(("d",), 0.0)])
    assert example.model_input.chunks == (EncodedTextChunk(b"ab"), image, EncodedTextChunk(b"cd"))
    assert example.weights.tolist() == [1, 1, 0, 0, 0, 1, 0]


def test_no_text_makes_no_chunk() -> None:
    assert encode_pieces(SafeEncoder.of(BYTES), ("", "")).chunks == ()


# ---- families that write each message by itself ------------------------------------------------------------------


def shout(message: Message, context: RenderContext) -> RenderedMessage:
    header = f"{message['role'][0].upper()}>"
    return RenderedMessage(header, (ensure_text(message["content"]), "<|im_end|>"), stop_overlap="~")


def test_a_family_says_how_it_writes_one_message_and_gets_the_rest() -> None:
    encoder = SafeEncoder.of(BYTES)
    messages = chat("u", "a", "v", "b")
    rendered = render_messages(shout, messages)
    prompt = generation_prompt(encoder, rendered[:-1], "A>", prefill="hm").to_ints()
    example = supervised_example(encoder, rendered, messages, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    tokens = example.model_input.to_ints()
    assert BYTES.decode(prompt) == "<|bos|>U>u<|im_end|>A>a<|im_end|>U>v<|im_end|>A>hm"
    assert BYTES.decode(tokens) == "<|bos|>U>u<|im_end|>A>a<|im_end|>U>v<|im_end|>A>b<|im_end|>~"
    assert tokens[: len(prompt) - 2] == prompt[:-2]
    assert BYTES.decode(np.array(tokens)[example.weights > 0].tolist()) == "b<|im_end|>~"


def test_a_message_is_told_where_it_stands() -> None:
    seen: list[RenderContext] = []

    def watch(message: Message, context: RenderContext) -> RenderedMessage:
        seen.append(context)
        return RenderedMessage("", ())

    messages = chat("u", "a", "v", "b")
    render_messages(watch, messages)
    assert [context.idx for context in seen] == [0, 1, 2, 3]
    assert [context.is_last for context in seen] == [False, False, False, True]
    assert [context.in_last_assistant_turn for context in seen] == [False, False, False, True]
    assert {context.last_user_index for context in seen} == {2}
    assert seen[1].prev_message is messages[0]
    assert seen[1].next_message is messages[2]
    assert seen[0].prev_message is seen[3].next_message is None


# ---- sampled tokens to a message ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "text", "termination"),
    [
        ([*b"hi", 258], "hi", ParseTermination.STOP_SEQUENCE),
        ([258], "", ParseTermination.STOP_SEQUENCE),
        ([*b"hi", STOP], "hi", ParseTermination.EOS),
        ([*b"hi"], "hi", ParseTermination.MALFORMED),
        ([], "", ParseTermination.MALFORMED),
        ([*b"hi", 258, 258], "hi", ParseTermination.MALFORMED),
        ([*b"hi", 258, *b"more"], "hi", ParseTermination.MALFORMED),
        ([*b"hi", 258, STOP], "hi", ParseTermination.MALFORMED),
        ([*b"hi", STOP, *b"yo", STOP], "hi<|im_end|>yo<|im_end|>", ParseTermination.MALFORMED),
        ([*b"hi", 257], "hi<|endoftext|>", ParseTermination.MALFORMED),
    ],
)
def test_how_a_response_ended_is_told(tokens: list[int], text: str, termination: ParseTermination) -> None:
    message, how = parse_response_for_stop_token(tokens, BYTES, stop_token=BYTES.convert_tokens_to_ids("<|im_start|>"))
    assert message == {"role": "assistant", "content": text}
    assert how is termination


def test_only_the_first_string_gets_the_tokenizers_own_tokens() -> None:
    tokens, weights = tokens_weights_from_strings_weights([("ab", 0.0), ("c", 1.0), ("", 0.5)], BYTES)
    assert tokens == [BYTES.bos_token_id, *b"abc"]
    assert weights.tolist() == [0, 0, 0, 1]
    assert weights.dtype == np.float32
