import copy
import datetime
from dataclasses import replace

import pytest
from tml_renderers import renderers as tml

from renderers import real_tokenizers
from renderers.conversations import conversation
from renderers.families import FAMILIES
from renderers.languages import chat, mask, trained_tokens
from renderers.oracle import TODAY, Oracle, tml_example, tml_prompt, trl_template
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers import get_renderer
from stovetop.renderers.base import ParseTermination, TrainOnWhat
from stovetop.renderers.gpt_oss import GptOssRenderer, ReasoningEffort
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, ToolSpec

DATE = TODAY.date().isoformat()
FEATURES = FAMILIES["gpt_oss_medium_reasoning"].features
TEMPLATE = Oracle(trl_template("gptoss"), arguments_as_text=False)
START = "<|start|>assistant"
ARGUMENTS = '{"city": "Paris", "n": 2, "flag": true}'
CALLED = f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
RESULT = '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
CALLS_GO_WHERE = "Calls to these tools must go to the commentary channel: 'functions'."


@pytest.fixture
def renderer() -> GptOssRenderer:
    return GptOssRenderer(real_tokenizers.gpt_oss())


def _user(text: str) -> str:
    return f"<|start|>user<|message|>{text}<|end|>"


def _on(channel: str, text: str) -> str:
    return f"<|channel|>{channel}<|message|>{text}"


def _thinking(thinking: str, text: str, **more: list[ToolCall]) -> Message:
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": text}]
    return Message(role="assistant", content=parts, **more)


def _call() -> ToolCall:
    return ToolCall(FunctionCall("get_weather", ARGUMENTS))


def _tool_chat() -> list[Message]:
    called = _thinking("R1", "T1", tool_calls=[_call()])
    return [*chat("U1"), called, Message(role="tool", content="sunny"), _thinking("R2", "A2")]


THINKING_CHAT = [*chat("U1"), _thinking("R1", "A1"), *chat("U2"), _thinking("R2", "A2")]
TOOL = ToolSpec("get_weather", "Tells.", {"type": "object", "properties": {"city": {"type": "string"}}})


# ---- what the model sees -----------------------------------------------------------------------------------------

_SYSTEM = [200006, 17360, 200008, 3575, 553, 17554, 162016, 11, 261, 4410, 6439, 2359, 22203, 656, 7788, 17527, 558]
_SYSTEM += [87447, 100594, 25, 220, 1323, 19, 12, 3218, 198, 6576, 3521, 25, 220, 1323, 20, 12, 3062, 12, 2922, 279]
_SYSTEM += [30377, 289, 25, 14093, 279, 2, 13888, 18403, 25, 8450, 11, 49159, 11, 1721, 13, 21030, 2804, 413, 7360]
_SYSTEM += [395, 1753, 3176, 13, 200007]
_TERSE = [200006, 77944, 200008, 2, 68406, 279, 3238, 28410, 364, 200007]  # Be terse.
_QUESTION = [200006, 1428, 200008, 4827, 382, 220, 17, 10, 17, 30, 200007]  # What is 2+2?
_ASSISTANT = [200006, 173781]


@pytest.mark.slow
def test_chats_have_the_ids_of_the_published_model() -> None:
    renderer = GptOssRenderer(real_tokenizers.gpt_oss(), "medium", DATE)
    prompt = renderer.build_generation_prompt(chat("What is 2+2?", system="Be terse.")).to_ints()
    assert prompt == [*_SYSTEM, *_TERSE, *_QUESTION, *_ASSISTANT]
    whole = renderer.build_supervised_example(chat("What is 2+2?", "4")).model_input.to_ints()
    assert whole == [*_SYSTEM, *_QUESTION, *_ASSISTANT, 200005, 17196, 200008, 19, 200002]
    bare = GptOssRenderer(real_tokenizers.gpt_oss()).build_generation_prompt(chat("What is 2+2?")).to_ints()
    assert bare == [*_QUESTION, *_ASSISTANT]


