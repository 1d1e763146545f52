"""The three phases of rlhf, on the recording backend: which checkpoints they hand on, what is given instead of a phase,
what is killed and goes on, and that the policy comes to be preferred."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from kitchen.modes import outcome
from kitchen.stages.configs import write_chats, write_comparisons
from kitchen.test_reward_model import MoreLetters
from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.checkpoints import get_last_checkpoint
from stovetop.cli import main
from stovetop.client import ServiceClient
from stovetop.errors import CheckpointNotFound, InvalidRequest, StageFailed
from stovetop.kitchen import Phase, run_phases, stage
from stovetop.kitchen.phases import check_phases, plan_phases
from stovetop.kitchen.run_config import RunConfig
from stovetop.preference.reward_model import PreferenceModel
from stovetop.recipes import rlhf
from stovetop.recipes.rlhf import PHASES, PRESETS, Config
from stovetop.runs import Run, load

FOLDERS = ("1_supervised", "2_reward", "3_reinforcement")


class Whole(NamedTuple):
    """A run that nothing stopped."""

    config: Config
    services: list[InProcessServiceClient]  # of each phase


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    config = Config(
        base_url="recording", model_name="any/model", log_path=str(folder / "run"), max_steps=2, save_every=1,
        sft_dataset=write_chats(folder / "chats.jsonl", 8), sft_learning_rate=0.1,
        dataset=write_comparisons(folder / "comparisons.jsonl"), test_size=2, rl_test_size=2,
        rm_learning_rate=0.1, rl_learning_rate=0.1, batch_size=2, groups_per_batch=2, max_tokens=3, lora_rank=4,
    )  # fmt: skip
    return Whole(config, run(config))


@pytest.fixture
def config(whole: Whole, tmp_path: Path) -> Config:
    """The same, not run yet."""
    return replace(whole.config, log_path=str(tmp_path / "run"))


def run(config: Config, phases: Sequence[Phase[Config]] = PHASES) -> list[InProcessServiceClient]:
    """To the end; returns the services that were opened, one for each phase that ran."""
    opened: list[InProcessServiceClient] = []

    def open_service(folder: str) -> ServiceClient:
        opened.append(recording.open_service(folder))
        return opened[-1]

    asyncio.run(run_phases(phases, config, open_service, console=False))
    return opened


def outcomes(config: Config) -> list[object]:
    return [outcome(str(Path(config.log_path) / folder)) for folder in FOLDERS]


def path_left(config: Config, folder: str, kind: str) -> str:
    last = get_last_checkpoint(str(Path(config.log_path) / folder))
    assert last is not None
    path = {"state": last.state_path, "weights": last.sampler_path}[kind]
    assert path is not None
    return path


def stops_at(name: str, step: int) -> list[Phase[Config]]:
    """The phases, of which this one fails behind the row of a step."""
    stopped_at = step

    @stage
    def stops(step: int) -> None:
        if step == stopped_at:
            raise ValueError("stopped")

    return [
        replace(each, workflow=each.workflow.insert_after("log_step", stops)) if each.name == name else each
        for each in PHASES
    ]


# ---- the chain -------------------------------------------------------------------------------------------------------


def test_the_policy_starts_from_the_supervised_model_and_the_reward_model_judges_it(whole: Whole) -> None:
    config, (*_, third) = whole
    paths = {
        call.verb: Path(str(next(iter(call.arguments.values())))) for call in third.calls if call.client == "service"
    }
    assert paths["create_training_client_from_state"].is_relative_to(Path(config.log_path) / FOLDERS[0])
    assert paths["create_sampling_client"].is_relative_to(Path(config.log_path) / FOLDERS[1])
    rows = [load(Path(config.log_path) / folder).metrics for folder in FOLDERS]
    assert [[row["step"] for row in of_phase] for of_phase in rows] == [[0, 1, 2]] * 3
    for measured, of_phase in zip(("test/nll", "test/accuracy", "test/win_rate"), rows, strict=True):
        assert measured in of_phase[-1]


def test_a_phase_is_not_run_where_what_it_would_leave_is_given(whole: Whole, config: Config) -> None:
    given = {
        "sft_checkpoint_path": path_left(whole.config, FOLDERS[0], "state"),
        "rm_weights_path": path_left(whole.config, FOLDERS[1], "weights"),
    }
    for name, skipped in zip(given, FOLDERS[:2], strict=True):
        one = replace(config, log_path=f"{config.log_path}-{name}", run_rl=False, **{name: given[name]})
        assert len(run(one)) == 1
        assert not (Path(one.log_path) / skipped).exists()
    both = replace(config, **given)
    assert len(run(both)) == 1
    assert outcome(f"{both.log_path}/{FOLDERS[2]}") == outcome(f"{whole.config.log_path}/{FOLDERS[2]}")


def test_without_rl_it_ends_before_the_third_phase_and_goes_on_there_when_asked(whole: Whole, config: Config) -> None:
    assert len(run(replace(config, run_rl=False))) == 2
    assert not (Path(config.log_path) / FOLDERS[2]).exists()
    assert run(replace(config, run_rl=False)) == []
    assert len(run(config)) == 1
    assert outcomes(config) == outcomes(whole.config)


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        pytest.param("supervised", 1, marks=pytest.mark.slow),
        pytest.param("reward", 0, marks=pytest.mark.slow),
        ("reward", 1),
        pytest.param("reinforcement", 0, marks=pytest.mark.slow),
        pytest.param("reinforcement", 1, marks=pytest.mark.slow),
    ],
)
def test_what_was_stopped_in_any_phase_is_the_run_that_would_have_been(
    whole: Whole, config: Config, phase: str, step: int
) -> None:
    with pytest.raises(StageFailed, match="stage 'stops'"):
        run(config, stops_at(phase, step))
    num_left = {"supervised": 3, "reward": 2, "reinforcement": 1}[phase]
    assert len(run(config)) == num_left
    assert outcomes(config) == outcomes(whole.config)
    assert run(config) == []


# ---- learning --------------------------------------------------------------------------------------------------------


@stage(writes="preference_model")
def init_more_letters(rm_weights_path: str) -> PreferenceModel:
    """A judge that is right, whatever the reward model says."""
    return MoreLetters()


@pytest.mark.slow
def test_the_policy_comes_to_be_preferred_to_the_answers_that_are_held_out(config: Config) -> None:
    """By a judge that is right; the recording model, which sees one token, cannot judge."""
    phases = [
        replace(each, workflow=each.workflow.replace("init_preference_model", init_more_letters))
        if each.name == "reinforcement"
        else each
        for each in PHASES
    ]
    run(
        replace(
            config, max_steps=24, rl_learning_rate=0.5, rl_num_epochs=8, rl_test_size=4, group_size=16, eval_every=99
        ),
        phases,
    )
    first, *_, last = load(Path(config.log_path) / FOLDERS[2]).metrics
    assert first["test/win_rate"] < 0.5 < last["test/win_rate"]


# ---- the config ------------------------------------------------------------------------------------------------------


def test_the_published_defaults_are_kept() -> None:
    config = Config()
    assert (config.model_name, config.sft_dataset, config.dataset) == ("Qwen/Qwen3.5-9B-Base", "no_robots", "hhh")
    assert (config.sft_learning_rate, config.rm_learning_rate, config.rl_learning_rate) == (2e-4, 3e-4, 1e-5)
    assert (config.lora_rank, config.max_length, config.batch_size, config.groups_per_batch) == (64, 16384, 256, 256)
    assert (config.group_size, config.max_tokens, config.temperature) == (4, 1024, 1.0)
    assert (config.eval_every, config.save_every, config.max_steps) == (20, 100, None)
    assert (config.test_size, config.rl_test_size) == (1024, 256)
    of_chats, of_comparisons, of_policy = (each.config for each in plan_phases(PHASES, config))
    assert isinstance(of_chats, rlhf.sl_basic.Config)
    assert isinstance(of_comparisons, rlhf.sl_basic.Config)
    assert isinstance(of_policy, rlhf.PolicyConfig)
    assert (of_chats.lr_schedule, of_comparisons.lr_schedule, of_policy.lr_schedule) == ("linear", "linear", "constant")
    assert (of_chats.num_epochs, of_comparisons.num_epochs, of_policy.num_epochs) == (1, 1, 1)
    assert of_policy.max_steps_off_policy == 0


def test_every_field_changes_the_config_of_a_phase(config: Config) -> None:
    values = {"bool": False, "int": 7, "float": 0.125, "str": "other"}
    named: dict[str, object] = {
        "renderer_name": "role_colon", "loss_fn": "cispo", "loss_fn_config": {"clip_low_threshold": 0.5},
        "on_rollout_error": "raise", "rollout_timeout_s": 3.0, "remove_constant_reward_groups": True,
    }  # fmt: skip
    of_run = {field.name for field in fields(RunConfig)}
    config = replace(config, loss_fn="ppo")
    before = [each.config for each in plan_phases(PHASES, config)]
    for field in fields(Config):
        if field.name in of_run:
            continue
        value = getattr(config, field.name)
        kind = "str" if value is None else type(value).__name__
        changed = replace(config, **{field.name: named.get(field.name, values.get(kind))})
        assert [each.config for each in plan_phases(PHASES, changed)] != before, field.name


def test_a_tokenizer_that_begins_the_judgements_alike_is_refused_before_anything_runs(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte after the colon is a space, whatever the judge says."""
    monkeypatch.setattr("stovetop.recipes.settings.check_model_name", lambda name: None)
    monkeypatch.setattr("stovetop.preference.comparison_renderer.find_model", Path)
    monkeypatch.setattr("stovetop.preference.comparison_renderer.get_tokenizer", lambda name: ByteTokenizer())
    here = replace(config, base_url=None, model_name="any/model", renderer_name="role_colon")
    with pytest.raises(InvalidRequest, match="begins the answers A, B, Tie with the same token"):
        rlhf.check(here)
    assert not Path(config.log_path).exists()


