"""Several workflows in a row as one run, on the recording backend: each phase is the run that it would be alone, and
what is killed anywhere, within a phase or between two, is the run that would have been."""

import asyncio
import contextlib
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kitchen.copies import Copier
from kitchen.modes import outcome as outcome_of
from kitchen.stages.configs import (
    PairwiseConfig,
    RewardModelConfig,
    SupervisedConfig,
    write_chats,
    write_comparisons,
    write_problems,
)
from kitchen.test_supervised import rows, weights
from kitchen.warm_start import PHASES, ChatsConfig, Config, reinforcement, supervised
from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.checkpoints import get_last_checkpoint
from stovetop.client import SamplingClient, ServiceClient
from stovetop.durable import read_rows, write_file
from stovetop.errors import InvalidRequest, StageFailed, UnknownName
from stovetop.kitchen import Finished, Phase, RunConfig, Workflow, run_phases, stage
from stovetop.kitchen.phases import check_phases, phases_in, plan_phases
from stovetop.kitchen.stages.session import MODELS_FILE
from stovetop.kitchen.workflows import PAIRWISE_REINFORCEMENT, REINFORCEMENT, REWARD_MODEL, SUPERVISED
from stovetop.runs import Run, load, open_run
from stovetop.stored_configs import read_config
from stovetop.tracking.events import Recorder

FOLDERS = ("1_supervised", "2_reinforcement")
NUM_PARTS = 100


def config_in(folder: Path, **changed: object) -> Config:
    chats, problems = write_chats(folder / "chats", 8), write_problems(folder / "problems")
    return replace(Config(chats=chats, problems=problems, log_path=str(folder / "run")), **changed)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path)


@dataclass
class Opener:
    """Opens services, and keeps where."""

    opened: list[str] = field(default_factory=list[str])

    def __call__(self, folder: str) -> ServiceClient:
        self.opened.append(Path(folder).name)
        return recording.open_service(folder)


def run_all(config: Config, phases: Sequence[Phase[Config]] = PHASES, *sinks: Recorder, after_s: float | None = None):
    """To the end, or cancelled after so many seconds. Returns the folders of the phases that ran."""
    opener = Opener()

    async def main() -> None:
        async with asyncio.timeout(after_s):
            await run_phases(phases, config, opener, console=False, sinks=sinks)

    asyncio.run(main())
    return opener.opened


def outcome(log_path: str | Path) -> list[object]:
    """All that a run of two phases has come to."""
    phases = [str(Path(log_path) / folder) for folder in FOLDERS]
    return [(outcome_of(each), len(read_rows(Path(each) / MODELS_FILE))) for each in phases]


def phases_with(name: str, workflow: Workflow) -> list[Phase[Config]]:
    return [replace(phase, workflow=workflow) if phase.name == name else phase for phase in PHASES]


def stopping_at(at: int):
    @stage
    def stops(step: int) -> None:
        if step == at:
            raise ValueError("stopped")

    return stops


# ---- a run of phases -------------------------------------------------------------------------------------------------


def test_each_phase_is_the_run_that_it_would_be_alone(config: Config) -> None:
    assert run_all(config) == list(FOLDERS)
    first = supervised(config, {})
    assert first is not None
    first = replace(first, log_path=f"{config.log_path}-first")
    with recording.open_service(first.log_path) as service, open_run(first.log_path, first, console=False) as run:
        asyncio.run(SUPERVISED.run(first, service=service, run=run))
    last = get_last_checkpoint(first.log_path)
    assert last is not None
    assert last.state_path is not None
    done = {"supervised": Finished("supervised", {"state_path": last.state_path})}
    second = replace(reinforcement(config, done), log_path=f"{config.log_path}-second")
    with recording.open_service(second.log_path) as service, open_run(second.log_path, second, console=False) as run:
        asyncio.run(REINFORCEMENT.run(second, service=service, run=run))
    assert outcome(config.log_path) == [(outcome_of(each), 1) for each in (first.log_path, second.log_path)]


def test_the_folder_has_the_config_of_the_whole_and_each_phase_its_own_and_its_workflow(config: Config) -> None:
    run_all(config)
    whole = Path(config.log_path)
    assert load(whole).config_as(Config) == config
    names = [(event.name, event.labels.get("phase")) for event in load(whole).events if event.name.startswith("phase.")]
    assert names == [(what, name) for name in ("supervised", "reinforcement") for what in ("phase.start", "phase.stop")]
    for folder, workflow in zip(FOLDERS, ("supervised", "reinforcement"), strict=True):
        assert json.loads((whole / folder / "workflow.json").read_text())["workflow"] == workflow
    first = load(whole / FOLDERS[0]).config_as(ChatsConfig)
    assert (first.dataset, first.log_path) == (config.chats, str(whole / FOLDERS[0]))


