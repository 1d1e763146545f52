"""Every backend of `providers.py` in turn: all of them in the conformance suite, those in this process where tests look
into them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from providers import IN_PROCESS, PROVIDERS, Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "provider" in metafunc.fixturenames:
        is_for_all = metafunc.definition.path.name.startswith("test_conformance_")
        names = list(PROVIDERS) if is_for_all else IN_PROCESS
        metafunc.parametrize("provider", names, indirect=True, scope="session")


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
