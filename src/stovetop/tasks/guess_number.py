"""Find a hidden number by guessing: after each guess the policy learns whether the number is higher or lower, or, where
a small model is not to have to remember, which numbers are left. The smallest task in which later turns must use what
earlier ones told: bisection finds all of 1024 numbers but one in ten guesses, blind guessing finds one in a hundred.

The reward is 1 for the guess that hits, -1 for an answer that is no number of the range (which ends the game), else 0.
Every turn goes on from the one before it, so a game becomes one datum.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stovetop.datasets import Split, split_rows
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.rl import Builders
from stovetop.kitchen.stages.supervised import Chats
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, get_text_content
from stovetop.rl.message_env import EnvFromMessageEnv, MessageStepResult
from stovetop.rl.problem_env import ProblemDataset
from stovetop.rl.types import Env, EnvGroupBuilder, StopReason
from stovetop.runs import Run

NAME = "guess_number"
NUM_NUMBERS = 1024  # 0..1023
MAX_TURNS = 10
MAX_TOKENS = 8  # a guess takes five with its end of turn
HIT_REWARD = 1.0
MALFORMED_REWARD = -1.0

Hints = Literal["direction", "list"]  # what is told after a guess: higher or lower, or every number that is left

_SPLIT_SEED = 0
_TEST_SHARE = 0.1


@dataclass(slots=True)
class GuessNumberEnv:
    """One game, as a `MessageEnv`."""

    number: int
    num_numbers: int = NUM_NUMBERS
    max_turns: int = MAX_TURNS
    hints: Hints = "direction"
    _left: range = field(init=False, default=range(0))  # what the hints have left
    _chat: list[Message] = field(init=False, default_factory=list[Message])
    _num_guesses: int = field(init=False, default=0)

    async def initial_observation(self) -> Sequence[Message]:
        self._left = range(self.num_numbers)
        self._chat = [_rules(self.num_numbers, self.max_turns, self.hints)]
        return list(self._chat)

    async def step(self, message: Message) -> MessageStepResult:
        guess = self._guess(get_text_content(message))
        self._num_guesses += 1
        if guess is None:
            return self._end(message, MALFORMED_REWARD, StopReason.PARSE_ERROR)
        if guess == self.number:
            return self._end(message, HIT_REWARD, StopReason.COMPLETED)
        if self._num_guesses == self.max_turns:
            return self._end(message, 0.0, StopReason.MAX_TURNS)
        self._left = left_of(self._left, self.number, guess)
        self._chat += [message, _hint(self.number, guess, self._left, self.hints)]
        return MessageStepResult(0.0, episode_done=False, next_messages=list(self._chat))

    def _guess(self, text: str) -> int | None:
        """The number that a text is, if it is one of the range."""
        if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
            return None
        return guess if (guess := int(text)) < self.num_numbers else None

    def _end(self, message: Message, reward: float, reason: StopReason) -> MessageStepResult:
        metrics = {
            "hit": float(reason is StopReason.COMPLETED),
            "malformed": float(reason is StopReason.PARSE_ERROR),
            "guesses": float(self._num_guesses),
        }
        return MessageStepResult(reward, True, [*self._chat, message], metrics, reason)


def left_of(left: range, number: int, guess: int) -> range:
    """Those of `left` that are left after a guess that was not the number."""
    if number > guess:
        return range(max(left.start, guess + 1), left.stop)
    return range(left.start, min(left.stop, guess))


def _rules(num_numbers: int, max_turns: int, hints: Hints) -> Message:
    told = "whether mine is higher or lower" if hints == "direction" else "which numbers are left"
    text = (
        f"I have chosen a whole number from 0 to {num_numbers - 1}. Find it in at most {max_turns} guesses. Say the "
        f"number of your guess and nothing else; I say {told}."
    )
    return Message(role="user", content=text)


def _hint(number: int, guess: int, left: range, hints: Hints) -> Message:
    if hints == "list":
        return Message(role="user", content=f"Mine is one of {', '.join(map(str, left))}.")
    return Message(role="user", content="Mine is higher." if number > guess else "Mine is lower.")


@dataclass(frozen=True, slots=True)
class GuessNumberGroupBuilder(EnvGroupBuilder):
    """The same number several times."""

    number: int
    renderer: Renderer
    num_envs: int
    num_numbers: int = NUM_NUMBERS
    max_turns: int = MAX_TURNS
    max_prompt_tokens: int | None = None  # a game whose chat is longer ends; None: no limit
    hints: Hints = "direction"

    async def make_envs(self) -> Sequence[Env]:
        return [
            EnvFromMessageEnv(
                GuessNumberEnv(self.number, self.num_numbers, self.max_turns, self.hints),
                self.renderer,
                failed_parse_reward=MALFORMED_REWARD,
                max_trajectory_tokens=None if self.max_prompt_tokens is None else self.max_prompt_tokens + 1,
                context_overflow_reward=MALFORMED_REWARD,
            )
            for _ in range(self.num_envs)
        ]

    def logging_tags(self) -> Sequence[str]:
        return [NAME]


# ---- which number is where ---------------------------------------------------------------------------------------


def numbers(num_numbers: int = NUM_NUMBERS, test_size: int | None = None) -> Split[int]:
    """Nine tenths to train on and one tenth held out, or `test_size` numbers; which is which never changes."""
    num_held_out = int(num_numbers * _TEST_SHARE) if test_size is None else test_size
    return split_rows(range(num_numbers), num_held_out, _SPLIT_SEED)


def dataset(
    renderer: Renderer,
    *,
    groups_per_batch: int = 32,
    group_size: int = 8,
    num_epochs: int = 1,
    seed: int = 0,
    num_numbers: int = NUM_NUMBERS,
    max_turns: int = MAX_TURNS,
) -> ProblemDataset:
    """The numbers to train on, in an order that depends on the seed."""
    builders = [
        GuessNumberGroupBuilder(number, renderer, group_size, num_numbers, max_turns)
        for number in numbers(num_numbers).train
    ]
    return ProblemDataset(builders, groups_per_batch, num_epochs=num_epochs, seed=seed)


def held_out_builders(renderer: Renderer, group_size: int = 1) -> list[EnvGroupBuilder]:
    """The held-out numbers."""
    return [GuessNumberGroupBuilder(number, renderer, group_size) for number in numbers().test]


# ---- games to learn from -----------------------------------------------------------------------------------------


def example_games(
    hidden: Sequence[int],
    num_games: int,
    *,
    num_numbers: int = NUM_NUMBERS,
    max_turns: int = MAX_TURNS,
    attention: float = 1.0,
    seed: int = 0,
    hints: Hints = "direction",
) -> list[list[Message]]:
    """Chats of a player who guesses at random: with probability `attention` a number that the hints have left, else any
    number. They show how the game is played; with little attention, not how it is won."""
    drawn = random.Random(seed)
    rules = _rules(num_numbers, max_turns, hints)
    return [
        [rules, *_example_game(drawn.choice(hidden), num_numbers, max_turns, attention, hints, drawn)]
        for _ in range(num_games)
    ]


def _example_game(
    number: int, num_numbers: int, max_turns: int, attention: float, hints: Hints, drawn: random.Random
) -> list[Message]:
    chat: list[Message] = []
    left = range(num_numbers)
    for turn in range(max_turns):
        attends = drawn.random() < attention
        guess = drawn.choice(left) if attends else drawn.randrange(num_numbers)
        chat.append(Message(role="assistant", content=str(guess)))
        if guess == number or turn == max_turns - 1:
            break
        left = left_of(left, number, guess)
        chat.append(_hint(number, guess, left, hints))
    return chat


# ---- stages of the recipe -----------------------------------------------------------------------------------------


@stage(writes="chats")
def show_games(
    num_numbers: int,
    test_size: int,
    max_turns: int,
    num_games: int,
    attention: float,
    seed: int,
    run: Run,
    hints: Hints = "direction",
) -> Chats:
    """Games about numbers that are not held out."""
    hidden = numbers(num_numbers, test_size).train
    games = example_games(
        hidden, num_games, num_numbers=num_numbers, max_turns=max_turns, attention=attention, seed=seed, hints=hints
    )
    run.emit("dataset.load", dataset="example games", num_train=len(games), num_test=0)
    return Split(list(enumerate(games)), [])


@stage(writes=("builders", "test_builders"))
def build_games(
    num_numbers: int,
    test_size: int,
    max_turns: int,
    renderer: Renderer,
    group_size: int,
    run: Run,
    max_prompt_tokens: int | None = None,
    hints: Hints = "direction",
) -> Builders:
    """`group_size` games for each number, and four for those held out."""
    train, test = (
        [
            GuessNumberGroupBuilder(hidden, renderer, size, num_numbers, max_turns, max_prompt_tokens, hints)
            for hidden in part
        ]
        for part, size in zip(numbers(num_numbers, test_size), (group_size, 4), strict=True)
    )
    run.emit("rl.env_group_built", num_train=len(train), num_test=len(test), group_size=group_size)
    return Builders(train, test)
