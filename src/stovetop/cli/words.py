"""What the commands share: what understanding one comes to, and how single words are read."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.model_store import canonical_name
from stovetop.types import SamplingParams

T = TypeVar("T")
Action = Callable[[], None]  # a command that was understood, ready to be carried out


def entry(kind: str, name: str, table: Mapping[str, T]) -> T:
    """What has this name in a table; a name that is not in it is refused, with the nearest."""
    if name not in table:
        raise UnknownName(kind, name, table)
    return table[name]


def count(text: str, least: int = 1) -> int:
    """A number of things, of which there has to be one; or another number of them."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}: {text!r}")
    return int(text)


def named_models(words: Sequence[str]) -> dict[str, str]:
    """Where models are, by the names that clients use: each word is an alias, a name, a folder or NAME=FOLDER."""
    models: dict[str, str] = {}
    for word in words:
        name, given, place = word.partition("=")
        name, place = (name, place) if given else (canonical_name(word), word)
        if not name or not place or name in models:
            raise InvalidRequest(f"each model has a name of its own, as in NAME=FOLDER: {word!r}")
        models[name] = place
    return models


def temperature(text: str) -> float:
    """One that can be sampled at."""
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0: {text!r}") from error
