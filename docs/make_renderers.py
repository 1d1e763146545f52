"""Writes docs/renderers.md: what each renderer makes of a chat, and what of it is trained.

    python docs/make_renderers.py

The tokenizers come from packages of the dev extra. A test fails when the page is not what this writes.
"""

import html
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from renderers.families import FAMILIES
from stovetop.renderers import get_renderer, supported_renderers
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import FunctionCall, Message, ThinkingPart, ToolCall, ToolSpec
from stovetop.renderers.show import stretches
from stovetop.tokenizing import Tokenizer

PAGE = Path(__file__).parent / "renderers.md"

INTRODUCTION = """\
# Renderers

A renderer writes chats as one family of models reads them. Below, each writes one chat. What a model is trained on with
`train_on_what="last_assistant_turn"` is <ins>underlined</ins>; all else has weight 0. Where a family shows earlier
turns otherwise than it wrote them (old thinking is dropped, say), one chat makes several examples: one for each message
of the assistant, as the model sees the chat then.

This page is written by `python docs/make_renderers.py`. To see chats of your own like this:

    stovetop show <model> chats.jsonl --train-on-what last_assistant_turn

"""

DATE = "2025-08-05"  # where a family writes the date
TOOL = ToolSpec(
    "get_weather",
    "The weather in a city",
    {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}}, "required": ["city"]},
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Renderers that write alike: the first of `names` is shown."""

    title: str
    names: tuple[str, ...]
    about: str
    models: str


KINDS = (
    Kind(
        "Qwen3", ("qwen3",), "Thinking of earlier turns is dropped, that of the current one kept.", "Qwen3 that thinks"
    ),
    Kind(
        "Qwen3, thinking disabled",
        ("qwen3_disable_thinking",),
        "The prompt ends with a thinking block that is over.",
        "the same, asked not to think",
    ),
    Kind("Qwen3 Instruct", ("qwen3_instruct",), "Knows no thinking.", "Qwen3 Instruct-2507"),
    Kind(
        "Qwen3-VL",
        ("qwen3_vl", "qwen3_vl_instruct"),
        "Images stand between `<|vision_start|>` and `<|vision_end|>`.",
        "Qwen3-VL",
    ),
    Kind(
        "Llama 3",
        ("llama3",),
        "With `date=...`, as from 3.1 on, a chat begins with the date.",
        "Llama 3, 3.1, 3.2, 3.3",
    ),
    Kind(
        "DeepSeek V3.1",
        ("deepseekv3", "deepseekv3_disable_thinking"),
        "The system prompt has no marker; an answer to a tool has none either.",
        "DeepSeek-V3.1",
    ),
    Kind("Kimi K2", ("kimi_k2",), "Without a system message it says who it is.", "Kimi-K2-Thinking"),
    Kind(
        "gpt-oss",
        ("gpt_oss_medium_reasoning", "gpt_oss_low_reasoning", "gpt_oss_high_reasoning", "gpt_oss_no_sysprompt"),
        "Thinking, calls and answers have channels of their own. The last of these renderers says nothing of identity, "
        "date and channels in the first message, and so has none where there are no tools.",
        "gpt-oss",
    ),
    Kind("Plain text", ("role_colon",), "The beginning of the next question ends an answer.", "base models"),
    Kind(
        "Any chat template",
        ("chat_template",),
        "What is trained is found by rendering parts of the chat, here with a template in the manner of SmolLM2's.",
        "any other chat model",
    ),
)

RULES = """
## What is written, and what is refused

Every part of a message (text, thinking, images, the name and arguments of each tool call, the result of a tool, the
name of a speaker) is found in what is written, or the chat is refused with the message and the part. What is left out
by rule:

- Thinking of earlier turns, in families whose templates leave it out. An answer that is trained on is written with its
  thinking, or refused: `deepseekv3`, `qwen3_instruct` and `qwen3_vl` write none (`writes_thinking=True` does, for the
  latter two).
- In a plain string of the assistant, tags such as `<think>` are tags, and what stands in them is thinking; in a text
  part they are text.
- White space at the beginning and end of what is said, where the template trims it.
- `name` and `tool_call_id` of a tool's result, where the template has no place for them: they say which call it
  answers.

Arguments of a tool call are a JSON object; anything else (`null`, a list) is refused by every renderer.

"Each prompt extends the last one" is "yes" only where it holds for every answer that a model may give in the layout of
its family. Where white space at the edges of an answer is all that can break it, chats still make one example, unless
theirs does.

## Which chat templates can be used

