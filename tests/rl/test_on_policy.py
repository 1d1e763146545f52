"""From rollouts to a gradient and back, on the recording backend: the parts of this package together."""

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_lowercase

import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.advantages import compute_advantages
from stovetop.rl.data_processing import assemble_training_data, without_mask
from stovetop.rl.metrics import compute_kl_sample_train
from stovetop.rl.problem_env import ProblemEnv, ProblemGroupBuilder, answer_builders
from stovetop.rl.rollouts import do_group_rollout, do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.types import AdamParams

RENDERER = ChatTemplateRenderer(ByteTokenizer())
ROWS = [{"question": f"Spell {letter}", "answer": letter} for letter in "abcd"]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.3])
def test_on_policy_the_trainer_sees_the_logprobs_of_the_sampler_at_any_temperature(tmp_path: Path, temperature: float):
    async def gap() -> dict[str, float]:
        sampler = await trainer.save_weights_and_get_sampling_client()
        policy = SamplingPolicy(sampler, max_tokens=4, temperature=temperature, seed=0)
        rollouts = await do_rollouts(answer_builders(ROWS, RENDERER, 3), policy)
        groups_P = [group for _, group in rollouts.owned_groups_P]
        data_D, metadata_D = assemble_training_data(groups_P, compute_advantages(groups_P))
        assert len(data_D) == len(metadata_D) == 4 * 3
        config = {"temperature": temperature}
        output = await trainer.forward_backward(without_mask(data_D), "importance_sampling", config)
        await trainer.optim_step(AdamParams(learning_rate=0.0))
        return compute_kl_sample_train(data_D, [datum["logprobs"] for datum in output.loss_fn_outputs])

    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/name").result()
        metrics = asyncio.run(gap())
        [sent] = [call.arguments["data"] for call in service.calls if call.verb == "forward_backward"]
    assert abs(metrics["optim/kl_sample_train_v1"]) < 1e-6
    assert metrics["optim/kl_sample_train_v2"] < 1e-12
    assert metrics["optim/entropy"] > 0
    assert all(sorted(datum.loss_fn_inputs) == ["advantages", "logprobs", "target_tokens"] for datum in sent)


@dataclass(frozen=True)
class SmallLetter:
    """Right is any answer of one small letter."""

    def get_question(self) -> str:
        return "?"

    def check_answer(self, text: str) -> bool:
        return text in ascii_lowercase

    def check_format(self, text: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "a"


def test_what_is_rewarded_becomes_more_likely(tmp_path: Path):
    builder = ProblemGroupBuilder(partial(ProblemEnv, SmallLetter(), RENDERER, truncated="graded"), num_envs=16)

    async def train() -> list[float]:
        mean_rewards: list[float] = []
        for step in range(20):
            sampler = await trainer.save_weights_and_get_sampling_client()
            group = await do_group_rollout(builder, SamplingPolicy(sampler, max_tokens=1, seed=step))
            mean_rewards.append(sum(group.get_total_rewards()) / 16)
            data_D, _ = assemble_training_data([group], compute_advantages([group]))
            trainer.forward_backward(without_mask(data_D), "importance_sampling")
            await trainer.optim_step(AdamParams(learning_rate=0.3))
        return mean_rewards

    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/name").result()
        mean_rewards = asyncio.run(train())
    assert sum(mean_rewards[:5]) / 5 < 0.5
    assert sum(mean_rewards[-5:]) / 5 > 0.8
