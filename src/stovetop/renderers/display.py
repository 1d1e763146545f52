"""Token sequences in colour, for a terminal: what an example trains, seen at a glance."""

from collections.abc import Sequence
from itertools import groupby

from stovetop.errors import InvalidRequest
from stovetop.tokenizing import Tokenizer
from stovetop.types import Datum

_GREEN, _YELLOW, _RED, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


def format_colorized(tokens: Sequence[int], weights: Sequence[float], tokenizer: Tokenizer) -> str:
    """The text of `tokens`: green where the weight is above 0, yellow at 0, red below.

    Neighbours of one colour are decoded together, so that a character made of several tokens appears whole.
    """
    if len(tokens) != len(weights):
        raise InvalidRequest(f"tokens and weights must be equally long: {len(tokens)} and {len(weights)}")
    pieces: list[str] = []
    for colour, run in groupby(zip(tokens, weights, strict=True), key=lambda pair: _colour(pair[1])):
        pieces.append(colour + tokenizer.decode([token for token, _ in run]) + _RESET)
    return "".join(pieces)


def colorize_example(datum: Datum, tokenizer: Tokenizer, key: str = "weights") -> str:
    """A datum's whole sequence, each token in the colour of its `key` ("weights", "advantages"). The first token is
    never a target, hence yellow."""
    for needed in ("target_tokens", key):
        if needed not in datum.loss_fn_inputs:
            raise InvalidRequest(f"the datum has no {needed!r} to show: it has {sorted(datum.loss_fn_inputs)}")
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs[key]
    if targets.array.ndim != 1:
        raise InvalidRequest(f"only one target per position can be shown: target_tokens has shape {targets.shape}")
    tokens = [*datum.model_input.to_ints(), int(targets.data[-1])]
    return format_colorized(tokens, [0.0, *weights.data], tokenizer)


def _colour(weight: float) -> str:
    return _GREEN if weight > 0 else _RED if weight < 0 else _YELLOW
