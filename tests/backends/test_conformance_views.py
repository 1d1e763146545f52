"""`ServiceClient.at`: a service for one of several runs, which shares the base models and saves elsewhere."""

from pathlib import Path

import numpy as np
import pytest
from examples import datum, logprobs, train
from providers import Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK
from stovetop.errors import InvalidRequest, ServiceClosed

DATA = [datum()]


def new_client(service: ServiceClient, provider: Provider, seed: int = 1) -> TrainingClient:
    return service.create_lora_training_client(provider.base_model, rank=4, seed=seed).result()


def test_a_view_saves_elsewhere_and_reads_what_others_saved(
    backend: ServiceClient, provider: Provider, tmp_path: Path
) -> None:
    with backend.at(tmp_path / "a") as one, backend.at(tmp_path / "b") as other:
        client = new_client(one, provider)
        train(client, 2, provider.learning_rate)
        path = client.save_state("x").result().path
        assert not provider.in_process or Path(path).is_relative_to(tmp_path / "a")
        again = other.create_training_client_from_state_with_optimizer(path).result()
        np.testing.assert_array_equal(logprobs(again, DATA), logprobs(client, DATA))
        saved = again.save_state("x").result().path
        assert not provider.in_process or Path(saved).is_relative_to(tmp_path / "b")


def test_clients_of_views_that_train_at_once_learn_what_each_learns_alone(
    backend: ServiceClient, provider: Provider, tmp_path: Path
) -> None:
    alone = [new_client(backend, provider, seed) for seed in (1, 2)]
    for client in alone:
        train(client, 2, provider.learning_rate)
    beside = [new_client(backend.at(tmp_path / str(seed)), provider, seed) for seed in (1, 2)]
    for client in beside:  # their calls wait side by side
        train(client, 2, provider.learning_rate)
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_allclose(logprobs(one, DATA), logprobs(other, DATA), atol=provider.tolerance)


def test_a_view_that_is_closed_makes_no_clients_and_the_service_goes_on(
    backend: ServiceClient, provider: Provider, tmp_path: Path
) -> None:
    with backend.at(tmp_path / "a") as view:
        new_client(view, provider)
    with pytest.raises(ServiceClosed):
        new_client(view, provider)
    with pytest.raises(ZeroDivisionError), backend.at(tmp_path / "b") as failing:
        raise ZeroDivisionError
    with pytest.raises(ServiceClosed):
        failing.create_sampling_client(base_model=provider.base_model)
    train(new_client(backend, provider), 2, provider.learning_rate)


def test_a_view_goes_with_its_service(provider: Provider, tmp_path: Path) -> None:
    with provider.open(tmp_path, LOCAL_DISK) as service:
        view = service.at(tmp_path / "a")
    with pytest.raises(ServiceClosed):
        new_client(view, provider)


def test_a_name_is_of_one_client_of_all_views(backend: ServiceClient, provider: Provider, tmp_path: Path) -> None:
    if not provider.in_process:
        pytest.skip("a server chooses the names")
    views = [backend.at(tmp_path / name) for name in "ab"]
    views[0].create_lora_training_client(provider.base_model, rank=4, model_id="mine").result()
    with pytest.raises(InvalidRequest, match="model_id must be new"):
        views[1].create_lora_training_client(provider.base_model, rank=4, model_id="mine")
