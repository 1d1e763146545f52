"""What the properties in `properties.py` need to know of each renderer: its real tokenizer, what its chats may contain,
who outside our code says how they are written, and what its template does to what was said."""

import functools
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from renderers import languages, real_tokenizers
from renderers.conversations import Features
from renderers.oracle import Oracle, trl_template
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.renderers.images import ImageProcessor
from stovetop.tokenizing import Tokenizer


def _as_it_is(text: str) -> str:
    return text


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@dataclass(frozen=True, slots=True)
class Family:
    tokenizer: Callable[[], Tokenizer]
    features: Features
    oracle: Oracle | None = None  # None: no published template, or it is compared elsewhere
    text: Callable[[str], str] = _as_it_is  # what is left of text, and of thinking, once it was written and read
    thinking: Callable[[str], str] = _as_it_is
    image_processor: Callable[[], ImageProcessor | None] = lambda: None


_EVERYTHING = Features()
_TEXT_ONLY = Features(thinking=False, tools=False)
_KIMI = Features(call_id=lambda name, index: f"functions.{name}:{index}")
_GPT_OSS = Features(max_calls=1)


@functools.cache
def qwen3_image_processor() -> ImageProcessor:
    return cast(ImageProcessor, Qwen2VLImageProcessorPil(patch_size=16, merge_size=2))


def _qwen3(template: str, features: Features = _EVERYTHING, **options: object) -> Family:
    oracle = Oracle(trl_template(template), options)
    return Family(real_tokenizers.qwen3, features, oracle, _nfc, _nfc, qwen3_image_processor)


_QWEN3 = replace(
    _qwen3("qwen3"),
    text=lambda text: _nfc(text).lstrip("\n"),
    thinking=lambda text: _nfc(text).strip("\n"),
)

_DEEPSEEK = Family(real_tokenizers.deepseek, Features(thinking=False))

FAMILIES: dict[str, Family] = {
    "role_colon": Family(ByteTokenizer, replace(_TEXT_ONLY, edges=False)),
    "chat_template": Family(languages.chatml, _TEXT_ONLY, Oracle(languages.CHATML)),
    "llama3": Family(
        real_tokenizers.llama3,
        _TEXT_ONLY,
        Oracle(trl_template("llama3"), {"bos_token": "<|begin_of_text|>"}),
        text=str.strip,
    ),
    "qwen3": _QWEN3,
    "qwen3_disable_thinking": replace(
        _QWEN3, features=Features(thinking=False), oracle=Oracle(trl_template("qwen3"), {"enable_thinking": False})
    ),
    "qwen3_instruct": _qwen3("qwen3_instruct_2507", Features(thinking=False)),
    "qwen3_vl": _qwen3("qwen3_vl", Features(thinking=False)),
    "qwen3_vl_instruct": _qwen3("qwen3_vl", Features(thinking=False)),
    "deepseekv3": _DEEPSEEK,
    "deepseekv3_disable_thinking": _DEEPSEEK,
    "kimi_k2": Family(real_tokenizers.kimi_k2, _KIMI),
    "gpt_oss_no_sysprompt": Family(real_tokenizers.gpt_oss, _GPT_OSS),
    "gpt_oss_low_reasoning": Family(real_tokenizers.gpt_oss, _GPT_OSS),
    "gpt_oss_medium_reasoning": Family(real_tokenizers.gpt_oss, _GPT_OSS),
    "gpt_oss_high_reasoning": Family(real_tokenizers.gpt_oss, _GPT_OSS),
}
