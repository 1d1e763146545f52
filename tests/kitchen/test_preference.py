"""PREFERENCE as a whole, on the recording backend: it is the flat loop of this file, a run that is stopped and resumed
is the run that would have been, and a resumed run has the reference it always had."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from costly import slow_but
from kitchen.stages.configs import PreferenceConfig, write_comparisons
from kitchen.test_supervised import checkpoints, rows, weights
from stovetop.backends import recording
from stovetop.backends.opened_base import Call
from stovetop.checkpoints import is_due, load_checkpoints_file, save_final_checkpoint, submit_checkpoint
from stovetop.client import ServiceClient
from stovetop.errors import StageFailed
from stovetop.kitchen import When, stage
from stovetop.kitchen.stages.steps import enters_epoch, set_epoch
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import PREFERENCE
from stovetop.lr_schedules import compute_schedule_lr_multiplier
from stovetop.model_families import recommended_renderer_name
from stovetop.preference.datasets import DPODataset, comparisons_from_jsonl
from stovetop.preference.loss_values import DPO, SimPO
from stovetop.preference.losses import preference_loss_fn
from stovetop.preference.reference import create_dpo_clients
from stovetop.renderers import get_renderer
from stovetop.runs import Run, load, open_run
from stovetop.supervised.logprobs import compute_reference_logprobs
from stovetop.types import AdamParams

NUM_STEPS = 8  # of two epochs: seven comparisons to train on, two a step


@pytest.fixture
def config(tmp_path: Path) -> PreferenceConfig:
    return PreferenceConfig(dataset=write_comparisons(tmp_path / "rows.jsonl"), log_path=str(tmp_path / "run"))


async def train(config: PreferenceConfig, workflow: Workflow = PREFERENCE) -> Sequence[Call]:
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False) as run,
    ):
        await workflow.run(config, service=service, run=run)
        return service.calls


async def train_flat(config: PreferenceConfig) -> None:
    """Direct preference optimization as one flat loop."""
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False) as run,
    ):
        comparisons = comparisons_from_jsonl(config.dataset, test_size=config.test_size).get_labeled_comparisons()
        start, reference = await create_dpo_clients(
            service, run.path, model_name=config.model_name, lora_rank=config.lora_rank, seed=config.seed
        )
        trainer = start.training_client
        tokenizer = trainer.get_tokenizer()
        renderer = get_renderer(recommended_renderer_name(tokenizer), tokenizer)
        dataset = DPODataset(comparisons.train, config.batch_size, renderer)
        num_steps = len(dataset) * config.num_epochs
        for step in range(num_steps):
            epoch, batch = divmod(step, len(dataset))
            if batch == 0:
                dataset.set_epoch(config.seed + epoch)
            data_D = dataset.get_batch(batch)
            loss_fn = preference_loss_fn(DPO(beta=config.dpo_beta), await compute_reference_logprobs(reference, data_D))
            rate = config.learning_rate * compute_schedule_lr_multiplier(config.lr_schedule, step, num_steps)
            trained = trainer.forward_backward_custom(data_D, loss_fn)
            stepped = trainer.optim_step(AdamParams(rate, config.adam_beta1, config.adam_beta2, config.adam_eps))
            saves = is_due(step + 1, config.save_every) and step + 1 < num_steps
            saved = submit_checkpoint(trainer, f"{step + 1:06d}", {"batch": step + 1}) if saves else None
            metrics = {
                "epoch": epoch,
                "progress": step / num_steps,
                "num_tokens": sum(datum.model_input.length for datum in data_D),
                "learning_rate": rate,
                **(await trained).metrics,
                **(await stepped).metrics,
            }
            run.log_metrics(metrics, step)
            if saved is not None:
                await saved.record(run.path)
        await save_final_checkpoint(trainer, run.path, start=start, num_batches=num_steps)


def test_it_is_the_flat_loop_row_by_row_and_to_the_bit(config: PreferenceConfig) -> None:
    asyncio.run(train(config))
    flat = replace(config, log_path=f"{config.log_path}-flat")
    asyncio.run(train_flat(flat))
    assert rows(config.log_path) == rows(flat.log_path)
    assert len(rows(config.log_path)) == NUM_STEPS
    assert weights(config.log_path) == weights(flat.log_path)
    assert checkpoints(config.log_path) == checkpoints(flat.log_path) == [("000003", 3), ("000006", 6), ("final", 8)]


def test_the_policy_learns_to_prefer(config: PreferenceConfig) -> None:
    asyncio.run(train(replace(config, num_epochs=4)))
    accuracy = load(config.log_path).series("accuracy").values
    assert (accuracy[0], accuracy[-1]) == (0.0, 1.0)


def test_each_step_is_one_loss_and_one_update_at_the_rate_of_the_schedule(config: PreferenceConfig) -> None:
    calls = [call for call in asyncio.run(train(config)) if call.verb in ("forward_backward_custom", "optim_step")]
    assert [call.verb for call in calls] == ["forward_backward_custom", "optim_step"] * NUM_STEPS
    rates = [config.learning_rate * (1 - step / NUM_STEPS) for step in range(NUM_STEPS)]
    found = [call.arguments["optim_params"] for call in calls[1::2]]
    assert found == [AdamParams(rate, 0.9, 0.95, 1e-8) for rate in rates]


def test_a_row_has_the_loss_the_rewards_and_where_the_run_is(config: PreferenceConfig) -> None:
    asyncio.run(train(config))
    row = {name for name in load(config.log_path).metrics[1] if not name.startswith("time/")}
    assert row >= {"epoch", "progress", "learning_rate", "num_pairs", "num_tokens"}
    assert row >= {"dpo_loss", "accuracy", "margin", "chosen_reward", "rejected_reward"}
    times = {name for name in load(config.log_path).metrics[1] if name.startswith("time/")}
    assert {"time/step", "time/compute_reference_logprobs", "time/get_preference_batch"} <= times


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PreferenceConfig:
    """A run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    config = PreferenceConfig(dataset=write_comparisons(folder / "rows.jsonl"), log_path=str(folder / "run"))
    asyncio.run(train(config))
    return config


