"""Preferences change a policy: from pairs to a gradient and back, on a transformer and on the recording backend."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.client import ServiceClient
from stovetop.errors import InvalidRequest
from stovetop.preference.comparison_renderer import ComparisonRendererFromChatRenderer
from stovetop.preference.datasets import DPODataset, preference_model_dataset, with_mismatched
from stovetop.preference.evaluator import ComparisonPolicyEvaluator
from stovetop.preference.loss_values import DPO, KTO, PREFERENCE_LOSSES, PreferenceLoss, needs_reference
from stovetop.preference.losses import preference_loss_fn
from stovetop.preference.reference import create_dpo_clients
from stovetop.preference.reward_model import PreferenceModelFromChatRenderer
from stovetop.supervised.logprobs import compute_reference_logprobs
from stovetop.types import AdamParams
from tiny_service import TinyService, open_tiny

from .examples import RENDERER, labeled, texts

# Separable: the better answers are in small letters, the worse in capitals.
ANSWERS = ["yes", "sure", "of course", "gladly", "why not", "here you are", "with pleasure", "as they like"]
TRAIN = [labeled("A", f"q{index}", answer, answer.upper()) for index, answer in enumerate(ANSWERS)]
TEST = [
    labeled("B", f"t{index}", answer.upper(), answer)
    for index, answer in enumerate(["of course, with pleasure", "as you like"])
]


async def train(
    service: ServiceClient, run: Path, model: str, loss: PreferenceLoss, *, seed: int, learning_rate: float
) -> list[dict[str, float]]:
    """The metrics of every batch, and then those of the held-out pairs."""
    clients = await create_dpo_clients(service, run, model_name=model, lora_rank=8, seed=seed)
    policy = clients.start.training_client
    batches = DPODataset(TRAIN, 4, RENDERER)
    held_out = DPODataset(TEST, 2, RENDERER).get_batch(0)
    history = []
    for epoch in range(4):
        batches.set_epoch(seed + epoch)
        for data_D in map(batches.get_batch, range(len(batches))):
            data_D = with_mismatched(data_D) if isinstance(loss, KTO) else data_D
            reference = await compute_reference_logprobs(clients.reference, data_D) if needs_reference(loss) else None
            output = policy.forward_backward_custom(data_D, preference_loss_fn(loss, reference))
            policy.optim_step(AdamParams(learning_rate=learning_rate))
            history.append((await output).metrics)
    test_D = with_mismatched(held_out) if isinstance(loss, KTO) else held_out
    reference = await compute_reference_logprobs(clients.reference, test_D) if needs_reference(loss) else None
    tested = await policy.forward_backward_custom(test_D, preference_loss_fn(loss, reference))
    return [*history, tested.metrics]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyService]:
    with open_tiny(tmp_path_factory.mktemp("tiny")) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_accuracy_passes_nine_tenths_on_a_transformer(tiny: TinyService, tmp_path: Path, seed: int):
    run = train(tiny.service, tmp_path / "run", tiny.model, DPO(), seed=seed, learning_rate=0.003)
    first, *_, last, tested = asyncio.run(run)
    assert first["accuracy"] == 0
    assert last["accuracy"] > 0.9
    assert tested["accuracy"] > 0.9
    assert last["dpo_loss"] < 0.1 < first["dpo_loss"]


@pytest.mark.parametrize("loss", [one() for one in PREFERENCE_LOSSES.values()], ids=lambda loss: loss.name)
def test_accuracy_passes_nine_tenths_on_a_separable_set_whatever_the_loss(tmp_path: Path, loss: PreferenceLoss):
    with recording.open_service(tmp_path) as service:
        run = train(service, tmp_path / "run", "any/name", loss, seed=0, learning_rate=0.05)
        *history, tested = asyncio.run(run)
    assert history[0]["accuracy"] <= 0.75 if not needs_reference(loss) else history[0]["accuracy"] == 0
    assert history[-1]["accuracy"] > 0.9
    assert tested["accuracy"] > 0.9
    assert history[-1][f"{loss.name}_loss"] < history[0][f"{loss.name}_loss"]


def test_a_single_pair_is_no_batch_for_kto():
    with pytest.raises(InvalidRequest, match="raise the batch size"):
        with_mismatched(DPODataset(TRAIN, 1, RENDERER).get_batch(0))


def test_a_preference_model_that_was_trained_on_comparisons_judges_a_policy(tmp_path):
    """The recording backend sees one token back, so it can only learn which label is the more frequent one."""
    judged = ComparisonRendererFromChatRenderer(RENDERER)

    async def run() -> tuple[dict[str, float], dict[str, float]]:
        trainer = await service.create_lora_training_client("any/judge")
        data_D = preference_model_dataset(TRAIN, len(TRAIN), judged, swap=False).get_batch(0)
        for _ in range(20):
            trainer.forward_backward(data_D, "cross_entropy")
            await trainer.optim_step(AdamParams(learning_rate=0.5))
        judge = PreferenceModelFromChatRenderer(judged, await trainer.save_weights_and_get_sampling_client())
        policy = await service.create_sampling_client(base_model="any/policy")
        comparisons = [one.comparison for one in TEST]
        evaluator = ComparisonPolicyEvaluator(comparisons, judge, RENDERER, max_tokens=4, both_ways=False, seed=0)
        return await evaluator(policy), judge.metrics()

    with recording.open_service(tmp_path) as service:
        metrics, judged_metrics = asyncio.run(run())
    assert metrics == {"win_rate": 0.0, "stderr": 0.0}  # it always says A, which here is the reference answer
    assert judged_metrics == {"preference_model/num_asked": 2, "preference_model/num_without_answer": 0}
    assert texts(TEST[0].comparison)[0].isupper()
