"""Every backend of `providers.py` in turn."""

from collections.abc import Iterator

import pytest
from providers import PROVIDERS, Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK


@pytest.fixture(scope="session", params=PROVIDERS)
def provider(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Provider:
    name: str = request.param
    return PROVIDERS[name](tmp_path_factory.mktemp(name))


@pytest.fixture(scope="session")
def backend(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    """One service for the whole suite: what a test does to its own clients must not matter to the next."""
    with provider.open(tmp_path_factory.mktemp("storage"), LOCAL_DISK) as service:
        yield service


@pytest.fixture
def trainer(provider: Provider, backend: ServiceClient) -> TrainingClient:
    """A fresh adapter; the same one for every test."""
    return backend.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