@pytest.mark.parametrize(
    "effort", [pytest.param("low", marks=pytest.mark.slow), "medium", pytest.param("high", marks=pytest.mark.slow)]
)
def test_chats_are_those_of_the_published_template(effort: ReasoningEffort, num_conversations: int) -> None:
    """Which takes the text of a message that calls tools for thinking; and in a whole chat drops the thinking before
    its last answer, which the prompt for that answer had. There, what follows the prompt is the template's."""
    template = replace(TEMPLATE, options={"reasoning_effort": effort})
    tokenizer = real_tokenizers.gpt_oss()
    renderer = get_renderer(f"gpt_oss_{effort}_reasoning", tokenizer, date=DATE)
    question = template.text(chat("U"), prompt=True)
    for seed in range(num_conversations):
        messages = conversation(seed, replace(FEATURES, text_beside_calls=False))
        prompt = template.text(messages[:-1], prompt=True)
        assert renderer.build_generation_prompt(messages[:-1]).to_ints() == _encode(prompt)
        last = template.text([*chat("U"), messages[-1]], prompt=False)
        answer = last.removeprefix(question)
        assert renderer.build_supervised_example(messages).model_input.to_ints() == _encode(prompt + answer)


def _encode(text: str) -> list[int]:
    return real_tokenizers.gpt_oss().encode(text, add_special_tokens=False)


def test_another_implementation_writes_and_trains_the_same(num_conversations: int) -> None:
    """It joins users who speak twice."""
    other = tml.GptOss.high(current_date=DATE)
    renderer = GptOssRenderer(real_tokenizers.gpt_oss(), "high", DATE)
    for seed in range(num_conversations):
        messages = conversation(seed, replace(FEATURES, repeated_users=False))
        assert renderer.build_generation_prompt(messages[:-1]).to_ints() == tml_prompt(other, messages[:-1])
        example = renderer.build_supervised_example(messages)
        tokens, weights = tml_example(other, messages)
        assert example.model_input.to_ints() == tokens
        answer = trained_tokens(example)
        assert [token for token, weight in zip(tokens, weights, strict=True) if weight][-len(answer) :] == answer


@pytest.mark.parametrize("instructions", ["", "Be <|end|> terse."])
def test_tools_are_declared_as_the_published_template_declares_them(instructions: str) -> None:
    renderer = GptOssRenderer(real_tokenizers.gpt_oss(), "medium", DATE)
    messages = [*renderer.create_conversation_prefix_with_tools([TOOL], instructions), *chat("U")]
    expected = TEMPLATE.text(chat("U", system=instructions), prompt=True, tools=[TOOL])
    tokens = renderer.build_generation_prompt(messages).to_ints()
    assert renderer.tokenizer.decode(tokens) == expected
    assert tokens.count(200007) == 3  # none of them is what the instructions say


def test_without_a_system_prompt_where_calls_go_is_all_that_the_system_says(renderer: GptOssRenderer) -> None:
    messages = [*renderer.create_conversation_prefix_with_tools([TOOL]), *chat("U")]
    text = renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints())
    assert text.startswith(f"<|start|>system<|message|>{CALLS_GO_WHERE}<|end|><|start|>developer<|message|># Tools\n\n")
    assert text.count("<|start|>system") == 1


def test_instructions_that_come_later_are_not_dropped(renderer: GptOssRenderer) -> None:
    text = renderer.tokenizer.decode(
        renderer.build_generation_prompt([*chat("U1", "A1"), *chat("U2", system="S")]).to_ints()
    )
    developer = "<|start|>developer<|message|># Instructions\n\nS\n\n<|end|>"
    assert text == f"{_user('U1')}{START}{_on('final', 'A1')}<|end|>{developer}{_user('U2')}{START}"


def test_the_date_is_todays_unless_it_is_given() -> None:
    tokenizer = real_tokenizers.gpt_oss()
    before = datetime.datetime.now().astimezone().date()
    date = GptOssRenderer(tokenizer, "low").date
    after = datetime.datetime.now().astimezone().date()
    assert date in (before.isoformat(), after.isoformat())
    prompt = GptOssRenderer(tokenizer, "low", "2001-02-03").build_generation_prompt([])
    assert "Current date: 2001-02-03\n\nReasoning: low\n\n" in tokenizer.decode(prompt.to_ints())


# ---- channels ----------------------------------------------------------------------------------------------------


def test_an_answer_is_on_the_final_channel(renderer: GptOssRenderer) -> None:
    history = f"{_user('U1')}{START}{_on('final', 'A1')}<|end|>{_user('U2')}{START}"
    example = renderer.build_supervised_example(chat("U1", "A1", "U2", "A2"))
    assert mask(renderer, example) == f"{history}¦{_on('final', 'A2')}<|return|>¦"


def test_thinking_of_earlier_answers_is_not_shown(renderer: GptOssRenderer) -> None:
    history = f"{_user('U1')}{START}{_on('final', 'A1')}<|end|>{_user('U2')}{START}"
    example = renderer.build_supervised_example(THINKING_CHAT)
    assert mask(renderer, example) == (
        f"{history}¦{_on('analysis', 'R2')}<|end|>{START}{_on('final', 'A2')}<|return|>¦"
    )


