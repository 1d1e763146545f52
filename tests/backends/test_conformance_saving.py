"""A save does not stop the others, and what comes after it sees it: of every backend that writes to a disk."""

import contextlib
import errno
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import OTHER_TOKENS, TOKENS, datum, logprobs, train
from providers import Provider
from slow_disk import LIMIT_S, SlowDisk, StuckDisk

from stovetop.backends.recording.failing_disk import FailingDisk
from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK, MANIFEST, read_folder, read_manifest
from stovetop.errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    InvalidRequest,
    RequestFailedError,
    RunNotFound,
    WriteFailed,
)
from stovetop.types import AdamParams, ModelInput, SamplingParams

STEP = AdamParams(learning_rate=0.05, weight_decay=0.01)
PROMPT = ModelInput.from_ints(TOKENS)
PathOf = Callable[..., str]


@pytest.fixture
def stuck(tmp_path: Path, provider: Provider) -> Iterator[tuple[ServiceClient, StuckDisk]]:
    """A service whose disk writes when it may."""
    disk = StuckDisk()
    with provider.open(tmp_path, disk) as service:
        try:
            yield service, disk
        finally:
            disk.free()


def new_client(service: ServiceClient, provider: Provider, seed: int = 1) -> TrainingClient:
    return service.create_lora_training_client(provider.base_model, rank=4, seed=seed).result()


@pytest.fixture
def path_of(provider: Provider, tmp_path: Path) -> PathOf:
    """Where a client of the service in this folder saves: known before anything is there."""
    return partial(saved_path, provider, tmp_path)


def saved_path(provider: Provider, storage: Path, client: TrainingClient, name: str, kind: str = "weights") -> str:
    return provider.path_of(storage, client.model_id, kind, name)


