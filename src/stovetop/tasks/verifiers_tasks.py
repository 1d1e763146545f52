"""Tasks of verifiers (the extra `verifiers`; version 0.4 or later) as environments: the prompt of a task is put to the
policy, and the task's own rewards score its answer.

    builders = verifiers_builders(taskset, renderer, group_size=8)   # for rollouts, a workflow or an evaluation

Tasks of one turn whose scoring needs nothing but the conversation. One with tools, with a container or a runtime, or
with work to do before it can be scored is refused by name: such a task runs in the harnesses of that library alone.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from stovetop.errors import InvalidRequest
from stovetop.extras import import_extra
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, get_text_content
from stovetop.rl.problem_env import OneTurnEnv, ProblemGroupBuilder, TurnResult
from stovetop.rl.types import Action

VerifiersTask = Any  # a `verifiers.v1.Task`; the package may not be installed
HOOKS = ("setup", "finalize", "stage_verifier")  # what a task does in a runtime, before it is scored


@dataclass(frozen=True, slots=True)
class VerifiersEnv(OneTurnEnv):
    """A task's prompt. The reward is the weighted sum of the task's rewards; each of them, and each of its metrics, is
    a metric."""

    task: VerifiersTask
    chat: Sequence[Message]
    renderer: Renderer

    def get_chat(self) -> Sequence[Message]:
        return self.chat

    async def grade(self, action: Action) -> TurnResult:
        message, _ = self.renderer.parse_response(action.tokens)
        trace = _trace(self.task, self.chat, get_text_content(message))
        await self.task.score(trace)
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return TurnResult(float(trace.reward), {name: float(value) for name, value in {**metrics, **scores}.items()})


def verifiers_builders(
    tasks: Iterable[VerifiersTask], renderer: Renderer, group_size: int, *, limit: int | None = None
) -> list[ProblemGroupBuilder]:
    """A group builder for each task, such as those of a Taskset; of one without an end, the first `limit`."""
    builders: list[ProblemGroupBuilder] = []
    for index, task in enumerate(tasks):
        if index == limit:
            break
        _refuse_more_than_one_turn(task, index)
        env = partial(VerifiersEnv, task, _chat(task, index), renderer)
        builders.append(ProblemGroupBuilder(env, group_size, type(task).__name__))
    if not builders:
        raise InvalidRequest("there is no task; load() of the taskset yields none")
    return builders


def _refuse_more_than_one_turn(task: VerifiersTask, index: int) -> None:
    base: Any = _library("verifiers.v1").Task
    kind = cast(Any, type(task))  # whatever it inherits
    needs = [name for name in HOOKS if getattr(kind, name) is not getattr(base, name)]
    needs += ["toolsets"] if kind.toolsets(task.config) else []
    needs += ["a container"] if kind.NEEDS_CONTAINER or task.data.image is not None else []
    needs += ["scoring that comes later"] if task.scoring_deferred else []
    scorers = [(f"{signal} {each.__name__}", each) for signal in ("reward", "metric") for each in task.hooks(signal)]
    scorers += [(f"judge {each.reward_name}", each.score) for each in task.plugged_judges()]
    for name, scorer in scorers:  # without a runtime, those that need one are left out in silence
        runtime = inspect.signature(scorer).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            needs.append(f"a runtime for its {name}")
    if needs:
        raise InvalidRequest(
            f"task {index} has or needs {', '.join(needs)}; only tasks of one turn that are scored by what was said "
            f"can be played here: {type(task).__name__}"
        )
    if not any(name.startswith(("reward", "judge")) for name, _ in scorers):
        raise InvalidRequest(f"task {index} has no reward, so no answer would be worth more: {type(task).__name__}")


def _chat(task: VerifiersTask, index: int) -> list[Message]:
    prompt = task.data.prompt
    if not prompt:
        raise InvalidRequest(f"task {index} has no prompt: {type(task).__name__}")
    system = [] if task.data.system_prompt is None else [Message(role="system", content=task.data.system_prompt)]
    if isinstance(prompt, str):
        return [*system, Message(role="user", content=prompt)]
    said: list[Message] = []
    for message in prompt:
        if message.role not in ("system", "user", "assistant") or not isinstance(message.content, str):
            raise InvalidRequest(
                f"a prompt is read as text of a system, a user and an assistant; task {index}: {message}"
            )
        said.append(Message(role=message.role, content=message.content))
    return [*system, *said]


def _trace(task: VerifiersTask, chat: Sequence[Message], answer: str) -> Any:
    """What happened, in the words of that library: one message after the other, of which the last was sampled."""
    v1, types, graph = (_library(f"verifiers.v1{name}") for name in ("", ".types", ".graph"))
    state_class = _library("verifiers.v1.state").state_cls(type(task))
    trace = v1.Trace(
        task=v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_class(),
        agent=v1.AgentInfo(config=v1.AgentConfig()),
    )
    kinds = {"system": types.SystemMessage, "user": types.UserMessage, "assistant": types.AssistantMessage}
    said = [*chat, Message(role="assistant", content=answer)]
    for number, message in enumerate(said):
        trace.nodes.append(
            graph.MessageNode(
                parent=number - 1 if number else None,
                message=kinds[message["role"]](content=get_text_content(message)),
                sampled=number == len(said) - 1,
            )
        )
    return trace


def _library(module: str) -> Any:
    return import_extra(module, "verifiers")
