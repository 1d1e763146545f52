import asyncio
import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.advantages import compute_advantages
from stovetop.rl.data_processing import assemble_training_data, trajectory_to_data, without_mask
from stovetop.rl.metrics import compute_trajectory_metrics
from stovetop.rl.rollouts import do_group_rollout, do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.types import StopReason, TrajectoryGroup
from stovetop.supervised.data import conversation_to_datum
from stovetop.tasks.guess_number import (
    MAX_TOKENS,
    GuessNumberGroupBuilder,
    dataset,
    example_games,
    held_out_builders,
    numbers,
)
from stovetop.types import AdamParams, ModelInput

TOKENIZER = ByteTokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)


def answer(text: str) -> TokensWithLogprobs:
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
    return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "stop")


async def bisect(model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None) -> TokensWithLogprobs:
    """A policy that halves what is left, from what the chat says."""
    chat = TOKENIZER.decode(model_input.to_ints())
    low, high = 0, 1023
    for guess, hint in re.findall(r"assistant\n(\d+)<\|im_end\|>\n<\|im_start\|>user\nMine is (higher|lower)", chat):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return answer(str((low + high) // 2))


async def halve_what_is_left(
    model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
) -> TokensWithLogprobs:
    """A policy that reads the last hint alone."""
    hints = re.findall(r"Mine is one of ([\d, ]+)\.", TOKENIZER.decode(model_input.to_ints()))
    left = hints[-1].split(", ") if hints else [str(number) for number in range(50)]
    return answer(left[len(left) // 2])


@dataclass
class Says:
    """A policy that always says the same."""

    text: str

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        return answer(self.text)


def game(number: int, text: str) -> TrajectoryGroup:
    return asyncio.run(do_group_rollout(GuessNumberGroupBuilder(number, RENDERER, 1), Says(text)))


def test_bisection_finds_every_number_but_one_in_ten_guesses():
    builders = [GuessNumberGroupBuilder(number, RENDERER, 1) for number in range(0, 1023, 73)]
    groups = [group for _, group in asyncio.run(do_rollouts(builders, bisect)).owned_groups_P]
    assert all(group.get_total_rewards() == [1.0] for group in groups)
    last = asyncio.run(do_group_rollout(GuessNumberGroupBuilder(1023, RENDERER, 1), bisect))
    assert last.get_total_rewards() == [0.0]
    assert last.trajectories_G[0].stop_reason is StopReason.MAX_TURNS


def test_where_the_numbers_that_are_left_are_told_the_last_hint_is_enough():
    builders = [GuessNumberGroupBuilder(number, RENDERER, 1, 50, 6, hints="list") for number in range(50)]
    groups = [group for _, group in asyncio.run(do_rollouts(builders, halve_what_is_left)).owned_groups_P]
    assert all(group.get_total_rewards() == [1.0] for group in groups)


def test_in_games_that_are_shown_what_is_told_to_be_left_shrinks_and_has_the_number():
    games = example_games([17], 30, num_numbers=50, max_turns=6, attention=0.25, hints="list")
    for game in games:
        told = [re.fullmatch(r"Mine is one of ([\d, ]+)\.", str(each["content"])) for each in game[2::2]]
        assert all(hint is not None for hint in told)
        left = [[int(number) for number in hint[1].split(", ")] for hint in told if hint is not None]
        assert all(17 in each for each in left)
        assert all(set(later) <= set(sooner) for sooner, later in itertools.pairwise([range(50), *left]))


def test_a_hit_earns_1_and_ends_the_game():
    group = game(7, " 7 ")
    assert group.get_total_rewards() == [1.0]
    assert group.trajectories_G[0].transitions[0].metrics == {
        "parse_error": 0.0, "hit": 1.0, "malformed": 0.0, "guesses": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "seven", "7.0", "-7", "7 8", "1024", "٧"])
def test_what_is_no_number_of_the_range_costs_1_and_ends_the_game(text: str):
    group = game(7, text)
    assert group.get_total_rewards() == [-1.0]
    assert group.trajectories_G[0].stop_reason is StopReason.PARSE_ERROR


def test_ten_misses_are_a_game_worth_nothing():
    group = game(7, "8")
    assert group.get_total_rewards() == [0.0]
    assert len(group.trajectories_G[0].transitions) == 10
    metrics = compute_trajectory_metrics([group], [["guess_number"]])
    assert metrics["env/all/stop/max_turns"] == 1.0
    assert metrics["env/all/hit"] == 0.0


def test_a_game_becomes_one_datum_in_which_only_the_guesses_train():
    [trajectory] = asyncio.run(do_group_rollout(GuessNumberGroupBuilder(1, RENDERER, 1), bisect)).trajectories_G
    [datum] = trajectory_to_data(trajectory, 1.0)
    assert len(trajectory.transitions) == 9
    assert datum.loss_fn_inputs["mask"].array.sum() == sum(len(turn.ac.tokens) for turn in trajectory.transitions)


def test_nine_tenths_are_to_train_on_and_which_is_where_never_changes():
    split = numbers()
    assert (len(split.train), len(split.test)) == (922, 102)
    assert sorted([*split.train, *split.test]) == list(range(1024))
    assert hashlib.sha256(repr(split).encode()).hexdigest()[:16] == "cc8ee912fea64550"
    assert len(held_out_builders(RENDERER)) == 102
    assert len(dataset(RENDERER)) == 29  # batches of 32, the last one short


@pytest.mark.slow
def test_a_policy_learns_to_play(tmp_path: Path):
    """A bigram cannot bisect. Shown how guesses are written it still says much else; reward teaches it not to, and of
    eight numbers it then finds some in ten guesses."""
    builders = dataset(RENDERER, groups_per_batch=2, group_size=16, num_numbers=8).get_batch(0)
    chats: list[list[Message]] = [
        [Message(role="user", content="Guess."), Message(role="assistant", content=str(number))] for number in range(8)
    ]

    async def play(step: int) -> list[TrajectoryGroup]:
        policy = SamplingPolicy(await trainer.save_weights_and_get_sampling_client(), MAX_TOKENS, seed=step)
        return [group for _, group in (await do_rollouts(builders, policy)).owned_groups_P]

    async def train() -> list[float]:
        shown = [conversation_to_datum(chat, RENDERER, 100) for chat in chats]
        for _ in range(4):
            trainer.forward_backward(shown, "cross_entropy")
            await trainer.optim_step(AdamParams(learning_rate=0.5))
        mean_rewards: list[float] = []
        for step in range(9):
            groups_P = await play(step)
            mean_rewards.append(sum(sum(group.get_total_rewards()) for group in groups_P) / (2 * 16))
            data_D, _ = assemble_training_data(groups_P, compute_advantages(groups_P))
            assert len(data_D) == 2 * 16  # each game is one datum
            trainer.forward_backward(without_mask(data_D), "importance_sampling")
            await trainer.optim_step(AdamParams(learning_rate=0.5))
        return mean_rewards

    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/name").result()
        mean_rewards = asyncio.run(train())

    assert sum(mean_rewards[:2]) / 2 < -0.5
    assert sum(mean_rewards[-2:]) / 2 > 0.3
