"""`chat_template` with templates of every kind that models are published with: each written here as short as it gets,
and those that the trl package collects."""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costly import slow_but
from renderers.conversations import Features, conversation
from renderers.languages import chat, mask, trained_tokens
from renderers.oracle import as_openai, trl_template
from renderers.real_tokenizers import package_file
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.base import TrainOnWhat
from stovetop.renderers.messages import FunctionCall, Message, ToolCall
from stovetop.renderers.template import ChatTemplateRenderer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import templates

LOOP = "{% for m in messages %}"
END = "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}"

# A turn ends where the next one begins; results of tools begin turns of their own.
GLM = (
    f"[gMASK]<sop>{LOOP}{{% if m.role == 'tool' %}}<|observation|>{{{{ m.content }}}}{{% else %}}<|{{{{ m.role }}}}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    f"{{% endfor %}}{{% endif %}}{END}{PROMPT}<|assistant|>{{% endif %}}<!-- <|user|> <|system|> -->"
).replace("<!-- <|user|> <|system|> -->", "{# <|user|> <|system|> #}")

# Ends a turn only once another follows it.
OPEN = (
    f"{LOOP}{{% if m.role == 'assistant' %}}<|bot|>{{{{ m.content }}}}{{% if not loop.last %}}{{{{ '\n' }}}}<|done|>"
    "{{ '\n' }}{% endif %}"
    f"{{% else %}}<|human|>{{{{ m.content }}}}\n{{% endif %}}{END}{PROMPT}<|bot|>{{% endif %}}"
)

# Sections within a turn end with control tokens, too.
SECTIONS = (
    f"{LOOP}<|open|>{{{{ m.role }}}}<|sep|>{{% if m.role == 'assistant' %}}<|open|>think<|sep|>{{{{ m.thinking }}}}"
    "<|close|>think<|sep|>{{ m.content }}{% for c in m.tool_calls %}<|open|>call<|sep|>{{ c.function | tojson }}"
    f"<|close|>call<|sep|>{{% endfor %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|close|>{{{{ m.role }}}}"
    f"<|end|>{END}{PROMPT}<|open|>assistant<|sep|><|open|>think<|sep|>{{% endif %}}"
)

# Writes the beginning of the next turn whether it is asked to or not, and a block of thinking that is over with it.
ALWAYS = (
    f"{LOOP}<|start|><|{{{{ m.role }}}}|>{{% if m.tool_calls %}}<|think|><|nothink|><|act|>"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|acted|>"
    f"{{% else %}}{{{{ m.content }}}}{{% endif %}}<|end|>{END}"
    "<|start|><|assistant|><|think|><|nothink|>{# <|user|> <|tool|> <|system|> #}"
)

# Ids of calls have nine letters and digits, or the template refuses the chat.
MISTRAL = (
    f"<s>{LOOP}{{% if m.role == 'user' %}}[INST]{{{{ m.content }}}}[/INST]{{% elif m.role == 'tool' %}}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    f"{{{{ c.function.name }}}}[ARGS]{{{{ c.function.arguments | tojson }}}}{{% endfor %}}</s>"
    f"{{% elif m.role == 'assistant' %}}{{{{ m.content }}}}</s>{{% endif %}}{END}"
)

# Drops the role `tool` in silence.
PHI = (
    f"{LOOP}{{% if m.role in ('system', 'user', 'assistant') %}}<|{{{{ m.role }}}}|>\n{{{{ m.content }}}}<|end|>\n"
    f"{{% endif %}}{END}{PROMPT}<|assistant|>\n{{% else %}}</s>{{% endif %}}{{# <|system|> <|user|> #}}"
)

# Content is a list of parts.
PARTS = (
    f"{LOOP}<|im_start|>{{{{ m.role }}}}: {{% for part in m.content %}}{{% if part.type == 'text' %}}"
    f"{{{{ part.text }}}}{{% endif %}}{{% endfor %}}<|im_end|>\n{END}{PROMPT}<|im_start|>assistant: {{% endif %}}"
)

# Arguments are JSON text.
AS_TEXT = (
    f"{LOOP}{{% if m.role == 'user' %}}<|user|>{{{{ m.content }}}}{{% elif m.role == 'tool' %}}<|tool|>"
    "{{ m.content }}{% elif m.tool_calls %}<|bot|>{% for c in m.tool_calls %}{{ c.function.name }} "
    "{{ '' + c.function.arguments }}"
    f"{{% endfor %}}<|end|>{{% else %}}<|bot|>{{{{ m.content }}}}<|end|>{{% endif %}}{END}{PROMPT}<|bot|>{{% endif %}}"
)

