import copy

import pytest

from renderers import real_tokenizers
from renderers.conversations import Features, conversation
from renderers.languages import chat, mask
from renderers.oracle import Oracle, trl_template
from stovetop.errors import InvalidRequest
from stovetop.renderers import get_renderer
from stovetop.renderers.base import ParseTermination, TrainOnWhat
from stovetop.renderers.llama3 import Llama3Renderer
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, ToolSpec, UnparsedToolCall

BOS = "<|begin_of_text|>"
DATED = (
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)


@pytest.fixture
def renderer() -> Llama3Renderer:
    return Llama3Renderer(real_tokenizers.llama3())


@pytest.fixture
def dated() -> Llama3Renderer:
    return Llama3Renderer(real_tokenizers.llama3(), date="26 Jul 2024")


# ---- what the model sees -----------------------------------------------------------------------------------------

_QUESTION = [128006, 882, 128007, 271, 3923, 374, 220, 17, 10, 17, 30, 128009]  # What is 2+2?
_ANSWER = [128006, 78191, 128007, 271]
_TERSE = [3513, 51637, 13, 128009]  # Be terse.
_SYSTEM = [128006, 9125, 128007, 271]
_DATE = [38766, 1303, 33025, 2696, 25, 6790, 220, 2366, 18, 198, 15724, 2696, 25, 220, 1627, 10263, 220, 2366, 19, 271]


def test_a_prompt_has_the_ids_of_the_published_model(renderer: Llama3Renderer, dated: Llama3Renderer) -> None:
    plain, with_system = chat("What is 2+2?"), chat("What is 2+2?", system="Be terse.")
    assert renderer.build_generation_prompt(plain).to_ints() == [128000, *_QUESTION, *_ANSWER]
    assert renderer.build_generation_prompt(with_system).to_ints() == [
        *(128000, *_SYSTEM, *_TERSE, *_QUESTION, *_ANSWER)
    ]
    assert dated.build_generation_prompt(plain).to_ints() == [*(128000, *_SYSTEM, *_DATE, 128009, *_QUESTION, *_ANSWER)]
    assert dated.build_generation_prompt(with_system).to_ints() == [
        *(128000, *_SYSTEM, *_DATE, *_TERSE, *_QUESTION, *_ANSWER)
    ]


def test_a_whole_chat_has_the_ids_of_the_published_model(renderer: Llama3Renderer, dated: Llama3Renderer) -> None:
    messages = chat("What is 2+2?", "4")
    example, later = renderer.build_supervised_example(messages), dated.build_supervised_example(messages)
    assert example.model_input.to_ints() == [128000, *_QUESTION, *_ANSWER, 19, 128009]
    assert later.model_input.to_ints() == [128000, *_SYSTEM, *_DATE, 128009, *_QUESTION, *_ANSWER, 19, 128009]


@pytest.mark.parametrize(
    ("template", "options", "date"),
    [("llama3_1", {"date_string": "26 Jul 2024"}, "26 Jul 2024"), ("llama3_2", {}, "05 Aug 2025")],
)
def test_with_a_date_chats_are_those_of_later_versions(
    template: str, options: dict[str, object], date: str, num_conversations: int
) -> None:
    oracle = Oracle(trl_template(template), {"bos_token": BOS, **options})
    tokenizer = real_tokenizers.llama3()
    renderer = get_renderer("llama3", tokenizer, date=date)
    for seed in range(num_conversations):
        messages = conversation(seed, Features(thinking=False, tools=False))
        prompt = renderer.build_generation_prompt(messages[:-1]).to_ints()
        assert prompt == oracle.tokens(tokenizer, messages[:-1], prompt=True)
        example = renderer.build_supervised_example(messages)
        assert example.model_input.to_ints() == oracle.tokens(tokenizer, messages, prompt=False)
        assert example.model_input.to_ints()[: len(prompt)] == prompt
        assert not example.weights[: len(prompt)].any()


def test_an_empty_chat_prompts_for_its_first_message(renderer: Llama3Renderer, dated: Llama3Renderer) -> None:
    decode = renderer.tokenizer.decode
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert decode(renderer.build_generation_prompt([]).to_ints()) == BOS + header
    assert decode(dated.build_generation_prompt([]).to_ints()) == f"{BOS}{DATED}<|eot_id|>{header}"


