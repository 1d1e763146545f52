"""Reinforcement learning over several turns: the model finds a hidden number by guessing, and learns to use what it is
told after each guess. Two phases, of which the first is optional: SUPERVISED, on games of a careless player, which show
how the game is played; and REINFORCEMENT. A game becomes one datum.

    stovetop run guess_number          1024 numbers, ten guesses, and a model from the hub; no games are shown
    stovetop run guess_number:small    20 numbers, told each time which are left, without a network

`rl_loop` shows the heart of the second phase as one flat loop, for games of one turn.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from stovetop.client import ServiceClient
from stovetop.kitchen import Finished, Phase, run_phases
from stovetop.kitchen.phases import check_phases, config_from
from stovetop.kitchen.workflows import REINFORCEMENT, SUPERVISED
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes.configs import PolicyLossConfig, RewardConfig, TrainingConfig, check_training
from stovetop.recipes.settings import Count, LearningRate, Positive, check_num_steps, check_rate
from stovetop.rules import Whole, number
from stovetop.tasks.guess_number import Hints, build_games, numbers, show_games
from stovetop.tracking.configs import MAY_CHANGE

Attention = Annotated[float, number(at_least=0, at_most=1)]


@dataclass(frozen=True, kw_only=True)
class Game(TrainingConfig):
    """What both phases have."""

    num_numbers: Annotated[int, Whole(2)] = 1024  # the hidden number is one of 0 to num_numbers - 1
    test_size: Count = 102  # numbers that are held out; 0: none
    max_turns: Positive = 10  # guesses in a game
    hints: Hints = "direction"  # what is told after a guess: higher or lower, or which numbers are left
    model_name: str = "Qwen/Qwen3.5-4B"


@dataclass(frozen=True, kw_only=True)
class PlayConfig(Game, RewardConfig, PolicyLossConfig):
    """That of the second phase, and of the whole."""

    log_path: str = field(default="runs/guess_number", metadata=MAY_CHANGE)
    groups_per_batch: Positive = 32
    group_size: Annotated[int, Whole(2)] = 8
    max_tokens: Positive = 64
    learning_rate: LearningRate = 3e-5
    lr_schedule: LRSchedule = "constant"
    eval_every: Count = field(default=5, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class Config(PlayConfig):
    num_games: Count = 0  # to learn from in the first phase; 0: there is none
    attention: Attention = 0.25  # how often the player of these games heeds what he was told
    games_batch_size: Positive = 16  # games a step
    games_learning_rate: LearningRate = 5e-4  # of the first phase; auto likewise
    games_num_epochs: Positive = 1  # passes over the games


@dataclass(frozen=True, kw_only=True)
class ShowConfig(Game):
    """That of the first phase."""

    num_games: Positive
    attention: Attention
    batch_size: Positive


def supervised(config: Config, done: Mapping[str, Finished]) -> ShowConfig | None:
    """Not run where no games are asked for."""
    if config.num_games == 0:
        return None
    return config_from(
        config,
        ShowConfig,
        batch_size=config.games_batch_size,
        learning_rate=config.games_learning_rate,
        warmup_steps=0,
        max_steps=None,
        num_epochs=config.games_num_epochs,
    )


def reinforcement(config: Config, done: Mapping[str, Finished]) -> PlayConfig:
    """From what the games taught, if there were any."""
    taught = {"load_checkpoint_path": done["supervised"].state_path} if "supervised" in done else {}
    return config_from(config, PlayConfig, **taught)


PHASES = (
    Phase("supervised", SUPERVISED.replace("load_dataset", show_games), supervised, columns=("train_mean_nll",)),
    Phase(
        "reinforcement",
        REINFORCEMENT.remove("load_problems").replace("build_env_group", build_games),
        reinforcement,
        columns=(
            "env/all/reward/total",
            "env/all/turns_per_episode",
            "env/all/malformed",
            "optim/entropy",
            "time/step",
            "test/env/all/reward/total",
        ),
    ),
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    check_training(
        config,
        lambda: check_phases(PHASES, config),
        lambda: check_numbers(config),
        lambda: check_rate(config.games_learning_rate, config.model_name),
    )


def check_numbers(config: Config) -> None:
    """Refuses fewer numbers than are held out, and a warm-up that is longer than the run on the others."""
    num = len(numbers(config.num_numbers, config.test_size).train)
    check_num_steps(num, config.groups_per_batch, config.num_epochs, config.max_steps, config.warmup_steps)


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    await run_phases(PHASES, config, service.at)


PRESETS = {
    # The games that are shown teach how to play, and little of how to win: their player heeds one hint in ten.
    "small": Config(
        num_numbers=20,
        test_size=4,
        max_turns=5,
        hints="list",
        model_name="smollm2",
        dtype="bfloat16",
        log_path="runs/guess_number_small",
        lora_rank=16,
        train_unembed=False,
        num_games=160,
        attention=0.1,
        games_batch_size=8,
        groups_per_batch=8,
        group_size=6,
        max_tokens=4,
        learning_rate=5e-4,
        num_epochs=9,
        max_steps=18,
        eval_every=9,
        save_every=9,
    ),
}


if __name__ == "__main__":
    asyncio.run(main(Config()))
