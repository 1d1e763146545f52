"""What the commands share: what understanding one comes to, and how single words are read."""

import argparse
from collections.abc import Callable, Mapping
from typing import TypeVar

from stovetop.errors import UnknownName
from stovetop.types import SamplingParams

T = TypeVar("T")
Action = Callable[[], None]  # a command that was understood, ready to be carried out


def entry(kind: str, name: str, table: Mapping[str, T]) -> T:
    """What has this name in a table; a name that is not in it is refused, with the nearest."""
    if name not in table:
        raise UnknownName(kind, name, table)
    return table[name]


def count(text: str) -> int:
    """A number of things, of which there has to be one."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1: {text!r}")
    return int(text)


def temperature(text: str) -> float:
    """One that can be sampled at."""
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0: {text!r}") from error