def stopping_at(at: int):
    @stage
    def stops(step: int) -> None:
        if step == at:
            raise ValueError("stopped")

    return stops


@pytest.mark.parametrize(
    "boundary", slow_but(2, ["optim_step", "record_checkpoint", "get_preference_batch", "log_step"])
)
def test_a_run_that_is_stopped_anywhere_and_resumed_is_the_run_that_would_have_been(
    config: PreferenceConfig, whole: PreferenceConfig, boundary: str
) -> None:
    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, PREFERENCE.insert_after(boundary, stopping_at(5))))
    asyncio.run(train(config))
    assert rows(config.log_path) == rows(whole.log_path)
    assert weights(config.log_path) == weights(whole.log_path)
    assert checkpoints(config.log_path) == checkpoints(whole.log_path)
    events = Counter((event.name, event.step) for event in load(config.log_path).events if event.step is not None)
    assert all(events[("dpo.step", step)] == 1 for step in range(NUM_STEPS))


def test_a_run_resumed_within_an_epoch_that_does_not_enter_it_anew_trains_on_other_data(
    config: PreferenceConfig, whole: PreferenceConfig
) -> None:
    """What the rule of `enters_epoch` is for."""

    def begins_epoch(batch: int) -> bool:
        return batch == 0

    sets = set_epoch.using("set_epoch", data="preference_dataset")
    assert When(enters_epoch, sets) in PREFERENCE.loop.stations[0].nodes  # pyright: ignore[reportOptionalMemberAccess]  it has one
    wrong = PREFERENCE.insert_before("set_epoch", When(begins_epoch, sets.using("another"))).remove("set_epoch")
    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, PREFERENCE.insert_after("log_step", stopping_at(6))))
    asyncio.run(train(config, wrong))
    assert rows(config.log_path) != rows(whole.log_path)


def test_a_resumed_run_has_the_reference_it_always_had_wherever_it_lies(config: PreferenceConfig) -> None:
    """The policy begins from a checkpoint that is gone when the run goes on, from another folder."""
    with recording.open_service(Path(config.log_path).parent / "before") as service:
        client = service.create_lora_training_client(config.model_name, rank=4, seed=5).result()
        begun_from = client.save_state("begun").result().path
    config = replace(config, load_checkpoint_path=begun_from)
    asyncio.run(train(replace(config, log_path=f"{config.log_path}-whole")))
    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, PREFERENCE.insert_after("log_step", stopping_at(5))))
    shutil.rmtree(begun_from)
    moved = f"{config.log_path}-moved"
    Path(config.log_path).rename(moved)
    asyncio.run(train(replace(config, log_path=moved)))
    assert rows(moved) == rows(f"{config.log_path}-whole")
    paths = {record.reference_path for record in load_checkpoints_file(moved)}
    assert [Path(str(path)).name for path in paths] == ["reference"]
    assert all(str(path).startswith(moved) for path in paths)


def test_another_loss_is_one_edit(config: PreferenceConfig) -> None:
    @stage(writes="preference_loss")
    def make_simpo() -> SimPO:
        return SimPO(beta=1.0, gamma=0.5)

    workflow = PREFERENCE.replace("make_preference_loss", make_simpo).remove("compute_reference_logprobs")
    asyncio.run(train(config, workflow))
    assert "simpo_loss" in rows(config.log_path)[0]


def test_it_has_no_problems_and_every_field_of_its_config_is_read(config: PreferenceConfig) -> None:
    checked = PREFERENCE.check(config, {"service": ServiceClient, "run": Run})
    assert (checked.problems, checked.unread) == ((), ())
    assert checked.config_fields["dpo_beta"] == ("make_preference_loss",)
    assert (
        PREFERENCE.remove("make_preference_loss")
        .check(config)
        .problems[0]
        .startswith("stage 'dpo_forward_backward' reads 'preference_loss', and nobody writes it before")
    )
