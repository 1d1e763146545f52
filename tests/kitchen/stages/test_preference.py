"""Each stage of preference learning alone, with nothing but what it reads, on the recording backend."""

import asyncio
from pathlib import Path

import pytest

from kitchen.stages.configs import ANSWERS, write_comparisons
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.checkpoints import CheckpointRecord, Start
from stovetop.client import TrainingClient
from stovetop.errors import InvalidRequest
from stovetop.kitchen import Positions, Row
from stovetop.kitchen.stages import preference
from stovetop.kitchen.stages.preference import PreferenceData
from stovetop.kitchen.stages.session import choose_adapter, init_renderer
from stovetop.preference.loss_values import DPO, SimPO
from stovetop.preference.types import LabeledComparison
from stovetop.runs import Run, load
from stovetop.types import AdamParams, OptimStepResponse

ADAPTER = choose_adapter("any/model", 4)
STEPS = Positions(num_per_epoch=2, num_steps=4)


@pytest.fixture
def data(tmp_path: Path, run: Run, client: TrainingClient) -> PreferenceData:
    comparisons = preference.load_comparisons(write_comparisons(tmp_path / "rows.jsonl"), run, test_size=2)
    return preference.build_preference_dataset(comparisons, init_renderer(client, "role_colon"), run, batch_size=4)


def emitted(run: Run, name: str) -> list[dict[str, float]]:
    return [dict(event.values) for event in load(run.path).events if event.name == name]


def test_load_comparisons_holds_some_out(tmp_path: Path, run: Run) -> None:
    comparisons = preference.load_comparisons(write_comparisons(tmp_path / "rows.jsonl"), run, test_size=2)
    assert (len(comparisons.train), len(comparisons.test)) == (len(ANSWERS) - 2, 2)
    assert emitted(run, "dataset.load") == [{"num_train": 7, "num_test": 2, "num_skipped": 0}]


def test_build_preference_dataset_leaves_ties_out_and_counts_them(
    data: PreferenceData, run: Run, client: TrainingClient, tmp_path: Path
) -> None:
    assert (len(data.preference_dataset), data.num_per_epoch) == (2, 2)
    comparisons = preference.load_comparisons(write_comparisons(tmp_path / "rows.jsonl"), run)
    tied = comparisons._replace(train=[*comparisons.train, LabeledComparison(comparisons.train[0].comparison, "Tie")])
    preference.build_preference_dataset(tied, init_renderer(client, "role_colon"), run, 3)
    assert emitted(run, "dpo.dataset_built")[1] == {
        "num_pairs": 9,
        "num_batches": 3,
        "num_ties": 1,
        "num_untrainable": 0,
    }


def test_get_preference_batch_gives_pairs_and_counts_them(data: PreferenceData, run: Run) -> None:
    row = Row(3)
    data_D = preference.get_preference_batch(data.preference_dataset, 1, 1, STEPS, row, run)
    assert data_D == data.preference_dataset.get_batch(1)
    num_tokens = sum(datum.model_input.length for datum in data_D)
    assert dict(row.values) == {"epoch": 1, "progress": 0.75, "num_tokens": num_tokens}
    [event] = [event for event in load(run.path).events if event.name == "dataset.batch"]
    assert (event.step, dict(event.values)) == (3, {"num_datums": len(data_D), "num_tokens": num_tokens})


def test_init_reference_keeps_the_weights_that_a_run_begins_with_in_the_run(
    service: InProcessServiceClient, client: TrainingClient, data: PreferenceData, run: Run
) -> None:
    data_D = data.preference_dataset.get_batch(0)
    fresh = asyncio.run(preference.init_reference(service, client, Start(client), ADAPTER))
    before = asyncio.run(preference.compute_reference_logprobs(data_D=data_D, reference=fresh.reference))
    client.forward_backward(data_D, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=0.5)).result()
    record = CheckpointRecord(name="000001", batch=1, reference_path=fresh.reference_path)
    resumed = asyncio.run(preference.init_reference(service, client, Start(client, 1, record), ADAPTER))
    after = asyncio.run(preference.compute_reference_logprobs(data_D, resumed.reference))
    assert all((one == other).all() for one, other in zip(before, after, strict=True))
    assert resumed.reference_path == fresh.reference_path
    assert Path(str(fresh.reference_path)).is_relative_to(run.path)


def test_another_model_as_the_reference_changes_its_logprobs_and_must_have_the_same_tokenizer(
    service: InProcessServiceClient, client: TrainingClient, data: PreferenceData
) -> None:
    data_D = data.preference_dataset.get_batch(0)
    own = asyncio.run(preference.init_reference(service, client, Start(client), ADAPTER))
    other = asyncio.run(preference.init_reference(service, client, Start(client), ADAPTER, "another/model"))
    assert other.reference_path is None
    found = [asyncio.run(preference.compute_reference_logprobs(data_D, each.reference)) for each in (own, other)]
    assert not all((one == another).all() for one, another in zip(*found, strict=True))


def test_dpo_forward_backward_submits_the_loss_and_log_dpo_metrics_reads_it(
    service: InProcessServiceClient, client: TrainingClient, data: PreferenceData, run: Run
) -> None:
    data_D, loss = data.preference_dataset.get_batch(0), preference.make_preference_loss(dpo_beta=0.5)
    assert loss == DPO(beta=0.5)
    reference = asyncio.run(preference.init_reference(service, client, Start(client), ADAPTER)).reference
    logprobs_D = asyncio.run(preference.compute_reference_logprobs(data_D, reference))
    output = preference.dpo_forward_backward(client, data_D, loss, logprobs_D).result()
    row = Row(2)
    preference.log_dpo_metrics(output, OptimStepResponse({"grad_norm": 2.0}), loss, AdamParams(0.25), row, run)
    assert row.values["dpo_loss"] == pytest.approx(0.6931, abs=1e-4)  # -log ½: the policy is the reference
    assert (row.values["learning_rate"], row.values["grad_norm"], row.values["num_pairs"]) == (0.25, 2.0, 4)
    [event] = emitted(run, "dpo.step")
    assert event == {
        "loss": row.values["dpo_loss"], "accuracy": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0, "margin": 0.0,
        "num_pairs": 4, "beta": 0.5,
    }  # fmt: skip


def test_a_loss_that_needs_a_reference_is_refused_without_one(client: TrainingClient, data: PreferenceData) -> None:
    data_D = data.preference_dataset.get_batch(0)
    with pytest.raises(InvalidRequest, match="dpo needs the logprobs of a reference"):
        preference.dpo_forward_backward(client, data_D, DPO())
    assert "simpo_loss" in preference.dpo_forward_backward(client, data_D, SimPO()).result().metrics