# No token ends a turn, but words begin the next.
WORDS = f"{LOOP}{{{{ m.role | capitalize }}}}: {{{{ m.content }}}}\n\n{END}{PROMPT}Assistant:{{% endif %}}"

# The prompt begins thinking that no answer is written with.
R1 = (
    f"{LOOP}{{% if m.role == 'assistant' %}}<|bot|>{{{{ m.content.split('</think>')[-1] }}}}<|end|>{{% else %}}<|user|>"
    f"{{{{ m.content }}}}{{% endif %}}{END}{PROMPT}<|bot|><think>\n{{% endif %}}"
)

CALL = ToolCall(FunctionCall("f", '{"x": "y"}'), "call00001")
CALLING = Message(role="assistant", content="", tool_calls=[CALL])
RESULT = Message(role="tool", content="7", name="f", tool_call_id="call00001")


@cache
def made(template: str) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(templates.tokenizer_for(template))


def shown(template: str, messages: Sequence[Message], mode: str = "last_assistant_message") -> str:
    renderer = made(template)
    return mask(renderer, renderer.build_supervised_example(messages, TrainOnWhat(mode)))


def test_a_turn_that_ends_where_the_next_begins_is_trained_with_what_begins_that() -> None:
    assert made(GLM).stops == ("<|user|>", "<|observation|>")
    assert shown(GLM, chat("q", "a")) == "[gMASK]<sop><|user|>q<|assistant|>¦a<|user|>¦"
    assert shown(GLM, [*chat("q"), CALLING]) == (
        '[gMASK]<sop><|user|>q<|assistant|>¦<tool_call>f{"x": "y"}</tool_call><|observation|>¦'
    )
    assert shown(
        GLM, [*chat("q"), CALLING, RESULT, *chat("q", "a")[1:], *chat("r", "b")], "all_assistant_messages"
    ) == (
        '[gMASK]<sop><|user|>q<|assistant|>¦<tool_call>f{"x": "y"}</tool_call><|observation|>¦7<|assistant|>¦a'
        "<|user|>¦r<|assistant|>¦b<|user|>¦"
    )
    with pytest.raises(InvalidRequest, match="call build_supervised_examples"):  # nobody asks between the two answers
        shown(GLM, [*chat("q", "a"), *chat("q", "b")[1:]], "all_assistant_messages")


def test_an_answer_that_stays_open_as_long_as_it_is_the_last_is_trained_with_its_end() -> None:
    assert made(OPEN).stops == ("<|done|>",)
    assert shown(OPEN, chat("q", "a")) == "<|human|>q\n<|bot|>¦a\n<|done|>¦"
    assert shown(OPEN, chat("q", "a", "r", "b"), "all_assistant_messages") == (
        "<|human|>q\n<|bot|>¦a\n<|done|>¦\n<|human|>r\n<|bot|>¦b\n<|done|>¦"
    )
    message, termination = made(OPEN).parse_response(
        trained_tokens(made(OPEN).build_supervised_example(chat("q", "a")))
    )
    assert (message["content"], termination.is_stop_sequence) == ("a", True)


def test_sections_within_a_turn_do_not_end_it() -> None:
    assert made(SECTIONS).stops == ("<|end|>",)
    thought = Message(role="assistant", content=[{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "a"}])
    head = "<|open|>user<|sep|>q<|close|>user<|end|><|open|>assistant<|sep|><|open|>think<|sep|>"
    assert shown(SECTIONS, [*chat("q"), thought]) == f"{head}¦R<|close|>think<|sep|>a<|close|>assistant<|end|>¦"
    assert shown(SECTIONS, [*chat("q"), CALLING]) == (
        f"{head}¦<|close|>think<|sep|><|open|>call<|sep|>"
        '{"name": "f", "arguments": {"x": "y"}}<|close|>call<|sep|><|close|>assistant<|end|>¦'
    )


def test_a_chat_that_ends_with_a_call_does_not_train_the_beginning_of_the_next_turn() -> None:
    assert made(ALWAYS).stops == ("<|end|>",)
    head = "<|start|><|user|>q<|end|><|start|><|assistant|><|think|><|nothink|>"
    assert shown(ALWAYS, [*chat("q"), CALLING]) == (
        f'{head}¦<|act|>{{"name": "f", "arguments": {{"x": "y"}}}}<|acted|><|end|>¦'
        "<|start|><|assistant|><|think|><|nothink|>"
    )


