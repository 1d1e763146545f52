# pyright: basic
"""When a sample ends: which token ids stop it, and which strings.

A string may begin and end anywhere inside tokens, so the text of the last tokens is decoded after each one: of as many
as it takes to have more bytes than the longest string. What is decoded starts with a few tokens that are the same for
all, and whose text is taken off again, for many decoders drop the space that a text begins with. The prompt is no part
of it, so nothing in it, and nothing that begins in it, ends a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stovetop.errors import InvalidRequest
from stovetop.tokenizing import Tokenizer
from stovetop.types import SamplingParams

LEAD = "x"
UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character are decoded to


@dataclass(frozen=True, slots=True)
class Stops:
    """`tokens` end a sample when drawn; `strings` when they appear in its text."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None
    lead: tuple[int, ...] = ()  # tokens of some text that whatever is decoded may follow

    def hit(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the tokens drawn so far ends the sample."""
        if tokens[-1] in self.tokens:
            return True
        if not self.strings or self.tokenizer is None:
            return False
        longest = max(len(string.encode()) for string in self.strings)
        count = longest + 4  # most tokens bring a byte at least, and a character that is cut in two is of four at most
        tail = self._text(tokens[-count:])
        while len(tail.encode()) < count < len(tokens):  # some bring none
            count *= 2
            tail = self._text(tokens[-count:])
        if UNREADABLE not in tail:
            return any(string in tail for string in self.strings)
        # a beginning within a character makes some decoders give up the characters behind it too
        tails = [tail, *(self._text(tokens[-start:]) for start in range(count - 1, count - 4, -1))]
        return any(string in each for each in tails for string in self.strings)

    def _text(self, tokens: Sequence[int]) -> str:
        assert self.tokenizer is not None, "strings come with a tokenizer"
        lead = list(self.lead)
        text = self.tokenizer.decode([*lead, *tokens], skip_special_tokens=False)
        return text.removeprefix(self.tokenizer.decode(lead, skip_special_tokens=False)) if lead else text


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
    lead = tuple(tokenizer.encode(LEAD, add_special_tokens=False)) if strings and tokenizer is not None else ()
    return Stops(ends_of_text | {item for item in stop if isinstance(item, int)}, strings, tokenizer, lead)
