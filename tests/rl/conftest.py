"""Worker processes start in half a second or so, which is why tests share them."""

from collections.abc import Iterator

import pytest

from stovetop.rl.process_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """With one worker: a call that did not free it would hold up the next one."""
    with WorkerPool(num_workers=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def pool_of_two() -> Iterator[WorkerPool]:
    with WorkerPool(num_workers=2) as opened:
        yield opened
