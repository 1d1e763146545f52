"""What a run keeps of its rollouts: which rows trajectories become, with which numbers of the trainer; pages of as many
groups as are wanted."""

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rl.scripted import says
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.renderers.messages import Message
from stovetop.renderers.role_colon import RoleColonRenderer
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.advantages import compute_advantages
from stovetop.rl.data_processing import assemble_training_data
from stovetop.rl.message_env import EnvFromMessageEnv, MessageStepResult
from stovetop.rl.problem_env import ProblemGroupBuilder, answer_builders
from stovetop.rl.rollout_record import RolloutRecord, TrainedOn, pieces_of
from stovetop.rl.rollouts import Rollouts, do_rollouts
from stovetop.rl.types import StepResult, Trajectory, TrajectoryGroup, Transition
from stovetop.runs import Run, open_run
from stovetop.tracking import logtree
from stovetop.tracking.html_tree import from_data, to_html
from stovetop.tracking.rollout_rows import Kind, RolloutRow, find_rollouts, read_rollouts
from stovetop.types import EncodedTextChunk, ImageChunk, ModelInput, TensorData

TOKENIZER = ByteTokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)
[BUILDER] = answer_builders([{"question": "q?", "answer": "a"}], RENDERER, 2, dataset_name="sums")


def turn(seen: bytes, said: bytes, reward: float = 0.0, *, trainable: bool = True, done: bool = False) -> Transition:
    action = TokensWithLogprobs(list(said), [-0.5] * len(said), "stop")
    observation = ModelInput.from_ints(list(seen))
    return Transition(observation, action, reward, done, {"speed": 2.0}, trainable, {"judge": "fine"})


def played(*groups: TrajectoryGroup) -> Rollouts:
    return Rollouts([(BUILDER, group) for group in groups], {}, 0, 0)


def trained_on(*groups: TrajectoryGroup) -> TrainedOn:
    """As a step on these groups leaves it, the trainer's logprobs being the sampler's minus a quarter."""
    data_D, _ = assemble_training_data(groups, compute_advantages(groups))
    logprobs_D = [TensorData.adopt(datum.loss_fn_inputs["logprobs"].array - 0.25) for datum in data_D]
    return TrainedOn(groups, data_D, logprobs_D)


def kept(run: Run) -> list[RolloutRow]:
    return read_rollouts(find_rollouts(run.path).rollouts)


@dataclass(frozen=True)
class Config:
    """A run needs one."""


def opened(path: Path) -> Run:
    return open_run(path / "run", Config(), console=False)


TWO_TURNS = Trajectory(
    [turn(b"Hi.", b"yo", 0.5), turn(b"Hi.yo So?", b"no!", 1.0, trainable=False), turn(b"New", b"x", done=True)],
    ModelInput.empty(),
)
ONE_TURN = Trajectory([turn(b"Hi.", b"y", done=True)], ModelInput.empty())
GROUP = TrajectoryGroup([TWO_TURNS, ONE_TURN], [0.25, -1.0], [{"won": 1.0}, {}])


