"""The config fields that no stage reads: those of the run and of the service, which a recipe opens before its workflow
runs."""

from dataclasses import dataclass, field

from stovetop.runs import BehaviorIfExists
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The base of a recipe's config. All other fields are read by a stage, a condition or the depth of the loop."""

    log_path: str = field(metadata=MAY_CHANGE)  # the run directory; again: it goes on
    behavior_if_exists: BehaviorIfExists = field(default="resume", metadata=MAY_CHANGE)
    base_url: str | None = field(default=None, metadata=MAY_CHANGE)  # None: train in this process
