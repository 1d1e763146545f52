"""The `..._async` names of older SDKs, for code that was written against them. Nothing in this package calls them.

`forward_backward_async` and its kin are coroutines that enqueue and return the `APIFuture`, which has `result_async()`;
`sample_async`, `compute_logprobs_async` and the `create_..._async` return the value itself.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C")


def with_older_names(*verbs: str, value: bool = False) -> Callable[[type[C]], type[C]]:
    """A class decorator that adds `verb_async` beside each verb; with `value`, it returns what the future brings."""

    def add(cls: type[C]) -> type[C]:
        for verb in verbs:
            setattr(cls, f"{verb}_async", _coroutine(getattr(cls, verb), value))
        return cls

    return add


def _coroutine(verb: Callable[..., Any], value: bool) -> Callable[..., Any]:
    @wraps(verb)
    async def older(*args: Any, **kwargs: Any) -> Any:
        future = verb(*args, **kwargs)
        return await future if value else future

    return older
