"""Getting a tokenizer by name, and encoding text so that what somebody wrote never becomes a control token.

Some tokens are matched as whole strings wherever they stand in a text: `<|im_end|>` typed by a user would end the turn.
`SafeEncoder.protect` puts an invisible cut into each such string, and `SafeEncoder.encode` encodes the sides of a cut
apart, so that the string stays text. A text without such strings is left as it is, and encoded in one piece.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Self, cast

from stovetop.client import Tokenizer
from stovetop.errors import UnknownName
from stovetop.gguf_files import is_gguf, load_gguf_config, load_gguf_tokenizer
from stovetop.model_families import TokenizerSource, tokenizer_source
from stovetop.model_store import find_model, known_models

_CUT = "\ufdd0"  # a Unicode noncharacter: no text means anything by it
_AS_TYPED = "\ufdd1"  # after _CUT: somebody did write that character
_CUTS = re.compile(f"{_CUT}(?!{_AS_TYPED})")
_MAX_CONSTANT = 40  # characters: header lines are shorter, and so are reasoning blocks that say nothing
_HTML = "table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|code"
_ORDINARY = re.compile(rf"\s+|</?({_HTML})>")


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model given by folder, by the name or alias of a fetched model, or by its id on the hub. The
    same object for the same model."""
    folder = find_model(name)
    return _load(tokenizer_source(name) if folder is None else TokenizerSource(str(folder)))


@functools.cache
def _load(source: TokenizerSource) -> Tokenizer:
    if is_gguf(path := Path(source.repository)):
        return cast(Tokenizer, load_gguf_tokenizer(path, load_gguf_config(path)))
    from transformers import AutoTokenizer

    options = {"revision": source.revision or "main", "trust_remote_code": source.runs_code}
    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(source.repository, **options))  # pyright: ignore[reportUnknownMemberType]  untyped
    except (OSError, ValueError) as error:
        hint = f"Pass a model's folder, or fetch the model first ({type(error).__name__}: {str(error).splitlines()[0]})"
        raise UnknownName("tokenizer", source.repository, known_models(), hint=hint) from error


@dataclass(frozen=True, slots=True)
class TokenizerName:
    """Stands for what `get_tokenizer` gives for this name, where the tokenizer itself is too large to be sent."""

    name: str


def named(tokenizer: Tokenizer) -> Tokenizer | TokenizerName:
    """The tokenizer's name, if `get_tokenizer` gave it under that name; else the tokenizer."""
    if "transformers" not in sys.modules:
        return tokenizer
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    name = cast(str, tokenizer.name_or_path)  # pyright: ignore[reportUnknownMemberType]  untyped
    try:
        return TokenizerName(name) if name and get_tokenizer(name) is tokenizer else cast(Tokenizer, tokenizer)
    except UnknownName:
        return cast(Tokenizer, tokenizer)