def test_each_trajectory_becomes_a_row_with_what_was_trained_of_it(tmp_path: Path) -> None:
    constant = TrajectoryGroup([replace(ONE_TURN)], [0.0], [{}])
    with opened(tmp_path) as run:
        record = RolloutRecord(run, RENDERER)
        asyncio.run(record.keep_step(3, played(GROUP, constant), trained_on(GROUP), policy_step=2))
        first, second, left_out = kept(run)
    assert [(each.step, each.group_idx, each.traj_idx, each.policy_step) for each in (first, second, left_out)] == [
        (3, 0, 0, 2),
        (3, 0, 1, 2),
        (3, 1, 0, 2),
    ]
    assert first.prompt == second.prompt == left_out.prompt
    assert (first.reward, first.final_reward, first.metrics) == (1.75, 0.25, {"speed": 2.0, "won": 1.0})
    assert first.tags == ["sums"]
    assert (first.num_turns, first.num_prompt_tokens, first.num_tokens) == (3, 3, 6)
    assert (first.prompt_text, first.answer) == ("Hi.", "yo So?no!Newx")
    kinds = "OOO" + "TT" + "OOOO" + "SSS" + "A" + "OOO" + "T"
    assert [Kind(kind).name[0] for kind in first.kinds] == list(kinds)
    assert first.token_ids[len("Hi.yo So?no!")] == -1
    assert first.logprobs == [-0.5] * 6
    assert first.trained_logprobs == [-0.75, -0.75, None, None, None, -0.75]
    assert first.advantages == [1.375, 1.375, None, None, None, 1.375]
    assert (first.advantage, second.advantage, left_out.advantage) == (1.375, -1.375, None)
    assert (left_out.trained_logprobs, left_out.kinds) == ([], [0, 0, 0, int(Kind.SAMPLED)])
    assert [each["num_observed"] for each in first.turns] == [3, 9, 3]
    assert first.turns[0]["logs"] == {"judge": "fine"}


def test_data_that_are_not_those_of_the_rollouts_leave_the_trainers_numbers_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = TrajectoryGroup([ONE_TURN, TWO_TURNS], [0.0, 1.0], [{}, {}])
    data = trained_on(other)
    with opened(tmp_path) as run, caplog.at_level(logging.WARNING, "stovetop"):
        asyncio.run(RolloutRecord(run, RENDERER).keep_step(0, played(GROUP), TrainedOn([GROUP], *data[1:])))
        assert [each.trained_logprobs for each in kept(run)] == [[], []]
    assert "kept without the trainer's numbers" in caplog.text


@pytest.mark.parametrize(("num_groups_to_log", "shown"), [(0, None), (1, 1), (2, 2), (9, 3)])
def test_the_first_groups_come_onto_a_page_and_it_counts_the_others(
    tmp_path: Path, num_groups_to_log: int, shown: int | None
) -> None:
    with opened(tmp_path) as run:
        record = RolloutRecord(run, RENDERER, num_groups_to_log)
        asyncio.run(record.keep_step(12, played(GROUP, GROUP, GROUP), trained_on(GROUP)))
        assert len(kept(run)) == 6
        pages = sorted(run.path.glob("iteration_*/*"))
    if shown is None:
        assert pages == []
        return
    assert [page.relative_to(run.path).as_posix() for page in pages] == [
        "iteration_000012/train.html",
        "iteration_000012/train.jsonl",
    ]
    text = pages[0].read_text()
    assert text.count("<table>") == 2 * shown
    assert f"{shown} of 3 groups are shown, {2 * shown} of 6 rollouts; {6 - 2 * shown} are not" in text
    assert len(pages[1].read_text().splitlines()) == 2 * shown


class Weather:
    """A message environment that notes what it does, and shows two messages."""

    async def initial_observation(self) -> list[Message]:
        logtree.log_text("the sky is looked at")
        return [Message(role="user", content="the weather?")]

    async def step(self, message: Message) -> MessageStepResult:
        with logtree.scope_header("grading"):
            logtree.log_text(f"said {message['content']}")
        chat = [Message(role="user", content="the weather?"), message, Message(role="user", content="thanks")]
        return MessageStepResult(1.0, True, chat, logs={"sky": "blue"})


async def rain(model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None) -> TokensWithLogprobs:
    return says(*TOKENIZER.encode("rain\n\nUser:", add_special_tokens=False))


