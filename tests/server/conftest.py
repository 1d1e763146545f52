"""One server for a module of tests."""

from collections.abc import Iterator

import pytest
import tinker
from running import Running, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def sdk(server: Running) -> Iterator[tinker.ServiceClient]:
    """The official SDK, connected to it."""
    with server.sdk() as client:
        yield client
