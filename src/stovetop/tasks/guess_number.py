"""Find a hidden number by guessing: after each guess the policy learns whether the number is higher or lower. The
smallest task in which later turns must use what earlier ones told: bisection finds all of 1024 numbers but one in ten
guesses, blind guessing finds one in a hundred.

The reward is 1 for the guess that hits, -1 for an answer that is no number of the range (which ends the game), else 0.
Every turn goes on from the one before it, so a game becomes one datum.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from stovetop.datasets import Split, split_rows
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, get_text_content
from stovetop.rl.message_env import EnvFromMessageEnv, MessageStepResult
from stovetop.rl.problem_env import ProblemDataset
from stovetop.rl.types import Env, EnvGroupBuilder, StopReason

NAME = "guess_number"
NUM_NUMBERS = 1024  # 0..1023
MAX_TURNS = 10
MAX_TOKENS = 8  # a guess takes five with its end of turn
HIT_REWARD = 1.0
MALFORMED_REWARD = -1.0

_SPLIT_SEED = 0
_TEST_SHARE = 0.1


@dataclass(slots=True)
class GuessNumberEnv:
    """One game, as a `MessageEnv`."""

    number: int
    num_numbers: int = NUM_NUMBERS
    max_turns: int = MAX_TURNS
    _chat: list[Message] = field(init=False, default_factory=list[Message])
    _num_guesses: int = field(init=False, default=0)

    async def initial_observation(self) -> Sequence[Message]:
        rules = (
            f"I have chosen a whole number from 0 to {self.num_numbers - 1}. Find it in at most {self.max_turns} "
            "guesses. Say the number of your guess and nothing else; I say whether mine is higher or lower."
        )
        self._chat = [Message(role="user", content=rules)]
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
        hint = "Mine is higher." if self.number > guess else "Mine is lower."
        self._chat += [message, Message(role="user", content=hint)]
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


@dataclass(frozen=True, slots=True)
class GuessNumberGroupBuilder(EnvGroupBuilder):
    """The same number several times."""

    number: int
    renderer: Renderer
    num_envs: int
    num_numbers: int = NUM_NUMBERS
    max_turns: int = MAX_TURNS

    async def make_envs(self) -> Sequence[Env]:
        return [
            EnvFromMessageEnv(
                GuessNumberEnv(self.number, self.num_numbers, self.max_turns),
                self.renderer,
                failed_parse_reward=MALFORMED_REWARD,
                context_overflow_reward=MALFORMED_REWARD,
            )
            for _ in range(self.num_envs)
        ]

    def logging_tags(self) -> Sequence[str]:
        return [NAME]


# ---- which number is where ---------------------------------------------------------------------------------------


def numbers(num_numbers: int = NUM_NUMBERS) -> Split[int]:
    """Nine tenths to train on, one tenth held out; which is which never changes."""
    return split_rows(range(num_numbers), int(num_numbers * _TEST_SHARE), _SPLIT_SEED)


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
