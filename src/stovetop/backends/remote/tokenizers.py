# pyright: basic
"""The tokenizer of a server's base model: it is read on this machine, a server sends none."""

import functools
from collections.abc import Callable
from typing import Any, cast

from stovetop.gguf_files import is_gguf, load_gguf_config, load_gguf_tokenizer
from stovetop.model_store import find_model
from stovetop.tokenizing import Tokenizer


def tokenizer_of(name: str, by_sdk: Callable[[], Any]) -> Tokenizer:
    """Of the model of this name if it is here; else where the SDK finds one, on the hub."""
    return _read(name) if find_model(name) is not None else cast(Tokenizer, by_sdk())


@functools.cache
def _read(name: str) -> Tokenizer:
    place = find_model(name)
    assert place is not None, "it was found"
    if is_gguf(place):
        return cast(Tokenizer, load_gguf_tokenizer(place, load_gguf_config(place)))
    from transformers import AutoTokenizer

    return cast(Tokenizer, AutoTokenizer.from_pretrained(place))
