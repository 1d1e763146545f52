"""Tasks of inspect-ai (the extra `inspect`) on a sampling client: its datasets, solvers, tools and scorers, our models.

model = inspect_model(client, renderer)
inspect_ai.eval("my_task.py", model=model)              # from a program
InspectEvaluator([my_task()], renderer, log_dir="logs") # inside a recipe, as a SamplingClientEvaluator
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stovetop.client import SamplingClient
from stovetop.completers import until_stop
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.extras import import_extra
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, ToolSpec, ensure_list, get_text_content
from stovetop.seeds import seed_for
from stovetop.types import ModelInput, SampledSequence, SamplingParams

MAX_TOKENS = 1000  # of an answer
NOT_OFFERED = ("frequency_penalty", "presence_penalty", "logit_bias", "best_of", "top_logprobs", "response_schema")

InspectObject = Any  # a value of inspect-ai, which may not be installed


def inspect_model(
    client: SamplingClient,
    renderer: Renderer,
    *,
    max_tokens: int = MAX_TOKENS,
    temperature: float = 1.0,
    seed: int | None = None,
) -> InspectObject:
    """An `inspect_ai.model.Model` that samples from a client. What a task asks for (max_tokens, temperature, top_p, and
    so on) wins over what is given here; an option that sampling does not have is refused. A stop sequence of a task
    ends the text where it occurs."""
    model = _library("inspect_ai.model")
    sampling = _Sampling(client, renderer, max_tokens, temperature, seed)
    base: Any = model.ModelAPI

    class StovetopAPI(base):
        """See `inspect_model`."""

        async def generate(
            self, input: Sequence[Any], tools: Sequence[Any], tool_choice: object, config: InspectObject
        ) -> InspectObject:
            return await sampling.generate(input, tools if tool_choice != "none" else (), config)

    registered: Any = model.modelapi(name="stovetop")(StovetopAPI)  # its logs name every model's API
    return model.Model(registered(model_name=client.get_base_model()), model.GenerateConfig())


@dataclass(frozen=True, slots=True)
class InspectEvaluator:
    """A SamplingClientEvaluator: runs tasks of inspect-ai and reports what their scorers do, as
    `<name>/<task>/<scorer>/<metric>`. A task that does not succeed is an error. Its logs are left in `log_dir`."""

    tasks: Sequence[InspectObject]  # Task objects, or what `inspect_ai.eval` takes: names, files
    renderer: Renderer
    log_dir: str
    max_tokens: int = MAX_TOKENS
    temperature: float = 1.0
    seed: int | None = None  # of the answers; None: fresh ones each time
    limit: int | None = None  # samples of each task
    name: str = "inspect"

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)  # refuses all others

    async def __call__(self, client: SamplingClient) -> dict[str, float]:
        model = inspect_model(
            client, self.renderer, max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed
        )
        logs = await _library("inspect_ai").eval_async(
            list(self.tasks), model=model, log_dir=self.log_dir, limit=self.limit
        )
        metrics: dict[str, float] = {}
        for log in logs:
            if log.status != "success" or log.results is None:
                raise RequestFailedError(f"the task {log.eval.task} of inspect-ai ended as {log.status}: {log.error}")
            for score in log.results.scores:
                for metric in score.metrics.values():
                    metrics[f"{self.name}/{log.eval.task}/{score.name}/{metric.name}"] = float(metric.value)
        return metrics


# ---- a request of inspect-ai -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Its messages to ours, our samples to its output."""

    client: SamplingClient
    renderer: Renderer
    max_tokens: int
    temperature: float
    seed: int | None

    async def generate(
        self, input: Sequence[InspectObject], tools: Sequence[InspectObject], config: InspectObject
    ) -> InspectObject:
        prompt = self.renderer.build_generation_prompt(self._chat(input, tools))
        num_choices = config.num_choices or 1
        response = await self.client.sample(prompt, num_choices, self._params(config, prompt))
        return self._output(prompt, response.sequences, config.stop_seqs or [])

    def _params(self, config: InspectObject, prompt: ModelInput) -> SamplingParams:
        for name in NOT_OFFERED:
            if getattr(config, name, None) not in (None, 0, {}):
                raise InvalidRequest(
                    f"sampling here has no {name}; leave it out of the task: {getattr(config, name)!r}"
                )
        own_seed = None if self.seed is None else seed_for(self.seed, prompt)
        given: dict[str, Any] = {
            "max_tokens": config.max_tokens or self.max_tokens,
            "temperature": self.temperature if config.temperature is None else config.temperature,
            "seed": own_seed if config.seed is None else config.seed,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "stop": self.renderer.get_stop_sequences(),
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def _chat(self, input: Sequence[InspectObject], tools: Sequence[InspectObject]) -> list[Message]:
        messages = [_message(each) for each in input]
        if not tools:
            return messages
        specs = [ToolSpec(tool.name, tool.description, tool.parameters.model_dump(exclude_none=True)) for tool in tools]
        begins = bool(messages) and messages[0]["role"] == "system"
        system = get_text_content(messages[0]) if begins else ""
        return [*self.renderer.create_conversation_prefix_with_tools(specs, system), *messages[begins:]]

    def _output(
        self, prompt: ModelInput, sequences: Sequence[SampledSequence], stop_seqs: Sequence[str]
    ) -> InspectObject:
        model = _library("inspect_ai.model")
        num_sampled = sum(len(sequence.tokens) for sequence in sequences)
        return model.ModelOutput(
            model=self.client.get_base_model(),
            choices=[self._choice(sequence, stop_seqs) for sequence in sequences],
            usage=model.ModelUsage(
                input_tokens=prompt.length, output_tokens=num_sampled, total_tokens=prompt.length + num_sampled
            ),
        )

    def _choice(self, sequence: SampledSequence, stop_seqs: Sequence[str]) -> InspectObject:
        model, tool = _library("inspect_ai.model"), _library("inspect_ai.tool")
        message, _ = self.renderer.parse_response(sequence.tokens)
        content: list[Any] = []
        for part in ensure_list(message["content"]):
            if part["type"] == "thinking":
                content.append(model.ContentReasoning(reasoning=part["thinking"]))
            elif part["type"] == "text":
                cut = until_stop(part["text"], stop_seqs)
                content.append(model.ContentText(text=part["text"] if cut is None else cut))
        calls = [
            tool.ToolCall(
                id=call.id or f"call_{number}",
                function=call.function.name,
                arguments=_arguments(call.function.arguments),
            )
            for number, call in enumerate(message.get("tool_calls", ()))
        ]
        text_alone = content[0].text if len(content) == 1 and content[0].type == "text" else content
        return model.ChatCompletionChoice(
            message=model.ChatMessageAssistant(
                content=text_alone or "",
                tool_calls=calls or None,
                model=self.client.get_base_model(),
                source="generate",
            ),
            stop_reason="tool_calls" if calls else "stop" if sequence.stop_reason == "stop" else "max_tokens",
        )


def _message(given: InspectObject) -> Message:
    """Of one of inspect-ai's; only text, and what it thought, can be read by the models here."""
    if not isinstance(given.content, str):
        for part in given.content:
            if part.type not in ("text", "reasoning"):
                raise InvalidRequest(f"only text can be put to this model; a message has a part of type {part.type!r}")
    message = Message(role=given.role, content=given.text)
    if given.role == "assistant" and given.tool_calls:
        message["tool_calls"] = [
            ToolCall(FunctionCall(call.function, json.dumps(call.arguments)), call.id) for call in given.tool_calls
        ]
    if given.role == "tool":
        if given.tool_call_id:
            message["tool_call_id"] = given.tool_call_id
        if given.function:
            message["name"] = given.function
    return message


def _arguments(text: str) -> Mapping[str, object]:
    read: object = json.loads(text)
    if not isinstance(read, dict):
        raise InvalidRequest(f"the arguments of a tool call must be an object: {text!r:.200}")
    return read  # pyright: ignore[reportUnknownVariableType]  what json gives


def _library(module: str) -> InspectObject:
    return import_extra(module, "inspect")
