"""Getting a tokenizer by name, and encoding text so that what somebody wrote never becomes a control token.

Some tokens are matched as whole strings wherever they stand in a text: `<|im_end|>` typed by a user would end the turn.
`SafeEncoder.protect` puts an invisible cut into each such string, and `SafeEncoder.encode` encodes the sides of a cut
apart, so that the string stays text. A text without such strings is left as it is, and encoded in one piece.
"""

import functools
import re
from dataclasses import dataclass
from typing import Self, cast

from stovetop.client import Tokenizer
from stovetop.errors import UnknownName
from stovetop.model_store import find_model, known_models

_CUT = "\ufdd0"  # a Unicode noncharacter: no text means anything by it
_AS_TYPED = "\ufdd1"  # after _CUT: somebody did write that character
_CUTS = re.compile(f"{_CUT}(?!{_AS_TYPED})")
_HTML = "table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|code"
_ORDINARY = re.compile(rf"\s+|</?({_HTML})>")


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model given by folder, by the name or alias of a fetched model, or by its id on the hub. The
    same object for the same model."""
    folder = find_model(name)
    return _load(name if folder is None else str(folder))


@functools.cache
def _load(location: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(location))  # pyright: ignore[reportUnknownMemberType]  untyped
    except (OSError, ValueError) as error:
        hint = f"Pass a model's folder, or fetch the model first ({type(error).__name__}: {str(error).splitlines()[0]})"
        raise UnknownName("tokenizer", location, known_models(), hint=hint) from error


@dataclass(frozen=True, slots=True)
class SafeEncoder:
    """Encodes rendered chats. Make one with `of`."""

    tokenizer: Tokenizer
    bos: str  # the text of the begin-of-text token; empty without one
    _controls: re.Pattern[str]  # one control string, at its first character
    _foreign: re.Pattern[str]  # one that a model does not write within its own turn

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, template: str = "", opening: str = "") -> Self:
        """Control strings are the tokenizer's added tokens: the special ones, but also others, with which many families
        mark turns. Exempt are whitespace and HTML tags, which some tokenizers have added as ordinary text.

        A model's own markup is what `template` writes and is neither special nor in `opening`, the beginning of a chat.
        """
        added = [text for text in tokenizer.get_added_vocab() if len(text) > 1]
        special = {text for text in added if _is_special(tokenizer, text)}
        controls = {text for text in added if text in special or not _ORDINARY.fullmatch(text)}
        own = {text for text in controls - special if text in template and text not in opening}
        bos_token_id = tokenizer.bos_token_id
        return cls(
            tokenizer,
            "" if bos_token_id is None else tokenizer.decode([bos_token_id]),
            _starts_of(controls),
            _starts_of(controls - own),
        )

    def protect(self, text: str) -> str:
        """`text`, to be put into a rendered chat without being able to form a control token there."""
        return self._controls.sub(_with_cut, text.replace(_CUT, _CUT + _AS_TYPED))

    def protect_own(self, text: str) -> str:
        """The same for what a model wrote as its turn: its own markup, such as `<think>`, stays markup."""
        return self._foreign.sub(_with_cut, text.replace(_CUT, _CUT + _AS_TYPED))

    def encode(self, rendered: str) -> list[int]:
        """Tokens of a rendered chat, or of a piece of one: no token is added to what stands there."""
        pieces = (piece.replace(_CUT + _AS_TYPED, _CUT) for piece in _CUTS.split(rendered))
        return [token for piece in pieces for token in self.tokenizer.encode(piece, add_special_tokens=False)]

    def find_controls(self, rendered: str) -> list[str]:
        """The control strings that stand in `rendered`, in order."""
        return self._controls.findall(rendered)


def _is_special(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.decode([tokenizer.convert_tokens_to_ids(text)], skip_special_tokens=True) == ""


def _starts_of(strings: set[str]) -> re.Pattern[str]:
    """Matches the first character of each occurrence, overlapping ones too; group 1 is the longest string there."""
    longest_first = sorted(strings, key=lambda string: (-len(string), string))
    return (
        re.compile(rf"(?=({'|'.join(map(re.escape, longest_first))})).", re.DOTALL) if strings else re.compile("(?!)")
    )


def _with_cut(found: re.Match[str]) -> str:
    return found[0] + _CUT