def test_it_has_no_problems_and_only_train_on_what_is_read_by_no_stage_of_a_phase() -> None:
    """The reward model has the config of supervised learning, and trains on one token, whatever that field says."""
    ports = {"service": ServiceClient, "run": Run}
    for planned in check_phases(PHASES, Config(log_path="nowhere")):
        assert planned.config is not None
        checked = planned.phase.workflow.check(planned.config, ports)
        assert checked.problems == ()
        assert set(checked.unread) <= {"train_on_what"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dataset": "nowhere"}, "unknown dataset 'nowhere'"),
        ({"sft_dataset": "nowhere"}, "unknown dataset 'nowhere'"),
        ({"sft_checkpoint_path": "nowhere", "base_url": None, "model_name": "smollm2"}, "sft_checkpoint_path is no"),
        ({"rm_weights_path": "nowhere", "base_url": None, "model_name": "smollm2"}, "rm_weights_path is no folder"),
    ],
)
def test_what_is_known_to_be_wrong_is_refused_before_anything_is_written(
    config: Config, changed: dict[str, object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stovetop.recipes.settings.check_model_name", lambda name: None)
    rlhf.check(config)
    with pytest.raises((InvalidRequest, CheckpointNotFound), match=re.escape(named)):
        rlhf.check(replace(config, **changed))
    assert not Path(config.log_path).exists()


@pytest.mark.parametrize("changed", [{"group_size": 1}, {"temperature": 0.0}, {"batch_size": 0}, {"max_steps": 0}])
def test_values_that_cannot_be_are_refused_by_the_config(changed: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(changed))):
        Config(**changed)  # pyright: ignore[reportArgumentType]  what is tested


# ---- the command line ------------------------------------------------------------------------------------------------


def test_it_is_run_dry_run_described_and_resumed_by_name(
    config: Config, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = [f"{field.name}={getattr(config, field.name)}" for field in fields(config)]
    words = [word for word in words if not word.endswith(("=None", "={}")) and not word.startswith("stall_after_s")]
    assert main(["run", "rlhf", *words, "--dry-run"]) == 0
    assert "Phase 3_reinforcement, in" in capsys.readouterr().out
    assert not Path(config.log_path).exists()
    assert main(["run", "rlhf", *words]) == 0
    assert main(["resume", config.log_path]) == 0
    assert "already complete: all of the 3 phases" in caplog.text
    capsys.readouterr()
    assert main(["describe", "rlhf", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    phases = [(each["phase"], each["workflow"]) for each in described["phases"]]
    assert phases == list(zip(FOLDERS, ("supervised", "reward_model", "pairwise_reinforcement"), strict=True))


@pytest.mark.slow
def test_the_preset_runs_without_a_network(tmp_path: Path) -> None:
    small = replace(
        PRESETS["small"], base_url="recording", model_name="any/model", max_steps=1, log_path=str(tmp_path / "run")
    )
    rlhf.check(small)
    assert len(run(small)) == 3
