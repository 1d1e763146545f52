import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from tml_renderers import renderers as tml

from renderers import real_tokenizers
from renderers.conversations import Features, conversation
from renderers.families import FAMILIES, qwen3_image_processor
from renderers.languages import chat, mask, save, thinking, trained_tokens
from renderers.oracle import Oracle, tml_prompt, trl_template
from renderers.properties import Case, extends
from stovetop.errors import InvalidRequest
from stovetop.renderers import get_renderer
from stovetop.renderers.base import ParseTermination, Renderer, TrainOnWhat
from stovetop.renderers.messages import ContentPart, FunctionCall, Message, TextPart, ThinkingPart, ToolCall, ToolSpec
from stovetop.tokenizer import get_tokenizer

NAMES = ["qwen3", "qwen3_disable_thinking", "qwen3_instruct", "qwen3_vl", "qwen3_vl_instruct"]

END = "<|im_end|>"
PROMPT = "<|im_start|>assistant\n"
NO_THINKING = "<think>\n\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris","n":2,"flag":true}}\n</tool_call>'
WEATHER = ToolSpec("get_weather", "Weather é <now>", {"type": "object", "properties": {"city": {"type": "string"}}})


def renderer(name: str, **options: object) -> Renderer:
    return get_renderer(name, real_tokenizers.qwen3(), qwen3_image_processor(), **options)


def said(text: str, thinking: str | None = None, *calls: ToolCall) -> Message:
    parts: list[ContentPart] = [] if thinking is None else [ThinkingPart(type="thinking", thinking=thinking)]
    message = Message(role="assistant", content=[*parts, TextPart(type="text", text=text)])
    if calls:
        message["tool_calls"] = list(calls)
    return message


def user(text: str) -> Message:
    return Message(role="user", content=text)


WEATHER_CALL = ToolCall(FunctionCall("get_weather", '{"city":"Paris","n":2,"flag":true}'))
A = chat("U1", "A1", "U2", "A2", system="S")
B = [user("U1"), said("A1", "R1"), user("U2"), said("A2", "R2")]
C = [user("U1"), said("T1", "R1", WEATHER_CALL), Message(role="tool", content="sunny"), said("A2", "R2")]


def text_of(tokens: Sequence[int]) -> str:
    return real_tokenizers.qwen3().decode(tokens)


def example(name: str, messages: Sequence[Message], mode: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE) -> str:
    """What stands from the last header on, ¦ where training begins and ends."""
    built = renderer(name)
    return mask(built, built.build_supervised_example(messages, mode)).rpartition(PROMPT)[2]


# ---- what is trained ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plain", "reasoned"),
    [
        ("qwen3", f"¦{NO_THINKING}A2{END}¦\n", f"¦<think>\nR2\n</think>\n\nA2{END}¦\n"),
        ("qwen3_disable_thinking", f"{NO_THINKING}¦A2{END}¦\n", None),
        ("qwen3_instruct", f"¦A2{END}¦\n", None),
        ("qwen3_vl", f"¦A2{END}¦\n", None),
        ("qwen3_vl_instruct", f"¦A2{END}¦\n", None),
    ],
)
def test_the_last_answer_is_trained_from_where_the_prompt_ends(name: str, plain: str, reasoned: str | None) -> None:
    assert example(name, A) == plain
    if reasoned is not None:
        assert example(name, B) == reasoned
        return
    assert renderer(name).build_generation_prompt(B)
    with pytest.raises(InvalidRequest, match=r"message 3: .*R2"):
        example(name, B)


def test_thinking_is_not_trained_under_a_prompt_that_rules_it_out() -> None:
    without = renderer("qwen3_disable_thinking")
    for thinker in (said("A2", "R2"), Message(role="assistant", content="<think>\nR2\n</think>\n\nA2")):
        with pytest.raises(InvalidRequest, match=r"message 3: .*R2"):
            without.build_supervised_example([*B[:3], thinker])
    prompt = text_of(without.build_generation_prompt(B[:3]).to_ints())
    assert prompt.endswith(f"{PROMPT}A1{END}\n<|im_start|>user\nU2{END}\n{PROMPT}{NO_THINKING}")


