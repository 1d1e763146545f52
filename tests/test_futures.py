"""Results on their way."""

import asyncio
import pickle
import threading

import pytest

from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture, ClientFuture, pending, resolved


def test_a_future_can_be_awaited_and_asked_as_often_as_one_likes() -> None:
    future = resolved(7)

    async def wait() -> list[int]:
        return [await future, await future.result_async(), await future.coroutine(), await future]

    assert asyncio.run(wait()) == [7, 7, 7, 7]
    assert future.result() == future.result(timeout=0) == future.future().result() == 7
    assert future.done()


def test_result_waits_for_another_thread() -> None:
    inner = pending()
    timer = threading.Timer(0.01, inner.set_result, ["late"])
    timer.start()
    assert APIFuture(inner).result(timeout=5) == "late"


def test_a_timeout_leaves_the_call_running() -> None:
    inner = pending()
    future = APIFuture(inner)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.001)
    with pytest.raises(TimeoutError):
        asyncio.run(future.result_async(timeout=0.001))
    inner.set_result("there")
    assert future.result() == "there"


def test_cancelling_a_waiter_does_not_take_the_call_back() -> None:
    inner = pending()
    future = APIFuture(inner)

    async def give_up() -> str:
        async with asyncio.TaskGroup() as group:
            waiter = group.create_task(future.result_async())
            await asyncio.sleep(0)
            waiter.cancel()
        inner.set_result("done all the same")
        return await future

    assert asyncio.run(give_up()) == "done all the same"


def test_an_error_is_raised_to_everyone_who_asks() -> None:
    inner = pending()
    inner.set_exception(KeyError("lost"))
    future = APIFuture(inner)
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            future.result()
    with pytest.raises(KeyError, match="lost"):
        asyncio.run(future.result_async())


def test_a_client_on_its_way_forwards_calls_and_waits_for_them() -> None:
    inner = pending()
    future = ClientFuture[str](inner)
    threading.Timer(0.01, inner.set_result, ["a client"]).start()
    assert future.upper() == "A CLIENT"
    with pytest.raises(AttributeError, match="no_such_verb"):
        _ = future.no_such_verb


def test_a_future_is_not_pickled_and_says_what_is() -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be pickled or copied.* Pass its result\(\)"):
        pickle.dumps(resolved(5))
