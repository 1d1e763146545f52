"""Problems that a policy solves: any environment of `rl`, played as in training and scored by its own grader."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stovetop.client import SamplingClient
from stovetop.evaluation.estimates import Estimate
from stovetop.evaluation.example_set import Reported
from stovetop.evaluation.rows import ExampleRow, Sample
from stovetop.rl.metrics import dict_mean
from stovetop.rl.rollouts import do_group_rollout
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.types import EnvGroupBuilder, Trajectory
from stovetop.seeds import seed_for
from stovetop.tokenizing import Tokenizer
from stovetop.types import SamplingParams

CUT_OFF = "cut_off"  # the score of a sample: 1 where max_tokens ended an answer of it
REWARD = "reward"


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """An ExampleSet. A sample is one episode; its scores are the environment's metrics, `reward` and `cut_off`. The
    group of a builder is the samples of its example, drawn in one request."""

    name: str
    builders: Mapping[str, EnvGroupBuilder]  # by id of the example
    tokenizer: Tokenizer  # answers are stored as text
    max_tokens: int  # of an answer
    reported: Reported
    temperature: float = 0.0

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)  # refuses all others

    @property
    def ids(self) -> Sequence[str]:
        return list(self.builders)

    async def measure(self, id: str, client: SamplingClient, seed: int) -> Sequence[Sample]:
        policy = SamplingPolicy(client, self.max_tokens, self.temperature, seed_for(seed, id))
        group = await do_group_rollout(self.builders[id], policy)
        played = zip(group.trajectories_G, group.get_total_rewards(), group.metrics_G, strict=True)
        return [self._sample(trajectory, reward, metrics) for trajectory, reward, metrics in played]

    def metrics(self, rows: Sequence[ExampleRow]) -> dict[str, Estimate]:
        return self.reported.metrics(rows)

    def _sample(self, trajectory: Trajectory, reward: float, of_group: Mapping[str, float]) -> Sample:
        turns = trajectory.transitions
        scores = dict_mean([*(turn.metrics for turn in turns), of_group])
        is_cut_off = any(turn.ac.stop_reason == "length" for turn in turns)
        answers = [self.tokenizer.decode(turn.ac.tokens) for turn in turns]
        return Sample(
            {**scores, REWARD: reward, CUT_OFF: float(is_cut_off)}, "\n".join(answers), turns[-1].ac.stop_reason
        )
