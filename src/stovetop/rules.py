"""What a field or an argument may hold, said once, in its annotation.

    Rank = Annotated[int, Whole(1, 65_536)]

A plain annotation has the obvious rule: an `int` takes integers only (numpy's too, which become Python's; 2.0 and True
are none), a `float` any finite number, a `str` text, a `Literal` its choices. The first word of an `Annotated` is a
narrower one. `checks.py` holds values and arguments to their rules.
"""

import inspect
import math
import reprlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, runtime_checkable

import numpy as np

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong = 40


class Unfit(Exception):
    """A value that breaks a rule; `where` says in which part of it, "[3]"."""

    def __init__(self, rule: "Rule", value: object, where: str = "") -> None:
        super().__init__(where, rule.says, value)
        self.rule, self.value, self.where = rule, value, where

    def message(self, what: str) -> str:
        """The sentence for `what`, the name of the field or argument."""
        return f"{what}{self.where} must be {self.rule.says}: {shown(self.value)}"


def shown(value: object) -> str:
    """A short form of any value, and its type where that is not plain to see."""
    text = _short.repr(value)
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return text
    if is_a(value, list, tuple, dict) and not value:
        return f"{text} (an empty {kind.__name__})"
    return f"{text} ({kind.__name__ if kind.__module__ == 'builtins' else f'{kind.__module__}.{kind.__qualname__}'})"


def is_a(value: object, *classes: type) -> bool:
    """isinstance, of a value that may be anything: the type checker learns nothing from it."""
    return isinstance(value, classes)


def is_torch(value: object) -> bool:
    """Where torch is not loaded, nothing is a tensor of it: it is not loaded to say so."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@runtime_checkable
class Rule(Protocol):
    """What may be passed."""

    @property
    def says(self) -> str:
        """The end of the sentence "it must be ..."."""
        ...

    def fits(self, value: Any) -> bool:
        """Whether the value is one to keep as it is. Asked first: it has to be fast."""
        ...

    def taken(self, value: Any) -> Any:
        """The value in the one form that is kept: an int for numpy's integers, say. Raises Unfit."""
        ...


# ---- numbers -------------------------------------------------------------------------------------------------------

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT_MAX = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Whole:
    """Integers from `low` to `high`, and `also` one more with a meaning of its own."""

    low: int = INT64_MIN
    high: int = INT64_MAX
    also: int | None = None
    meaning: str = ""  # of `also`
    hint: str = ""  # what to do instead

    @property
    def says(self) -> str:
        if self.low == self.high:
            words = str(self.low)
        elif self.high != INT64_MAX:
            words = f"an integer from {self.low} to {self.high}"
        else:
            words = "an integer of 64 bits" if self.low == INT64_MIN else f"an integer of at least {self.low}"
        return _hinted(words if self.also is None else f"{self.also} ({self.meaning}) or {words}", self.hint)

    def fits(self, value: Any) -> bool:
        return type(value) is int and (self.low <= value <= self.high or value == self.also)

    def taken(self, value: Any) -> int:
        value = _scalar(value)
        if is_a(value, int, np.integer) and not is_a(value, bool) and self.fits(plain := int(value)):
            return plain
        if is_a(value, int) and value > INT64_MAX == self.high:  # the limit that `says` leaves out
            raise Unfit(Whole(self.low, hint=f"at most {INT64_MAX}"), value)
        raise Unfit(self, value)


@dataclass(frozen=True, slots=True)
class Number:
    """Finite numbers from `low` to `high`, and `also` one more. Made by `number`, which finds the words."""

    low: float
    high: float
    also: float | None
    says: str
    finite: bool = True

    def fits(self, value: Any) -> bool:
        return type(value) is float and (self.low <= value <= self.high or value == self.also or not self.finite)

    def taken(self, value: Any) -> float:
        value = _scalar(value)
        if is_a(value, int, float, np.integer, np.floating) and not is_a(value, bool):
            try:
                plain = float(value)
            except OverflowError:
                raise Unfit(self, value) from None
            if self.fits(plain):
                return plain
        raise Unfit(self, value)


def _scalar(value: Any) -> Any:
    """The number in an array or tensor without axes, as `loss.mean()` and `np.asarray(3)` are; anything else as it
    is."""
    if is_a(value, np.ndarray) and value.ndim == 0:
        return value[()]
    if is_torch(value) and value.ndim == 0 and not value.is_meta:
        return value.item()
    return value