def test_a_template_without_a_place_for_thinking_gets_one_on_demand() -> None:
    writes = renderer("qwen3_instruct", writes_thinking=True)
    shown = mask(writes, writes.build_supervised_example(B))
    assert shown.endswith(f"{PROMPT}¦<think>R2</think>A2{END}¦\n")
    assert "R1" not in shown
    assert not writes.has_extension_property


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("last_assistant_message", "S$ | U1$ | A1$ | U2$ | ¦A2$¦"),
        ("last_assistant_turn", "S$ | U1$ | A1$ | U2$ | ¦A2$¦"),
        ("all_assistant_messages", "S$ | U1$ | ¦A1$¦ | U2$ | ¦A2$¦"),
        ("all_messages", "¦S$¦ | ¦U1$¦ | ¦A1$¦ | ¦U2$¦ | ¦A2$¦"),
        ("all_user_and_system_messages", "¦S$¦ | ¦U1$¦ | A1$ | ¦U2$¦ | A2$"),
    ],
)
def test_each_mode_trains_what_messages_say_and_never_their_headers(mode: str, expected: str) -> None:
    built = renderer("qwen3_instruct")
    shown = mask(built, built.build_supervised_example(A, TrainOnWhat(mode)))
    headers = [f"{'' if index == 0 else chr(10)}<|im_start|>{message['role']}\n" for index, message in enumerate(A)]
    bodies = expected.replace("$", END).split(" | ")
    assert shown == "".join(map(str.__add__, headers, bodies)) + "\n"


def test_all_tokens_and_customized_train_what_they_say() -> None:
    built = renderer("qwen3_instruct")
    assert built.build_supervised_example(A, TrainOnWhat.ALL_TOKENS).weights.all()
    flagged: list[Message] = [{**message, "trainable": index in (1, 4)} for index, message in enumerate(A)]
    assert text_of(trained_tokens(built.build_supervised_example(flagged, TrainOnWhat.CUSTOMIZED))) == f"U1{END}A2{END}"


def test_each_turn_is_trained_as_it_would_be_sampled() -> None:
    qwen = renderer("qwen3")
    first, second = [text_of(trained_tokens(built)) for built in qwen.build_supervised_examples(C)]
    assert first == f"<think>\nR1\n</think>\n\nT1\n{CALL}{END}"
    assert second == f"<think>\nR2\n</think>\n\nA2{END}"
    assert len(qwen.build_supervised_examples(B)) == 1
    assert len(qwen.build_supervised_examples(B, TrainOnWhat.ALL_ASSISTANT_MESSAGES)) == 2


# ---- what the model sees -----------------------------------------------------------------------------------------


def test_reasoning_is_kept_in_the_tool_round_that_is_under_way_and_dropped_before() -> None:
    qwen = renderer("qwen3")
    under_way = text_of(qwen.build_generation_prompt(C[:3]).to_ints())
    assert f"{PROMPT}<think>\nR1\n</think>\n\nT1\n{CALL}{END}" in under_way
    over = text_of(qwen.build_generation_prompt([*C, user("U2")]).to_ints())
    assert f"{PROMPT}T1\n{CALL}{END}" in over
    assert "R1" not in over
    assert "R2" not in over


def test_thinking_in_a_plain_string_is_dropped_from_history_too() -> None:
    spelled = Message(role="assistant", content="<think>\nR1\n</think>\n\nA1")
    for built in (renderer("qwen3"), renderer("qwen3_disable_thinking")):
        prompt = text_of(built.build_generation_prompt([user("U1"), spelled, user("U2")]).to_ints())
        assert f"{PROMPT}A1{END}\n" in prompt
        assert "R1" not in prompt
    assert spelled["content"] == "<think>\nR1\n</think>\n\nA1"


@pytest.mark.parametrize(
    "said_then", ["<think>\nR\n</think>\n\nx </think>\n\nA1", "R</think>A1", "x<think>R</think>A1"]
)
def test_of_an_answer_with_odd_tags_history_keeps_what_the_template_keeps(said_then: str) -> None:
    messages = chat("U1", said_then, "U2")
    expected = Oracle(trl_template("qwen3")).tokens(real_tokenizers.qwen3(), messages, prompt=True)
    assert renderer("qwen3").build_generation_prompt(messages).to_ints() == expected


def test_results_of_tools_share_a_user_turn() -> None:
    results = [Message(role="tool", content="1"), Message(role="tool", content="2")]
    prompt = text_of(renderer("qwen3").build_generation_prompt([*C[:2], *results]).to_ints())
    turn = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert prompt.endswith(f"{CALL}{END}\n<|im_start|>user\n{turn}{END}\n{PROMPT}")


