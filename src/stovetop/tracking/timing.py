"""How long something took, as a metric or as events."""

import time
from collections.abc import Callable, Generator, MutableMapping
from contextlib import contextmanager


@contextmanager
def timed(key: str, metrics: MutableMapping[str, float]) -> Generator[None]:
    """Writes `time/{key}` in seconds, also when the body raises. A key that is timed twice adds up."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        name = f"time/{key}"
        metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start_s


@contextmanager
def span(name: str, emit: Callable[..., None], **fields: str | int | None) -> Generator[None]:
    """Emits NAME.start, and at the end NAME.stop with the seconds, or NAME.exception with what was raised too."""
    start_s = time.perf_counter()
    emit(f"{name}.start", **fields)
    try:
        yield
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}".removesuffix(": ")
        emit(f"{name}.exception", **fields, seconds=time.perf_counter() - start_s, error=raised)
        raise
    emit(f"{name}.stop", **fields, seconds=time.perf_counter() - start_s)
