"""A message environment in which a policy may call tools until it answers without one. How a tool is described to a
model, and how calls are read from its tokens, are matters of renderers.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stovetop.errors import InvalidRequest, ServiceClosed
from stovetop.renderers import tools as function_tools
from stovetop.renderers.messages import Message, ToolCall, ToolSpec
from stovetop.renderers.tools import ToolError, ToolOk
from stovetop.rl.message_env import MessageStepResult
from stovetop.rl.types import Metrics, StopReason


def _no_metrics() -> Metrics:
    return {}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to."""

    messages: Sequence[Message]  # what the policy sees of it
    should_stop: bool = False  # the episode is over
    metrics: Metrics = field(default_factory=_no_metrics)


class Tool(Protocol):
    """Something that a policy can call: a function with `@tool` (`renderers.tools`), or whatever else has these two,
    such as a tool that ends the episode. An InvalidRequest that it raises is told to the policy; anything else fails
    the rollout."""

    @property
    def spec(self) -> ToolSpec:
        """What the policy is told of the tool. Its name is what calls ask for."""
        ...

    async def __call__(self, call: ToolCall) -> ToolResult | function_tools.ToolResult: ...


RewardFn = Callable[[Sequence[Message]], Awaitable[tuple[float, Metrics]]]
"""The reward of an episode, and metrics, from its whole chat."""


def simple_tool_result(call: ToolCall, text: str) -> ToolResult:
    """One message that answers a call."""
    return ToolResult([function_tools.ToolResult(call, ToolOk(text)).message()])


def error_tool_result(call: ToolCall, reason: str) -> ToolResult:
    """Tells the policy why its call came to nothing. Counted as `tool_errors`."""
    return _of_function(function_tools.ToolResult(call, ToolError(reason)))


def _of_function(result: function_tools.ToolResult) -> ToolResult:
    match result.outcome:
        case ToolOk():
            return ToolResult([result.message()])
        case ToolError():
            return ToolResult([result.message()], metrics={"tool_errors": 1.0})


@dataclass(slots=True)
class AgentToolMessageEnv:
    """A `MessageEnv`: runs the calls of each message one after the other and shows their results. It ends with a
    message that calls nothing, with a tool that says so, or after `max_turns` messages; then `reward_fn` looks at the
    chat. Each message with a call that cannot be read has `failed_parse_reward` too, and the policy is told why."""

    tools: Sequence[Tool]
    initial_messages: Sequence[Message]
    reward_fn: RewardFn
    max_turns: int = 5
    failed_parse_reward: float = -0.1
    _chat: list[Message] = field(init=False, default_factory=list[Message])
    _num_turns: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        names = [tool.spec.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequest(f"each tool needs a name of its own: {', '.join(names)}")

    async def initial_observation(self) -> Sequence[Message]:
        self._chat = list(self.initial_messages)
        return list(self._chat)

    async def step(self, message: Message) -> MessageStepResult:
        self._num_turns += 1
        calls, unread = message.get("tool_calls", []), message.get("unparsed_tool_calls", [])
        results = [await self._run(call) for call in calls]
        self._chat += [message, *(reply for result in results for reply in result.messages)]
        self._chat += [Message(role="tool", content=f"Error: {call.error}") for call in unread]
        reason = self._stop_reason(results, is_answer=not calls and not unread)
        reward = self.failed_parse_reward if unread else 0.0
        counts = {"tool_calls": len(calls), "tool_calls_unread": len(unread), "tool_errors": 0.0}
        metrics: dict[str, float] = {**counts, **_summed(results)}
        if reason is not None:
            final_reward, final_metrics = await self.reward_fn(self._chat)
            reward += final_reward
            metrics |= final_metrics
        return MessageStepResult(
            reward,
            episode_done=reason is not None,
            next_messages=list(self._chat),
            metrics=metrics,
            stop_reason=reason or StopReason.COMPLETED,
            num_tool_calls=len(calls),
        )

    async def _run(self, call: ToolCall) -> ToolResult:
        tools = {tool.spec.name: tool for tool in self.tools}
        if call.function.name not in tools:
            return error_tool_result(call, f"there is no tool {call.function.name!r}; there are: {', '.join(tools)}")
        try:
            result = await tools[call.function.name](call)
        except ServiceClosed:
            raise  # no other call would go better
        except InvalidRequest as error:
            return error_tool_result(call, str(error))
        return result if isinstance(result, ToolResult) else _of_function(result)

    def _stop_reason(self, results: Sequence[ToolResult], *, is_answer: bool) -> StopReason | None:
        if is_answer:
            return StopReason.COMPLETED
        if any(result.should_stop for result in results):
            return StopReason.TOOL_STOPPED
        return StopReason.MAX_TURNS if self._num_turns >= self.max_turns else None


def _summed(results: Sequence[ToolResult]) -> dict[str, float]:
    names = dict.fromkeys(name for result in results for name in result.metrics)
    return {name: sum(result.metrics.get(name, 0.0) for result in results) for name in names}
