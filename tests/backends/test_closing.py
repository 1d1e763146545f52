"""How a service ends: what was accepted is finished, or, when something went wrong, what has not begun is dropped."""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
from examples import datum

from processes import ctrl_c_is_heard
from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.concurrency import together
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.futures import APIFuture

SOON_S = 5.0  # by which a service has ended that need not finish what it queued


def queue_many(service: InProcessServiceClient, num_calls: int = 200) -> list[APIFuture[object]]:
    client = service.create_lora_training_client("any/model", seed=0).result()
    return [client.forward_backward([datum()], "cross_entropy") for _ in range(num_calls)]


def slow_service() -> InProcessServiceClient:
    """200 calls take ten seconds."""
    return recording.open_service(latency_s=0.05)


def test_a_block_that_is_left_by_an_exception_drops_what_has_not_begun() -> None:
    futures: list[APIFuture[object]] = []
    start_s = time.monotonic()
    with contextlib.suppress(KeyError), slow_service() as service:
        futures += queue_many(service)
        futures[0].result(timeout=30)
        raise KeyError("mine")
    assert time.monotonic() - start_s < SOON_S
    assert futures[0].result(timeout=0) is futures[0].result(timeout=0)
    with pytest.raises(
        RequestFailedError, match=r"forward_backward \(call 200 of .*dropped because .*KeyError"
    ) as info:
        futures[-1].result(timeout=0)
    assert info.value.category == "user"


@pytest.mark.parametrize("leave", [lambda: None, lambda: sys.exit(0), lambda: sys.exit()])
def test_a_block_that_is_left_otherwise_finishes_what_was_accepted(leave: Callable[[], None]) -> None:
    futures: list[APIFuture[object]] = []
    with contextlib.suppress(SystemExit), recording.open_service(latency_s=0.002) as service:
        futures += queue_many(service, 20)
        leave()
    for future in futures:
        future.result(timeout=0)


def test_an_async_block_drops_when_it_is_cancelled_and_finishes_otherwise() -> None:
    async def leave(cancelled: bool) -> tuple[list[APIFuture[object]], int]:
        futures: list[APIFuture[object]] = []
        ticks = 0

        async def work() -> None:
            async with recording.open_service(latency_s=0.01) as service:
                futures.extend(queue_many(service, 1000 if cancelled else 10))
                if cancelled:
                    await asyncio.sleep(30)

        async def tick() -> None:
            nonlocal ticks
            while not all(future.done() for future in futures) or not futures:
                await asyncio.sleep(0.005)
                ticks += 1
                if cancelled and futures:
                    raise TimeoutError

        with contextlib.suppress(TimeoutError):
            await together([work(), tick()])
        return futures, ticks

    futures, ticks = asyncio.run(leave(cancelled=False))
    assert ticks >= 3, "the event loop went on while the calls were finished"
    assert all(future.result(timeout=0) for future in futures)
    futures, _ = asyncio.run(leave(cancelled=True))
    with pytest.raises(RequestFailedError, match=r"dropped because .*CancelledError"):
        futures[-1].result(timeout=0)


def test_ctrl_c_while_a_service_finishes_drops_the_rest() -> None:
    service = slow_service()
    futures = queue_many(service)
    ctrl_c = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    with ctrl_c_is_heard():
        ctrl_c.start()
        with pytest.raises(KeyboardInterrupt):
            service.close()
    with pytest.raises(RequestFailedError, match="KeyboardInterrupt"):
        futures[-1].result(timeout=0)
    with pytest.raises(InvalidRequest, match="closed"):
        queue_many(service)
