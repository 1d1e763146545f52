"""How far a student is from its teachers on prompts that are held out."""

from collections.abc import Sequence
from dataclasses import dataclass

from stovetop.client import SamplingClient
from stovetop.distillation.on_policy import assemble_sourced_data, incorporate_teacher_kl
from stovetop.rl.advantages import compute_advantages
from stovetop.rl.rollout_record import RolloutRecord
from stovetop.rl.rollouts import RetryOnFailure, do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.types import EnvGroupBuilder


@dataclass(frozen=True, slots=True)
class TeacherKLEvaluator:
    """A SamplingClientEvaluator: the student answers, and `test/teacher_kl` (`test/teacher_kl/dataset_<i>`) is the mean
    of its logprobs minus its teacher's, as `on_policy.incorporate_teacher_kl` has it in training."""

    builders: Sequence[EnvGroupBuilder]  # of a CompositeDataset
    teachers: Sequence[SamplingClient]
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0  # the same in every evaluation
    record: RolloutRecord | None = None  # keeps the rollouts of each round; None: they go

    async def __call__(self, client: SamplingClient) -> dict[str, float]:
        policy = SamplingPolicy(client, self.max_tokens, self.temperature, seed=self.seed)
        rollouts = await do_rollouts(self.builders, policy, RetryOnFailure())
        if self.record is not None:
            await self.record.keep_evaluation("test", rollouts)
        owned_P = rollouts.owned_groups_P
        sourced_D = assemble_sourced_data(owned_P, compute_advantages([group for _, group in owned_P]))
        _, metrics = await incorporate_teacher_kl(sourced_D, self.teachers)
        return {f"test/{name}": value for name, value in metrics.items()}
