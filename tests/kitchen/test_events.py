"""The events of every workflow: exactly these, as often as they happen, also when a run is stopped and goes on."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from costly import slow_but
from kitchen.stages.configs import (
    DistillationConfig,
    KLConfig,
    OffPolicyConfig,
    PairwiseConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    StreamingConfig,
    SupervisedConfig,
    TopKConfig,
    write_chats,
    write_comparisons,
    write_problems,
)
from stovetop.backends import recording
from stovetop.checkpoints import load_checkpoints_file
from stovetop.durable import read_rows
from stovetop.errors import StageFailed
from stovetop.kitchen import RunConfig, stage
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import list_workflows
from stovetop.runs import load, open_run
from stovetop.tracking.configs import HOW_LONG
from stovetop.tracking.events import Event

Step = int | None
Steps = Sequence[Step]


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RLConfig):
    """What PPO reads too."""

    ppo_epochs: int = 2


RL_STEP = {"reward_mean", "reward_std", "policy_loss", "kl_div", "entropy", "clip_fraction"}
PLAYED = {
    "dataset.batch": {"num_groups"},
    "rl.rollout_complete": {"num_groups", "num_episodes", "reward_mean", "reward_std"},
    "rl.batch_assembled": {"num_datums", "num_tokens"},
}
RL = {**PLAYED, "rl.advantages_computed": {"num_groups", "num_trajectories"}, "rl.step": RL_STEP}
PROBLEMS = {
    "dataset.load": {"num_train", "num_test", "num_skipped"},
    "rl.env_group_built": {"num_train", "num_test", "group_size"},
}
CHATS = {"dataset.load": {"num_train", "num_test", "num_skipped"}}
OFF_POLICY = {"distillation.step": {"loss", "learning_rate"}}


@dataclass(frozen=True)
class Case:
    """A workflow's config, its steps, and which fields its events have that come once a run or once a step."""

    config: Callable[[Path], RunConfig]
    num_steps: int
    num_per_epoch: int
    once: Mapping[str, set[str]]
    every_step: Mapping[str, set[str]]
    saved: Steps = ()  # before the last step
    evaluated: Steps = ()


def rl(config_class: type[RLConfig], more: Mapping[str, set[str]] | None = None) -> Case:
    def config(folder: Path) -> RunConfig:
        return config_class(dataset=write_problems(folder / "rows.jsonl"), log_path=str(folder / "run"))

    return Case(config, 6, 3, PROBLEMS, {**RL, **(more or {})}, saved=(1, 3), evaluated=(0, 2, 4, 6))


def supervised(folder: Path) -> RunConfig:
    return SupervisedConfig(dataset=write_chats(folder / "rows.jsonl"), log_path=str(folder / "run"))


def preference(folder: Path) -> RunConfig:
    return PreferenceConfig(dataset=write_comparisons(folder / "rows.jsonl"), log_path=str(folder / "run"))


def reward_model(folder: Path) -> RunConfig:
    return RewardModelConfig(dataset=write_comparisons(folder / "rows.jsonl"), log_path=str(folder / "run"))


def pairwise(folder: Path) -> RunConfig:
    dataset = write_comparisons(folder / "rows.jsonl")
    return PairwiseConfig(dataset=dataset, log_path=str(folder / "run"), num_epochs=3)


def distillation(folder: Path) -> RunConfig:
    return DistillationConfig(dataset=write_problems(folder / "rows.jsonl"), log_path=str(folder / "run"))


def off_policy(folder: Path) -> RunConfig:
    return OffPolicyConfig(dataset=write_problems(folder / "rows.jsonl"), log_path=str(folder / "run"))


def topk(folder: Path) -> RunConfig:
    return TopKConfig(dataset=write_chats(folder / "rows.jsonl"), log_path=str(folder / "run"))


