"""What saving and loading promise, of every backend: exact to the bit, whole or not at all."""

import copy
import errno
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from examples import OTHER_TOKENS, TOKENS, datum, logprobs, train
from providers import Provider

from costly import slow_but
from stovetop.backends.recording.failing_disk import FailingDisk, Operation
from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import CheckpointError, CheckpointNotFound, InvalidRequest, RequestFailedError, TornCheckpoint
from stovetop.types import AdamParams

NUM_STEPS = 6


def step(client: TrainingClient, index: int) -> None:
    """Step `index` of one fixed run; two of its forward_backwards share an optim_step."""
    client.forward_backward([datum(TOKENS[index % 4 :])], "cross_entropy")
    client.forward_backward([datum(OTHER_TOKENS, weight=0.5 + index)], "cross_entropy")
    client.optim_step(AdamParams(learning_rate=0.05 / (1 + index), weight_decay=0.01))


@pytest.fixture(scope="module")
def run(provider: Provider, backend: ServiceClient) -> tuple[list[str], list[np.ndarray]]:
    """A run that saves before every step and at the end: the paths, and the logprobs at each."""
    client = backend.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
    saved, seen = [], []
    for index in range(NUM_STEPS):
        saved.append(client.save_state(f"step-{index}"))
        seen.append(logprobs(client))
        step(client, index)
    saved.append(client.save_state("end"))
    return [future.result().path for future in saved], [*seen, logprobs(client)]


Resume = Callable[[ServiceClient, Provider, str], TrainingClient]


def new_client(service: ServiceClient, provider: Provider, path: str) -> TrainingClient:
    return service.create_training_client_from_state_with_optimizer(path).result()


def running_client(service: ServiceClient, provider: Provider, path: str) -> TrainingClient:
    """One that has trained on something else, and has a gradient that it never used."""
    client = service.create_lora_training_client(provider.base_model, rank=4, seed=9).result()
    train(client, 2, 0.1)
    client.forward_backward([datum()], "cross_entropy")
    client.load_state_with_optimizer(path)
    return client


@pytest.mark.parametrize("resume", [new_client, pytest.param(running_client, marks=pytest.mark.slow)])
def test_a_run_resumed_at_any_step_is_the_run_that_would_have_been(
    provider: Provider, backend: ServiceClient, run: tuple[list[str], list[np.ndarray]], resume: Resume
) -> None:
    paths, seen = run
    for start in range(NUM_STEPS + 1):
        client = resume(backend, provider, paths[start])
        for index in range(start, NUM_STEPS):
            np.testing.assert_array_equal(logprobs(client), seen[index])
            step(client, index)
        np.testing.assert_array_equal(logprobs(client), seen[-1])


def test_weights_without_optimizer_start_it_afresh(
    provider: Provider, backend: ServiceClient, run: tuple[list[str], list[np.ndarray]]
) -> None:
    paths, seen = run
    made = backend.create_training_client_from_state(paths[3]).result()
    loaded = running_client(backend, provider, paths[5])
    loaded.load_state(paths[3])
    np.testing.assert_array_equal(logprobs(made), seen[3])
    for client in (made, loaded):
        step(client, 3)
    np.testing.assert_array_equal(logprobs(made), logprobs(loaded))
    assert (logprobs(made) != seen[4]).any(), "with its optimizer the step would have been another"


def test_loading_drops_gradients(
    provider: Provider, backend: ServiceClient, run: tuple[list[str], list[np.ndarray]]
) -> None:
    client = running_client(backend, provider, run[0][2])
    with pytest.raises(RequestFailedError, match="no gradient"):
        client.optim_step(AdamParams()).result()


def test_a_state_holds_the_step_after_which_it_was_submitted(provider: Provider, backend: ServiceClient) -> None:
    """Nothing is awaited between: the file named k must not hold step k + 1."""
    client = backend.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
    pending = []
    for index in range(NUM_STEPS):
        pending.append((client.forward([datum()], "cross_entropy"), client.save_state(f"before-{index}")))
        step(client, index)
    for forward, saved in pending:
        resumed = new_client(backend, provider, saved.result().path)
        np.testing.assert_array_equal(
            logprobs(resumed, [datum()]), forward.result().loss_fn_outputs[0]["logprobs"].to_numpy()
        )


def test_a_path_is_known_before_and_stands_for_a_folder(
    provider: Provider, trainer: TrainingClient, storage: Path
) -> None:
    for kind, save in {"weights": trainer.save_state, "sampler_weights": trainer.save_weights_for_sampler}.items():
        path = save("a").result().path
        assert path == provider.path_of(storage.resolve(), trainer.model_id, kind, "a")
        assert provider.folder_of(storage, path).is_absolute()
        assert provider.folder_of(storage, path).is_dir()


def test_a_loaded_client_has_the_rank_of_the_state(
    backend: ServiceClient, run: tuple[list[str], list[np.ndarray]]
) -> None:
    assert backend.create_training_client_from_state(run[0][0]).result().get_info().lora_rank == 4


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_name_is_taken_once_unless_overwriting(provider: Provider, trainer: TrainingClient) -> None:
    path = trainer.save_state("last").result().path
    with pytest.raises(CheckpointError, match=r"'last' exists.*overwrite=True"):
        trainer.save_state("last")
    train(trainer, 1, provider.learning_rate)
    now = logprobs(trainer)
    assert trainer.save_state("last", overwrite=True).result().path == path
    trainer.load_state(path)
    np.testing.assert_array_equal(logprobs(trainer), now)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "with space"])
