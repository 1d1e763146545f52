"""What the model reads: chunks of token ids, or an image each, in order. `types.py` has these names too."""

import operator
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np

from stovetop.checks import take
from stovetop.errors import InvalidRequest
from stovetop.rules import Instance, ListOf, Whole, shown
from stovetop.tensors import in_order
from stovetop.value import Value


def _token_ids(tokens: Iterable[int]) -> tuple[int, ...]:
    """Whether all are Python's own integers, their sum tells fastest: only of those it is one. (Integers of numpy,
    which would overflow in a sum, are seen by the first. A True behind the first is not seen here: to look for it costs
    more than all the rest. The verbs see it, `input_checks.check_model_input`.)"""
    ids = tuple(tokens if tokens.__class__ is list else in_order("tokens", tokens))
    try:
        if not ids or (type(ids[0]) is int and type(sum(ids)) is int):
            return ids
    except TypeError:
        pass
    return tuple(_token_id(index, token) for index, token in enumerate(ids))


def _token_id(index: int, token: int) -> int:
    if not isinstance(token, bool | np.bool_):
        with suppress(TypeError):
            return operator.index(token)
    raise InvalidRequest(f"token ids must be integers; tokens[{index}] is: {shown(token)}")


@dataclass(frozen=True, slots=True)
class EncodedTextChunk(Value):
    """A run of token ids."""

    tokens: tuple[int, ...]
    type: Literal["encoded_text"] = "encoded_text"

    def __init__(self, tokens: Iterable[int], type: Literal["encoded_text"] = "encoded_text") -> None:
        if type != "encoded_text":
            raise InvalidRequest(f"EncodedTextChunk.type must be 'encoded_text': {shown(type)}")
        object.__setattr__(self, "tokens", _token_ids(tokens))
        object.__setattr__(self, "type", type)

    @property
    def length(self) -> int:
        """Positions in the context: one for each token."""
        return len(self.tokens)

    def first(self, num_tokens: int) -> "EncodedTextChunk":
        """So many tokens from the left; with a negative number, all but so many."""
        return EncodedTextChunk._of_checked(self.tokens[: take(Whole(), num_tokens, "num_tokens")])

    def followed_by(self, tokens: Iterable[int]) -> "EncodedTextChunk":
        """A new chunk with these tokens behind its own."""
        return EncodedTextChunk._of_checked(self.tokens + _token_ids(tokens))

    @classmethod
    def _of_checked(cls, tokens: tuple[int, ...]) -> Self:
        chunk = object.__new__(cls)
        object.__setattr__(chunk, "tokens", tokens)
        object.__setattr__(chunk, "type", "encoded_text")
        return chunk


@dataclass(frozen=True, slots=True)
class ImageChunk(Value):
    """One image as encoded bytes. `expected_tokens` is how many positions it takes in the context."""

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: Annotated[int, Whole(0)] | None = None
    type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        """Positions in the context. Refused while `expected_tokens` is None."""
        if self.expected_tokens is None:
            raise InvalidRequest("an ImageChunk has a length only when expected_tokens is set: expected_tokens=None")
        return self.expected_tokens


ModelInputChunk = EncodedTextChunk | ImageChunk


_MAKE_ONE = "ModelInput.from_ints(tokens) makes an input of token ids"
_CHUNK = Instance((EncodedTextChunk, ImageChunk))
_CHUNKS = ListOf(_CHUNK, hint=_MAKE_ONE)


@dataclass(frozen=True, slots=True)
class ModelInput(Value):
    """What the model reads: chunks in order. Values never change; `append` returns a new one."""

    chunks: tuple[ModelInputChunk, ...]

    def __init__(self, chunks: Iterable[ModelInputChunk] = ()) -> None:
        object.__setattr__(self, "chunks", tuple(take(_CHUNKS, chunks, "ModelInput.chunks")))

    @classmethod
    def empty(cls) -> Self:
        """No chunks: what an environment shows after its last step."""
        return cls(())

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> Self:
        """One chunk of these token ids; of none, no chunk."""
        chunk = EncodedTextChunk(tokens)
        made = object.__new__(cls)
        object.__setattr__(made, "chunks", (chunk,) if chunk.tokens else ())
        return made

    def to_ints(self) -> list[int]:
        """All token ids; refused when there is an image among the chunks."""
        tokens: list[int] = []
        for index, chunk in enumerate(self.chunks):
            if isinstance(chunk, ImageChunk):
                raise InvalidRequest(f"to_ints needs text chunks only; chunk {index} is an image: {chunk.format}")
            tokens.extend(chunk.tokens)
        return tokens

    @property
    def length(self) -> int:
        """Positions taken in the context, images included."""
        return sum([chunk.length for chunk in self.chunks])

    def append(self, chunk: ModelInputChunk) -> "ModelInput":
        """A new input with this chunk behind its own."""
        return ModelInput((*self.chunks, chunk))

    def append_int(self, token: int) -> "ModelInput":
        """One more token; it joins the last chunk if that is text."""
        if self.chunks and isinstance(last := self.chunks[-1], EncodedTextChunk):
            return ModelInput((*self.chunks[:-1], last.followed_by((token,))))
        return self.append(EncodedTextChunk((token,)))


MODEL_INPUT = Instance((ModelInput,), _MAKE_ONE)
