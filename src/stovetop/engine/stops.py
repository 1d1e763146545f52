# pyright: basic
"""When a sample ends: which token ids stop it, and which strings.

A string may begin and end anywhere inside tokens, so the text of the last tokens is decoded after each one. Every token
brings at least one byte, which bounds how far back to look.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stovetop.client import Tokenizer
from stovetop.errors import InvalidRequest
from stovetop.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Stops:
    """`tokens` end a sample when drawn; `strings` when they appear in its text."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    def hit(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the tokens drawn so far ends the sample."""
        if tokens[-1] in self.tokens:
            return True
        if not self.strings or self.tokenizer is None:
            return False
        longest = max(len(string.encode()) for string in self.strings)
        tail = self.tokenizer.decode(tokens[-(longest + 4) :], skip_special_tokens=False)
        return any(string in tail for string in self.strings)


def stops_of(params: SamplingParams, ends_of_text: frozenset[int], tokenizer: Tokenizer | None) -> Stops:
    """What is asked for comes on top of the model's ends of text; `[]` turns everything off."""
    stop = params.stop
    if stop is None:
        return Stops(ends_of_text)
    if isinstance(stop, str):
        stop = [stop]
    if len(stop) == 0:
        return Stops(frozenset())
    strings = tuple(item for item in stop if isinstance(item, str))
    if strings and tokenizer is None:
        raise InvalidRequest(f"stop strings need a tokenizer, and this model has none; pass token ids: {strings}")
    return Stops(ends_of_text | {item for item in stop if isinstance(item, int)}, strings, tokenizer)