def test_a_name_that_is_no_folder_name_is_refused(trainer: TrainingClient, name: str) -> None:
    with pytest.raises(InvalidRequest, match="checkpoint name"):
        trainer.save_state(name)


def test_a_path_without_a_state_is_refused_by_the_call_itself(
    backend: ServiceClient, trainer: TrainingClient, tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere")
    for call in (
        trainer.load_state,
        trainer.load_state_with_optimizer,
        trainer.create_sampling_client,
        backend.create_sampling_client,
        backend.create_training_client_from_state,
        backend.create_training_client_from_state_with_optimizer,
    ):
        with pytest.raises(CheckpointNotFound, match="nowhere"):
            call(nowhere)


def test_a_state_of_another_base_model_is_refused_by_name(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    other = backend.create_lora_training_client(provider.other_model, rank=4, seed=1).result()
    path = other.save_state("s").result().path
    with pytest.raises(CheckpointError, match=f"trained on '{provider.other_model}', not on '{provider.base_model}'"):
        trainer.load_state(path)
    with pytest.raises(CheckpointError, match="trained on"):
        trainer.create_sampling_client(path)
    with pytest.raises(CheckpointError, match="trained on"):
        backend.create_training_client_from_state(path, base_model=provider.base_model)


def test_an_adapter_of_another_shape_is_refused(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    wider = backend.create_lora_training_client(provider.base_model, rank=5, seed=1).result()
    path = wider.save_state("s").result().path
    with pytest.raises(InvalidRequest, match=r"rank=4.*rank=5.*make a client from that state"):
        trainer.load_state(path)


def test_sampler_weights_have_no_optimizer_to_load(backend: ServiceClient, trainer: TrainingClient) -> None:
    path = trainer.save_weights_for_sampler("s").result().path
    with pytest.raises(CheckpointError, match="without an optimizer"):
        backend.create_training_client_from_state_with_optimizer(path)
    assert backend.create_training_client_from_state(path).result().get_info().lora_rank == 4


# ---- damage ----------------------------------------------------------------------------------------------------------


def _failure_of(call: Callable[[], object]) -> None:
    """A torn state is refused by the call where its manifest shows it, else by the future."""
    with pytest.raises(TornCheckpoint, match="use an earlier one"):
        call()


@pytest.mark.parametrize("damage", slow_but(1, ["flip", "truncate", "empty", "remove"]))
def test_a_torn_state_is_recognised_and_the_client_goes_on(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient, storage: Path, damage: str
) -> None:
    train(trainer, 1, 0.1)
    before = logprobs(trainer)
    good = trainer.save_state("good").result().path
    names = [file.name for file in provider.folder_of(storage, good).iterdir()]
    for name in names:
        path = trainer.save_state(f"{damage}-{name.replace('_', '-')}").result().path
        torn = provider.folder_of(storage, path) / name
        content = bytearray(torn.read_bytes())
        content[len(content) // 2] ^= 4
        damaged = {"truncate": content[: len(content) // 2], "flip": content, "empty": b"", "remove": b""}[damage]
        torn.write_bytes(damaged)
        if damage == "remove":
            torn.unlink()
        _failure_of(lambda path=path: trainer.load_state_with_optimizer(path).result())
        _failure_of(lambda path=path: backend.create_training_client_from_state(path).result())
        _failure_of(lambda path=path: trainer.create_sampling_client(path).result())
        np.testing.assert_array_equal(logprobs(trainer), before)
    trainer.load_state_with_optimizer(good).result()
    np.testing.assert_array_equal(logprobs(trainer), before)


def test_a_failing_disk_leaves_the_previous_state_or_the_new_one(provider: Provider, tmp_path: Path) -> None:
    """Every write, sync and rename of an overwrite in turn."""
    disk = FailingDisk()
    with provider.open(tmp_path, disk) as service:
        client = service.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
        path = client.save_state("last").result().path
        done = disk.done.copy()
        client.save_state("last", overwrite=True).result()
        operations = [(name, nth) for name, count in (disk.done - done).items() for nth in range(1, count + 1)]
        assert {name for name, _ in operations} == {"write", "sync", "rename"}
        for operation, nth in operations:
            _overwrite_on(client, disk, operation, nth, path)


def _overwrite_on(client: TrainingClient, disk: FailingDisk, operation: Operation, nth: int, path: str) -> None:
    old = logprobs(client)
    train(client, 1, 0.1)
    new = logprobs(client)
    disk.fail(operation, nth, OSError(errno.EIO, "input/output error"))
    with pytest.raises(RequestFailedError, match=r"save_state \(call \d+ of .*input/output error"):
        client.save_state("last", overwrite=True).result()
    np.testing.assert_array_equal(logprobs(client), new)
    client.load_state_with_optimizer(path).result()
    found = logprobs(client)
    assert (found == old).all() or (found == new).all()
    client.save_state("last", overwrite=True).result()


def test_a_client_is_not_pickled_or_copied_and_says_what_is_passed_instead(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    sampling = backend.create_sampling_client(base_model=provider.base_model).result()
    for client in (backend, trainer, sampling):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(InvalidRequest, match=r"Client cannot be pickled or copied.* Pass what makes one"):
                copied(client)