def test_thinking_is_shown_until_the_model_has_answered(renderer: GptOssRenderer) -> None:
    called = f"{_on('commentary', 'T1')}<|end|>{START}{CALLED}{RESULT}{START}"
    example = renderer.build_supervised_example(_tool_chat())
    assert mask(renderer, example) == (
        f"{_user('U1')}{START}{_on('analysis', 'R1')}<|end|>{START}{called}"
        f"¦{_on('analysis', 'R2')}<|end|>{START}{_on('final', 'A2')}<|return|>¦"
    )
    later = renderer.tokenizer.decode(renderer.build_generation_prompt([*_tool_chat(), *chat("U2")]).to_ints())
    assert later == f"{_user('U1')}{START}{called}{_on('final', 'A2')}<|end|>{_user('U2')}{START}"


def test_each_answer_gets_an_example_that_shows_what_the_model_saw(renderer: GptOssRenderer) -> None:
    first, second = renderer.build_supervised_examples(THINKING_CHAT, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    decode = renderer.tokenizer.decode
    assert decode(trained_tokens(first)).startswith("<|channel|>analysis<|message|>R1<|end|>")
    assert decode(trained_tokens(second)).startswith("<|channel|>analysis<|message|>R2<|end|>")
    assert len(renderer.build_supervised_examples(THINKING_CHAT)) == 1
    assert len(renderer.build_supervised_examples(_tool_chat())) == 2


def test_a_call_without_text_ends_its_turn_too(renderer: GptOssRenderer) -> None:
    called = Message(role="assistant", content="", tool_calls=[_call()])
    example = renderer.build_supervised_example([*chat("U1"), called])
    assert mask(renderer, example) == f"{_user('U1')}{START}¦{CALLED}¦"


def test_several_calls_follow_each_other(renderer: GptOssRenderer) -> None:
    called = Message(role="assistant", content="", tool_calls=[_call(), _call()])
    text = renderer.tokenizer.decode(renderer.build_generation_prompt([*chat("U1"), called]).to_ints())
    assert text == f"{_user('U1')}{START}{CALLED}{START}{CALLED}{START}"


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (Message(role="tool", content="7", name="h"), "h"),
        (Message(role="tool", content="7", tool_call_id="1"), "f"),
        (Message(role="tool", content="7"), "g"),
    ],
)
def test_a_result_names_the_function(renderer: GptOssRenderer, result: Message, name: str) -> None:
    calls = [ToolCall(FunctionCall("f", "{}"), id="1"), ToolCall(FunctionCall("g", "{}"), id="2")]
    called = Message(role="assistant", content="", tool_calls=calls)
    text = renderer.tokenizer.decode(renderer.build_generation_prompt([*chat("U"), called, result]).to_ints())
    assert text.endswith(f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"7"<|end|>{START}')


def test_a_prefill_begins_the_final_answer(renderer: GptOssRenderer) -> None:
    prompt = renderer.build_generation_prompt(chat("U"), prefill="Sure").to_ints()
    assert renderer.tokenizer.decode(prompt) == f"{_user('U')}{START}{_on('final', 'Sure')}"


@pytest.mark.parametrize("role", ["system", "user"])
def test_the_model_may_be_asked_to_play_another(renderer: GptOssRenderer, role: str) -> None:
    prompt = renderer.tokenizer.decode(renderer.build_generation_prompt(chat("U", "A"), role=role).to_ints())  # pyright: ignore[reportArgumentType]  a role
    played: list[Message] = [*chat("U", "A"), Message(role=role, content="X")]  # pyright: ignore[reportArgumentType]  a role
    assert renderer.tokenizer.decode(renderer.build_generation_prompt(played).to_ints()).startswith(f"{prompt}X")


# ---- what it cannot say ------------------------------------------------------------------------------------------


def test_a_result_of_no_call_is_refused(renderer: GptOssRenderer) -> None:
    with pytest.raises(InvalidRequest, match="gpt_oss, message 1: no call before it is the one that it answers"):
        renderer.build_generation_prompt([*chat("U"), Message(role="tool", content="7")])


def test_images_are_refused(renderer: GptOssRenderer) -> None:
    with pytest.raises(InvalidRequest, match="gpt_oss, message 0: only text, thinking can be written, not: image"):
        renderer.build_generation_prompt([Message(role="user", content=[{"type": "image", "image": "cat.png"}])])


def test_an_effort_is_one_of_three() -> None:
    with pytest.raises(UnknownName, match="unknown reasoning_effort 'hihg'; did you mean 'high'"):
        GptOssRenderer(real_tokenizers.gpt_oss(), "hihg")  # pyright: ignore[reportArgumentType]  the mistake


def test_a_date_that_nothing_would_tell_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="set reasoning_effort too: date='2025-08-05'"):
        GptOssRenderer(real_tokenizers.gpt_oss(), date=DATE)
    with pytest.raises(UnknownName, match="unknown option of renderer 'gpt_oss_no_sysprompt' 'date'"):
        get_renderer("gpt_oss_no_sysprompt", real_tokenizers.gpt_oss(), date=DATE)