def files_of(path: Path) -> dict[str, bytes]:
    """But for the manifest, which names the run."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != MANIFEST}


def seen_by(sampler: SamplingClient) -> list[float | None]:
    return sampler.compute_logprobs(PROMPT).result(LIMIT_S)


# ---- order -----------------------------------------------------------------------------------------------------------


def run_random(service: ServiceClient, provider: Provider, storage: Path, seed: int, *, wait: bool) -> list[Any]:
    """Thirty random steps, saves and loads of one client; what they returned, and every file that they left."""
    chosen, client = random.Random(seed), new_client(service, provider)
    path_of = partial(saved_path, provider, storage)
    futures, saved = [], ["start"]
    done: list[Any] = []
    asked = {("weights", "start")}

    def ask(future: Any) -> None:
        futures.append(future)
        if wait:
            future.result(LIMIT_S)

    ask(client.save_state("start"))
    for number in range(30):
        match chosen.choice(["step", "step", "save", "last", "sampler", "load", "make", "look"]):
            case "step":
                ask(client.forward_backward([datum(OTHER_TOKENS, weight=1.0 + number)], "cross_entropy"))
                ask(client.optim_step(STEP))
            case "save":
                ask(client.save_state(f"s{number}"))
                saved.append(f"s{number}")
                asked.add(("weights", f"s{number}"))
            case "last":
                ask(client.save_state("last", overwrite=True))
                saved.append("last")
                asked.add(("weights", "last"))
            case "sampler":
                ask(client.save_weights_for_sampler(f"w{number}"))
                asked.add(("sampler_weights", f"w{number}"))
                path = path_of(client, f"w{number}", "sampler_weights")
                done.append(service.create_sampling_client(path).compute_logprobs(PROMPT))
            case "load":
                ask(client.load_state_with_optimizer(path_of(client, chosen.choice(saved))))
            case "make":
                path = path_of(client, chosen.choice(saved))
                other = service.create_training_client_from_state_with_optimizer(path)
                done.append(other.forward([datum()], "cross_entropy"))
            case _:
                done.append(client.forward([datum()], "cross_entropy"))
    for future in futures:
        future.result(LIMIT_S)
    results = [future.result(LIMIT_S) for future in done]
    losses = [each if isinstance(each, list) else each.loss_fn_outputs[0]["logprobs"].tolist() for each in results]
    paths = [path_of(client, name, kind) for kind, name in sorted(asked)]
    return [*losses, [(path.split("/")[-2:], files_of(provider.folder_of(storage, path))) for path in paths]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_saves_and_loads_that_nobody_waits_for_give_the_bytes_of_those_that_are_waited_for(
    provider: Provider, tmp_path: Path, seed: int
) -> None:
    """A second: thirty calls, twice, and the disk is slow."""
    with provider.open(tmp_path / "waited", LOCAL_DISK) as service:
        waited = run_random(service, provider, tmp_path / "waited", seed, wait=True)
    with provider.open(tmp_path / "pipelined", SlowDisk(0.004, seed)) as service:
        assert run_random(service, provider, tmp_path / "pipelined", seed, wait=False) == waited


def test_of_two_saves_under_one_name_the_later_one_stays(
    provider: Provider, stuck: tuple[ServiceClient, StuckDisk], tmp_path: Path
) -> None:
    service, disk = stuck
    client = new_client(service, provider)
    first = client.save_state("last", overwrite=True)
    train(client, 1, 0.1)
    second = client.save_state("last", overwrite=True)
    now = logprobs(client)
    disk.free()
    assert first.result(LIMIT_S).path == second.result(LIMIT_S).path
    train(client, 1, 0.1)
    client.load_state(second.result().path)
    np.testing.assert_array_equal(logprobs(client), now)


def test_a_second_save_under_a_name_that_is_being_written_is_refused(
    provider: Provider, stuck: tuple[ServiceClient, StuckDisk]
) -> None:
    service, disk = stuck
    client = new_client(service, provider)
    first, second = client.save_state("a"), client.save_state("a")
    disk.free()
    first.result(LIMIT_S)
    with pytest.raises(CheckpointExists):
        second.result(LIMIT_S)


def test_a_path_may_be_used_before_anything_is_there(
    provider: Provider, stuck: tuple[ServiceClient, StuckDisk], tmp_path: Path, path_of: PathOf
) -> None:
    service, disk = stuck
    client, other = new_client(service, provider), new_client(service, provider, seed=2)
    train(client, 2, 0.1)
    before = logprobs(client)
    state, weights = client.save_state("a"), client.save_weights_for_sampler("a")
    train(client, 1, 0.1)
    path = path_of(client, "a")
    made = service.create_training_client_from_state_with_optimizer(path)
    loaded, restored = other.load_state(path), client.load_state_with_optimizer(path)
    sampler = service.create_sampling_client(path_of(client, "a", "sampler_weights"))
    after = client.forward([datum(), datum(OTHER_TOKENS)], "cross_entropy")
    assert disk.reached.wait(LIMIT_S)
    train(new_client(service, provider, seed=3), 1, 0.1)
    assert not any(future.done() for future in (state, weights, made, loaded, restored, sampler, after))
    disk.free()
    for client_now in (made.result(LIMIT_S), other, client):
        np.testing.assert_array_equal(logprobs(client_now), before)
    restored.result(LIMIT_S)
    assert seen_by(sampler.result(LIMIT_S)) == seen_by(service.create_sampling_client(path).result(LIMIT_S))


def test_what_does_not_fit_is_refused_by_the_call_also_before_anything_is_there(
    provider: Provider, stuck: tuple[ServiceClient, StuckDisk], tmp_path: Path, path_of: PathOf
) -> None:
    service, _ = stuck
    client = new_client(service, provider)
    wider = service.create_lora_training_client(provider.base_model, rank=5, seed=1).result()
    wider.save_state("a")
    client.save_weights_for_sampler("a")
    with pytest.raises(InvalidRequest, match=r"rank=4.*rank=5"):
        client.load_state(path_of(wider, "a"))
    with pytest.raises(CheckpointError, match="without an optimizer"):
        client.load_state_with_optimizer(path_of(client, "a", "sampler_weights"))
    with pytest.raises(CheckpointError, match="trained on"):
        service.create_training_client_from_state(
            path_of(client, "a", "sampler_weights"), provider.other_model
        ).result()
    with pytest.raises(CheckpointNotFound):
        client.load_state(path_of(client, "b")).result(LIMIT_S)


def test_lists_hold_the_saves_that_were_asked_for_before(
    provider: Provider, stuck: tuple[ServiceClient, StuckDisk], tmp_path: Path, path_of: PathOf
) -> None:
    service, disk = stuck
    client, rest = new_client(service, provider), service.create_rest_client()
    path = path_of(client, "a")
    client.save_state("a")
    asked = [
        rest.list_checkpoints(client.model_id),
        rest.list_user_checkpoints(),
        rest.list_training_runs(),
        rest.get_training_run(client.model_id),
        rest.get_training_run_by_tinker_path(path),
        rest.get_weights_info_by_tinker_path(path),
    ]
    deleted = rest.delete_checkpoint_from_tinker_path(path)
    assert not any(future.done() for future in (*asked, deleted))
    disk.free()
    listed, of_user, runs, run, by_path, weights = (future.result(LIMIT_S) for future in asked)
    assert [each.checkpoint_id for each in listed.checkpoints] == ["weights/a"]
    assert [each.tinker_path for each in of_user.checkpoints] == [path]
    assert runs.training_runs == [run] == [by_path]
    assert run.last_checkpoint.checkpoint_id == "weights/a"
    assert weights.lora_rank == 4
    deleted.result(LIMIT_S)
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []
    with pytest.raises(RunNotFound):
        rest.get_training_run("nobody").result()


# ---- the others go on ------------------------------------------------------------------------------------------------


def test_while_a_save_is_written_all_clients_go_on_its_own_too(
    provider: Provider, stuck: tuple[ServiceClient, StuckDisk]
) -> None:
    service, disk = stuck
    client, other = new_client(service, provider), new_client(service, provider, seed=2)
    saved = client.save_state("a")
    assert disk.reached.wait(LIMIT_S)
    for each in (client, other):
        train(each, 2, 0.1)
        sampler = each.save_weights_and_get_sampling_client().result(LIMIT_S)
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=4)).result(LIMIT_S)
    assert not saved.done()


def test_saves_beyond_what_memory_is_taken_for_wait_and_nothing_else_does(
    provider: Provider, stuck: tuple[ServiceClient, StuckDisk], tmp_path: Path
) -> None:
    """Three snapshots are in memory at most; of what comes then, each save waits in its client's order."""
    service, disk = stuck
    clients = [new_client(service, provider, seed) for seed in range(6)]
    expected, saves, steps = [], [], []
    for client in clients:
        train(client, 1, 0.1)
        expected.append(logprobs(client))
        saves.append(client.save_state("a"))
        steps.append(client.forward_backward([datum()], "cross_entropy"))
        client.optim_step(STEP)
    for step in steps[:3]:
        step.result(LIMIT_S)
    free = new_client(service, provider, seed=9)
    train(free, 2, 0.1)
    logprobs(free)
    assert [step.done() for step in steps] == [True] * 3 + [False] * 3
    disk.free()
    for client, save, seen in zip(clients, saves, expected, strict=True):
        client.load_state(save.result(LIMIT_S).path)
        np.testing.assert_array_equal(logprobs(client), seen)


