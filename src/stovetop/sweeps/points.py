"""Which values the runs of a sweep have. A point is what one run has of its own: the words of its fields, by name.

learning_rate=1e-4,3e-4       a choice
learning_rate=1e-5..1e-3      a range, to draw from: whole numbers where both ends are
"""

import hashlib
import itertools
import math
import random
import re
from collections.abc import Mapping
from typing import NamedTuple

from stovetop.errors import InvalidRequest

SEED_FIELD = "seed"  # not searched: every point is run with each of them
MOST_MISSES = 1000  # in a row, of draws that were there already: fewer points differ than were asked for
MAX_NAME = 120  # letters of a folder
WIDE = 10.0  # a range whose ends differ by this factor or more is drawn from by its logarithm

Point = Mapping[str, str]


class Choice(NamedTuple):
    """One of these."""

    values: tuple[str, ...]

    def draw(self, drawn: random.Random) -> str:
        return drawn.choice(self.values)


class Range(NamedTuple):
    """Any number between these, ends included."""

    low: float
    high: float
    is_whole: bool

    @property
    def is_wide(self) -> bool:
        return self.low > 0 and self.high / self.low >= WIDE

    def draw(self, drawn: random.Random) -> str:
        """With the same chance everywhere; in a wide range, the same for every factor of ten. Four digits."""
        if self.is_wide:
            number = math.exp(drawn.uniform(math.log(self.low), math.log(self.high)))
        else:
            number = drawn.uniform(self.low, self.high)
        number = min(max(number, self.low), self.high)
        return str(round(number)) if self.is_whole else f"{number:.4g}"


Values = Choice | Range


def parse_values(field: str, text: str) -> Values | None:
    """What a field is to have in turn; None where it is one value, the same for all runs."""
    number = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
    if ends := re.fullmatch(rf"({number})\.\.({number})", text):
        low, high = float(ends[1]), float(ends[2])
        if low >= high:
            raise InvalidRequest(f"{field}: a range goes from a number to a higher one: {text!r}")
        return Range(low, high, all(re.fullmatch(r"[-+]?\d+", end) for end in ends.groups()))
    if "," not in text:
        return None
    values = tuple(value.strip() for value in text.split(","))
    if not all(values) or len(set(values)) < len(values):
        raise InvalidRequest(f"{field}: several values are divided by commas, each is there once: {text!r}")
    return Choice(values)


def grid(fields: Mapping[str, Values]) -> list[Point]:
    """Every combination, the last field changing fastest."""
    choices: list[tuple[str, ...]] = []
    for name, values in fields.items():
        if isinstance(values, Range):
            raise InvalidRequest(
                f"{name}: values are drawn from a range, draw=20 says how many; or name them: {name}=a,b,c"
            )
        choices.append(values.values)
    return [dict(zip(fields, chosen, strict=True)) for chosen in itertools.product(*choices)]


def draw_points(fields: Mapping[str, Values], num: int, seed: int = 0) -> list[Point]:
    """`num` points drawn at random, each with every seed. The first are the same however many are drawn, so that a
    search can be gone on with."""
    seeds = fields.get(SEED_FIELD)
    searched = {name: values for name, values in fields.items() if name != SEED_FIELD}
    if not searched:
        raise InvalidRequest("draw searches in fields other than the seed; give one several values: field=a,b")
    if isinstance(seeds, Range):
        raise InvalidRequest("seed: name the seeds, each point is run with all of them: seed=0,1,2")
    points: dict[tuple[str, ...], Point] = {}
    last_new = 0
    for number in itertools.count():
        if len(points) == num or number - last_new > MOST_MISSES:
            break
        drawn = {name: values.draw(random.Random(f"{seed}/{number}/{name}")) for name, values in searched.items()}
        if points.setdefault(tuple(drawn.values()), drawn) is drawn:
            last_new = number
    own: list[dict[str, str]] = [{}] if seeds is None else [{SEED_FIELD: each} for each in seeds.values]
    return [{**point, **each} for point in points.values() for each in own]


def name_of(point: Point) -> str:
    """Of the folder of its run. What cannot stand in one is left out, and the name then ends in a digest of all."""
    text = ",".join(f"{field}={value}" for field, value in point.items())
    name = re.sub(r"[^A-Za-z0-9=,.+_-]", "_", text)[:MAX_NAME]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def without_seed(point: Point) -> tuple[tuple[str, str], ...]:
    """What runs have in common that differ in the seed alone."""
    return tuple((field, value) for field, value in point.items() if field != SEED_FIELD)
