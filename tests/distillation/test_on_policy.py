import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.distillation.datasets import CompositeDataset, PromptOnlyDataset, SourcedGroupBuilder
from stovetop.distillation.on_policy import SourcedDatum, assemble_sourced_data, incorporate_teacher_kl
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture, resolved
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.advantages import compute_advantages
from stovetop.rl.data_processing import remove_constant_reward_groups, without_mask
from stovetop.rl.rollouts import MinViableGroup, do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.types import Env, EnvGroupBuilder, Trajectory, TrajectoryGroup, Transition
from stovetop.types import AdamParams, Datum, ModelInput

RENDERER = ChatTemplateRenderer(ByteTokenizer())


@dataclass
class Constant:
    """A teacher that gives every token the same logprob."""

    logprob: float

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        return resolved([None] + [self.logprob] * (prompt.length - 1))


@dataclass
class Fixed:
    """A teacher that knows two sequences, by their lengths."""

    by_length: dict[int, list[float]]

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        return resolved([None, *self.by_length[prompt.length]])


def datum(sampled: Sequence[float], mask: Sequence[float], dataset_index: int = 0) -> SourcedDatum:
    length = len(mask)
    inputs = {
        "target_tokens": [1] * length,
        "logprobs": np.float32(sampled),
        "advantages": np.zeros(length, np.float32),
        "mask": np.float32(mask),
    }
    return SourcedDatum(Datum(ModelInput.from_ints([1] * length), inputs), dataset_index)


# ---- golden numbers --------------------------------------------------------------------------------------------------


def test_the_gap_to_the_teacher_becomes_the_advantage_uncentred():
    data = [datum([0, -1, -2], [0, 1, 1]), datum([0, -3], [0, 1])]
    teacher = Fixed({4: [0.0, -1.5, -1.5], 3: [0.0, -2.0]})
    distilled, metrics = asyncio.run(incorporate_teacher_kl(data, [teacher], kl_penalty_coef=0.5))
    advantages = [one.loss_fn_inputs["advantages"].array.tolist() for one in distilled]
    assert advantages == [pytest.approx([0, -0.25, 0.25]), pytest.approx([0, 0.5])]
    assert metrics == pytest.approx({"teacher_kl": -1 / 3, "teacher_kl/dataset_0": -1 / 3})


def test_a_discount_gives_a_token_the_later_gaps_too():
    data = [datum([0, -1, -2], [0, 1, 1])]
    distilled, _ = asyncio.run(incorporate_teacher_kl(data, [Constant(-1.5)], kl_discount_factor=0.5))
    assert distilled[0].loss_fn_inputs["advantages"].tolist() == pytest.approx([0, -0.5 + 0.5 * 0.5, 0.5])


def test_a_student_that_is_its_teacher_gains_nothing():
    distilled, metrics = asyncio.run(incorporate_teacher_kl([datum([-1, -1], [0, 1])], [Constant(-1.0)]))
    assert distilled[0].loss_fn_inputs["advantages"].tolist() == [0, 0]
    assert metrics["teacher_kl"] == 0


def test_without_a_token_to_measure_on_there_is_nothing_to_report():
    assert asyncio.run(incorporate_teacher_kl([datum([0, 0], [0, 0])], [Constant(-1.0)])).metrics == {}


# ---- whose teacher it is ---------------------------------------------------------------------------------------------


def test_each_datum_is_scored_by_the_teacher_of_its_dataset():
    data = [datum([-1], [1], 1), datum([-1], [1], 0), datum([-1], [1], 1)]
    distilled, metrics = asyncio.run(incorporate_teacher_kl(data, [Constant(-1.0), Constant(-4.0)]))
    assert [one.loss_fn_inputs["advantages"].tolist() for one in distilled] == [[-3], [0], [-3]]
    assert metrics == {"teacher_kl": 2, "teacher_kl/dataset_0": 0, "teacher_kl/dataset_1": 3}


@dataclass(frozen=True)
class Broken(EnvGroupBuilder):
    """A group that can never be played."""

    async def make_envs(self) -> Sequence[Env]:
        raise RuntimeError("no room")


