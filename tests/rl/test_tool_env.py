import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.errors import InvalidRequest, RequestFailedError, ServiceClosed
from stovetop.renderers import get_renderer
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, ToolSpec, UnparsedToolCall, ensure_text
from stovetop.renderers.tools import Tool, tool
from stovetop.rl.data_processing import trajectory_to_data
from stovetop.rl.message_env import EnvFromMessageEnv, MessageStepResult
from stovetop.rl.rollouts import do_single_rollout
from stovetop.rl.tool_env import AgentToolMessageEnv, ToolResult, error_tool_result, simple_tool_result
from stovetop.rl.types import Metrics, StopReason
from stovetop.types import ModelInput


@dataclass
class Adder:
    """Adds to a sum; "stop" ends the episode, "bad" is refused, "broken" raises."""

    name: str = "add"
    total: int = 0

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, "adds", {"type": "object"})

    async def __call__(self, call: ToolCall) -> ToolResult:
        match call.function.arguments:
            case "stop":
                return ToolResult(simple_tool_result(call, "bye").messages, should_stop=True)
            case "bad":
                raise InvalidRequest("that is no number")
            case "broken":
                raise KeyError("a bug")
            case number:
                self.total += int(number)
                return ToolResult(simple_tool_result(call, str(self.total)).messages, metrics={"added": int(number)})


def calls(*arguments: str, name: str = "add") -> Message:
    made = [ToolCall(FunctionCall(name, each), id=f"call {index}") for index, each in enumerate(arguments)]
    return Message(role="assistant", content="", tool_calls=made)


ANSWER = Message(role="assistant", content="done")
START = [Message(role="user", content="Add.")]


async def number_of_messages(history: Sequence[Message]) -> tuple[float, Metrics]:
    return float(len(history)), {"length": float(len(history))}


def play(*messages: Message, max_turns: int = 5) -> list[MessageStepResult]:
    async def steps() -> list[MessageStepResult]:
        env = AgentToolMessageEnv([Adder()], START, number_of_messages, max_turns)
        assert await env.initial_observation() == START
        return [await env.step(message) for message in messages]

    return asyncio.run(steps())


def texts(result: MessageStepResult) -> list[str]:
    return [ensure_text(message["content"]) for message in result.next_messages]


def test_calls_run_in_order_and_their_results_are_shown():
    called, answered = play(calls("1", "2"), ANSWER)
    assert texts(called) == ["Add.", "", "1", "3"]
    assert [message.get("tool_call_id") for message in called.next_messages[2:]] == ["call 0", "call 1"]
    assert (called.reward, called.episode_done, called.num_tool_calls) == (0.0, False, 2)
    assert called.metrics == {"tool_calls": 2, "tool_calls_unread": 0, "tool_errors": 0, "added": 3}
    assert (answered.reward, answered.episode_done, answered.stop_reason) == (5.0, True, StopReason.COMPLETED)
    assert answered.metrics["length"] == 5.0


def test_a_tool_may_end_the_episode():
    [result] = play(calls("1", "stop"))
    assert (result.reward, result.episode_done, result.stop_reason) == (4.0, True, StopReason.TOOL_STOPPED)


def test_the_last_turn_allowed_is_played_and_graded():
    first, second = play(calls("1"), calls("2"), max_turns=2)
    assert not first.episode_done
    assert (second.reward, second.episode_done, second.stop_reason) == (5.0, True, StopReason.MAX_TURNS)


def test_five_turns_are_allowed_unless_told_otherwise():
    env = AgentToolMessageEnv([Adder()], START, number_of_messages)
    asyncio.run(env.initial_observation())
    assert [asyncio.run(env.step(calls("1"))).episode_done for _ in range(5)] == [False] * 4 + [True]


def test_metrics_of_the_calls_of_a_turn_are_summed_whichever_call_has_them():
    [result] = play(calls("1", "bad", "2"))
    assert (result.metrics["added"], result.metrics["tool_errors"]) == (3, 1)


