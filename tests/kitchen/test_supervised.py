"""SUPERVISED as a whole, on the recording backend: it is the flat loop, and a run that is stopped and resumed is the
run that would have been."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from costly import slow_but
from kitchen.stages.configs import SupervisedConfig, write_chats
from stovetop.backends import recording
from stovetop.backends.opened_base import Call
from stovetop.backends.recording import Raises
from stovetop.checkpoints import load_checkpoints_file
from stovetop.client import ServiceClient
from stovetop.errors import StageFailed
from stovetop.kitchen import stage
from stovetop.kitchen.stages import all_stages
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import SUPERVISED, get_workflow, list_workflows
from stovetop.recipes import sl_loop
from stovetop.runs import Run, load, open_run
from stovetop.tracking.trace import TRACE_FILE

NUM_STEPS = 8  # of two epochs


@pytest.fixture
def config(tmp_path: Path) -> SupervisedConfig:
    return SupervisedConfig(dataset=write_chats(tmp_path / "chats.jsonl"), log_path=str(tmp_path / "run"))


async def train(config: SupervisedConfig, workflow: Workflow = SUPERVISED, *faults: Raises) -> list[Call]:
    with (
        recording.open_service(config.log_path, faults=faults) as service,
        open_run(config.log_path, config, console=False) as run,
    ):
        await workflow.run(config, service=service, run=run)
        return service.calls


def rows(log_path: str) -> list[dict[str, float]]:
    """The metrics of each step, without the clock."""
    metrics = load(log_path).metrics
    return [{name: value for name, value in row.items() if not name.startswith("time")} for row in metrics]


def weights(log_path: str) -> dict[str, bytes]:
    last = load_checkpoints_file(log_path)[-1]
    assert last.name == "final"
    assert last.state_path is not None
    return {file.name: file.read_bytes() for file in Path(last.state_path).glob("*.safetensors")}


def checkpoints(log_path: str) -> list[tuple[str, int | None]]:
    return [(record.name, record.batch) for record in load_checkpoints_file(log_path)]


def test_it_is_the_flat_loop_row_by_row_and_to_the_bit(config: SupervisedConfig) -> None:
    asyncio.run(train(config))
    own = asdict(config).items()
    shared = {name: value for name, value in own if name in {field.name for field in fields(sl_loop.Config)}}
    flat = sl_loop.Config(**{**shared, "log_path": f"{config.log_path}-flat"})
    with recording.open_service(flat.log_path) as service:
        asyncio.run(sl_loop.train(flat, service))
    assert rows(config.log_path) == rows(flat.log_path)
    steps = [
        [(event.step, dict(event.values)) for event in load(each.log_path).events if event.name == "training.step"]
        for each in (config, flat)
    ]
    assert steps[0] == steps[1]
    assert weights(config.log_path) == weights(flat.log_path)
    assert checkpoints(config.log_path) == checkpoints(flat.log_path) == [("000003", 3), ("000006", 6), ("final", 8)]


def test_calls_are_made_in_program_order(config: SupervisedConfig) -> None:
    verbs = [call.verb for call in asyncio.run(train(config)) if call.client not in ("service", "sampling")]
    step = ["forward_backward", "optim_step"]
    assert verbs == [
        *["forward", *step, *step, *step, "save_state"] * 2, "forward", *step, *step,
        "forward", "save_state", "save_weights_for_sampler",
    ]  # fmt: skip


def test_an_epoch_ends_with_the_means_of_its_rows(config: SupervisedConfig) -> None:
    asyncio.run(train(config))
    record = load(config.log_path)
    epoch = next(event for event in record.events if event.name == "training.epoch")
    assert (epoch.step, epoch.values["num_steps"]) == (3, 4)
    losses = record.series("train_mean_nll").values[:4]
    assert epoch.values["train_mean_nll"] == pytest.approx(sum(losses) / 4)


def test_a_row_has_the_time_of_every_stage_before_it(config: SupervisedConfig) -> None:
    asyncio.run(train(config))
    first, second, *_ = load(config.log_path).metrics
    names = ["get_batch", "schedule", "forward_backward", "optim_step", "await_forward_backward", "await_optim_step"]
    expected = {f"time/{name}" for name in [*names, "log_step_metrics", "step", "total"]}

    def times(row: Mapping[str, float]) -> set[str]:
        return {name for name in row if name.startswith("time/") and not name.startswith("time/engine/")}

    calls = {"time/forward_backward:total", "time/optim_step:total"}
    assert {name for name in times(second) if ":" not in name} == expected
    assert {name for name in times(first) if ":" not in name} == expected | {"time/evaluate"}
    assert calls <= times(first)
    assert "time/engine/waiting_share" in second


def test_a_trace_has_each_stage_of_each_step_and_the_calls_although_steps_overlap(config: SupervisedConfig) -> None:
    async def traced() -> None:
        with (
            recording.open_service(config.log_path) as service,
            open_run(config.log_path, config, console=False, enable_trace=True) as run,
        ):
            await SUPERVISED.run(config, service=service, run=run)

    asyncio.run(traced())
    events = json.loads((Path(config.log_path) / TRACE_FILE).read_text())
    begun = Counter(event["name"] for event in events if event["ph"] == "B")
    assert begun["forward_backward"] == begun["await_optim_step"] == begun["log_step"] == NUM_STEPS
    assert begun == Counter(event["name"] for event in events if event["ph"] == "E")
    steps = {event["args"]["step"] for event in events if event["ph"] == "B" and event["name"] == "log_step"}
    assert steps == set(range(NUM_STEPS))
    calls = Counter(event["name"] for event in events if event["ph"] == "b")
    assert calls["forward_backward"] == calls["optim_step"] == NUM_STEPS
    open_in: dict[int, list[str]] = {}
    for event in events:
        if event["ph"] in "BE":
            lane = open_in.setdefault(event["tid"], [])
            lane.append(event["name"]) if event["ph"] == "B" else None
            assert event["ph"] == "B" or lane.pop() == event["name"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SupervisedConfig:
    """A run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    config = SupervisedConfig(dataset=write_chats(folder / "chats.jsonl"), log_path=str(folder / "run"))
    asyncio.run(train(config))
    return config


