"""A stage: a function whose parameters are the names that it reads, and the names that it writes.

    @stage(writes="data_D")
    async def kl_to_base(data_D: list[Datum], reference: SamplingClient, kl_penalty_coef: float = 0.0) -> list[Datum]:
        \"\"\"Pulls the advantages towards the base model.\"\"\"

It can be called like the function that it is made of. Where names come from is said in `workflow.py`.
"""

import inspect
import re
from collections import abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar, get_args, get_origin, overload

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.kitchen.annotations import UNKNOWN, fields_of, resolved

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, repr=False)
class Stage(Generic[P, T_co]):
    """Made by `stage`. It keeps no state: what must survive a step is written, carried, or in the run."""

    name: str
    function: Callable[P, T_co]
    reads: Mapping[str, str]  # parameter -> the name that it gets
    optional: frozenset[str]  # parameters with a default, which they have where the name is absent
    writes: Mapping[str, str]  # what the function gives -> the name that it goes by

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"stage {self.name!r}"

    def using(self, name: str, /, **names: str) -> "Stage[P, T_co]":
        """The same stage under another name, with other names to read or to write:
        `await_future.using("await_optim", future="stepped")`. What it both reads and writes is renamed in both."""
        for own in names:
            if own not in self.reads and own not in self.writes:
                raise UnknownName(f"name of stage {self.name!r}", own, {*self.reads, *self.writes})
        reads = {parameter: names.get(parameter, read) for parameter, read in self.reads.items()}
        writes = {given: names.get(given, written) for given, written in self.writes.items()}
        _check_names(name, reads.values(), writes.values())
        return replace(self, name=name, reads=reads, writes=writes)

    @property
    def opens(self) -> bool:
        """Whether it is an async generator: what it yields is what it writes, the rest runs when the workflow ends."""
        return inspect.isasyncgenfunction(inspect.unwrap(self.function))

    @property
    def doc(self) -> str:
        """The first sentence of the function's docstring."""
        paragraph = (inspect.getdoc(self.function) or "").partition("\n\n")[0]
        return re.split(r"(?<=[.?!])\s", " ".join(paragraph.split()), maxsplit=1)[0]

    def takes(self) -> dict[str, object]:
        """What each parameter is annotated as; UNKNOWN where that does not resolve."""
        parameters = inspect.signature(self.function).parameters.values()
        return {each.name: self._resolved(each.annotation) for each in parameters}

    def returned(self) -> object:
        """What the function returns, or yields, likewise."""
        returned = self._resolved(inspect.signature(self.function).return_annotation)
        if get_origin(returned) in (abc.AsyncIterator, abc.AsyncGenerator, abc.Awaitable, abc.Coroutine):
            return get_args(returned)[0 if self.opens else -1]
        return returned

    def gives(self) -> dict[str, object]:
        """What each name that it writes is annotated as, likewise."""
        returned = self.returned()
        if len(self.writes) == 1:
            return dict.fromkeys(self.writes.values(), returned)
        fields = fields_of(returned) if isinstance(returned, type) else {}
        return {name: fields.get(given, UNKNOWN) for given, name in self.writes.items()}

    def _resolved(self, annotation: object) -> object:
        return resolved(annotation, inspect.unwrap(self.function).__globals__)


AnyStage = Stage[..., object]


@overload
def stage(function: Callable[P, T_co], /) -> Stage[P, T_co]: ...
@overload
def stage(*, writes: str | tuple[str, ...] = ()) -> Callable[[Callable[P, T_co]], Stage[P, T_co]]: ...
def stage(function: Callable[..., Any] | None = None, /, *, writes: str | tuple[str, ...] = ()) -> object:
    """Makes a stage of a function, which may be async. With one name in `writes`, that is the return value; with
    several it returns a NamedTuple or a dict that has them; without, None.

    A parameter with a default is an optional read: where the name is absent, it has the default. A plain function that
    returns a future writes the future; one that blocks, blocks everything. An async generator opens something: see
    `Stage.opens`; it stands outside the loop only. The function must keep no state between calls, in a closure or
    elsewhere: a resumed run would not have it.
    """
    names = (writes,) if isinstance(writes, str) else writes

    def decorate(function: Callable[..., Any]) -> AnyStage:
        if not inspect.isfunction(inspect.unwrap(function)) or inspect.isgeneratorfunction(function):
            raise InvalidRequest(f"a stage is made of a function, a coroutine or an async generator: {function!r}")
        _check_names(function.__name__, (), names)
        return reading(function, {name: name for name in names})

    return decorate if function is None else decorate(function)


def reading(function: Callable[..., T_co], writes: Mapping[str, str]) -> Stage[..., T_co]:
    """A function whose arguments are looked up by name: a stage, or the condition of a When, which writes nothing."""
    parameters = inspect.signature(function).parameters.values()
    for each in parameters:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise InvalidRequest(
                f"what {function.__name__!r} reads must be plain parameters, whose names say what they are, without *, "
                f"** or /: {each}"
            )
    optional = frozenset(each.name for each in parameters if each.default is not each.empty)
    return Stage(function.__name__, function, {each.name: each.name for each in parameters}, optional, writes)


def _check_names(stage_name: str, reads: Collection[str], writes: Collection[str]) -> None:
    for name in (stage_name, *reads, *writes):
        if not name.isidentifier():
            raise InvalidRequest(f"names of stages and values are identifiers; stage {stage_name!r}: {name!r}")
        if list(writes).count(name) > 1:
            raise InvalidRequest(f"a stage writes each name once; stage {stage_name!r}: {name!r}")
