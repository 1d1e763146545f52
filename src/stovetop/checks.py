"""Holds a value's fields and a call's arguments to the rules that their annotations state (`rules.py`).

    @dataclass(frozen=True, slots=True)
    class Parameters:
        rank: Annotated[int, Whole(1, 65_536)] = 32
        seed: int | None = None

        def __post_init__(self) -> None:
            check(self)

    @checked
    def train(self, parameters: Parameters, name: str) -> None: ...

What breaks a rule is an InvalidRequest that names the call, the field, what it must be, and the value; several fields
are one error. `collecting` does the same for any checks. Nothing but the standard library and numpy is needed: the
engine runs where pydantic is not installed, and a value of six fields is checked in half a microsecond.
"""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

from stovetop.errors import InvalidRequest, SeveralProblems, StovetopError, UnknownName
from stovetop.rules import Maybe, Rule, Unfit, rule_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


# ---- values --------------------------------------------------------------------------------------------------------


def check(value: Any) -> None:
    """Holds every field of a dataclass to the rule of its annotation; for `__post_init__`. A frozen one keeps each
    field in its one form (numpy's integers become Python's). All fields that break their rule are named."""
    cls: type[Any] = value.__class__
    problems: tuple[str, ...] = ()
    for name, default, rule, fits in _with_defaults(cls):
        given = getattr(value, name)
        if given is not default and not fits(given):
            try:
                object.__setattr__(value, name, rule.taken(given))
            except Unfit as unfit:
                problems += (unfit.message(f"{cls.__name__}.{name}"),)
    if problems:
        raise InvalidRequest(problems[0]) if len(problems) == 1 else SeveralProblems(problems)


def take(rule: Rule, value: Any, what: str) -> Any:
    """The value in the form that is kept, or an InvalidRequest about `what`."""
    try:
        return value if rule.fits(value) else rule.taken(value)
    except Unfit as unfit:
        raise InvalidRequest(unfit.message(what)) from None


def unchecked(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """A dataclass of fields that this package has just computed: `__post_init__` does not look at them. All fields are
    given by name, in the form that is kept, and belong to the value alone."""
    assert not args, "fields are given by name"
    value = object.__new__(cast("type[T]", cls))
    for name, field in kwargs.items():
        object.__setattr__(value, name, field)
    return value


@cache
def rules_of(cls: type) -> dict[str, Rule]:
    """The fields of a dataclass and their rules."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: rule_of(hints[field.name]) for field in fields(cls)}


@cache
def _with_defaults(cls: type) -> list[tuple[str, object, Rule, Callable[[Any], bool]]]:
    """A field that is left at its default, which follows its rule, needs no second look."""
    defaults = {field.name: field.default for field in fields(cls)}
    for name, rule in rules_of(cls).items():
        if defaults[name] is not MISSING:
            take(rule, defaults[name], f"the default of {cls.__name__}.{name}")
    return [
        (name, defaults[name], rule, _without_none(rule, defaults[name]).fits) for name, rule in rules_of(cls).items()
    ]


def _without_none(rule: Rule, default: object) -> Rule:
    """A None that is the default has been seen already."""
    return rule.rule if isinstance(rule, Maybe) and default is None else rule


# ---- several checks ------------------------------------------------------------------------------------------------


class Problems:
    """Enter it for each check: what one refuses is kept, and the next is made."""

    def __init__(self) -> None:
        self._found: list[StovetopError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, StovetopError):
            self._found.append(error)
            return True
        return False

    def raise_all(self) -> None:
        """One as it was raised; several as SeveralProblems, each once, in the order in which they were found."""
        problems = dict.fromkeys(each for error in self._found for each in problems_of(error))
        if len(problems) == 1:
            raise self._found[0]
        if problems:
            raise SeveralProblems(problems)


def problems_of(error: StovetopError) -> tuple[str, ...]:
    """The sentences of an error."""
    return error.problems if isinstance(error, SeveralProblems) else (str(error),)


@contextmanager
def collecting() -> Generator[Problems]:
    """Raises, at the end, all that is wrong instead of the first. A check that needs what another finds is within it.

    with collecting() as problem:
        with problem:
            check(config)
        with problem:
            rows = load_rows(config.dataset)
            check_num_steps(len(rows), ...)
    """
    found = Problems()
    yield found
    found.raise_all()


def check_all(*checks: Callable[[], object]) -> None:
    """Makes each of these checks and raises all that they refuse together.

    check_all(lambda: check(config), lambda: parse_loss(config.loss_fn))
    """
    with collecting() as problem:
        for each in checks:
            with problem:
                each()


# ---- calls ---------------------------------------------------------------------------------------------------------


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuses a call with an argument that breaks the rule of its annotation, or with one that the function does not
    have, before anything is done. Every refusal begins with the function's name."""
    return checked_as(function.__name__)(function)


def checked_as(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`checked`, for a function that its caller knows under another name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        takes_more = any(map(_is_more, signature.parameters.values()))
        rules = {
            name: rule_of(parameter.annotation)
            for name, parameter in signature.parameters.items()
            if name != "self" and not _is_more(parameter)
        }

        @wraps(function)
        def checking(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                unknown = next((key for key in kwargs if key not in rules), None)
                if unknown is not None and not takes_more:
                    raise UnknownName("argument", unknown, rules)
                bound = _bound(signature, args, kwargs)
                for key, rule in rules.items():
                    if key in bound.arguments:
                        bound.arguments[key] = take(rule, bound.arguments[key], key)
                return function(*bound.args, **bound.kwargs)
            except InvalidRequest as error:
                _begin_with(name, error)
                raise

        return checking

    return decorate


def _is_more(parameter: inspect.Parameter) -> bool:
    """Whether this is `**more`, whose values have no rules."""
    return parameter.kind is inspect.Parameter.VAR_KEYWORD


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(name for name in signature.parameters if name != "self")
        raise InvalidRequest(f"{error}; the arguments are: {names or 'none'}") from None


def _begin_with(verb: str, error: InvalidRequest) -> None:
    """What the body refuses is about the same call."""
    if error.args and not str(error.args[0]).startswith(f"{verb}: "):
        error.args = (f"{verb}: {error.args[0]}", *error.args[1:])