# ---- what is trained ---------------------------------------------------------------------------------------------


def _turn(role: str, said: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{said}"


@pytest.mark.parametrize(
    ("mode", "trained"),
    [
        (TrainOnWhat.LAST_ASSISTANT_MESSAGE, {4}),
        (TrainOnWhat.LAST_ASSISTANT_TURN, {4}),
        (TrainOnWhat.ALL_ASSISTANT_MESSAGES, {2, 4}),
        (TrainOnWhat.ALL_MESSAGES, {0, 1, 2, 3, 4}),
        (TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES, {0, 1, 3}),
        (TrainOnWhat.CUSTOMIZED, {1, 4}),
    ],
)
def test_messages_are_trained_with_the_token_that_ends_them(
    renderer: Llama3Renderer, mode: TrainOnWhat, trained: set[int]
) -> None:
    messages = chat("U1", "A1", "U2", "A2", system="S")
    if mode is TrainOnWhat.CUSTOMIZED:
        messages = [Message(**message, trainable=index in trained) for index, message in enumerate(messages)]
    expected = BOS + "".join(
        _turn(
            message["role"],
            f"¦{message['content']}<|eot_id|>¦" if index in trained else f"{message['content']}<|eot_id|>",
        )
        for index, message in enumerate(messages)
    )
    assert mask(renderer, renderer.build_supervised_example(messages, mode)) == expected


def test_the_date_is_trained_with_all_tokens_alone(dated: Llama3Renderer) -> None:
    messages = chat("U", "A", system="S")
    said = f"{_turn('user', 'U<|eot_id|>')}{_turn('assistant', 'A<|eot_id|>')}"
    example = dated.build_supervised_example(messages, TrainOnWhat.ALL_TOKENS)
    assert mask(dated, example) == f"{BOS}¦{DATED}S<|eot_id|>{said}¦"
    example = dated.build_supervised_example(messages, TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES)
    assert mask(dated, example).startswith(f"{BOS}{DATED}¦S<|eot_id|>¦")


def test_one_example_is_enough(renderer: Llama3Renderer) -> None:
    examples = renderer.build_supervised_examples(chat("U1", "A1", "U2", "A2"), TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    assert len(examples) == 1


# ---- what it cannot say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Message(role="tool", content="7"),
        Message(role="assistant", content="", tool_calls=[ToolCall(FunctionCall("f", "{}"))]),
        Message(role="assistant", content="", unparsed_tool_calls=[UnparsedToolCall("{", "no JSON")]),
        Message(role="user", content=[{"type": "image", "image": "cat.png"}]),
        Message(role="assistant", content=[{"type": "thinking", "thinking": "R"}]),
    ],
)
def test_tools_images_and_thinking_are_refused(renderer: Llama3Renderer, message: Message) -> None:
    with pytest.raises(InvalidRequest, match=r"llama3.* message 1"):
        renderer.build_generation_prompt([*chat("U"), message])


def test_tools_cannot_be_declared(renderer: Llama3Renderer) -> None:
    with pytest.raises(InvalidRequest, match=r"llama3 has no tools: \['f'\]"):
        renderer.create_conversation_prefix_with_tools([ToolSpec("f", "", {})])


def test_the_date_cannot_hold_a_control_token() -> None:
    renderer = Llama3Renderer(real_tokenizers.llama3(), date="<|eot_id|>")
    assert renderer.build_generation_prompt([]).to_ints().count(128009) == 1


# ---- what it reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "termination"),
    [
        ("hi<|eot_id|>", "hi", ParseTermination.STOP_SEQUENCE),
        ("hi", "hi", ParseTermination.MALFORMED),
        ("hi<|eot_id|>ho<|eot_id|>", "hi", ParseTermination.MALFORMED),
        ("", "", ParseTermination.MALFORMED),
    ],
)
def test_how_an_answer_ended_is_told(
    renderer: Llama3Renderer, text: str, content: str, termination: ParseTermination
) -> None:
    message, how = renderer.parse_response(renderer.tokenizer.encode(text, add_special_tokens=False))
    assert message == {"role": "assistant", "content": content}
    assert how is termination
    assert renderer.get_stop_sequences() == [128009]


def test_a_copy_has_the_same_date(dated: Llama3Renderer) -> None:
    assert copy.copy(dated).date == "26 Jul 2024"
