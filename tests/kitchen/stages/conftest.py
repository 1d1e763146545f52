"""What the tests of stages have in common: a run that is open, a service that saves into it, a training client."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.recording import open_service
from stovetop.client import TrainingClient
from stovetop.runs import Run, open_run


@dataclass(frozen=True)
class NoConfig:
    pass


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with open_run(tmp_path / "run", NoConfig(), console=False) as opened:
        yield opened


@pytest.fixture
def service(run: Run) -> Iterator[InProcessServiceClient]:
    with open_service(run.path) as opened:
        yield opened


@pytest.fixture
def client(service: InProcessServiceClient) -> TrainingClient:
    return service.create_lora_training_client("any/model", rank=4, seed=0).result()
