"""What several proofs measure alike."""

from collections.abc import Callable, Sequence
from pathlib import Path

from stovetop.checkpoints import get_last_checkpoint
from stovetop.client import SamplingClient
from stovetop.model_families import recommended_renderer_name
from stovetop.renderers import get_renderer
from stovetop.renderers.base import Renderer
from stovetop.rl.evaluation import RLTestSetEvaluator
from stovetop.rl.types import EnvGroupBuilder
from stovetop.runs import load

SEED = 10_000  # of the answers that are measured, whatever the run's own


def first_and_last(folder: Path, metric: str) -> dict[str, float]:
    """`before` and `after` of a metric that the run in this folder measured before its first step and at its end."""
    values = load(folder).series(metric).values
    return {"before": values[0], "after": values[-1]}


def final_weights(folder: Path) -> str:
    """Of the run in this folder, which is complete, to sample from: the path of a sampling client."""
    last = get_last_checkpoint(folder)
    assert last is not None, f"no checkpoint in {folder}"
    assert last.final, f"the last checkpoint of {folder} is not its final one: {last.name}"
    assert last.sampler_path is not None
    return last.sampler_path


def own_renderer(client: SamplingClient) -> Renderer:
    """The one recommended for its model."""
    tokenizer = client.get_tokenizer()
    return get_renderer(recommended_renderer_name(tokenizer), tokenizer)


async def played(
    client: SamplingClient, groups: Sequence[EnvGroupBuilder], max_tokens: int, temperature: float = 1.0
) -> dict[str, float]:
    """How held-out episodes go, once for each environment of these groups: the metrics of a test set, without its name.
    `env/all/correct` is the accuracy where an episode is one problem, `env/all/reward/total` the mean reward."""
    evaluate = RLTestSetEvaluator(groups, max_tokens, temperature, seed=SEED)
    return {name.removeprefix("test/"): value for name, value in (await evaluate(client)).items()}


def best_constant(answers: Sequence[str], equal: Callable[[str, str], bool] = str.__eq__) -> float:
    """The share that one and the same answer to all of these problems would get right: of the best one there is among
    their reference answers."""
    return max(sum(equal(answer, guess) for answer in answers) for guess in set(answers)) / len(answers)
