"""How well a policy does on held-out problems. When an evaluator runs, and what else it may be, is in evaluators.

Shape suffixes: `P` problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stovetop.client import SamplingClient
from stovetop.rl.metrics import compute_trajectory_metrics
from stovetop.rl.rollout_record import RolloutRecord
from stovetop.rl.rollouts import do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.types import EnvGroupBuilder, RLDataset
from stovetop.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RLTestSetEvaluator:
    """A SamplingClientEvaluator: plays every group once, all at the same time, and reports what
    `compute_trajectory_metrics` says of them under `<name>/`. The first failure is raised: a test set with holes in it
    would give numbers that do not compare."""

    dataset: RLDataset | Sequence[EnvGroupBuilder]  # all batches of a test set, or its groups
    max_tokens: int
    temperature: float = 1.0
    name: str = "test"
    seed: int | None = None  # of the answers; None: fresh ones each time
    record: RolloutRecord | None = None  # keeps the rollouts of each round, and makes pages of them; None: they go

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)  # refuses all others

    async def __call__(self, client: SamplingClient) -> dict[str, float]:
        if isinstance(self.dataset, Sequence):
            builders_P = self.dataset
        else:
            builders_P = [builder for index in range(len(self.dataset)) for builder in self.dataset.get_batch(index)]
        policy = SamplingPolicy(client, self.max_tokens, self.temperature, self.seed)
        rollouts = await do_rollouts(builders_P, policy)
        groups_P = [group for _, group in rollouts.owned_groups_P]
        if self.record is not None:
            await self.record.keep_evaluation(self.name, rollouts)
        metrics = compute_trajectory_metrics(groups_P, [builder.logging_tags() for builder in builders_P])
        return {f"{self.name}/{name}": value for name, value in metrics.items()}