@dataclass(frozen=True, slots=True)
class SafeEncoder:
    """Encodes rendered chats. Make one with `of`."""

    tokenizer: Tokenizer
    bos: str  # the text of the begin-of-text token; empty without one
    control_tokens: dict[int, str]  # the control strings by their ids
    _control: re.Pattern[str]  # one of them
    _controls: re.Pattern[str]  # the first character of each
    _foreign: re.Pattern[str]  # the first character of each that a model does not write within its own turn
    _encode: Callable[[str], list[int]]  # of text without cuts
    _constants: dict[str, list[int]] = field(default_factory=dict[str, list[int]], compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, template: str = "", opening: str = "") -> Self:
        """Control strings are the tokenizer's added tokens: the special ones, but also others, with which many families
        mark turns. Exempt are whitespace and HTML tags, which some tokenizers have added as ordinary text.

        A model's own markup is what `template` writes and is neither special nor in `opening`, the beginning of a chat.
        """
        added = {text: token for text, token in tokenizer.get_added_vocab().items() if len(text) > 1}
        special = {text for text in added if _is_special(tokenizer, text)}
        controls = {text for text in added if text in special or not _ORDINARY.fullmatch(text)}
        own = {text for text in controls - special if text in template and text not in opening}
        bos_token_id = tokenizer.bos_token_id
        return cls(
            tokenizer,
            "" if bos_token_id is None else tokenizer.decode([bos_token_id]),
            {added[text]: text for text in controls},
            re.compile(_one_of(controls)),
            _starts_of(controls),
            _starts_of(controls - own),
            _encoding(tokenizer, "".join(sorted(controls))),
        )

    def protect(self, text: str) -> str:
        """`text`, to be put into a rendered chat without being able to form a control token there."""
        return self._cut(text, self._controls)

    def protect_own(self, text: str) -> str:
        """The same for what a model wrote as its turn: its own markup, such as `<think>`, stays markup."""
        return self._cut(text, self._foreign)

    def _cut(self, text: str, starts: re.Pattern[str]) -> str:
        if _CUT in text:
            text = text.replace(_CUT, _CUT + _AS_TYPED)
        return starts.sub(_with_cut, text) if self._control.search(text) else text

    def unprotect(self, text: str) -> str:
        """The text as it was before `protect`."""
        return _CUTS.sub("", text).replace(_CUT + _AS_TYPED, _CUT) if _CUT in text else text

    def encode(self, rendered: str) -> list[int]:
        """Tokens of a rendered chat, or of a piece of one: no token is added to what stands there."""
        if _CUT not in rendered:
            return self._encode(rendered)
        pieces = (piece.replace(_CUT + _AS_TYPED, _CUT) for piece in _CUTS.split(rendered))
        return [token for piece in pieces for token in self._encode(piece)]

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, which together are those of all texts in one string, unless a token would lie
        across a border. There the border wins: a sampler begins its answer after the prompt's tokens, never inside
        one."""
        whole = self.encode("".join(texts))
        borders = self._borders(texts, whole)
        if borders is not None:
            return [whole[start:end] for start, end in pairwise([0, *borders, len(whole)])]
        parts = [self.encode(text) for text in texts]
        if list(chain.from_iterable(parts)) == whole:
            return parts
        # Some tokenizers encode a text otherwise at its beginning than after another: ask for each beginning of the
        # whole.
        fitted: list[list[int]] = []
        so_far: list[int] = []
        for end, part in enumerate(parts, start=1):
            beginning = self.encode("".join(texts[:end]))
            fits = beginning[: len(so_far)] == so_far
            fitted.append(beginning[len(so_far) :] if fits else part)
            so_far += fitted[-1]
        return fitted

    def _borders(self, texts: Sequence[str], whole: list[int]) -> list[int] | None:
        """Where in `whole` each text but the last ends. Seen without encoding the texts, if each ends with a control
        token and a few characters of its own: nothing is merged across a control token."""
        places = [index for index, token in enumerate(whole) if token in self.control_tokens]
        borders: list[int] = []
        num_controls = 0
        for text in texts[:-1]:
            found = list(self._control.finditer(text))
            rest = text[found[-1].end() :] if found else ""
            num_controls += len(found)
            if not found or num_controls > len(places) or len(rest) > _MAX_CONSTANT:
                return None
            start = places[num_controls - 1] + 1
            tokens = self._constant(rest)
            if whole[start : start + len(tokens)] != tokens:
                return None
            borders.append(start + len(tokens))
        return borders if num_controls + len(self.find_controls(texts[-1])) == len(places) else None

    def _constant(self, text: str) -> list[int]:
        """Tokens of what every chat has, such as the line that says who speaks; encoded once."""
        if text not in self._constants:
            self._constants[text] = self.encode(text)
        return self._constants[text]

    def find_controls(self, rendered: str) -> list[str]:
        """The control strings that stand in `rendered`, in order."""
        return self._control.findall(rendered)


def _encoding(tokenizer: Tokenizer, controls: str) -> Callable[[str], list[int]]:
    """Text to tokens, none added. The library below a fast tokenizer of transformers takes two thirds of the time when
    it is asked itself; it is, if it says the same of a text with all that is special."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    if "transformers" not in sys.modules:
        return encode
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return encode
    below = tokenizer.backend_tokenizer

    def encode_below(text: str) -> list[int]:
        settings = cast(object, below.truncation or below.padding or below.encode_special_tokens)  # pyright: ignore[reportUnknownMemberType]  untyped
        if settings:  # left there by somebody's call
            return encode(text)
        return below.encode_batch_fast([text], add_special_tokens=False)[0].ids

    probe = f" A b\n\ne\u0301  {controls} "
    return encode_below if encode_below(probe) == encode(probe) else encode


def _is_special(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.decode([tokenizer.convert_tokens_to_ids(text)], skip_special_tokens=True) == ""


def _one_of(strings: Iterable[str]) -> str:
    """A pattern that matches one of these, the longest where there are several; never, without any. Strings that begin
    alike share their beginning in it: some tokenizers have hundreds, and to try each would take longer than to encode.

    >>> _one_of(["<a>", "<a", "<bc>"])
    '<(?:a(?:>)?|bc>)'
    """
    endings: dict[str, list[str]] = {}
    for string in strings:
        endings.setdefault(string[0], []).append(string[1:])
    branches = [re.escape(first) + _ending(endings[first]) for first in sorted(endings)]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else "(?!)"


def _ending(endings: Sequence[str]) -> str:
    longer = [ending for ending in endings if ending]
    if len(longer) == len(endings):
        return _one_of(longer)
    return f"(?:{_one_of(longer)})?" if longer else ""


def _starts_of(strings: set[str]) -> re.Pattern[str]:
    """Matches the first character of each occurrence, overlapping ones too."""
    return re.compile(rf"(?={_one_of(strings)}).", re.DOTALL)


def _with_cut(found: re.Match[str]) -> str:
    return found[0] + _CUT