BATCH = {"dataset.batch": {"num_datums", "num_tokens"}}
CASES = {
    "supervised": Case(
        supervised, 8, 4, CHATS, {**BATCH, "training.step": {"loss", "learning_rate", "epoch"}},
        saved=(2, 5), evaluated=(0, 3, 6, 8),
    ),
    "preference": Case(
        preference, 8, 4, {**CHATS, "dpo.dataset_built": {"num_pairs", "num_batches", "num_ties", "num_untrainable"}},
        {**BATCH, "dpo.step": {"loss", "accuracy", "chosen_reward", "rejected_reward", "margin", "num_pairs", "beta"}},
        saved=(2, 5),
    ),
    "reward_model": Case(
        reward_model, 6, 3,
        {**CHATS, "reward_model.dataset_built": {
            "num_comparisons", "num_test", "num_untrainable", "num_test_untrainable",
        }},
        {**BATCH, "training.step": {"loss", "learning_rate", "epoch"}}, saved=(2,), evaluated=(0, 3, 6),
    ),
    "reinforcement": rl(RLConfig),
    "pairwise_reinforcement": Case(
        pairwise, 6, 2, {**CHATS, "rl.env_group_built": {"num_train", "num_left_out", "group_size"}}, RL,
        saved=(1, 3), evaluated=(0, 2, 4, 6),
    ),
    "ppo": rl(PPOConfig, {"rl.ppo_update": {"policy_loss", "entropy", "num_updates"}}),
    "streaming": rl(StreamingConfig),
    "ready": rl(RLConfig),
    "kl_reinforcement": rl(KLConfig),
    "distillation": Case(
        distillation, 6, 3, {"dataset.load": {"num_train", "num_test", "num_skipped"}},
        {**PLAYED, "distillation.step": {"loss", "teacher_kl", "teacher_kl_dataset_0"}},
        saved=(1, 3), evaluated=(0, 2, 4, 6),
    ),
    "off_policy_distillation": Case(
        off_policy, 10, 5, {"dataset.load": {"num_train", "num_test", "num_skipped"}},
        {"dataset.batch": {"num_prompts"}, **OFF_POLICY}, saved=(2, 5, 8), evaluated=(0, 2, 4, 6, 8, 10),
    ),
    "topk_distillation": Case(
        topk, 8, 4, CHATS, {**BATCH, **OFF_POLICY}, saved=(2, 5), evaluated=(0, 2, 4, 6, 8),
    ),
}  # fmt: skip


def train(config: RunConfig, workflow: Workflow) -> list[Event]:
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False) as run,
    ):
        asyncio.run(workflow.run(config, service=service, run=run))
    return list(load(config.log_path).events)


def of_steps(case: Case) -> dict[str, Steps]:
    """The steps of every event that has one, but for those of stages."""
    ends = [step for step in range(case.num_steps) if (step + 1) % case.num_per_epoch == 0]
    return {
        **dict.fromkeys(case.every_step, range(case.num_steps)),
        "training.epoch": ends,
        "training.checkpoint": [*case.saved, case.num_steps],
        "model.registered": [case.num_steps],
        **({"eval.complete": case.evaluated} if case.evaluated else {}),
    }


def of_stages(case: Case, workflow: Workflow) -> Counter[tuple[str, Step]]:
    """How often each stage runs, and at which steps."""
    in_loop: dict[str, Steps] = {
        "saves": case.saved,
        "evaluates": [step for step in case.evaluated if step != case.num_steps],
        "enters_epoch": range(0, case.num_steps, case.num_per_epoch),
        "ends_epoch": of_steps(case)["training.epoch"],
    }
    counted: Counter[tuple[str, Step]] = Counter()
    for stage_, condition, phase, *_ in workflow.stages:
        every: Steps = range(case.num_steps) if phase == "loop" else (None,)
        steps = in_loop[condition.name] if condition is not None and phase == "loop" else every
        counted.update((stage_.name, step) for step in steps)
    return counted


def test_every_workflow_is_here() -> None:
    assert CASES.keys() == list_workflows().keys()


QUICK = ("supervised", "preference", "ready", "topk_distillation")


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_every_event_is_emitted_as_often_as_it_happens(name: str, tmp_path: Path) -> None:
    case, workflow = CASES[name], list_workflows()[name]
    events = train(case.config(tmp_path), workflow)
    of_run = ["run.start", "run.config", "run.stop", "workflow.start", "workflow.stop", *case.once]
    expected = Counter([(event, None) for event in of_run])
    expected.update((event, step) for event, steps in of_steps(case).items() for step in steps)
    assert Counter((event.name, event.step) for event in events if not event.name.startswith("stage.")) == expected
    for end in ("stage.start", "stage.stop"):
        found = Counter((event.labels["stage"], event.step) for event in events if event.name == end)
        assert found == of_stages(case, workflow)
    fields = {**case.once, **case.every_step}
    assert all(set(event.values) == fields[event.name] for event in events if event.name in fields)


