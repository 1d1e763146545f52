"""`chat_template` with templates that are told of tools: how to call them is written in the markup of the calls."""

import pytest

from renderers.languages import chat, mask, trained_tokens
from renderers.test_template_kinds import templates
from stovetop.renderers.base import TrainOnWhat
from stovetop.renderers.messages import FunctionCall, Message, ToolCall
from stovetop.renderers.template import ChatTemplateRenderer

TOOLS: list[dict[str, object]] = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
CALL = ToolCall(FunctionCall("f", '{"x": "y"}'), "call00001")

# Says how to call tools before the chat; a turn ends where the next one begins.
TOLD = (
    "[gMASK]{% if tools %}<|system|>Call {{ tools | tojson }} by <tool_call>NAME ARGUMENTS</tool_call>{% endif %}"
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{# <|user|> <|observation|> #}"
)

# Tells of tools before the last question, which it finds by comparing it with the others.
BEFORE_LAST = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}<s>{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == users[-1] %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def made(template: str, **options: object) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(templates.tokenizer_for(template), options)


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}], ids=["untold", "told"])
def test_a_call_as_the_model_wrote_it_keeps_its_tokens_whether_the_chat_tells_of_tools_or_not(
    options: dict[str, object],
) -> None:
    renderer = made(TOLD, **options)
    sampled = renderer.tokenizer.encode("<tool_call>f {}</tool_call><|user|>", add_special_tokens=False)
    assert renderer.tokenizer.convert_tokens_to_ids("<tool_call>") == sampled[0]
    prompt = renderer.build_generation_prompt(chat("q")).to_ints()
    message, _ = renderer.parse_response(sampled)
    assert trained_tokens(renderer.build_supervised_example([*chat("q"), message])) == sampled
    following = renderer.build_generation_prompt([*chat("q"), message, *chat("r")]).to_ints()
    assert following[: len(prompt) + len(sampled)] == prompt + sampled


def test_the_markup_of_a_call_does_not_end_its_turn_where_the_chat_tells_of_tools() -> None:
    renderer = made(TOLD, tools=TOOLS)
    assert renderer.stops == ("<|user|>", "<|observation|>")
    calling = Message(role="assistant", content="", tool_calls=[CALL, CALL])
    example = renderer.build_supervised_example([*chat("q"), calling])
    call = '<tool_call>f {"x": "y"}</tool_call>'
    assert mask(renderer, example).endswith(f"<|user|>q<|assistant|>¦{call}{call}<|observation|>¦")


def test_prompts_that_tell_of_tools_before_the_last_question_do_not_extend_each_other() -> None:
    assert made(BEFORE_LAST).has_extension_property
    renderer = made(BEFORE_LAST, tools=TOOLS)
    assert not renderer.has_extension_property
    examples = renderer.build_supervised_examples(chat("q", "a", "r", "b"), TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    assert [mask(renderer, example).split("[/TOOLS]")[1] for example in examples] == [
        "[INST]q[/INST]¦a</s>¦",
        "[INST]r[/INST]¦b</s>¦",
    ]