def test_a_chat_and_what_an_environment_notes_come_to_its_rollout_alone(tmp_path: Path) -> None:
    builder = ProblemGroupBuilder(lambda: EnvFromMessageEnv(Weather(), RoleColonRenderer(TOKENIZER)), 2)
    rollouts = asyncio.run(do_rollouts([builder], rain))
    [group] = [group for _, group in rollouts.owned_groups_P]
    with opened(tmp_path) as run:
        record = RolloutRecord(run, RoleColonRenderer(TOKENIZER))
        asyncio.run(record.keep_evaluation("the test", rollouts))
        rows = kept(run)
        assert [page.name for page in sorted(run.path.glob("iteration_000000/*"))] == [
            "eval_the%20test.html",
            "eval_the%20test.jsonl",
        ]
    for row in rows:
        assert [(each["role"], each["content"]) for each in row.chat] == [
            ("user", "the weather?"),
            ("assistant", "rain"),
            ("user", "thanks"),
        ]
        assert to_html(from_data(row.notes)) == (
            "<p>the sky is looked at</p><section><h2>grading</h2><p>said rain</p></section>"
        )
        assert row.turns[0]["logs"] == {"sky": "blue"}
        assert (row.split, row.advantage, row.policy_step) == ("eval_the%20test", None, 0)
    assert group.trajectories_G[0].notes is not group.trajectories_G[1].notes


def test_the_chat_of_a_problem_ends_with_the_answer_and_bare_tokens_are_shown_as_a_chat_too(tmp_path: Path) -> None:
    problems = asyncio.run(do_rollouts(answer_builders([{"question": "q?", "answer": "rain"}], RENDERER, 1), rain))
    with opened(tmp_path) as run:
        record = RolloutRecord(run, RENDERER)
        asyncio.run(record.keep_evaluation("a", problems))
        asyncio.run(record.keep_evaluation("b", played(TrajectoryGroup([ONE_TURN], [0.0], [{}]))))
        of_problem, of_tokens = kept(run)
    assert of_problem.chat[0] == {"role": "user", "content": "q?"}
    assert of_problem.chat[-1]["role"] == "assistant"
    assert of_problem.chat[-1]["content"].startswith("rain")
    assert [(each["role"], each["content"]) for each in of_tokens.chat] == [("user", "Hi."), ("assistant", "y")]


def test_equal_prompts_have_equal_digests_and_others_differ(tmp_path: Path) -> None:
    def group(*chunks: EncodedTextChunk | ImageChunk) -> TrajectoryGroup:
        transition = Transition(ModelInput(list(chunks)), says(1), 0.0, episode_done=True)
        return TrajectoryGroup([Trajectory([transition], ModelInput.empty())], [0.0], [{}])

    text, image, other = EncodedTextChunk([1, 2]), ImageChunk(b"abc", "png", 3), ImageChunk(b"abd", "png", 3)
    groups = [group(text), group(EncodedTextChunk([1]), EncodedTextChunk([2])), group(text, image), group(text, other)]
    with opened(tmp_path) as run:
        asyncio.run(RolloutRecord(run, RENDERER).keep_evaluation("x", played(*groups)))
        rows = kept(run)
    digests = [row.prompt for row in rows]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert rows[2].token_ids == [1, 2, -1, 1]


def test_a_character_of_several_tokens_is_with_the_last_of_them() -> None:
    ids = [*"a厨".encode(), *"é".encode(), 0xE5, 0x8E]
    pieces = pieces_of(ids, TOKENIZER, {})
    assert pieces == ["a", "", "", "厨", "", "é", "", "\ufffd"]
    assert pieces_of([-1, 97], TOKENIZER, {}) == ["", "a"]


def test_halves_of_surrogates_and_numbers_that_are_none_are_kept_as_text(tmp_path: Path) -> None:
    odd = Transition(ModelInput.from_ints([65]), says(66), 0.0, True, {"odd": float("inf")}, True, {"log": "\ud800"})
    with opened(tmp_path) as run:
        group = TrajectoryGroup([Trajectory([odd], ModelInput.empty())], [0.0], [{}])
        asyncio.run(RolloutRecord(run, RENDERER).keep_evaluation("x", played(group)))
        [row] = kept(run)
    assert row.metrics == {"odd": float("inf")}
    assert row.turns[0]["metrics"] == {"odd": "Infinity"}
    assert row.turns[0]["logs"] == {"log": "\\ud800"}


def test_a_step_result_has_no_logs_unless_it_is_given_some() -> None:
    assert dict(StepResult(0.0, True, ModelInput.empty(), []).logs) == {}
