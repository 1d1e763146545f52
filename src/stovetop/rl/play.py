"""A person as the policy: to see what a model sees, and what an environment makes of an answer.

An answer may have several lines; two blank lines, or the end of the input, end it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.errors import InvalidRequest
from stovetop.rl.rollouts import do_single_rollout
from stovetop.rl.types import Action, Env, Observation, StepResult, Trajectory
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput

ReadLine = Callable[[], str]  # the next line with its line break, "" at the end: such as sys.stdin.readline
Show = Callable[[str], None]


async def play_w_env(env: Env, tokenizer: Tokenizer, read_line: ReadLine, show: Show) -> Trajectory:
    """Plays one episode to its end. Shows each observation (of one that goes on from the last, what is new), the reward
    of each step, and a summary."""
    trajectory = await do_single_rollout(Person(tokenizer, read_line, show), _ShownEnv(env, show), name="play")
    rewards = [transition.reward for transition in trajectory.transitions]
    show(f"The episode is over: {trajectory.stop_reason}. Turns: {len(rewards)}, total reward: {sum(rewards):g}")
    return trajectory


@dataclass(slots=True)
class Person:
    """A TokenCompleter that asks. Every answer ends as the stop condition says; there are no logprobs."""

    tokenizer: Tokenizer
    read_line: ReadLine
    show: Show
    _shown: str = field(init=False, default="")

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        text = self.tokenizer.decode(model_input.to_ints())
        self.show(text.removeprefix(self._shown))
        self._shown = text
        tokens = self.tokenizer.encode(read_answer(self.read_line), add_special_tokens=False)
        return TokensWithLogprobs([*tokens, *self._end(stop)], None, "stop")

    def _end(self, stop: StopCondition) -> list[int]:
        if not stop:
            return []
        first = stop[0]
        return [first] if isinstance(first, int) else self.tokenizer.encode(first, add_special_tokens=False)


def read_answer(read_line: ReadLine) -> str:
    """The lines up to two blank ones, or to the end of the input."""
    lines: list[str] = []
    while line := read_line():
        lines.append(line.rstrip("\r\n"))
        if len(lines) >= 2 and not lines[-1].strip() and not lines[-2].strip():
            return "\n".join(lines[:-2])
    if not lines:
        raise InvalidRequest("the input ended before the episode did")
    return "\n".join(lines).rstrip("\n")


@dataclass(frozen=True, slots=True)
class _ShownEnv:
    env: Env
    show: Show

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return await self.env.initial_observation()

    async def step(self, action: Action) -> StepResult:
        result = await self.env.step(action)
        metrics = "".join(f", {name} {value:g}" for name, value in result.metrics.items())
        self.show(f"reward {result.reward:g}{metrics}")
        return result
