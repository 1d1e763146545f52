"""A recipe of the tests, to be interrupted: REINFORCEMENT on the recording backend, where each sample takes a while."""

from dataclasses import dataclass

from kitchen.stages.configs import RLConfig
from stovetop.backends import recording
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.runs import open_run

WORKFLOW = REINFORCEMENT
SECONDS_A_SAMPLE = 0.05


@dataclass(frozen=True, kw_only=True)
class Config(RLConfig):
    max_steps_off_policy: int = 1


async def main(config: Config) -> None:
    with (
        recording.open_service(
            config.log_path, latency_s=lambda verb: SECONDS_A_SAMPLE if verb == "sample" else 0.0
        ) as service,
        open_run(config.log_path, config, columns=["lag"]) as run,
    ):
        await WORKFLOW.run(config, service=service, run=run)