@dataclass
class WithBroken:
    """A dataset whose batches begin with a group that fails."""

    rest: PromptOnlyDataset

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [Broken(), *self.rest.get_batch(index)]

    def __len__(self) -> int:
        return len(self.rest)


def prompts(name: str, count: int, group_size: int = 2) -> PromptOnlyDataset:
    chats = [[Message(role="user", content=f"{name}{index}")] for index in range(count)]
    return PromptOnlyDataset(chats, count, RENDERER, group_size=group_size)


def test_after_a_failed_group_every_datum_keeps_its_own_teacher(tmp_path):
    composite = CompositeDataset([WithBroken(prompts("a", 1)), prompts("b", 2)], [2, 2])

    async def play() -> list[SourcedDatum]:
        client = await service.create_sampling_client(base_model="any/student")
        policy = SamplingPolicy(client, max_tokens=4, seed=0)
        rollouts = await do_rollouts(composite.get_batch(0), policy, MinViableGroup(max_retries=0))
        assert rollouts.num_groups_skipped == 1
        groups_P = [group for _, group in rollouts.owned_groups_P]
        return assemble_sourced_data(rollouts.owned_groups_P, compute_advantages(groups_P))

    with recording.open_service(tmp_path) as service:
        sourced = asyncio.run(play())
    asked = [ByteTokenizer().decode(one.datum.model_input.to_ints()).split("user\n")[1][0] for one in sourced]
    assert asked == ["a", "a", "b", "b", "b", "b"]
    assert [one.dataset_index for one in sourced] == [0, 0, 1, 1, 1, 1]


def group(*rewards: float) -> TrajectoryGroup:
    one = ModelInput.from_ints([1])
    trajectories = [
        Trajectory([Transition(one, TokensWithLogprobs([2], [-1.0]), reward, True)], one) for reward in rewards
    ]
    return TrajectoryGroup(trajectories, [0.0] * len(rewards), [{}] * len(rewards))


def test_a_filtered_group_takes_its_dataset_along():
    owned = [(SourcedGroupBuilder(Broken(), 0), group(0, 0)), (SourcedGroupBuilder(Broken(), 1), group(0, 1))]
    kept = remove_constant_reward_groups(owned)
    sourced = assemble_sourced_data(kept, compute_advantages([one for _, one in kept]))
    assert [one.dataset_index for one in sourced] == [1, 1]


def test_a_dataset_without_a_teacher_is_refused_by_its_index():
    with pytest.raises(InvalidRequest, match=r"there are 1, and data of datasets \[2\]"):
        asyncio.run(incorporate_teacher_kl([datum([0, -1], [0, 1], dataset_index=2)], [Constant(-1.0)]))


def test_groups_of_no_dataset_are_refused():
    with pytest.raises(InvalidRequest, match="come from a CompositeDataset"):
        assemble_sourced_data([(Broken(), group(0))], [[0.0]])


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reverse_kl_of_what_a_student_says_falls_by_half(tmp_path, seed):
    composite = CompositeDataset([prompts("a", 1, 64), prompts("b", 1, 64)], [1, 1])

    async def train() -> list[dict[str, float]]:
        teacher = await service.create_sampling_client(base_model="any/teacher")
        history = []
        for step in range(8):
            sampler = await trainer.save_weights_and_get_sampling_client()
            policy = SamplingPolicy(sampler, max_tokens=1, seed=1000 * seed + step)
            owned_P = (await do_rollouts(composite.get_batch(0), policy)).owned_groups_P
            sourced = assemble_sourced_data(owned_P, compute_advantages([group for _, group in owned_P]))
            data_D, metrics = await incorporate_teacher_kl(sourced, [teacher, teacher])
            history.append(metrics)
            trainer.forward_backward(without_mask(data_D), "importance_sampling")
            await trainer.optim_step(AdamParams(learning_rate=0.3))
        return history

    with recording.open_service(tmp_path, seed=seed) as service:
        trainer = service.create_lora_training_client("any/student").result()
        history = asyncio.run(train())
    first, last = history[0]["teacher_kl"], np.mean([metrics["teacher_kl"] for metrics in history[-3:]])
    assert last < first / 2
