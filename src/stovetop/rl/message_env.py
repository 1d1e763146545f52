"""Environments that speak in messages, and what makes an environment of tokens of one: rendering, parsing, and what
happens to answers that are cut off or cannot be read. What is said in them is the message environment's part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from stovetop.completers import StopCondition
from stovetop.errors import InvalidRequest
from stovetop.renderers.base import Renderer, TrainOnWhat
from stovetop.renderers.messages import Message
from stovetop.rl.limits import ParseErrorPolicy
from stovetop.rl.types import Action, Logs, Metrics, Observation, StepResult, StopReason
from stovetop.tracking.chats import ConversationFormatter
from stovetop.tracking.logtree import log_formatter
from stovetop.types import ImageChunk, ModelInput


def _no_metrics() -> Metrics:
    return {}


def _no_logs() -> Logs:
    return {}


@dataclass(frozen=True, slots=True)
class MessageStepResult:
    """What a message environment answers to a message."""

    reward: float
    episode_done: bool
    next_messages: Sequence[Message]  # the whole chat that the policy sees next, the message it just wrote included
    metrics: Metrics = field(default_factory=_no_metrics)
    stop_reason: StopReason = StopReason.COMPLETED  # read when the episode is done
    num_tool_calls: int = 0  # that the message made
    logs: Logs = field(default_factory=_no_logs)  # what became of the message: shown with the rollout


FORGIVING = ParseErrorPolicy(max_consecutive=2)


class MessageEnv(Protocol):
    """One episode in messages, used once. It holds plain data, so that it pickles."""

    async def initial_observation(self) -> Sequence[Message]:
        """The chat that the policy sees first. Asked once, before any step."""
        ...

    async def step(self, message: Message) -> MessageStepResult:
        """What a message of the policy leads to. Messages that could not be read do not come here."""
        ...


@dataclass(slots=True)
class EnvFromMessageEnv:
    """An `Env`: shows the chat of a message environment as tokens, and gives it the messages that the policy's tokens
    say.

    Where the renderer allows it, an observation is the one before it, the tokens of the answer as they were sampled,
    and what is new: so a whole episode becomes one datum, even if the sampled text has other tokens than the renderer
    would give it. An environment that rewrites its chat gets the chat rendered anew.
    """

    message_env: MessageEnv
    renderer: Renderer
    failed_parse_reward: float = -1.0  # of an answer that cannot be read and ends the episode
    terminate_on_parse_error: bool = True  # the first of these; False: as `parse_errors` says
    max_trajectory_tokens: int | None = None  # an observation with its answer; None: no limit
    max_generation_tokens: int | None = None  # room that an answer needs; None: one token
    context_overflow_reward: float = -0.1  # added when the chat outgrows that, or an answer is cut off
    terminate_on_length: bool = True  # an answer that is cut off ends the episode; False: it is read as it is
    parse_errors: ParseErrorPolicy = FORGIVING
    _messages: list[Message] = field(init=False, default_factory=list[Message])
    _observation: ModelInput = field(init=False, default_factory=ModelInput.empty)
    _num_parse_errors: int = field(init=False, default=0)  # in a row

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        self._messages = list(await self.message_env.initial_observation())
        self._observation = self.renderer.build_generation_prompt(self._messages)
        log_formatter(ConversationFormatter(self._messages))
        if self._overflows(self._observation):
            raise InvalidRequest(
                f"the first chat has {self._observation.length} tokens, which leaves no room for an answer; "
                f"max_trajectory_tokens and max_generation_tokens are: {self.max_trajectory_tokens}, "
                f"{self.max_generation_tokens}"
            )
        return self._observation, self.renderer.get_stop_sequences()

    async def step(self, action: Action) -> StepResult:
        if action.stop_reason == "length" and self.terminate_on_length:
            return self._end(self.context_overflow_reward, StopReason.MAX_TOKENS, {"truncated": 1.0})
        message, termination = self.renderer.parse_response(action.tokens)
        if not termination.is_clean:
            return self._parse_error(message)
        self._num_parse_errors = 0
        result = await self.message_env.step(message)
        ended_by_family = termination.is_stop_sequence
        step = StepResult(
            reward=result.reward,
            episode_done=result.episode_done,
            next_observation=self._observe(message, result.next_messages, action if ended_by_family else None),
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics={"parse_error": 0.0, **result.metrics},
            stop_reason=result.stop_reason,
            num_tool_calls=result.num_tool_calls,
            logs=result.logs,
        )
        return self._end_if_too_long(step)

    def _parse_error(self, message: Message) -> StepResult:
        """The end, or another try that is told of the error."""
        self._num_parse_errors += 1
        if self.terminate_on_parse_error or self._num_parse_errors > self.parse_errors.max_consecutive:
            return self._end(self.failed_parse_reward, StopReason.PARSE_ERROR, {"parse_error": 1.0})
        reply = Message(role="user", content=self.parse_errors.reply)
        step = StepResult(
            reward=self.parse_errors.penalty,
            episode_done=False,
            next_observation=self._observe(message, [*self._messages, message, reply]),
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics={"parse_error": 1.0},
            trainable=not self.parse_errors.mask_error_turns,
        )
        return self._end_if_too_long(step)

    def _end(self, reward: float, reason: StopReason, metrics: Metrics) -> StepResult:
        trainable = not (reason is StopReason.PARSE_ERROR and self.parse_errors.mask_error_turns)
        stop = self.renderer.get_stop_sequences()
        return StepResult(reward, True, ModelInput.empty(), stop, metrics, stop_reason=reason, trainable=trainable)

    def _end_if_too_long(self, step: StepResult) -> StepResult:
        if step.episode_done or not self._overflows(step.next_observation):
            return step
        return replace(
            step,
            reward=step.reward + self.context_overflow_reward,
            episode_done=True,
            metrics={**step.metrics, "context_overflow": 1.0},
            stop_reason=StopReason.CONTEXT_OVERFLOW,
        )

    def _overflows(self, observation: ModelInput) -> bool:
        room_needed = self.max_generation_tokens or 1
        return self.max_trajectory_tokens is not None and observation.length + room_needed > self.max_trajectory_tokens

    def _observe(self, message: Message, chat: Sequence[Message], action: Action | None = None) -> ModelInput:
        """The chat as the policy sees it next; from now on it is the chat so far. With the action that said the last
        message and ended as the family ends a turn, its tokens are kept."""
        rendered = self.renderer.build_generation_prompt(chat)
        added = self._tokens_after(message, chat, rendered) if action is not None else None
        if action is not None and added is not None:
            answer_and_more = ModelInput.from_ints([*action.tokens, *added])
            rendered = ModelInput([*self._observation.chunks, *answer_and_more.chunks])
        self._messages, self._observation = list(chat), rendered
        log_formatter(ConversationFormatter(self._messages))
        return rendered

    def _tokens_after(self, message: Message, chat: Sequence[Message], rendered: ModelInput) -> list[int] | None:
        """What a rendered chat has behind the message that was just said; None where it does not go on from there."""
        answered = [*self._messages, message]
        has_images = any(isinstance(chunk, ImageChunk) for chunk in rendered.chunks)
        if has_images or list(chat[: len(answered)]) != answered:
            return None
        example = self.renderer.build_supervised_example(answered, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
        end = int(example.weights.nonzero()[0][-1]) + 1
        tokens = rendered.to_ints()
        return tokens[end:] if tokens[:end] == example.model_input.to_ints()[:end] else None