def test_an_answer_is_trained_behind_a_block_of_thinking_that_the_prompt_has_and_the_template_leaves_out() -> None:
    head = "<|start|><|user|>q<|end|><|start|><|assistant|><|think|><|nothink|>"
    assert shown(ALWAYS, chat("q", "a")) == f"{head}¦a<|end|>¦<|start|><|assistant|><|think|><|nothink|>"


def test_calls_whose_ids_have_nine_characters_are_written_and_others_refused() -> None:
    assert shown(MISTRAL, [*chat("q"), CALLING, RESULT, *chat("q", "a")[1:]], "all_assistant_messages") == (
        '<s>[INST]q[/INST]¦[TOOL_CALLS]f[ARGS]{"x": "y"}</s>¦[TOOL_RESULTS]7[/TOOL_RESULTS]¦a</s>¦'
    )
    without = Message(role="assistant", content="", tool_calls=[ToolCall(CALL.function)])
    with pytest.raises(InvalidRequest, match=r"roles \['user', 'assistant'\]: .*nine characters"):
        shown(MISTRAL, [*chat("q"), without])


def test_text_beside_a_call_that_the_template_drops_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"leaves out the text of message 1 \(assistant\)"):
        shown(MISTRAL, [*chat("q"), {**CALLING, "content": "let me see"}])


