"""Getting a tokenizer by name, and encoding text so that what somebody wrote never becomes a control token.

Some tokens are matched as whole strings wherever they stand in a text: `<|im_end|>` typed by a user would end the turn.
`SafeEncoder.protect` puts an invisible cut into each such string, and `SafeEncoder.encode` encodes the sides of a cut
apart, so that the string stays text. A text without such strings is left as it is, and encoded in one piece.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Self, cast

from stovetop.errors import UnknownName
from stovetop.gguf_files import is_gguf, load_gguf_config, load_gguf_tokenizer
from stovetop.hub import asking
from stovetop.model_families import TokenizerSource, tokenizer_source
from stovetop.model_store import find_model, known_models
from stovetop.tokenizing import Tokenizer

_CUT = "\ufdd0"  # a Unicode noncharacter: no text means anything by it
_AS_TYPED = "\ufdd1"  # after _CUT: somebody did write that character
_CUTS = re.compile(f"{_CUT}(?!{_AS_TYPED})")
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
    with asking(unless_here=path) as problem:
        try:
            return cast(Tokenizer, AutoTokenizer.from_pretrained(source.repository, **options))  # pyright: ignore[reportUnknownMemberType]  untyped
        except (OSError, ValueError) as error:
            said = problem or f"{type(error).__name__}: {str(error).splitlines()[0]}"
            hint = f"Pass a model's folder, or fetch the model first ({said})"
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


Encode = Callable[[Sequence[str]], list[list[int]]]  # the tokens of each text, none added to what stands there


@dataclass(frozen=True, slots=True)
class SafeEncoder:
    """Encodes rendered chats. Make one with `of`."""

    tokenizer: Tokenizer
    bos: str  # the text of the begin-of-text token; empty without one
    control_tokens: dict[int, str]  # the control strings by their ids
    _control: re.Pattern[str]  # one of them
    _controls: re.Pattern[str]  # the first character of each
    _foreign: re.Pattern[str]  # the first character of each that a model does not write within its own turn
    _between: re.Pattern[str]  # what text lies between: control strings and cuts
    _ids: dict[str, list[int]]  # of those; a cut has none
    _encode: Encode  # of texts without cuts
    _is_separable: bool  # the tokens of a text between control strings are those that it has alone

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
        # A tokenizer may take white space before or behind a control token into it, or see the beginning of a word
        # there: then these differ.
        probe = " A b\n\ne\u0301 " + "".join(f"x{text}x \n{text}\n " for text in sorted(controls))
        encode = _encoding(tokenizer, probe)
        encoder = cls(
            tokenizer,
            "" if bos_token_id is None else tokenizer.decode([bos_token_id]),
            {added[text]: text for text in controls},
            re.compile(_one_of(controls)),
            _starts_of(controls),
            _starts_of(controls - own),
            re.compile(f"({'|'.join([_CUTS.pattern, *_branches(controls)])})"),
            {text: [added[text]] for text in controls} | {_CUT: []},
            encode,
            _is_separable=True,
        )
        return replace(encoder, _is_separable=encoder.encode_parts([probe]) == encode([probe]))

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
        return self.encode_parts([rendered])[0]

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, which together are those of all texts in one string, unless a token would lie
        across a border. There the border wins: a sampler begins its answer after the prompt's tokens, never inside
        one."""
        if not self._is_separable:
            return self._fitted(texts, self._whole("".join(texts)))
        texts_split = [self._between.split(text) for text in texts]  # ordinary, control, ordinary, control ...
        stretches = _stretches(texts_split)
        wholes = [_as_typed("".join(stretch)) for stretch in stretches]
        once = list(dict.fromkeys(wholes))  # who speaks, for one, stands in a chat many times
        tokens_of = dict(zip(once, self._encode(once), strict=True))
        ordinary = chain.from_iterable(map(self._fitted, stretches, map(tokens_of.__getitem__, wholes)))
        parts: list[list[int]] = []
        for pieces in texts_split:
            tokens: list[int] = []
            for index, piece in enumerate(pieces):
                if index % 2:
                    tokens += self._ids[piece]
                elif piece:
                    tokens += next(ordinary)
            parts.append(tokens)
        return parts

    def _fitted(self, texts: Sequence[str], whole: list[int]) -> list[list[int]]:
        """`whole`, the tokens of all these texts in one string, cut where each of them ends."""
        if len(texts) == 1:
            return [whole]
        borders = [0]
        for text in texts[:-1]:
            tokens = self._whole(text)
            end = borders[-1] + len(tokens)
            if whole[borders[-1] : end] != tokens:
                return self._one_by_one(texts)
            borders.append(end)
        return [whole[start:end] for start, end in pairwise([*borders, len(whole)])]

    def _one_by_one(self, texts: Sequence[str]) -> list[list[int]]:
        """Some tokenizers encode a text otherwise at its beginning than after another: ask for each beginning of the
        whole."""
        fitted: list[list[int]] = []
        so_far: list[int] = []
        for end, text in enumerate(texts, start=1):
            beginning = self._whole("".join(texts[:end]))
            fits = beginning[: len(so_far)] == so_far
            fitted.append(beginning[len(so_far) :] if fits else self._whole(text))
            so_far += fitted[-1]
        return fitted

    def _whole(self, text: str) -> list[int]:
        """Tokens of a text with whatever stands in it; the sides of a cut are encoded apart."""
        pieces = self._encode([_as_typed(piece) for piece in _CUTS.split(text)])
        return pieces[0] if len(pieces) == 1 else list(chain.from_iterable(pieces))

    def find_controls(self, rendered: str) -> list[str]:
        """The control strings that stand in `rendered`, in order."""
        return self._control.findall(rendered)

    def find_foreign(self, rendered: str) -> list[re.Match[str]]:
        """The control strings in `rendered` that a model does not write within its own turn."""
        return [found for found in self._control.finditer(rendered) if self._foreign.match(rendered, found.start())]


