"""A forked child has a copy of the clients and none of the threads that answer them: whatever is asked there is refused
at once. What must not happen is that it waits."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from examples import datum
from wrong_values import PROMPT

from stovetop.backends import recording
from stovetop.client import ServiceClient
from stovetop.errors import ServiceClosed
from stovetop.types import AdamParams, SamplingParams

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

LIMIT_S = 20


def calls_of(service: ServiceClient, path: str) -> dict[str, Callable[[], object]]:
    """One of every call that there is."""
    training: Any = service.create_lora_training_client("m").result()
    sampling: Any = service.create_sampling_client(base_model="m").result()
    rest: Any = service.create_rest_client()
    data: Any = ([datum()], "cross_entropy")
    return {
        "forward": lambda: training.forward(*data),
        "forward_backward": lambda: training.forward_backward(*data),
        "forward_backward_custom": lambda: training.forward_backward_custom(
            [datum()], lambda data, logprobs: (logprobs[0].sum(), {})
        ),
        "optim_step": lambda: training.optim_step(AdamParams()),
        "save_state": lambda: training.save_state("name"),
        "save_weights_for_sampler": lambda: training.save_weights_for_sampler("name"),
        "load_state": lambda: training.load_state(path),
        "load_state_with_optimizer": lambda: training.load_state_with_optimizer(path),
        "save_weights_and_get_sampling_client": training.save_weights_and_get_sampling_client,
        "create_sampling_client": lambda: training.create_sampling_client(path),
        "get_info": training.get_info,
        "get_tokenizer": training.get_tokenizer,
        "sample": lambda: sampling.sample(PROMPT, 1, SamplingParams(max_tokens=1)),
        "compute_logprobs": lambda: sampling.compute_logprobs(PROMPT),
        "get_base_model": sampling.get_base_model,
        "tokenizer of the sampler": sampling.get_tokenizer,
        "create_lora_training_client": lambda: service.create_lora_training_client("m"),
        "create_lora_training_client of another": lambda: service.create_lora_training_client("other"),
        "create_training_client_from_state": lambda: service.create_training_client_from_state(path),
        "create_training_client_from_state_with_optimizer": lambda: (
            service.create_training_client_from_state_with_optimizer(path)
        ),
        "create_sampling_client of the service": lambda: service.create_sampling_client(base_model="m"),
        "create_rest_client": service.create_rest_client,
        "get_server_capabilities": service.get_server_capabilities,
        "list_training_runs": rest.list_training_runs,
        "list_user_checkpoints": rest.list_user_checkpoints,
        "list_checkpoints": lambda: rest.list_checkpoints(training.model_id),
        "get_training_run": lambda: rest.get_training_run(training.model_id),
        "get_training_run_by_tinker_path": lambda: rest.get_training_run_by_tinker_path(path),
        "get_weights_info_by_tinker_path": lambda: rest.get_weights_info_by_tinker_path(path),
        "delete_checkpoint": lambda: rest.delete_checkpoint(training.model_id, "weights"),
        "delete_checkpoint_from_tinker_path": lambda: rest.delete_checkpoint_from_tinker_path(path),
        "get_server_capabilities of the rest client": rest.get_server_capabilities,
    }


def not_refused(calls: dict[str, Callable[[], object]], words: str) -> list[str]:
    wrong: list[str] = []
    for name, call in calls.items():
        try:
            wrong.append(f"{name}: accepted, {call()!r}")
        except ServiceClosed as error:
            if words not in str(error):
                wrong.append(f"{name}: {error}")
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
    return wrong


def in_a_fork(work: Callable[[], list[str]], folder: Path) -> str:
    """What `work` finds to say in a forked child, which is killed when it takes too long."""
    told = folder / "told"
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        try:
            told.write_text("\n".join(work()))
        except BaseException as error:
            told.write_text(repr(error))
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "it waited for something that never comes"
    return told.read_text()


def saved(service: ServiceClient) -> str:
    return service.create_lora_training_client("m").result().save_state("s").result().path


def test_every_call_in_a_forked_child_is_refused(tmp_path: Path) -> None:
    with recording.open_service(tmp_path) as service:
        calls = calls_of(service, saved(service))
        assert in_a_fork(lambda: not_refused(calls, "this process was forked from the one"), tmp_path) == ""
        calls["optim_step"]()  # the parent goes on


def test_a_pending_result_is_refused_in_a_forked_child_and_one_that_is_there_is_given(tmp_path: Path) -> None:
    with recording.open_service(tmp_path, latency_s=lambda verb: 0.5 if verb == "forward" else 0.0) as service:
        client = service.create_lora_training_client("m").result()
        done = client.forward_backward([datum()], "cross_entropy")
        done.result()
        pending = client.forward([datum()], "cross_entropy")
        on_its_way = service.create_lora_training_client("m")
        on_its_way.result()
        later: Any = client.save_weights_and_get_sampling_client()

        def work() -> list[str]:
            assert done.result().metrics
            return not_refused({"result": pending.result, "of a client": lambda: later.sample}, "forked from the one")

        assert in_a_fork(work, tmp_path) == ""
        assert pending.result().metrics


def test_a_forked_child_can_leave_the_block_and_ends_as_it_wants_to(tmp_path: Path) -> None:
    def leave() -> list[str]:
        service.__exit__(None, None, None)
        service.__exit__(KeyError, KeyError("mine"), None)
        service.close()
        return []

    with recording.open_service(tmp_path) as service:
        client = service.create_lora_training_client("m").result()
        assert in_a_fork(leave, tmp_path) == ""
        client.forward([datum()], "cross_entropy").result()


def child_of_multiprocessing(client: Any, answers: Any) -> None:
    try:
        answers.put(repr(client.optim_step(AdamParams())))
    except ServiceClosed as error:
        answers.put(str(error))


@pytest.mark.skipif(sys.platform == "darwin", reason="where fork is not to be trusted")
def test_a_call_in_a_process_of_multiprocessing_is_refused(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with recording.open_service(tmp_path) as service:
        client = service.create_lora_training_client("m").result()
        answers = context.Queue()
        process = context.Process(target=child_of_multiprocessing, args=(client, answers))
        process.start()
        try:
            assert "optim_step: this process was forked" in answers.get(timeout=LIMIT_S)
        finally:
            process.join(LIMIT_S)
            process.kill()


def test_after_it_was_closed_every_call_of_a_service_and_of_its_clients_is_refused(tmp_path: Path) -> None:
    service = recording.open_service(tmp_path)
    calls = calls_of(service, saved(service))
    service.close()
    service.close().result()
    assert not_refused(calls, "service is closed; make a new ServiceClient") == []
    with pytest.raises(ServiceClosed):
        service.__enter__()