def test_what_is_of_the_run_and_of_the_service_is_that_of_the_whole(config: Config) -> None:
    config = replace(config, base_url="recording", dtype="float32", threads=2)
    for _, folder, own, *_ in plan_phases(PHASES, config):
        assert own is not None
        assert (own.base_url, own.dtype, own.threads, own.log_path) == ("recording", "float32", 2, str(folder))


@pytest.mark.slow
def test_a_phase_is_not_run_where_the_user_gives_what_it_would_leave(config: Config) -> None:
    run_all(config)
    start = get_last_checkpoint(f"{config.log_path}/{FOLDERS[0]}")
    assert start is not None
    given = replace(config, start_path=start.state_path, log_path=f"{config.log_path}-given")
    assert run_all(given) == [FOLDERS[1]]
    assert rows(f"{given.log_path}/{FOLDERS[1]}") == rows(f"{config.log_path}/{FOLDERS[1]}")
    assert [phase.folder.name for phase in phases_in(Path(given.log_path))] == [FOLDERS[1]]


# ---- going on --------------------------------------------------------------------------------------------------------


def test_it_goes_on_in_the_first_phase_that_is_not_complete(config: Config) -> None:
    stopping = phases_with("reinforcement", REINFORCEMENT.insert_after("log_step", stopping_at(1)))
    with pytest.raises(StageFailed, match="stage 'stops' of workflow 'reinforcement'"):
        run_all(config, stopping)
    assert [phase.is_complete for phase in phases_in(Path(config.log_path))] == [True, False]
    stopped = [event for event in load(config.log_path).events if event.name == "phase.stop"]
    assert [event.labels["outcome"] for event in stopped] == ["completed", "StageFailed"]
    assert run_all(config) == [FOLDERS[1]]
    assert [phase.is_complete for phase in phases_in(Path(config.log_path))] == [True, True]
    assert run_all(config) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a run that nothing stopped."""
    config = config_in(tmp_path_factory.mktemp("whole"))
    run_all(config)
    return config


@pytest.fixture(scope="module")
def copies(whole: Config, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of another one, as it was at each boundary."""
    config = replace(whole, log_path=str(tmp_path_factory.mktemp("killed") / "run"))
    copier = Copier(Path(config.log_path))
    run_all(config, PHASES, copier)
    return copier.all_copies()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_run_that_is_killed_at_any_boundary_of_any_phase_is_the_run_that_would_have_been(
    whole: Config, copies: list[Path], part: int
) -> None:
    """Each copy goes on where it lies, while the original is still there too."""
    for copy in copies[part::NUM_PARTS]:
        run_all(replace(whole, log_path=str(copy)))
        assert outcome(copy) == outcome(whole.log_path)


def test_a_run_that_is_killed_between_two_phases_is_the_run_that_would_have_been(whole: Config, tmp_path: Path) -> None:
    copy = shutil.copytree(whole.log_path, tmp_path / "copy")
    shutil.rmtree(copy / FOLDERS[1])
    assert run_all(replace(whole, log_path=str(copy))) == [FOLDERS[1]]
    assert outcome(copy) == outcome(whole.log_path)


@pytest.mark.slow
def test_a_run_that_is_cancelled_at_any_moment_is_the_run_that_would_have_been(whole: Config, tmp_path: Path) -> None:
    config = replace(whole, log_path=str(tmp_path / "run"))
    generator = random.Random(3)
    for _ in range(6):
        with contextlib.suppress(TimeoutError):
            run_all(config, after_s=generator.uniform(0.05, 0.15))
    run_all(config)
    assert outcome(config.log_path) == outcome(whole.log_path)


def test_a_run_that_was_moved_goes_on_where_it_lies(whole: Config, tmp_path: Path) -> None:
    config = replace(whole, log_path=str(tmp_path / "old" / "run"))
    stopping = phases_with("reinforcement", REINFORCEMENT.insert_after("log_step", stopping_at(2)))
    with pytest.raises(StageFailed):
        run_all(config, stopping)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new" / "run"
    run_all(replace(config, log_path=str(moved)))
    assert outcome(moved) == outcome(whole.log_path)
    start = str(read_config(moved / FOLDERS[1]).config["load_checkpoint_path"])
    assert Path(start).is_relative_to(moved)


def test_a_phase_that_stands_still_says_so_after_the_time_of_the_whole_and_says_it_alone(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "nothing has gone on" in message]

    @stage
    async def hangs() -> None:
        while not any("hangs" in message for message in said()):
            await asyncio.sleep(0.01)

    config = replace(config, stall_after_s=0.1)
    run_all(config, phases_with("supervised", SUPERVISED.insert_before("save_final_weights", hangs)))
    assert all(message.count("\n") for message in said())  # each of a phase, which lists what it waits for