def test_a_disk_that_fails_fails_the_call_whose_save_it_was(
    provider: Provider, tmp_path: Path, path_of: PathOf
) -> None:
    disk = FailingDisk()
    with provider.open(tmp_path, disk) as service:
        client = new_client(service, provider)
        disk.fail("write", 1, OSError(errno.ENOSPC, "no space left on device"))
        failed, fine = client.save_state("a"), client.save_state("b")
        loaded = client.load_state(path_of(client, "a"))
        with pytest.raises(RequestFailedError, match=r"save_state \(call 1 of .*no space left on device") as info:
            failed.result(LIMIT_S)
        assert isinstance(info.value.__cause__, WriteFailed) or not provider.in_process
        with pytest.raises(CheckpointNotFound):
            loaded.result(LIMIT_S)
        client.load_state(fine.result(LIMIT_S).path).result(LIMIT_S)


# ---- samplers --------------------------------------------------------------------------------------------------------


def test_a_frozen_sampler_is_saved_as_save_weights_for_sampler_would_have_and_loads_as_it_is(
    provider: Provider, tmp_path: Path
) -> None:
    if not provider.in_process:
        pytest.skip("a server's frozen weights are not written to a folder of this machine: test_remote.py")
    folder = tmp_path / "elsewhere" / "frozen"
    with provider.open(tmp_path / "storage", LOCAL_DISK) as service:
        client = new_client(service, provider)
        train(client, 1, 0.1)
        frozen = client.save_weights_and_get_sampling_client().result()
        weights = Path(client.save_weights_for_sampler("w").result().path)
        train(client, 1, 0.1)
        saving = frozen.save(folder)
        early = service.create_sampling_client(str(folder)).result()
        assert saving.result().path == str(folder)
        expected = seen_by(frozen)
        assert seen_by(early) == expected
        again = Path(early.save(str(tmp_path / "again")).result().path)
    assert files_of(folder) == files_of(weights) == files_of(again)
    assert read_manifest(folder) == read_manifest(weights) == read_manifest(again)
    with provider.open(tmp_path / "other", LOCAL_DISK) as service:
        assert seen_by(service.create_sampling_client(str(folder)).result()) == expected
        run = service.create_rest_client().get_training_run_by_tinker_path(str(folder)).result()
        assert run.training_run_id == client.model_id


