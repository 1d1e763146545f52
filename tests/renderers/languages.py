"""Tokenizers with chat templates of different kinds, small enough to be made anew, and random chats to try on them."""

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stovetop.renderers.base import Renderer, SupervisedExample
from stovetop.renderers.messages import Message
from stovetop.tokenizing import Tokenizer

CORPUS = [
    "the end of the line\n\n",
    "hello there, user:\n",
    "assistant: system\n\n\n",
    "a  b   c <|im",
    "think of it",
] * 3

# Where words are cut apart, before anything is merged: as in newer models, and as in GPT-2.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS_OF_GPT2 = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# As in SmolLM2: a system message is put first when there is none.
CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As in Llama 3: begin-of-text, content trimmed, and nothing behind the end of a turn.
LLAMA = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# As in Qwen3: reasoning is written for answers after the last question, and dropped from those before it.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% set content = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}"
    "{% elif '</think>' in message.content %}"
    "{% set reasoning = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% else %}{% set reasoning = '' %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}{{ content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}{{ '\n<tool_call>\n' }}"
    "{{ call.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}{% endif %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


@functools.cache
def chatml(template: str | None = CHATML) -> Tokenizer:
    return _tokenizer(template, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], bos="<|im_start|>", eos="<|im_end|>")


@functools.cache
def llama(words: str = WORDS) -> Tokenizer:
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"]
    return _tokenizer(LLAMA, special, bos="<|begin_of_text|>", eos="<|end_of_text|>", words=words)


@functools.cache
def thinking() -> Tokenizer:
    """Its tags for reasoning and tool calls are added tokens, but not special ones; and so is an HTML tag."""
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<table>"]
    return _tokenizer(THINKING, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], tags, eos="<|im_end|>")


def _tokenizer(
    template: str | None,
    special: Sequence[str],
    tags: Sequence[str] = (),
    *,
    bos: str | None = None,
    eos: str,
    words: str = WORDS,
) -> Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), behavior="isolated"), bytes_])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    bpe.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return cast(Tokenizer, tokenizer)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """As a model's folder would have it."""
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')


def template_tokens(tokenizer: Tokenizer, messages: Sequence[Message], *, prompt: bool) -> list[int]:
    """What the template itself makes of a chat: the oracle."""
    return tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=prompt, return_dict=False)


def mask(renderer: Renderer, example: SupervisedExample) -> str:
    """The text of an example, with ¦ where training begins and ends."""
    text, training = "", False
    for token, weight in zip(example.model_input.to_ints(), example.weights, strict=True):
        if bool(weight) != training:
            text, training = text + "¦", bool(weight)
        text += renderer.tokenizer.decode([token])
    return text + ("¦" if training else "")


def trained_tokens(example: SupervisedExample) -> list[int]:
    return [token for token, weight in zip(example.model_input.to_ints(), example.weights, strict=True) if weight]


def chat(*turns: str, system: str | None = None) -> list[Message]:
    """User and assistant in turn."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return messages + [
        {"role": "assistant" if index % 2 else "user", "content": turn} for index, turn in enumerate(turns)
    ]


PIECES = ["the", " end", "hello", "\n", "\n\n", " ", "  ", "é", "日本", "🎉", "\t", "\u0301", "\ufdd0", "user:", "1"]


def random_chat(seed: int) -> list[Message]:
    """One to three questions with answers; any content may be empty, or white space."""
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(7)))

    turns = [text() for _ in range(2 * rng.randrange(1, 4))]
    return chat(*turns, system=text() if rng.random() < 0.5 else None)