@pytest.mark.parametrize("content", ["7", "q", "a", "end"])
def test_the_result_of_a_tool_that_the_template_drops_is_refused(content: str) -> None:
    """Also where the same words stand elsewhere in the chat."""
    messages = [*chat("q", "a"), {**RESULT, "content": content}, *chat("q", "a")[1:]]
    for build in (made(PHI).build_supervised_example, made(PHI).build_generation_prompt):
        with pytest.raises(InvalidRequest, match=r"leaves out the text of message 2 \(tool\)"):
            build(messages)
    assert shown(PHI, chat("q", "a", system="s")).endswith("<|assistant|>\n¦a<|end|>¦\n</s>")


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (Message(role="user", content="q", name="Bob"), "name"),
        (Message(role="assistant", content="a", tool_calls=[CALL]), "tool_calls"),
    ],
)
def test_whatever_else_the_template_drops_is_refused_by_name(message: Message, part: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{part}.*message 1|leaves out the {part} of message 1"):
        made(PHI).build_generation_prompt([*chat("q"), message])


def test_content_is_given_in_parts_to_a_template_that_reads_parts() -> None:
    assert shown(PARTS, chat("q", "a")) == "<|im_start|>user: q<|im_end|>\n<|im_start|>assistant: ¦a<|im_end|>¦\n"


def test_arguments_are_given_as_text_to_a_template_that_reads_text() -> None:
    call = Message(role="assistant", content="", tool_calls=[ToolCall(FunctionCall("f", '{"x":  1.0}'))])
    assert shown(AS_TEXT, [*chat("q"), call]) == '<|user|>q<|bot|>¦f {"x":  1.0}<|end|>¦'


def test_words_that_begin_the_next_turn_stop_an_answer_where_no_token_does() -> None:
    renderer = made(WORDS)
    assert renderer.get_stop_sequences() == ["\n\nUser:"]
    assert shown(WORDS, chat("q", "a")) == "User: q\n\nAssistant:¦ a\n\nUser:¦"
    sampled = renderer.tokenizer.encode(" a\n\nUser:", add_special_tokens=False)
    message, termination = renderer.parse_response(sampled)
    assert (message["content"], termination.is_stop_sequence) == ("a", True)
    assert renderer.parse_response(sampled[:-1])[1].is_clean is False
    with pytest.raises(InvalidRequest, match="2 times; as sampled, it ends once"):
        shown(WORDS, chat("q", "a\n\nUser: b"))


def test_thinking_that_the_prompt_begins_and_no_answer_is_written_with_cannot_be_trained() -> None:
    for answer in ("a", "R\n</think>\n\na", "<think>\nR\n</think>\n\na"):
        with pytest.raises(InvalidRequest, match=r"does not begin message 1 .* as it prompts for it"):
            shown(R1, chat("q", answer))


def test_a_plain_string_with_tags_of_thinking_is_not_trained_without_what_stands_before_them() -> None:
    template = R1.replace("<think>\n", "")
    assert shown(template, chat("q", "a")) == "<|user|>q<|bot|>¦a<|end|>¦"
    with pytest.raises(InvalidRequest, match=r"message 1 says beside a tag of thinking.*'R'"):
        shown(template, chat("q", "R</think>a"))


def test_a_chat_that_begins_with_the_assistant_is_refused_with_what_to_do() -> None:
    template = f"{{% if messages[0].role == 'assistant' %}}{{{{ raise_exception('no') }}}}{{% endif %}}{PARTS}"
    with pytest.raises(InvalidRequest, match="begin the chat with a system or user message"):
        made(template).build_supervised_example(chat("", "a")[1:])
    with pytest.raises(InvalidRequest, match="begin the chat with a system or user message"):
        made(template).build_generation_prompt([])


@pytest.mark.parametrize(("option", "nearest"), [("enable_thinkin", "enable_thinking"), ("tool", "tools")])
def test_an_option_that_the_template_does_not_read_is_refused(option: str, nearest: str) -> None:
    tokenizer = templates.tokenizer_for(f"{OPEN}{{% if enable_thinking or tools %}} {{% endif %}}")
    with pytest.raises(UnknownName, match=f"did you mean '{nearest}'"):
        ChatTemplateRenderer(tokenizer, {option: []})
    assert ChatTemplateRenderer(tokenizer, {nearest: []})
    with pytest.raises(UnknownName, match="option of the chat template 'tools'"):
        ChatTemplateRenderer(templates.tokenizer_for(PHI), {"tools": []})


# ---- templates as they are published -----------------------------------------------------------------------------

PUBLISHED = sorted(
    file.stem
    for file in package_file("trl", "trl/chat_templates").glob("*.jinja")
    if not file.stem.endswith("_training")
)
UNUSABLE = {"deepseek_r1_distill", "deepseekv3"}  # their prompts begin thinking that no answer is written with
QUICK = {"cohere2", "gemma3", "glm4moe", "gptoss", "lfm2_2_5", "llama3_1", "nemotron_3_nano", "qwen3", "qwen3_vl"}


@cache
def published(name: str) -> templates.Report:
    return templates.report(name, trl_template(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_all_published_templates_but_these_can_be_used(name: str) -> None:
    assert published(name).is_usable == (name not in UNUSABLE)


@pytest.mark.parametrize("name", slow_but(QUICK, sorted(set(PUBLISHED) - UNUSABLE)))
def test_chats_are_written_as_the_published_template_writes_them(name: str) -> None:
    """What transformers makes of them, token for token, but for a stop that the template leaves out at the end; and
    what was trained is what was said."""
    kinds = published(name).written
    thinks = "answers" not in kinds
    renderer = ChatTemplateRenderer(
        templates.tokenizer_for(trl_template(name)), kinds["thinking" if thinks else "answers"]
    )
    features = Features(
        system="system messages" in kinds, repeated_users=False, thinking=thinks, tools=False, edges=False
    )
    num_compared = 0
    for seed in range(12):
        messages = [
            message if message["role"] != "user" or str(message["content"]).strip() else {**message, "content": "hm"}
            for message in conversation(seed, features)
        ]
        try:
            example = renderer.build_supervised_example(messages)
        except InvalidRequest:  # thinking that this chat lacks, or has
            continue
        num_compared += 1
        given = [_with_parts(as_openai(message), name) for message in messages]
        apply = renderer.tokenizer.apply_chat_template
        options = {"tokenize": True, "return_dict": False, **renderer.options}
        expected = apply(given, **options)
        tokens = example.model_input.to_ints()
        assert tokens[: len(expected)] == expected
        assert renderer.build_generation_prompt(messages[:-1]).to_ints() == apply(
            given[:-1], add_generation_prompt=True, **options
        )
        message, termination = renderer.parse_response(trained_tokens(example))
        assert termination.is_stop_sequence
        again = renderer.build_supervised_example([*messages[:-1], message])
        assert again.model_input == example.model_input
        assert again.weights.tolist() == example.weights.tolist()
    assert num_compared >= 3


def _with_parts(message: dict[str, object], name: str) -> dict[str, object]:
    if name not in ("idefics3", "smolvlm", "llava_next"):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@given(
    text=st.text(alphabet=st.characters(codec="utf-8"), max_size=30),
    name=st.sampled_from(sorted(set(PUBLISHED) - UNUSABLE)),
)
def test_whatever_an_answer_says_is_in_what_is_trained(text: str, name: str) -> None:
    kinds = published(name).written
    if "answers" not in kinds or "\ufdd0" in text:
        return
    renderer = made_published(name)
    example = renderer.build_supervised_example([*chat("q"), Message(role="assistant", content=text)])
    assert text.strip() in renderer.tokenizer.decode(trained_tokens(example))


@cache
def made_published(name: str) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(templates.tokenizer_for(trl_template(name)), published(name).written["answers"])
