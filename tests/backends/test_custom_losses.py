# pyright: basic
"""A custom loss meets its own client alone: whom it may call and who waits for it. Nothing is left when it has ended,
is cancelled or never returns."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from custom_losses import PROMPT, STEP, Gate, Loss, another, held, left_behind, total
from examples import OTHER_TOKENS, datum, logprobs
from providers import Provider

from stovetop.backends import expected
from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK
from stovetop.errors import Cancelled, InvalidRequest, RequestFailedError, ServiceClosed, StovetopError
from stovetop.types import SamplingParams

# ---- who waits -------------------------------------------------------------------------------------------------------


def test_while_a_loss_runs_later_calls_of_its_client_wait_and_those_of_others_do_not(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    other = another(provider, backend)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    with held(trainer) as (_, custom):
        later = [trainer.forward([datum()], "cross_entropy"), trainer.optim_step(STEP), trainer.save_state("later")]
        other.forward_backward([datum()], "cross_entropy").result(10)
        other.forward_backward_custom([datum()], total).result(10)
        other.optim_step(STEP).result(10)
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2)).result(10)
        assert not any(future.done() for future in [custom, *later])
    assert custom.result(10).metrics["loss:sum"] > 0
    assert [future.result(10) is not None for future in later] == [True] * 3
    assert not left_behind(trainer)


def test_a_loss_may_call_other_clients(provider: Provider, backend: ServiceClient, tmp_path: Path) -> None:
    """A frozen reference, another training client, another service."""
    client, student = another(provider, backend, 1), another(provider, backend)
    reference = client.save_weights_and_get_sampling_client().result()
    with provider.open(tmp_path, LOCAL_DISK) as elsewhere:
        teacher = another(provider, elsewhere)

        def loss_fn(data: Any, scored: Any) -> Any:
            own = reference.compute_logprobs(data[0].model_input).result()
            assert own[1] == pytest.approx(scored[0][0].item(), abs=1e-3)
            student.forward_backward(list(data), "cross_entropy").result()
            student.optim_step(STEP).result()
            taught = teacher.forward(list(data), "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
            return ((scored[0] - taught + 1) ** 2).sum(), {"reference": own[1]}

        assert client.forward_backward_custom([datum()], loss_fn).result(20).metrics["loss:sum"] > 0
        client.optim_step(STEP).result()
    assert not left_behind(client)


def in_the_loss(client: TrainingClient) -> None:
    client.optim_step(STEP)


def in_asyncio(client: TrainingClient) -> None:
    async def call() -> None:
        await client.forward([datum()], "cross_entropy")

    asyncio.run(call())


def in_to_thread(client: TrainingClient) -> None:
    asyncio.run(asyncio.to_thread(client.forward, [datum()], "cross_entropy"))


def in_older_names(client: Any) -> None:
    asyncio.run(client.optim_step_async(STEP))


def for_a_sampler(client: TrainingClient) -> None:
    client.save_weights_and_get_sampling_client()


def with_a_custom_loss(client: TrainingClient) -> None:
    client.forward_backward_custom([datum()], total)


WITHIN: list[Callable[[Any], None]] = [
    in_the_loss,
    in_asyncio,
    in_to_thread,
    in_older_names,
    for_a_sampler,
    with_a_custom_loss,
]


@pytest.mark.parametrize("call", WITHIN)
def test_a_call_of_its_own_client_is_refused_at_once(trainer: TrainingClient, call: Callable[[Any], None]) -> None:
    """Both where the loss catches it and where it does not."""
    caught: list[InvalidRequest] = []

    def catching(data: Any, scored: Any) -> Any:
        with pytest.raises(InvalidRequest, match=r"cannot call the client that it is computed for") as error:
            call(trainer)
        caught.append(error.value)
        return total(data, scored)

    def falling(data: Any, scored: Any) -> Any:
        call(trainer)
        return total(data, scored)

    trainer.forward_backward_custom([datum()], catching).result(10)
    assert len(caught) == 1
    with pytest.raises(RequestFailedError, match=r"cannot call the client that it is computed for"):
        trainer.forward_backward_custom([datum()], falling).result(10)
    with pytest.raises(RequestFailedError, match=r"cannot call the client that it is computed for"):
        trainer.optim_step(STEP).result(10)
    assert not left_behind(trainer)


def leave_block(service: ServiceClient) -> None:
    with service:
        pass


def leave_async_block(service: ServiceClient) -> None:
    async def leave() -> None:
        async with service:
            pass

    asyncio.run(leave())


@pytest.mark.parametrize("close", [lambda service: service.close(), leave_block, leave_async_block])
def test_a_loss_cannot_close_its_service_which_would_wait_for_it(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient, close: Callable[[ServiceClient], object]
) -> None:
    def closes(data: Any, scored: Any) -> Any:
        close(backend)
        return total(data, scored)

    with pytest.raises(RequestFailedError, match="a custom loss cannot close its own service"):
        trainer.forward_backward_custom([datum()], closes).result(timeout=10)
    another(provider, backend).forward_backward_custom([datum()], total).result(timeout=10)  # it is open


def test_a_loss_within_a_loss_cannot_call_the_client_of_the_outer_one(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    inner = another(provider, backend)

    def calls_outer(data: Any, scored: Any) -> Any:
        trainer.optim_step(STEP).result()
        return total(data, scored)

    def outer(data: Any, scored: Any) -> Any:
        inner.forward_backward_custom([datum()], calls_outer).result()
        return total(data, scored)

    with pytest.raises(RequestFailedError, match=r"cannot call the client that it is computed for"):
        trainer.forward_backward_custom([datum()], outer).result(10)
    assert not left_behind(trainer)


def waits_for_itself(client: TrainingClient) -> Loss:
    """In a thread of its own, of which it is not known that it belongs to the loss."""

    def loss_fn(data: Any, scored: Any) -> Any:
        thread = threading.Thread(target=lambda: client.forward([datum()], "cross_entropy").result(20), daemon=True)
        thread.start()
        thread.join(20)
        return total(data, scored)

    return loss_fn


def test_a_loss_that_waits_for_its_client_in_another_thread_is_told_of_and_ended_by_cancel(
    trainer: TrainingClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(expected, "SECONDS_UNTIL_TOLD", 0.05)
    future = trainer.forward_backward_custom([datum()], waits_for_itself(trainer))
    with caplog.at_level(logging.WARNING):
        while "cancel() its future" not in caplog.text:
            time.sleep(0.01)
    future.cancel()
    with pytest.raises(Cancelled):
        future.result(10)
    trainer.forward([datum()], "cross_entropy").result(10)
    assert not left_behind(trainer)


def test_a_loss_that_waits_for_itself_is_given_up_in_the_end(
    trainer: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected, "SECONDS_FOR_WORK", 0.1)
    future = trainer.forward_backward_custom([datum()], waits_for_itself(trainer))
    step = trainer.optim_step(STEP)
    with pytest.raises(RequestFailedError, match=r"did not return in 0.1 s; does it wait for a call of its client\?"):
        future.result(10)
    with pytest.raises(RequestFailedError, match=r"did not return in 0.1 s"):
        step.result(10)
    assert not left_behind(trainer)


# ---- cancelled, not begun, dropped -----------------------------------------------------------------------------------


def test_a_call_cancelled_before_while_or_after_its_loss_runs_leaves_nothing(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    """Taken back, it never was: the step after it needs another gradient. After it, `cancel` does nothing."""
    before = logprobs(trainer)
    never = Gate()
    with held(trainer) as (_, running):
        waiting = trainer.forward_backward_custom([datum()], never)
        waiting.cancel()
        with pytest.raises(Cancelled):
            waiting.result(10)
        running.cancel()
        running.cancel()
        with pytest.raises(Cancelled):
            running.result(10)
        with pytest.raises(RequestFailedError, match="there is no gradient"):
            trainer.optim_step(STEP).result(10)
        assert not left_behind(trainer)
        done = trainer.forward_backward_custom([datum()], total)  # while the cancelled function still runs
        done.result(10)
    done.cancel()
    assert not never.begun.is_set()
    assert done.result() is not None
    np.testing.assert_array_equal(logprobs(trainer), before)
    trainer.optim_step(STEP).result(10)
    assert (logprobs(trainer) != before).any()
    assert not left_behind(trainer)


def test_a_call_cancelled_at_any_moment_is_either_taken_back_or_done(trainer: TrainingClient) -> None:
    for delay_s in np.linspace(0, 0.01, 12):
        future = trainer.forward_backward_custom([datum(), datum(OTHER_TOKENS)], total)
        time.sleep(delay_s)
        future.cancel()
        was_done = _is_done(future)
        step = trainer.optim_step(STEP)
        if was_done:
            step.result(10)
        else:
            with pytest.raises(RequestFailedError, match="there is no gradient"):
                step.result(10)
    assert not left_behind(trainer)


def _is_done(future: Any) -> bool:
    try:
        return future.result(10) is not None
    except Cancelled:
        return False


def test_a_loss_for_which_there_is_no_thread_fails_and_its_client_goes_on(
    trainer: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if "custom loss" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RequestFailedError, match=r"custom loss could not be begun: .*can't start new thread"):
            trainer.forward_backward_custom([datum()], total).result(10)
    with pytest.raises(RequestFailedError, match="can't start new thread"):
        trainer.optim_step(STEP).result(10)
    trainer.forward_backward_custom([datum()], total).result(10)
    assert not left_behind(trainer)


# ---- the end of a service --------------------------------------------------------------------------------------------


def test_leaving_a_service_finishes_a_slow_loss_and_what_it_asks_for(provider: Provider, tmp_path: Path) -> None:
    """Also the calls of other clients that it still makes, and what waits behind it."""
    with provider.open(tmp_path, LOCAL_DISK) as service:
        client, other = another(provider, service, 1), another(provider, service)

        def slow(data: Any, scored: Any) -> Any:
            time.sleep(0.1)
            other.forward([datum()], "cross_entropy").result()
            return other.forward_backward_custom([datum()], total).result() and total(data, scored)

        futures = [client.forward_backward_custom([datum()], slow) for _ in range(2)]
        futures += [client.optim_step(STEP), client.save_state("last")]
    assert all(future.result(0) for future in futures)
    with pytest.raises(ServiceClosed):
        other.forward([datum()], "cross_entropy")


def test_a_loss_that_never_returns_ends_a_close_within_its_bound_once_a_client(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(expected, "SECONDS_AFTER_CLOSE", 0.3)
    monkeypatch.setattr(expected, "SECONDS_UNTIL_TOLD_AFTER_CLOSE", 0.1)
    service = provider.open(tmp_path, LOCAL_DISK)
    client, other = another(provider, service, 1), another(provider, service)
    gate = Gate()
    futures = [client.forward_backward_custom([datum()], gate) for _ in range(20)]
    step, saved, others = client.optim_step(STEP), client.save_state("last"), other.optim_step(STEP)
    assert gate.begun.wait(10)
    start_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        service.close().result()
    assert 0.25 < time.monotonic() - start_s < 2
    gate.opened.set()
    assert "closing waits for it, 0.3 s at most" in caplog.text
    with pytest.raises(StovetopError, match=r"did not return in 0.3 s after the service was closed"):
        futures[0].result(0)
    for future in futures[1:]:
        with pytest.raises(StovetopError, match=r"not begun, because of an earlier one: .*did not return"):
            future.result(0)
    with pytest.raises(StovetopError, match="did not return"):
        step.result(0)
    with pytest.raises(StovetopError, match="there is no gradient"):
        others.result(0)
    assert saved.result(0).path