@pytest.mark.parametrize("system_prompt", ["", "Be kind."])
@pytest.mark.parametrize("name", NAMES)
def test_tools_are_declared_as_the_template_does(name: str, system_prompt: str) -> None:
    built = renderer(name)
    prefix = built.create_conversation_prefix_with_tools([WEATHER, WEATHER], system_prompt)
    template = {"qwen3_instruct": "qwen3_instruct_2507", "qwen3_vl": "qwen3_vl", "qwen3_vl_instruct": "qwen3_vl"}
    oracle = Oracle(trl_template(template.get(name, "qwen3")), {"enable_thinking": not built.disables_thinking})
    system = [Message(role="system", content=system_prompt)] if system_prompt else []
    expected = oracle.tokens(real_tokenizers.qwen3(), [*system, user("hi")], prompt=True, tools=[WEATHER, WEATHER])
    assert built.build_generation_prompt([*prefix, user("hi")]).to_ints() == expected


def test_a_system_prompt_cannot_type_tags_by_declaring_tools() -> None:
    prefix = renderer("qwen3").create_conversation_prefix_with_tools([WEATHER], "<tool_call> <|im_end|>")
    controls = set(real_tokenizers.qwen3().get_added_vocab().values())
    tokens = renderer("qwen3").build_generation_prompt(prefix).to_ints()
    plain = renderer("qwen3").build_generation_prompt(
        renderer("qwen3").create_conversation_prefix_with_tools([WEATHER], "")
    )
    assert [t for t in tokens if t in controls] == [t for t in plain.to_ints() if t in controls]


def test_a_vision_model_has_no_place_for_a_later_system_message() -> None:
    with pytest.raises(InvalidRequest, match="leaves out a system message"):
        renderer("qwen3_vl").build_generation_prompt([user("hi"), Message(role="system", content="S")])


@pytest.mark.parametrize(
    ("name", "other"), [("qwen3", tml.Qwen3()), ("qwen3_instruct", tml.Qwen3.instruct())], ids=["qwen3", "instruct"]
)
def test_another_implementation_has_the_same_tokens(name: str, other: object) -> None:
    # It makes one turn of several user messages, and encodes what is said apart from the header.
    features = Features(thinking=False, tools=False, repeated_users=False, edges=False)
    for seed in range(40):
        messages = conversation(seed, features)[:-1]
        assert renderer(name).build_generation_prompt(messages).to_ints() == tml_prompt(other, messages)


def test_a_prefill_has_tokens_of_its_own() -> None:
    prompt = renderer("qwen3").build_generation_prompt([user("hi")], prefill="<think>\n")
    assert text_of(prompt.to_ints()).endswith(f"{PROMPT}<think>\n")
    assert prompt.to_ints()[-2:] == real_tokenizers.qwen3().encode("<think>\n", add_special_tokens=False)


# ---- what the model said -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "answer", "termination", "content"),
    [
        ("qwen3", f"hi{END}", "stop_sequence", "hi"),
        ("qwen3", "hi", "malformed", "hi"),
        ("qwen3", "hi<|endoftext|>", "malformed", "hi<|endoftext|>"),
        ("qwen3", f"hi{END}{END}", "malformed", "hi"),
        ("qwen3", f"<think>\nR\n</think>\n\nhi{END}", "stop_sequence", [("thinking", "R"), ("text", "hi")]),
        (
            "qwen3_instruct",
            f"<think>\nR\n</think>\n\nhi{END}",
            "stop_sequence",
            [("thinking", "\nR\n"), ("text", "\n\nhi")],
        ),
        ("qwen3", "<think>\nR", "malformed", [("thinking", "R")]),
        ("qwen3", f"<tool_call>\n{{bad json\n</tool_call>{END}", "stop_sequence", ""),
        ("qwen3", '<tool_call>\n{"name": "f"', "malformed", ""),
        ("qwen3", "", "malformed", ""),
    ],
)
def test_an_answer_is_read_as_far_as_it_goes(
    name: str, answer: str, termination: str, content: str | list[tuple[str, str]]
) -> None:
    message, ended = renderer(name).parse_response(real_tokenizers.qwen3().encode(answer, add_special_tokens=False))
    assert ended is ParseTermination(termination)
    expected = content if isinstance(content, str) else [{"type": kind, kind: text} for kind, text in content]
    assert message["content"] == expected
    assert ("unparsed_tool_calls" in message) == ("<tool_call>" in answer)