# ---- other configs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_last_phase_may_be_made_longer(config: Config, tmp_path: Path) -> None:
    run_all(config)
    assert run_all(replace(config, max_steps=5)) == [FOLDERS[1]]
    longer = config_in(tmp_path, max_steps=5, log_path=str(tmp_path / "longer"))
    run_all(longer)
    numbers = [
        [{name: value for name, value in row.items() if not name.startswith("progress")} for row in rows(log_path)]
        for log_path in (f"{config.log_path}/{FOLDERS[1]}", f"{longer.log_path}/{FOLDERS[1]}")
    ]
    assert numbers[0][-1] == numbers[1][-1]
    assert weights(f"{config.log_path}/{FOLDERS[1]}") == weights(f"{longer.log_path}/{FOLDERS[1]}")


def test_a_config_that_would_learn_something_else_is_refused(config: Config) -> None:
    run_all(config)
    before = outcome(config.log_path)
    with pytest.raises(InvalidRequest, match=r"chats_learning_rate: 0\.5 -> 0\.25"):
        run_all(replace(config, chats_learning_rate=0.25))
    assert run_all(replace(config, save_every=1)) == []
    assert outcome(config.log_path) == before


@pytest.mark.slow
def test_a_complete_phase_whose_config_would_be_another_is_refused(config: Config) -> None:
    """The config of the whole is the same, but what is made of it is not."""
    run_all(config)

    def changed(config: Config, done: Mapping[str, Finished]) -> SupervisedConfig:
        own = supervised(config, done)
        assert own is not None
        return replace(own, batch_size=4)

    phases = [replace(PHASES[0], config_of=changed), PHASES[1]]
    with pytest.raises(InvalidRequest, match=r"this phase is complete(.|\n)*batch_size: 2 -> 4(.|\n)*1_supervised"):
        run_all(config, phases)
    assert run_all(replace(config, behavior_if_exists="delete"), phases) == list(FOLDERS)


def test_what_failed_before_anything_was_learnt_may_be_corrected(config: Config) -> None:
    with pytest.raises(StageFailed, match="no such file"):
        run_all(replace(config, chats="nowhere.jsonl"))
    assert run_all(config) == list(FOLDERS)


# ---- before anything runs --------------------------------------------------------------------------------------------


def test_all_phases_are_checked_before_the_first_is_begun(config: Config) -> None:
    def unread(config: Config, done: Mapping[str, Finished]) -> SupervisedConfig:
        return SupervisedConfig(log_path="", dataset=config.chats, max_length=9)

    phases = [
        Phase("supervised", SUPERVISED.replace("build_supervised_dataset", no_length).remove("make_optimizer"), unread),
        *phases_with("reinforcement", REINFORCEMENT.remove("do_rollout"))[1:],
    ]
    with pytest.raises(InvalidRequest) as refused:
        run_all(config, phases)
    said = str(refused.value)
    assert "phase '1_supervised': stage 'schedule' reads 'optimizer', and nobody writes it" in said
    assert "phase '1_supervised': config field 'max_length' is set to 9, and no stage reads it" in said
    assert "phase '2_reinforcement': stage 'compute_advantages' reads 'rollouts'" in said
    assert not Path(config.log_path).exists()


@stage(writes=("examples", "test_D"))
def no_length(chats: object) -> dict[str, object]:
    return {}


def test_what_earlier_phases_have_not_left_yet_is_given_in_words(config: Config) -> None:
    planned = check_phases(PHASES, config)
    assert [(each.folder.name, each.is_complete) for each in planned] == [(name, False) for name in FOLDERS]
    assert f"load_checkpoint_path='{config.log_path}/1_supervised: state, will exist'" in str(planned[1].config)
    assert not Path(config.log_path).exists()
    run_all(config)
    planned = check_phases(PHASES, config)
    assert [each.is_complete for each in planned] == [True, True]
    assert "/1_supervised/checkpoints/" in str(planned[1].config)


def test_what_a_phase_does_not_leave_is_said() -> None:
    done = {"supervised": Finished("supervised", {"state_path": "here", "sampler_path": "there"})}
    assert (done["supervised"].state_path, done["supervised"].sampler_path) == ("here", "there")
    with pytest.raises(UnknownName, match="path that phase 'supervised' leaves 'file'"):
        _ = done["supervised"].file


def says_nothing(config: Config, done: Mapping[str, Finished]):
    return reinforcement(config, done)


