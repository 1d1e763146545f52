"""Tasks of verifiers on the fake model. The package brings forty others, among them two providers' SDKs, so .ci/run
installs it in a folder of its own: without it these are skipped. It imports a package `renderers`, as a folder of these
tests is called: so what needs it runs in processes of its own."""

import sys
from importlib.util import find_spec

import pytest

from processes import run_python
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import MissingExtra
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.tasks.verifiers_tasks import verifiers_builders

HAS_VERIFIERS = find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(
    not HAS_VERIFIERS, reason="needs verifiers, a large package: pip install verifiers"
)

LETTERS = """
import asyncio

import verifiers.v1 as vf
from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.errors import InvalidRequest
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.rollouts import do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.steps import prepare_minibatch, train_step
from stovetop.tasks.verifiers_tasks import verifiers_builders

RENDERER = ChatTemplateRenderer(ByteTokenizer())


class Letters(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def small(self, trace: vf.Trace) -> float:
        said = trace.last_reply
        return sum(letter.islower() and letter.isascii() for letter in said) / max(1, len(said))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Tasks(vf.Taskset[Letters, vf.TasksetConfig]):
    def load(self):
        for name in "AB":
            yield Letters(vf.TaskData(prompt=name, system_prompt="Small letters."), self.config.task)


TASKS = Tasks(vf.TasksetConfig())


def refusal(**made):
    kind = type("Letters", (Letters,), made)
    try:
        verifiers_builders([kind(vf.TaskData(prompt="A"))], RENDERER, 1)
    except InvalidRequest as error:
        return str(error)
"""


def run(program: str) -> None:
    run_python("-c", LETTERS + program, check=True)


@needs_verifiers
@pytest.mark.slow
def test_the_reward_is_that_of_the_task_and_its_scores_are_metrics():
    """Seconds: the package is imported."""
    run("""
[builder, _] = verifiers_builders(TASKS, RENDERER, 2)
[env, _] = asyncio.run(builder.make_envs())
observation, [stop] = asyncio.run(env.initial_observation())
shown = RENDERER.tokenizer.decode(observation.to_ints())
assert shown.index("Small letters.") < shown.index("A"), shown
said = [*RENDERER.tokenizer.encode("abC", add_special_tokens=False), stop]
result = asyncio.run(env.step(TokensWithLogprobs(said, None)))
assert abs(result.reward - 2 * 2 / 3) < 1e-9, result
assert result.metrics == {"small": 2 / 3, "length": 3.0}, result
assert len(verifiers_builders(TASKS, RENDERER, 1, limit=1)) == 1
""")


@needs_verifiers
@pytest.mark.slow
def test_a_model_trains_on_a_task_until_it_does_better():
    """Likewise."""
    run("""
async def rewards(client):
    found = []
    for step in range(10):
        sampler = await client.save_weights_and_get_sampling_client()
        rollouts = await do_rollouts(builders, SamplingPolicy(sampler, max_tokens=2, seed=step))
        batch = await prepare_minibatch(rollouts.owned_groups_P)
        found.append(batch.metrics["env/all/reward/total"])
        await train_step(batch.data_D, client, 0.6)
    return found


builders = verifiers_builders(TASKS, RENDERER, 8)
with recording.open_service() as service:
    found = asyncio.run(rewards(service.create_lora_training_client("some/model", rank=4, seed=0).result()))
assert sum(found[-3:]) > sum(found[:3]) + 0.3, found
""")


@needs_verifiers
@pytest.mark.slow
def test_a_task_that_needs_more_than_a_conversation_is_refused():
    """Likewise."""
    run("""
assert "task 0 has or needs a container; only tasks of one turn" in refusal(NEEDS_CONTAINER=True)
assert "has or needs setup;" in refusal(setup=lambda self, trace, runtime: None)
assert "has or needs toolsets;" in refusal(toolsets=classmethod(lambda cls, config: ["search"]))


@vf.reward
async def by_tests(self, trace, runtime):
    return 1.0


assert "a runtime for its reward by_tests" in refusal(by_tests=by_tests)
assert "has or needs scoring that comes later;" in refusal(scoring_deferred=True)


class Reads(vf.Judge):
    async def score(self, task, trace, runtime):
        return 1.0


assert "a runtime for its judge reads" in refusal(plugged_judges=lambda self: [Reads()])
assert "task 0 has no reward" in refusal(small=None)
try:
    verifiers_builders([], RENDERER, 1)
except InvalidRequest as error:
    assert "there is no task" in str(error)
""")


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(MissingExtra, match=r"stovetop\[verifiers\]"):
        verifiers_builders([object()], ChatTemplateRenderer(ByteTokenizer()), 1)
