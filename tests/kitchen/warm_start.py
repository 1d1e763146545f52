"""A recipe of two phases for tests: supervised learning, then reinforcement from its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kitchen.stages.configs import RLConfig, SupervisedConfig
from stovetop.client import ServiceClient
from stovetop.kitchen import Finished, Phase, RunConfig, run_phases
from stovetop.kitchen.workflows import REINFORCEMENT, SUPERVISED
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """That of the whole."""

    log_path: str = field(default="runs/warm_start", metadata=MAY_CHANGE)  # of the whole
    chats: str = "sample:chats"  # to learn from first
    problems: str = "sample:arithmetic"  # to learn from then
    model_name: str = "any/model"
    start_path: str | None = None  # weights that are there already; None: learnt from chats
    chats_learning_rate: float = 0.5
    lr_schedule: str = "constant"
    max_steps: int = field(default=3, metadata=HOW_LONG)  # of the second phase
    save_every: int = field(default=2, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class ChatsConfig(SupervisedConfig):
    """That of the first phase."""

    save_every: int = field(default=2, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class ProblemsConfig(RLConfig):
    """That of the second."""

    max_steps: int | None = field(default=None, metadata=HOW_LONG)
    save_every: int = field(default=2, metadata=MAY_CHANGE)


def supervised(config: Config, done: Mapping[str, Finished]) -> ChatsConfig | None:
    """Not run where there are weights already."""
    if config.start_path is not None:
        return None
    return ChatsConfig(
        log_path="",
        dataset=config.chats,
        model_name=config.model_name,
        num_epochs=1,
        learning_rate=config.chats_learning_rate,
        save_every=config.save_every,
    )


def reinforcement(config: Config, done: Mapping[str, Finished]) -> ProblemsConfig:
    """From what is there, or from what was learnt."""
    return ProblemsConfig(
        log_path="",
        dataset=config.problems,
        model_name=config.model_name,
        load_checkpoint_path=config.start_path or done["supervised"].state_path,
        groups_per_batch=2,
        group_size=3,
        num_epochs=3,
        max_steps=config.max_steps,
        max_steps_off_policy=1,
        save_every=config.save_every,
    )


PHASES = (
    Phase("supervised", SUPERVISED, supervised, columns=("train_mean_nll",)),
    Phase("reinforcement", REINFORCEMENT, reinforcement, columns=("env/all/reward/total",)),
)


async def main(config: Config) -> None:
    """Runs both."""
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    await run_phases(PHASES, config, service.at)