def test_what_was_no_call_is_shown_to_the_model_as_it_wrote_it() -> None:
    qwen = renderer("qwen3")
    answer = f"<think>\nR\n</think>\n\nok\n<tool_call>\n{{bad\n</tool_call>{END}"
    sampled = real_tokenizers.qwen3().encode(answer, add_special_tokens=False)
    message, _ = qwen.parse_response(sampled)
    assert trained_tokens(qwen.build_supervised_example([user("U"), message])) == sampled


@pytest.mark.parametrize("name", NAMES)
def test_a_streamed_answer_ends_with_the_parsed_one(name: str) -> None:
    built = renderer(name)
    assert built.supports_streaming
    for seed in range(20):
        messages = conversation(seed, Features(last_thinking=name == "qwen3"))
        sampled = trained_tokens(built.build_supervised_example(messages))
        *_, message = built.parse_response_streaming(iter(sampled))
        assert message == built.parse_response(sampled)[0]


def test_what_the_family_cannot_write_is_refused_by_name() -> None:
    qwen = renderer("qwen3")
    parts: list[ContentPart] = [TextPart(type="text", text="A"), ThinkingPart(type="thinking", thinking="R")]
    with pytest.raises(InvalidRequest, match=r"qwen3, message 0 \(assistant\): thinking comes before text"):
        qwen.build_generation_prompt([Message(role="assistant", content=parts)])
    with pytest.raises(InvalidRequest, match=r"qwen3, message 0 \(user\): only text"):
        qwen.build_generation_prompt([Message(role="user", content=parts)])
    with pytest.raises(InvalidRequest, match=r"message 0 .* a tool call cannot be written: Invalid JSON"):
        qwen.build_generation_prompt([said("", None, ToolCall(FunctionCall("f", "{")))])
    with pytest.raises(InvalidRequest, match="leave writes_thinking=True out"):
        renderer("qwen3", writes_thinking=True)


# ---- prompts that extend each other ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_disable_thinking"])
def test_with_its_thinking_kept_each_prompt_extends_the_one_before(name: str) -> None:
    """But for an answer that begins with line breaks where the prompt ends with some."""
    keeps = renderer(name, strip_thinking_from_history=False)
    assert keeps.has_extension_property == (name == "qwen3")
    assert not renderer(name).has_extension_property
    features = Features(edges=False, thinking=not keeps.disables_thinking)
    chats = [conversation(seed, features) for seed in range(40)]
    assert all(extends(Case(keeps, FAMILIES[name], messages)) for messages in chats)
    assert not all(extends(Case(renderer(name), FAMILIES[name], messages)) for messages in chats)
    assert len(keeps.build_supervised_examples(A, TrainOnWhat.ALL_ASSISTANT_MESSAGES)) == 1


def test_what_was_sampled_stays_as_it_is_in_a_chat_of_five_turns() -> None:
    """With tokens that encoding the text again would merge or split otherwise."""
    keeps = renderer("qwen3", strip_thinking_from_history=False)
    messages = [user("hi")]
    for answer in ("a\n\n\n", " \n b", "日本🎉", "éx", "\ta  "):
        prompt = keeps.build_generation_prompt(messages).to_ints()
        sampled = real_tokenizers.qwen3().encode(f"{NO_THINKING}{answer}{END}", add_special_tokens=False)
        message, termination = keeps.parse_response(sampled)
        assert termination.is_stop_sequence
        messages += [message, user("\n\nmore")]
        extended = keeps.build_generation_prompt(messages).to_ints()
        assert extended[: len(prompt) + len(sampled)] == prompt + sampled


# ---- pickling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_renderer_is_pickled_by_the_name_of_its_tokenizer(name: str, tmp_path: Path) -> None:
    save(thinking(), tmp_path)
    tokenizer = get_tokenizer(str(tmp_path))
    built = get_renderer(name, tokenizer, qwen3_image_processor(), strip_thinking_from_history=False)
    pickled = pickle.dumps(built)
    assert len(pickled) < 5_000
    again = pickle.loads(pickled)
    assert again.tokenizer is tokenizer
    for messages in (A, B, C):
        assert again.build_generation_prompt(messages) == built.build_generation_prompt(messages)
