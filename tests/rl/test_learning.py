"""Reinforcement learning, all of it together: what is rewarded becomes more likely, on a transformer and on the
recording backend. Each test is a whole run, and takes about half a second."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest

from costly import slow_but
from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import SamplingClient, TrainingClient
from stovetop.completers import StopCondition
from stovetop.rl.advantages import CENTRED, GAE, Centred, Estimator, LeaveOneOut, Standardised
from stovetop.rl.rollouts import do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.steps import KLPenalty, ppo_update, prepare_minibatch, train_step
from stovetop.rl.types import Action, Env, EnvGroupBuilder, Observation, StepResult
from stovetop.types import ModelInput
from tiny_service import TinyService, open_tiny

SMALL_LETTERS = frozenset(ascii_lowercase.encode())


@dataclass
class Letters:
    """Two turns; the reward of each is the share of small letters in its answer."""

    shown: list[int]
    num_turns: int = 2
    turn: int = field(default=0)

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return ModelInput.from_ints(self.shown), [ByteTokenizer.eos_token_id]

    async def step(self, action: Action) -> StepResult:
        self.turn += 1
        self.shown = [*self.shown, *action.tokens, ord(">")]
        reward = sum(token in SMALL_LETTERS for token in action.tokens) / len(action.tokens)
        return StepResult(reward, self.turn == self.num_turns, ModelInput.from_ints(self.shown), [])


@dataclass(frozen=True)
class LettersGroup(EnvGroupBuilder):
    prompt: bytes

    async def make_envs(self) -> list[Env]:
        return [Letters(list(self.prompt)) for _ in range(8)]


BUILDERS = [LettersGroup(prompt) for prompt in (b"A>", b"B>")]
NUM_STEPS = 12


async def mean_rewards(
    trainer: TrainingClient,
    base: SamplingClient,
    *,
    seed: int,
    estimator: Estimator = CENTRED,
    loss_fn: str = "importance_sampling",
    kl_coef: float = 0,
    learning_rate: float = 0.6,
) -> list[float]:
    rewards: list[float] = []
    for step in range(NUM_STEPS):
        sampler = await trainer.save_weights_and_get_sampling_client()
        rollouts = await do_rollouts(BUILDERS, SamplingPolicy(sampler, max_tokens=2, seed=100 * seed + step))
        penalty = KLPenalty(base, kl_coef) if kl_coef else None
        batch = await prepare_minibatch(rollouts.owned_groups_P, estimator=estimator, kl_penalty=penalty)
        rewards.append(batch.metrics["env/all/reward/total"] / 2)
        if loss_fn == "ppo":
            await ppo_update(batch.data_D, trainer, 0.2, ppo_epochs=2, num_substeps=2)
        else:
            await train_step(batch.data_D, trainer, learning_rate, loss_fn=loss_fn)
    return rewards


def learn(folder: Path, seed: int, estimator: Estimator, loss_fn: str, kl_coef: float = 0) -> list[float]:
    with recording.open_service(folder, seed=seed) as service:
        trainer = service.create_lora_training_client("any/name", seed=seed).result()
        base = service.create_sampling_client(base_model="any/name").result()
        return asyncio.run(
            mean_rewards(trainer, base, seed=seed, estimator=estimator, loss_fn=loss_fn, kl_coef=kl_coef)
        )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyService]:
    with open_tiny(tmp_path_factory.mktemp("tiny")) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises_on_a_transformer(tiny: TinyService, seed: int):
    trainer = tiny.service.create_lora_training_client(tiny.model, rank=8, seed=seed).result()
    base = tiny.service.create_sampling_client(base_model=tiny.model).result()
    rewards = asyncio.run(mean_rewards(trainer, base, seed=seed, learning_rate=0.03))
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.9


@pytest.mark.parametrize("estimator", slow_but(2, [Centred(), GAE(), Standardised(), LeaveOneOut()]))
def test_the_reward_rises_under_every_estimator(tmp_path: Path, estimator: Estimator):
    rewards = learn(tmp_path, 0, estimator, "importance_sampling")
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3


def test_the_reward_rises_by_ppo_and_a_strong_penalty_holds_the_policy_where_it_was(tmp_path: Path):
    free = learn(tmp_path / "free", 0, Centred(), "ppo")
    assert np.mean(free[-3:]) > np.mean(free[:3]) + 0.3
    held = learn(tmp_path / "held", 0, Centred(), "ppo", kl_coef=5.0)
    assert np.mean(held[-3:]) < np.mean(free[-3:]) - 0.2
