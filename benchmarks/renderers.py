"""How long renderers take: chats to tokens and weights, against two things that do less.

    python benchmarks/renderers.py [--conversations 2000] [--rounds 5] [--json FILE]

`bare` is the tokenizer alone, given the finished texts; `template` is apply_chat_template, which gives tokens and no
weights. One process, and nothing is kept from one chat to the next. The pieces of a chat are encoded together, for
which the tokenizers library takes several threads; TOKENIZERS_PARALLELISM=false in the environment leaves it one, as
the two others have anyway. Each round times all three on all chats; a ratio is that of the fastest rounds. The
tokenizers come from packages of the dev extra.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from renderers import real_tokenizers
from renderers.conversations import Features, conversation
from renderers.oracle import as_openai, trl_template
from stovetop.renderers import get_renderer
from stovetop.renderers.messages import Message
from stovetop.tokenizing import Tokenizer

T = TypeVar("T")

MOST_OF_BARE = 1.25  # what we aim at: at most so many times the time of the tokenizer alone,
LEAST_OF_TEMPLATE = 1.5  # and at least so many times as fast as apply_chat_template

# In Kimi's format, for messages of text; no package has its own template.
KIMI = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You are Kimi, an "
    "AI assistant created by Moonshot AI.<|im_end|>{% endif %}"
    "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{% if m.role == 'assistant' %}<think>"
    "{% if loop.last %}{{ m.reasoning_content }}{% endif %}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Family:
    renderer: str
    tokenizer: Callable[[], Tokenizer]
    template: str
    features: Features  # of its chats: what its template writes too


EVERYTHING = Features(max_pieces=120)
WITHOUT_TOOLS = replace(EVERYTHING, tools=False)
TEXT = replace(WITHOUT_TOOLS, thinking=False)

FAMILIES = {
    "Qwen3": Family("qwen3", real_tokenizers.qwen3, trl_template("qwen3"), EVERYTHING),
    "Llama 3": Family("llama3", real_tokenizers.llama3, trl_template("llama3"), TEXT),
    "DeepSeek": Family("deepseekv3", real_tokenizers.deepseek, trl_template("deepseekv3"), TEXT),
    "Kimi": Family("kimi_k2", real_tokenizers.kimi_k2, KIMI, WITHOUT_TOOLS),
    "gpt-oss": Family("gpt_oss_medium_reasoning", real_tokenizers.gpt_oss, trl_template("gptoss"), WITHOUT_TOOLS),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for all chats, in the fastest round."""

    num_tokens: int
    render_s: float
    bare_s: float
    template_s: float

    @property
    def of_bare(self) -> float:
        return self.render_s / self.bare_s

    @property
    def of_template(self) -> float:
        return self.template_s / self.render_s


def measure(family: Family, num_conversations: int, num_rounds: int) -> Timing:
    tokenizer: Any = family.tokenizer()
    tokenizer.chat_template = family.template
    renderer = get_renderer(family.renderer, tokenizer)
    chats = [conversation(seed, family.features) for seed in range(num_conversations)]
    shown = [[as_openai(message) for message in messages] for messages in chats]

    def render(messages: Sequence[Message]) -> int:
        model_input, weights = renderer.build_supervised_example(messages)
        return len(weights) + model_input.length

    texts = [tokenizer.decode(renderer.build_supervised_example(messages).model_input.to_ints()) for messages in chats]
    rounds = [
        (
            seconds(render, chats),
            seconds(lambda text: tokenizer.encode(text, add_special_tokens=False), texts),
            seconds(lambda messages: tokenizer.apply_chat_template(messages, tokenize=True), shown),
        )
        for _ in range(num_rounds)
    ]
    num_tokens = sum(renderer.build_supervised_example(messages).model_input.length for messages in chats)
    return Timing(num_tokens, *map(min, zip(*rounds, strict=True)))


def seconds(what: Callable[[T], object], values: Sequence[T]) -> float:
    start = time.perf_counter()
    for value in values:
        what(value)
    return time.perf_counter() - start


def report(timings: dict[str, Timing]) -> str:
    lines = [
        f"{'family':<10}{'tokens':>9}{'render':>9}{'bare':>9}{'template':>10}{'render/bare':>13}{'template/render':>17}"
    ]
    for name, timing in timings.items():
        lines.append(
            f"{name:<10}{timing.num_tokens:>9}{timing.render_s:>8.2f}s{timing.bare_s:>8.2f}s{timing.template_s:>9.2f}s"
            f"{timing.of_bare:>13.2f}{timing.of_template:>17.2f}"
        )
    return "\n".join([*lines, f"{'aim':<47}{f'<= {MOST_OF_BARE}':>13}{f'>= {LEAST_OF_TEMPLATE}':>17}"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Times renderers against the tokenizer and against chat templates.")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes both ratios of each family")
    options = parser.parse_args()
    timings = {name: measure(family, options.conversations, options.rounds) for name, family in FAMILIES.items()}
    print(report(timings))
    if options.json is not None:
        ratios = {
            name: {"render_over_bare": timing.of_bare, "template_over_render": timing.of_template}
            for name, timing in timings.items()
        }
        options.json.write_text(json.dumps(ratios, indent=1) + "\n")


if __name__ == "__main__":
    main()