def test_a_sampler_is_not_saved_over_what_is_there_nor_where_there_is_nothing_to_save(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient, tmp_path: Path
) -> None:
    if not provider.in_process:
        pytest.skip("the same")
    frozen = trainer.save_weights_and_get_sampling_client().result()
    with pytest.raises(CheckpointExists, match=str(tmp_path)):
        frozen.save(tmp_path)
    with pytest.raises(InvalidRequest, match="nothing to save"):
        backend.create_sampling_client(base_model=provider.base_model).result().save(tmp_path / "base")
    (tmp_path / "file").touch()
    with pytest.raises(RequestFailedError, match=r"save failed: .*cannot write"):
        frozen.save(tmp_path / "file" / "below").result(LIMIT_S)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_close_finishes_what_is_to_be_written_and_what_waits_for_it(
    provider: Provider, tmp_path: Path, path_of: PathOf
) -> None:
    with provider.open(tmp_path, SlowDisk(0.01, 0)) as service:
        client = new_client(service, provider)
        saves = [client.save_state(f"s{number}") for number in range(6)]
        made = service.create_training_client_from_state(path_of(client, "s5"))
    for save in saves:
        folder = provider.folder_of(tmp_path, save.result(0).path)
        assert set(read_folder(folder)) == set(read_manifest(folder)["files"])
    assert made.result(0).model_id != client.model_id


def test_a_block_left_by_an_exception_finishes_the_save_that_is_written_and_drops_the_others(
    provider: Provider, tmp_path: Path
) -> None:
    if not provider.in_process:
        pytest.skip("a server has what was sent to it, and does it")
    disk, saves = StuckDisk(), list[Any]()
    with contextlib.suppress(KeyError), provider.open(tmp_path, disk) as service:
        client = new_client(service, provider)
        saves += [client.save_state(f"s{number}") for number in range(6)]
        assert disk.reached.wait(LIMIT_S)
        free_soon(disk)
        raise KeyError("mine")
    assert read_folder(Path(saves[0].result(0).path))
    for save in saves[1:]:
        with pytest.raises(RequestFailedError, match=r"save_state \(call .*dropped because .*KeyError"):
            save.result(0)
    assert [path.name for path in Path(saves[0].result(0).path).parent.iterdir()] == ["s0"]


def free_soon(disk: StuckDisk) -> None:
    threading.Timer(0.05, disk.free).start()