SAVED = ["save_final_weights", "register_model", "delete_old_checkpoints_at_end"]
RECORDED = ["log_step", "log_epoch_metrics", "record_checkpoint", "delete_old_checkpoints"]
TRAINED = ["schedule", "train_step", "save_checkpoint", "freeze_policy"]
SEQUENCES = {
    "supervised": [
        "load_dataset", "choose_adapter", "init_session", "init_renderer", "build_supervised_dataset", "make_batches",
        "make_evaluators", "plan_steps", "make_optimizer",
        "get_batch", "evaluate", "schedule", "forward_backward", "optim_step", "save_checkpoint",
        "await_forward_backward", "await_optim_step", "log_step_metrics", *RECORDED,
        "evaluate_at_end", *SAVED,
    ],
    "preference": [
        "load_comparisons", "choose_adapter", "init_session", "init_reference", "init_renderer",
        "build_preference_dataset", "plan_steps", "make_optimizer", "make_preference_loss",
        "set_epoch", "get_preference_batch", "compute_reference_logprobs", "schedule", "dpo_forward_backward",
        "optim_step", "save_checkpoint",
        "await_dpo", "await_optim_step", "log_dpo_metrics", *RECORDED,
        *SAVED,
    ],
    "reinforcement": [
        "load_problems", "choose_adapter", "init_session", "init_renderer", "limit_prompts", "build_env_group",
        "batch_problems", "open_rollout_record", "make_rl_evaluators", "plan_steps", "make_optimizer",
        "make_policy_loss", "choose_sampling", "initial_policies",
        "do_rollout", "compute_advantages", "assemble_rl_batch",
        "evaluate", *TRAINED, "log_rl_metrics", "keep_rollouts", *RECORDED,
        "evaluate_at_end", *SAVED,
    ],
    "distillation": [
        "load_prompts", "choose_adapter", "init_session", "init_renderer", "choose_teacher", "choose_prompt_batching",
        "choose_sources", "init_teachers", "build_prompt_dataset", "open_rollout_record",
        "make_teacher_evaluators", "plan_steps", "make_optimizer", "make_policy_loss", "choose_sampling",
        "initial_policies",
        "do_rollout", "assemble_distillation_batch", "incorporate_teacher_kl",
        "evaluate", *TRAINED, "log_on_policy_metrics", "keep_rollouts", *RECORDED,
        "evaluate_at_end", *SAVED,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_stages_of_a_step_run_in_this_order(name: str, tmp_path: Path) -> None:
    """At the first step, the only one of its epoch, everything is due."""
    config = CASES[name].config(tmp_path)
    whole = {"supervised": {"batch_size": 8}, "preference": {"batch_size": 7}}.get(name, {"groups_per_batch": 9})
    due = {"eval_every": 1} if CASES[name].evaluated else {}
    events = train(replace(config, **whole, **due, save_every=1), list_workflows()[name])
    begun = [event for event in events if event.name == "stage.start" and event.step in (None, 0)]
    assert [event.labels["stage"] for event in begun] == SEQUENCES[name]


@pytest.mark.parametrize("name", slow_but(["supervised"], CASES))
def test_no_event_is_there_twice_when_a_run_was_stopped_and_went_on(name: str, tmp_path: Path) -> None:
    @stage
    def stops(step: int) -> None:
        if step == 4:
            raise ValueError("stopped")

    case, workflow = CASES[name], list_workflows()[name]
    config = case.config(tmp_path)
    with pytest.raises(StageFailed, match="'stops'"):
        train(config, workflow.insert_after("log_step", stops))
    events = train(config, workflow)
    expected = Counter((event, step) for event, steps in of_steps(case).items() for step in steps)
    expected.update((event, None) for event in case.once)
    of_process = ("stage.", "run.", "workflow.")
    assert Counter((event.name, event.step) for event in events if not event.name.startswith(of_process)) == expected


def test_a_model_is_registered_once_wherever_the_end_of_a_run_is_cut_off(tmp_path: Path) -> None:
    @stage
    def stops() -> None:
        raise ValueError("stopped")

    workflow = list_workflows()["supervised"]
    for where, edited in (
        ("before", workflow.insert_before("register_model", stops)),
        ("after", workflow.insert_after("register_model", stops)),
    ):
        (tmp_path / where).mkdir()
        config = replace(supervised(tmp_path / where), batch_size=8, num_epochs=1)
        with pytest.raises(StageFailed, match="'stops'"):
            train(config, edited)
        for _ in range(2):
            events = train(config, workflow)
            assert [event.step for event in events if event.name == "model.registered"] == [1]
        assert len((Path(config.log_path) / "models.jsonl").read_text().splitlines()) == 1


@dataclass(frozen=True, kw_only=True)
class MayBeLonger(RLConfig):
    """As those of the recipes."""

    max_steps: int | None = field(default=None, metadata=HOW_LONG)


def test_a_run_that_was_made_longer_and_cut_off_at_its_end_registers_its_final_weights_too(tmp_path: Path) -> None:
    @stage
    def stops() -> None:
        raise ValueError("stopped")

    workflow = list_workflows()["reinforcement"]
    config = MayBeLonger(dataset=write_problems(tmp_path / "rows"), log_path=str(tmp_path / "run"), max_steps=1)
    train(config, workflow)
    longer = replace(config, max_steps=2)
    with pytest.raises(StageFailed, match="'stops'"):
        train(longer, workflow.insert_before("register_model", stops))
    train(longer, workflow)
    final = [record.sampler_path for record in load_checkpoints_file(config.log_path) if record.final]
    assert [row["path"] for row in read_rows(Path(config.log_path) / "models.jsonl")] == final
    assert len(set(final)) == 2