@pytest.mark.parametrize(
    ("boundary", "at"),
    slow_but(
        2,
        [
            ("log_step", 2), ("register_model", 0), ("get_batch", 3), ("optim_step", 5), ("await_optim_step", 3),
            ("log_step", 5), ("record_checkpoint", 5),
        ],
    ),
)  # fmt: skip
def test_a_run_that_is_stopped_anywhere_and_resumed_is_the_run_that_would_have_been(
    config: SupervisedConfig, whole: SupervisedConfig, boundary: str, at: int
) -> None:
    @stage
    def stops(step: int = at) -> None:
        if step == at:
            raise ValueError("stopped")

    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, SUPERVISED.insert_after(boundary, stops)))
    calls = asyncio.run(train(config))
    assert rows(config.log_path) == rows(whole.log_path)
    assert weights(config.log_path) == weights(whole.log_path)
    assert checkpoints(config.log_path) == checkpoints(whole.log_path)
    assert (boundary == "register_model") == ("optim_step" not in [call.verb for call in calls])
    events = Counter((event.name, event.step) for event in load(config.log_path).events if event.step is not None)
    assert all(events[("training.step", step)] == 1 for step in range(NUM_STEPS))
    assert all(events[("training.epoch", step)] == 1 for step in (3, 7))


def test_a_finished_run_trains_nothing_and_keeps_what_it_has(config: SupervisedConfig) -> None:
    asyncio.run(train(config))
    before = rows(config.log_path), checkpoints(config.log_path)
    calls = asyncio.run(train(config))
    assert [call.verb for call in calls] == ["create_training_client_from_state_with_optimizer"]
    assert (rows(config.log_path), checkpoints(config.log_path)) == before


def test_a_failed_call_names_the_stage_that_waited_for_it(config: SupervisedConfig) -> None:
    fault = Raises("forward_backward", 3, RuntimeError("card fell off"))
    with pytest.raises(
        StageFailed, match=r"stage 'await_forward_backward' of workflow 'supervised' failed at step 2: .*card"
    ):
        asyncio.run(train(config, SUPERVISED, fault))


def test_it_has_no_problems_and_every_field_of_its_config_is_read(config: SupervisedConfig) -> None:
    checked = SUPERVISED.check(config, {"service": ServiceClient, "run": Run})
    assert (checked.problems, checked.unread) == ((), ())
    assert checked.config_fields["seed"] == ("load_dataset", "choose_adapter", "make_batches")
    assert checked.config_fields["num_epochs"] == ("make_batches", "plan_steps")
    assert SUPERVISED.describe().notes == ()


PUBLISHED = (
    "build_preference_dataset get_preference_batch compute_reference_logprobs dpo_forward_backward log_dpo_metrics "
    "build_env_group do_rollout compute_advantages assemble_rl_batch ppo_update log_rl_metrics "
    "init_teacher build_distillation_dataset get_distillation_batch teacher_inference distillation_forward_backward "
    "log_distillation_metrics load_dataset init_session await_future optim_step set_epoch get_batch "
    "build_supervised_dataset forward_backward log_step_metrics log_epoch_metrics save_checkpoint evaluate "
    "save_final_weights register_model"
)


def test_stages_and_workflows_are_listed() -> None:
    assert list_workflows()["supervised"] is get_workflow("supervised") is SUPERVISED
    used = {each.stage.name for workflow in list_workflows().values() for each in workflow.stages}
    assert used | set(PUBLISHED.split()) <= set(all_stages())
    long = {name for name, each in all_stages().items() if len(each.reads) > 6}
    # to make one value of so many fields; and to draw answers, have them judged and write them down
    assert long == {"make_optimizer", "make_win_rate_evaluators"}
    assert all(each.doc for each in all_stages().values())
