"""Every backend of `providers.py` in turn: all of them in the conformance suite, those in this process where tests look
into them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from providers import IN_PROCESS, PROVIDERS, Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK

# What takes a second or more there, with all its parameters, and less in this process.
SLOW_OVER_A_SERVER = {
    "test_a_failing_disk_leaves_the_previous_state_or_the_new_one",
    "test_a_hundred_clients_come_and_go",
    "test_a_run_resumed_at_any_step_is_the_run_that_would_have_been",
    "test_a_torn_state_is_recognised_and_the_client_goes_on",
    "test_any_cut_into_micro_batches_gives_the_same_gradient",
    "test_close_finishes_what_is_to_be_written_and_what_waits_for_it",
    "test_saves_beyond_what_memory_is_taken_for_wait_and_nothing_else_does",
    "test_the_gradient_of_a_loss_is_that_of_cross_entropy_weighted_by_its_slope",
    "test_training_teaches",
    "test_weights_without_optimizer_start_it_afresh",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "provider" in metafunc.fixturenames:
        is_for_all = metafunc.definition.path.name.startswith("test_conformance_")
        names = list(PROVIDERS) if is_for_all else IN_PROCESS
        is_slow = metafunc.function.__name__ in SLOW_OVER_A_SERVER
        slow = [pytest.param(name, marks=pytest.mark.slow) if is_slow and name == "remote" else name for name in names]
        metafunc.parametrize("provider", slow, indirect=True, scope="session")


@pytest.fixture(scope="session")
def storage(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the service of the whole suite saves."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="session")
def provider(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Provider:
    name: str = request.param
    return PROVIDERS[name](tmp_path_factory.mktemp(name))


@pytest.fixture(scope="session")
def backend(provider: Provider, storage: Path) -> Iterator[ServiceClient]:
    """One service for the whole suite: what a test does to its own clients must not matter to the next."""
    with provider.open(storage, LOCAL_DISK) as service:
        yield service


@pytest.fixture
def trainer(provider: Provider, backend: ServiceClient) -> TrainingClient:
    """A fresh adapter; the same one for every test."""
    return backend.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