def _stretches(texts_split: Iterable[Sequence[str]]) -> list[list[str]]:
    """The ordinary text between control strings; where texts meet within a stretch, it is in pieces."""
    stretches: list[list[str]] = [[]]
    for pieces in texts_split:
        for index, piece in enumerate(pieces):
            if index % 2:
                if stretches[-1]:
                    stretches.append([])
            elif piece:
                stretches[-1].append(piece)
    return stretches if stretches[-1] else stretches[:-1]


def _as_typed(text: str) -> str:
    return text.replace(_CUT + _AS_TYPED, _CUT) if _CUT in text else text


def _encoding(tokenizer: Tokenizer, probe: str) -> Encode:
    """Text to tokens, none added. The library below a fast tokenizer of transformers takes two thirds of the time when
    it is asked itself; it is, if it says the same of the probe."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    if "transformers" not in sys.modules:
        return encode
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return encode
    below = tokenizer.backend_tokenizer

    def encode_below(texts: Sequence[str]) -> list[list[int]]:
        settings = cast(object, below.truncation or below.padding or below.encode_special_tokens)  # pyright: ignore[reportUnknownMemberType]  untyped
        if settings:  # left there by somebody's call
            return encode(texts)
        return [encoding.ids for encoding in below.encode_batch_fast(texts, add_special_tokens=False)]

    return encode_below if encode_below([probe]) == encode([probe]) else encode


def _is_special(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.decode([tokenizer.convert_tokens_to_ids(text)], skip_special_tokens=True) == ""


def _one_of(strings: Iterable[str]) -> str:
    """A pattern that matches one of these, the longest where there are several; never, without any. Strings that begin
    alike share their beginning in it: some tokenizers have hundreds, and to try each would take longer than to encode.

    >>> _one_of(["<a>", "<a", "<bc>"])
    '<(?:a(?:>)?|bc>)'
    """
    branches = _branches(strings)
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else "(?!)"


def _branches(strings: Iterable[str]) -> list[str]:
    """The same for those that begin with one character, each pattern for another."""
    endings: dict[str, list[str]] = {}
    for string in strings:
        endings.setdefault(string[0], []).append(string[1:])
    return [re.escape(first) + _ending(endings[first]) for first in sorted(endings)]


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
