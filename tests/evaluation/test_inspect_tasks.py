"""Tasks of inspect-ai on the fake model. The package brings forty others, so .ci/run installs it in a folder of its
own; without it these are skipped."""

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import SamplingClient, ServiceClient
from stovetop.errors import InvalidRequest, MissingExtra
from stovetop.evaluation.inspect_tasks import InspectEvaluator, inspect_model
from stovetop.renderers.template import ChatTemplateRenderer

HAS_INSPECT = find_spec("inspect_ai") is not None
needs_inspect = pytest.mark.skipif(not HAS_INSPECT, reason="needs inspect-ai, a large package: pip install inspect-ai")
RENDERER = ChatTemplateRenderer(ByteTokenizer())


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="some/model").result()


def spelling(target: Sequence[str], **config: Any) -> Any:
    """A task of three letters, of which those in `target` are right answers."""
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, system_message

    samples = [Sample(input=f"Spell {letter}", target=list(target)) for letter in "abc"]
    return Task(
        dataset=samples, solver=[system_message("One byte."), generate()], scorer=includes(), name="spelling",
        config=GenerateConfig(**config),
    )  # fmt: skip


def evaluated(task: Any, sampler: SamplingClient, folder: Path) -> dict[str, float]:
    return asyncio.run(InspectEvaluator([task], RENDERER, str(folder), max_tokens=3, seed=1)(sampler))


@needs_inspect
def test_a_task_is_solved_and_scored_by_what_the_client_samples(sampler: SamplingClient, tmp_path: Path):
    printable = [chr(code) for code in range(33, 127)]
    right, wrong = evaluated(spelling(printable), sampler, tmp_path), evaluated(spelling(["é!"]), sampler, tmp_path)
    assert right["inspect/spelling/includes/accuracy"] > 0.5
    assert wrong["inspect/spelling/includes/accuracy"] == 0
    assert "inspect/spelling/includes/stderr" in right
    assert len(list(tmp_path.glob("*.eval"))) == 2


@needs_inspect
def test_what_a_task_asks_for_wins_and_what_sampling_does_not_have_is_refused(
    service: ServiceClient, sampler: SamplingClient, tmp_path: Path
):
    evaluated(spelling(["x"], max_tokens=2, temperature=0.5, seed=7), sampler, tmp_path)
    asked = [call.arguments for call in service.calls if call.verb == "sample"]  # pyright: ignore[reportAttributeAccessIssue]  of the recording service
    params = {(each["sampling_params"].max_tokens, each["sampling_params"].temperature) for each in asked}
    assert (params, {each["sampling_params"].seed for each in asked}) == ({(2, 0.5)}, {7})
    with pytest.raises(InvalidRequest, match="sampling here has no frequency_penalty"):
        _generate(sampler, [], frequency_penalty=0.5)


def _generate(sampler: SamplingClient, messages: Sequence[Any], tools: Sequence[Any] = (), **config: Any) -> Any:
    from inspect_ai.model import GenerateConfig

    api = inspect_model(sampler, RENDERER, max_tokens=8, seed=3).api
    return asyncio.run(api.generate(list(messages), list(tools), "auto", GenerateConfig(**config)))


@needs_inspect
def test_messages_go_there_and_back(sampler: SamplingClient):
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, ContentImage

    chat = [ChatMessageSystem(content="s"), ChatMessageUser(content="u"), ChatMessageAssistant(content="a"),
            ChatMessageUser(content="v")]  # fmt: skip
    output = _generate(sampler, chat, num_choices=2)
    assert len(output.choices) == 2
    assert all(isinstance(choice.message.content, str) for choice in output.choices)
    assert {choice.stop_reason for choice in output.choices} <= {"stop", "max_tokens"}
    assert output.usage.total_tokens == output.usage.input_tokens + output.usage.output_tokens
    [said, *_] = (choice.message.content for choice in output.choices)
    again = _generate(sampler, chat, num_choices=2, stop_seqs=[said[1]])
    assert again.choices[0].message.content == said[: said.index(said[1])]
    with pytest.raises(InvalidRequest, match="only text can be put to this model"):
        _generate(sampler, [ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA==")])])


def test_without_the_package_its_extra_is_named(sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "inspect_ai.model", None)
    with pytest.raises(MissingExtra, match=r"stovetop\[inspect\]"):
        inspect_model(sampler, RENDERER)