def number(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    also: float | None = None,
    meaning: str = "",
) -> Number:
    """A range of finite numbers; `also` one more with a meaning of its own."""
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    words = " and ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)
    says = f"a finite number {words}".strip()
    low = at_least if above is None else math.nextafter(above, math.inf)
    high = at_most if below is None else math.nextafter(below, -math.inf)
    return Number(
        -FLOAT_MAX if low is None else low,
        FLOAT_MAX if high is None else high,
        also,
        says if also is None else f"{also:g} ({meaning}) or {says}",
    )


ANY_NUMBER = Number(-FLOAT_MAX, FLOAT_MAX, None, "a number", finite=False)  # of results, which report what happened


# ---- other single values -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Strings that can be written down: lone surrogates (half a character) cannot."""

    says: str = "a string"
    suits: Callable[[str], object] | None = None  # what else must hold

    def fits(self, value: Any) -> bool:
        return (
            type(value) is str
            and (value.isascii() or _encodable(value))
            and (self.suits is None or bool(self.suits(value)))
        )

    def taken(self, value: Any) -> str:
        if isinstance(value, str):
            plain = str.__str__(value)  # of a StrEnum or numpy.str_, the string
            if not plain.isascii() and not _encodable(plain):
                raise Unfit(Text(f"{self.says}, and valid Unicode"), value)
            if self.fits(plain):
                return plain
        raise Unfit(self, value)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes; what holds some, as a bytearray does, is copied."""

    says: str = "bytes"

    def fits(self, value: Any) -> bool:
        return type(value) is bytes

    def taken(self, value: Any) -> bytes:
        if is_a(value, bytes, bytearray, memoryview):
            return bytes(value)
        raise Unfit(self, value)


@dataclass(frozen=True, slots=True)
class Flag:
    says: str = "True or False"

    def fits(self, value: Any) -> bool:
        return value is True or value is False

    def taken(self, value: Any) -> bool:
        if is_a(value, bool, np.bool_):
            return bool(value)
        raise Unfit(self, value)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values, each told from the others by type too (1 is not True)."""

    choices: tuple[object, ...]

    @property
    def says(self) -> str:
        return " or ".join(map(repr, self.choices))

    def fits(self, value: Any) -> bool:
        return any(value is choice for choice in self.choices)

    def taken(self, value: Any) -> Any:
        for choice in self.choices:
            if (
                isinstance(value, type(choice))
                and isinstance(value, bool) == isinstance(choice, bool)
                and value == choice
            ):
                return choice
        raise Unfit(self, value)


@dataclass(frozen=True, slots=True)
class Instance:
    """Objects of a class, or of one of several."""

    classes: tuple[type, ...]
    hint: str = ""  # how to get one

    @property
    def says(self) -> str:
        names = " or ".join(cls.__name__ for cls in self.classes)
        return _hinted(f"{'an' if names[0] in 'AEIOU' else 'a'} {names}", self.hint)

    def fits(self, value: Any) -> bool:
        return isinstance(value, self.classes)

    def taken(self, value: Any) -> Any:
        if isinstance(value, self.classes):
            return value
        raise Unfit(self, value)


@dataclass(frozen=True, slots=True)
class Function:
    """Something to call with so many positional arguments; not an async function, which would return before it has
    run."""

    num_arguments: int
    form: str  # "(data, logprobs) -> (loss, metrics)"

    @property
    def says(self) -> str:
        return f"a function {self.form}"

    def fits(self, value: Any) -> bool:
        if not callable(value) or inspect.iscoroutinefunction(value):
            return False
        try:
            inspect.signature(value).bind(*range(self.num_arguments))
        except TypeError:
            return False
        except ValueError:  # a built-in function, which does not say what it takes
            return True
        return True

    def taken(self, value: Any) -> Any:
        if self.fits(value):
            return value
        raise Unfit(self, value)


@dataclass(frozen=True, slots=True)
class Anything:
    says: str = "anything"

    def fits(self, value: Any) -> bool:
        return True

    def taken(self, value: Any) -> Any:
        return value


