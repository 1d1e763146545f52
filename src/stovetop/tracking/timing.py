"""How long something took, as a metric."""

import time
from collections.abc import Generator, MutableMapping
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