# ---- what it reads -----------------------------------------------------------------------------------------------

_R, _HI = {"type": "thinking", "thinking": "R"}, {"type": "text", "text": "hi"}
_CLEAN, _CUT = ParseTermination.STOP_SEQUENCE, ParseTermination.MALFORMED


@pytest.mark.parametrize(
    ("text", "expected", "termination"),
    [
        (f"{_on('final', 'hi')}<|return|>", {"content": "hi"}, _CLEAN),
        (f"{_on('analysis', 'R')}<|end|>{START}{_on('final', 'hi')}<|return|>", {"content": [_R, _HI]}, _CLEAN),
        (f"{_on('analysis', 'R')}<|end|>{START}{CALLED}", {"content": [_R], "tool_calls": [_call()]}, _CLEAN),
        (f"{_on('commentary', 'hi')}<|end|>{START}{CALLED}", {"content": "hi", "tool_calls": [_call()]}, _CLEAN),
        (CALLED.replace("json", "<|constrain|>json"), {"content": "", "tool_calls": [_call()]}, _CLEAN),
        (
            f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            {"content": "", "tool_calls": [_call()]},
            _CLEAN,
        ),
        (_on("analysis", "R"), {"content": [_R]}, _CUT),
        (f"{_on('analysis', 'R')}<|end|>{START}{_on('final', 'hi')}", {"content": [_R, _HI]}, _CUT),
        (f"{_on('analysis', 'R')}<|end|>{START}<|channel|>fin", {"content": [_R]}, _CUT),
        (f"{_on('analysis', 'R')}<|end|>{START}", {"content": [_R]}, _CUT),
        (f"{_on('final', 'hi')}<|return|>{START}<|return|>", {"content": "hi"}, _CUT),
        ("hi<|return|>", {"content": "hi"}, _CLEAN),  # behind a prefill
        ("", {"content": ""}, _CUT),
    ],
)
def test_what_tokens_say_is_told(
    renderer: GptOssRenderer, text: str, expected: dict[str, object], termination: ParseTermination
) -> None:
    message, how = renderer.parse_response(_encode(text))
    assert message == {"role": "assistant", **expected}
    assert how is termination


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (CALLED.replace(ARGUMENTS, "{bad"), "Invalid JSON"),
        (CALLED.replace("functions.get_weather", "browser.open"), "only functions can be called: 'browser.open'"),
        (CALLED.replace("get_weather", ""), "a call needs a name"),
        (f"{CALLED[:20]}<|call|>", "the call is never ended"),
    ],
)
def test_what_is_no_call_is_kept_with_the_reason_and_written_as_it_was(
    renderer: GptOssRenderer, written: str, reason: str
) -> None:
    sampled = _encode(f"{_on('analysis', 'R')}<|end|>{START}{written}")
    message, termination = renderer.parse_response(sampled)
    assert termination is _CLEAN
    assert "tool_calls" not in message
    [call] = message["unparsed_tool_calls"]
    assert call.raw_text + "<|call|>" == written
    assert reason in call.error
    assert trained_tokens(renderer.build_supervised_example([*chat("U"), message])) == sampled


def test_a_call_that_was_cut_off_is_none(renderer: GptOssRenderer) -> None:
    message, termination = renderer.parse_response(_encode(CALLED.removesuffix("<|call|>")))
    assert termination is _CUT
    assert [call.error for call in message["unparsed_tool_calls"]] == ["the call is never ended"]


def test_it_stops_at_the_end_of_an_answer_and_of_a_call(renderer: GptOssRenderer) -> None:
    assert renderer.get_stop_sequences() == [200002, 200012]


def test_a_copy_has_the_same_system_prompt() -> None:
    copied = copy.copy(GptOssRenderer(real_tokenizers.gpt_oss(), "high", "2001-02-03"))
    assert (copied.reasoning_effort, copied.date) == ("high", "2001-02-03")