def test_a_phase_that_makes_no_sense_is_refused(config: Config) -> None:
    with pytest.raises(InvalidRequest, match="an identifier, such as 'supervised': 'a b'"):
        Phase("a b", SUPERVISED, supervised)
    with pytest.raises(InvalidRequest, match="phase 'one', file 'rows'"):
        Phase("one", SUPERVISED, supervised, file="rows")
    with pytest.raises(InvalidRequest, match="phase 'one', file None"):
        Phase("one", Workflow("no loop"), supervised)
    with pytest.raises(InvalidRequest, match="config_of of phase 'one' must be a function that says what it returns"):
        Phase("one", SUPERVISED, says_nothing)
    with pytest.raises(InvalidRequest, match="each phase has a name of its own: supervised, supervised"):
        run_all(config, [PHASES[0], PHASES[0]])


# ---- learning from a reward model ------------------------------------------------------------------------------------


def learn_to_judge(config: Config, done: Mapping[str, Finished]) -> RewardModelConfig:
    return RewardModelConfig(log_path="", dataset=config.problems, model_name=config.model_name)


def be_judged(config: Config, done: Mapping[str, Finished]) -> PairwiseConfig:
    return PairwiseConfig(
        log_path="",
        dataset=config.problems,
        model_name=config.model_name,
        load_checkpoint_path=done["supervised"].state_path,
        rm_weights_path=done["reward"].sampler_path,
        num_epochs=1,
    )


@pytest.mark.slow
def test_a_policy_starts_from_one_phase_and_is_judged_by_another(tmp_path: Path) -> None:
    config = config_in(tmp_path, problems=write_comparisons(tmp_path / "comparisons"))
    phases = [
        PHASES[0],
        Phase("reward", REWARD_MODEL, learn_to_judge),
        Phase("reinforcement", PAIRWISE_REINFORCEMENT, be_judged),
    ]
    opened: list[InProcessServiceClient] = []

    def open_service(folder: str) -> ServiceClient:
        opened.append(recording.open_service(folder))
        return opened[-1]

    asyncio.run(run_phases(phases, config, open_service, console=False))
    paths = {
        call.verb: Path(str(next(iter(call.arguments.values()))))
        for call in opened[2].calls
        if call.client == "service"
    }
    folder = Path(config.log_path)
    assert paths["create_training_client_from_state"].is_relative_to(folder / "1_supervised")
    assert paths["create_sampling_client"].is_relative_to(folder / "2_reward")


# ---- a phase without a loop ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AnswersConfig(RunConfig):
    teacher_name: str = "any/teacher"
    num_answers: int = 8


@stage(writes="teacher")
async def open_teacher(service: ServiceClient, teacher_name: str) -> SamplingClient:
    return await service.create_sampling_client(base_model=teacher_name)


@stage
def write_answers(teacher: SamplingClient, run: Run, num_answers: int) -> None:
    chats = [
        [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": teacher.get_base_model()}]
        for i in range(num_answers)
    ]
    write_file(run.path / "answers.jsonl", "".join(f"{json.dumps({'messages': chat})}\n" for chat in chats).encode())


def answers(config: Config, done: Mapping[str, Finished]) -> AnswersConfig:
    return AnswersConfig(log_path="")


def learn_answers(config: Config, done: Mapping[str, Finished]) -> SupervisedConfig:
    return SupervisedConfig(log_path="", dataset=done["answers"].file, num_epochs=1)


ANSWER = Workflow("answer", open_teacher, write_answers)


def test_a_phase_without_a_loop_is_complete_when_its_file_is_there(config: Config, tmp_path: Path) -> None:
    @stage
    def dies() -> None:
        raise ValueError("power cut")

    def phases(workflow: Workflow) -> list[Phase[Config]]:
        return [
            Phase("answers", workflow, answers, file="answers.jsonl"),
            Phase("student", SUPERVISED, learn_answers),
        ]

    with pytest.raises(StageFailed, match="power cut"):
        run_all(config, phases(ANSWER.insert_before("write_answers", dies)))
    assert [phase.is_complete for phase in phases_in(Path(config.log_path))] == [False, False]
    with pytest.raises(StageFailed, match="power cut"):
        run_all(config, phases(ANSWER.insert_after("write_answers", dies)))
    assert [phase.is_complete for phase in phases_in(Path(config.log_path))] == [True, False]
    moved = Path(config.log_path).rename(tmp_path / "moved")
    assert run_all(replace(config, log_path=str(moved)), phases(ANSWER)) == ["2_student"]
    assert read_config(moved / "2_student").config["dataset"] == str(moved / "1_answers" / "answers.jsonl")
    assert run_all(replace(config, log_path=str(moved)), phases(ANSWER)) == []