def test_a_call_of_no_tool_or_with_bad_arguments_is_told_to_the_policy():
    unknown, bad = play(calls("1", name="subtract"), calls("bad"))
    assert texts(unknown)[-1] == "Error: there is no tool 'subtract'; there are: add"
    assert texts(bad)[-1] == "Error: that is no number"
    assert unknown.metrics["tool_errors"] == bad.metrics["tool_errors"] == 1.0
    assert not bad.episode_done


def test_what_a_tool_raises_otherwise_fails_the_episode():
    with pytest.raises(KeyError, match="a bug"):
        play(calls("broken"))


def test_a_call_that_cannot_be_read_costs_something_and_is_told_to_the_policy():
    unread = Message(
        role="assistant", content="", unparsed_tool_calls=[UnparsedToolCall("<tool_call>{", "Invalid JSON")]
    )
    [result] = play(unread)
    assert (result.reward, result.episode_done) == (-0.1, False)
    assert texts(result)[-1] == "Error: Invalid JSON"
    assert result.metrics["tool_calls_unread"] == 1


@tool
def shout(text: str, times: int = 1) -> str:
    """Says it loud."""
    if not text:
        raise ValueError("nothing to say")
    return text.upper() * times


def test_a_typed_function_is_a_tool_and_its_failures_are_told_to_the_policy():
    async def steps() -> list[MessageStepResult]:
        env = AgentToolMessageEnv([shout], START, number_of_messages)
        await env.initial_observation()
        said = ['{"text": "ho", "times": 2}', '{"text": ""}', '{"loud": 1}']
        return [await env.step(calls(arguments, name="shout")) for arguments in said]

    right, failed, wrong = asyncio.run(steps())
    assert texts(right)[-1] == "HOHO"
    assert texts(failed)[-1] == "Error: ValueError: nothing to say"
    assert texts(wrong)[-1].startswith("Error: shout cannot be called with these arguments")
    assert [result.metrics["tool_errors"] for result in (right, failed, wrong)] == [0, 1, 1]


def test_a_model_that_a_tool_asks_and_that_is_gone_fails_the_episode_and_is_not_told_to_the_policy():
    @tool
    def ask(model: str) -> str:
        """Asks another model."""
        raise ServiceClosed("closed") if model == "closed" else RequestFailedError("its engine failed")

    class Judge(Adder):
        async def __call__(self, call: ToolCall) -> ToolResult:
            raise ServiceClosed("closed")

    async def step(asked: Tool, name: str, arguments: str) -> None:
        env = AgentToolMessageEnv([asked], START, number_of_messages)
        await env.initial_observation()
        await env.step(calls(arguments, name=name))

    for asked, name, arguments, error in (
        (ask, "ask", '{"model": "closed"}', ServiceClosed),
        (ask, "ask", '{"model": "open"}', RequestFailedError),
        (Judge(), "add", "1", ServiceClosed),
    ):
        with pytest.raises(error):
            asyncio.run(step(asked, name, arguments))


def test_an_episode_with_tools_in_the_language_of_a_family_becomes_one_datum():
    tokenizer = ByteTokenizer()
    renderer = get_renderer("qwen3_instruct", tokenizer)
    answers = iter(['<tool_call>\n{"name": "shout", "arguments": {"text": "ho"}}\n</tool_call>', "<tool_call>{", "HO"])

    async def policy(model_input: ModelInput, stop: object, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        tokens = [*tokenizer.encode(next(answers), add_special_tokens=False), tokenizer.eos_token_id]
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "stop")

    env = EnvFromMessageEnv(AgentToolMessageEnv([shout], START, number_of_messages), renderer)
    trajectory = asyncio.run(do_single_rollout(policy, env))
    assert "<tool_response>\nHO\n</tool_response>" in tokenizer.decode(trajectory.transitions[1].ob.to_ints())
    assert [turn.reward for turn in trajectory.transitions] == [0.0, -0.1, 6.0]
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


def test_tools_need_names_of_their_own():
    with pytest.raises(InvalidRequest, match="a name of its own: add, add"):
        AgentToolMessageEnv([Adder(), Adder()], START, number_of_messages)


def test_an_answer_to_a_call_names_it():
    call = ToolCall(FunctionCall("add", "1"), id="7")
    [message] = error_tool_result(call, "why").messages
    assert message == {"role": "tool", "content": "Error: why", "name": "add", "tool_call_id": "7"}