`chat_template` tries a template when it is made: whether content is a string or parts, where thinking goes, whether
arguments are an object or text, what ends an answer and what a message with calls. A turn that ends where the next one
begins (GLM) is trained with the token that begins it, which is the stop; so is one whose end the template writes only
once another message follows. Mistral's templates want the ids of calls to have nine letters and digits: give them such
ids. Some prompts open thinking or close it: what an answer then must have, an error says, and options of the template
(`enable_thinking=False`) change it. Templates that refuse a role, or leave a part out, refuse or are refused by name.

`python benchmarks/templates.py FOLDER` tells it of any templates. Of 123 published ones, 117 can be used. The others:

- DeepSeek-R1-Distill (two revisions), DeepSeek-R1 and a later revision of DeepSeek-V3: the prompt ends with `<think>`,
  and the template writes no answer with its thinking, so no chat can be trained on as it would be sampled.
- Command R+ (tool use): it writes instructions behind the last message, and so behind the answer to train on.
- Apriel-1.6: the prompt ends with "Here are my reasoning steps:", which no answer is written with.
"""


def page() -> str:
    missing = set(supported_renderers()) - {name for kind in KINDS for name in kind.names}
    if missing:
        raise SystemExit(f"docs/make_renderers.py does not show these renderers: {sorted(missing)}")
    return INTRODUCTION + "\n".join(_overview()) + "\n" + RULES + "".join(map(_section, KINDS))


def _overview() -> Iterator[str]:
    yield "| renderer | for | stops at | each prompt extends the last one |"
    yield "|---|---|---|---|"
    for kind in KINDS:
        for name in kind.names:
            renderer = _renderer(name)
            stops = ", ".join(f"`{_stop(renderer.tokenizer, stop)}`" for stop in renderer.get_stop_sequences())
            yield f"| `{name}` | {kind.models} | {stops} | {'yes' if renderer.has_extension_property else 'no'} |"


def _stop(tokenizer: Tokenizer, stop: str | int) -> str:
    return repr(stop)[1:-1] if isinstance(stop, str) else tokenizer.decode([stop])


def _section(kind: Kind) -> str:
    name = kind.names[0]
    renderer = _renderer(name)
    chat = conversation(renderer, name)
    blocks = [
        "<pre>" + "".join(_shown(text, trained) for text, trained in stretches(renderer, example)) + "</pre>\n"
        for example in renderer.build_supervised_examples(chat)
    ]
    names = ", ".join(f"`{other}`" for other in kind.names)
    return f"\n## {kind.title}\n\n{names}. {kind.about}\n\n" + "\n".join(blocks)


def _shown(text: str, trained: bool) -> str:
    escaped = html.escape(text, quote=False)
    return f"<ins>{escaped}</ins>" if trained else escaped


def _renderer(name: str) -> Renderer:
    family = FAMILIES[name]
    dated = name.startswith("gpt_oss") and name != "gpt_oss_no_sysprompt"
    options = {"date": DATE} if dated else {}
    return get_renderer(name, family.tokenizer(), family.image_processor(), **options)


def conversation(renderer: Renderer, name: str) -> list[Message]:
    """A greeting, then a question that takes a tool to answer; as much of it as the family can say."""
    features = FAMILIES[name].features
    call_id = features.call_id("get_weather", 0)
    call = ToolCall(FunctionCall("get_weather", '{"city": "Paris"}'), call_id)
    labels = {"name": "get_weather"} | ({} if call_id is None else {"tool_call_id": call_id})
    thinks = features.thinking
    system = (
        renderer.create_conversation_prefix_with_tools([TOOL], "Be brief.")
        if features.tools
        else [Message(role="system", content="Be brief.")]
    )
    greeting = [Message(role="user", content="Hello!"), _answer("A greeting.", "Hi!", thinks)]
    if not features.tools:
        return [*system, *greeting, Message(role="user", content="2 + 2?"), _answer("Easy.", "4", thinks)]
    return [
        *system,
        *greeting,
        Message(role="user", content="Is it sunny in Paris?"),
        Message(_answer("I have to look.", "Let me see.", thinks), tool_calls=[call]),
        Message(role="tool", content="sunny", **labels),
        _answer("It is.", "Yes.", thinks and features.last_thinking),
    ]


def _answer(thinking: str, text: str, thinks: bool) -> Message:
    if not thinks:
        return Message(role="assistant", content=text)
    parts = [ThinkingPart(type="thinking", thinking=thinking), {"type": "text", "text": text}]
    return Message(role="assistant", content=parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