# ---- values made of others -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list, or another sequence that becomes one, whose items all follow a rule. A string is none, nor is what can
    be read only once."""

    item: Rule
    at_least: int = 0  # items
    hint: str = ""

    @property
    def says(self) -> str:
        some = f" of at least {self.at_least} item{'' if self.at_least == 1 else 's'}" if self.at_least else ""
        return _hinted(f"a list{some}, each {self.item.says}", self.hint)

    def fits(self, value: Any) -> bool:
        return False  # what is kept is a copy, so that nobody else changes it

    def taken(self, value: Any) -> list[Any]:
        if value.__class__ is not list and (not is_a(value, tuple, Sequence) or is_a(value, str, bytes, bytearray)):
            raise Unfit(self, value)
        items: list[Any] = list(value)
        if len(items) < self.at_least:
            raise Unfit(self, value)
        if not _all_fit(self.item, items):
            for index, item in enumerate(items):
                try:
                    items[index] = self.item.taken(item)
                except Unfit as unfit:
                    raise Unfit(unfit.rule, unfit.value, f"[{index}]{unfit.where}") from None
        return items


def _all_fit(rule: Rule, items: list[Any]) -> bool:
    """`rule.fits` of every item; for long lists of numbers without a call each."""
    match rule:
        case Whole(low, high, None):
            return not items or (set(map(type, items)) == {int} and low <= min(items) and max(items) <= high)
        case Number(finite=False):
            return set(map(type, items)) <= {float}
        case _:
            return all(map(rule.fits, items))


@dataclass(frozen=True, slots=True)
class DictOf:
    """A dictionary from strings to values that all follow a rule."""

    item: Rule

    @property
    def says(self) -> str:
        return f"a dictionary from strings to values, each {self.item.says}"

    def fits(self, value: Any) -> bool:
        return False  # what is kept is a copy

    def taken(self, value: Any) -> dict[str, Any]:
        if not is_a(value, Mapping):
            raise Unfit(self, value)
        taken: dict[str, Any] = {}
        for key, item in value.items():
            try:
                taken[Text("a string as key").taken(key)] = item if self.item.fits(item) else self.item.taken(item)
            except Unfit as unfit:
                raise Unfit(unfit.rule, unfit.value, f"[{_short.repr(key)}]{unfit.where}") from None
        return taken


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What one of several rules takes. The first that fits counts."""

    rules: tuple[Rule, ...]

    @property
    def says(self) -> str:
        return ", or ".join(rule.says for rule in self.rules)

    def fits(self, value: Any) -> bool:
        return any(rule.fits(value) for rule in self.rules)

    def taken(self, value: Any) -> Any:
        inner: Unfit | None = None
        for rule in self.rules:
            try:
                return rule.taken(value)
            except Unfit as unfit:
                inner = unfit if unfit.where else inner
        raise inner or Unfit(self, value)


@dataclass(frozen=True, slots=True)
class Maybe:
    """None, or what a rule takes."""

    rule: Rule

    @property
    def says(self) -> str:
        return f"{self.rule.says}, or None"

    def fits(self, value: Any) -> bool:
        return value is None or self.rule.fits(value)

    def taken(self, value: Any) -> Any:
        if value is None:
            return None
        try:
            return self.rule.taken(value)
        except Unfit as unfit:
            raise Unfit(self, value) if unfit.rule is self.rule and not unfit.where else unfit from None


def _hinted(says: str, hint: str) -> str:
    return f"{says} ({hint})" if hint else says


# ---- from annotations ----------------------------------------------------------------------------------------------


_PLAIN: dict[Any, Rule] = {
    int: Whole(),
    float: number(),
    str: Text(),
    bool: Flag(),
    bytes: Bytes(),
    Any: Anything(),
    object: Anything(),
}


def rule_of(annotation: Any) -> Rule:
    """The rule that an annotation states. One that has none is a fault of ours, found when the class is first used."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return arguments[1]
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Literal:
        return OneOf(arguments)
    if origin in (Union, types.UnionType):
        rules = tuple(rule_of(each) for each in arguments if each is not type(None))
        rule = rules[0] if len(rules) == 1 else AnyOf(rules)
        return Maybe(rule) if type(None) in arguments else rule
    if origin in (list, Sequence):
        return ListOf(rule_of(arguments[0]))
    if origin in (dict, Mapping) and arguments[0] is str:
        return DictOf(rule_of(arguments[1]))
    if isinstance(annotation, type) and origin is None:
        return Instance((annotation,))
    raise TypeError(f"no rule is known for the annotation {annotation!r}; say it: Annotated[..., rule]")
