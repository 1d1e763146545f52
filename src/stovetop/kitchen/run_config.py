"""The config fields that no stage reads: those of the run and of the service, which a recipe opens before its workflow
runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from stovetop.client import ServiceClient
from stovetop.retention import KeepCheckpoints
from stovetop.rules import Whole, number
from stovetop.runs import BehaviorIfExists
from stovetop.tracking.configs import MAY_CHANGE
from stovetop.tracking.waiting import STALL_AFTER_S

ENGINE_FIELDS = ("device", "dtype", "deterministic", "threads")  # of an engine in this process

Seconds = Annotated[float, number(above=0)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The base of a recipe's config. All other fields are read by a stage, a condition or the depth of the loop."""

    log_path: str = field(metadata=MAY_CHANGE)  # the run directory; again: it goes on
    behavior_if_exists: BehaviorIfExists = field(default="resume", metadata=MAY_CHANGE)  # of a run that is there
    base_url: str | None = field(default=None, metadata=MAY_CHANGE)  # None: in this process; recording: a fake; a URL
    stall_after_s: Seconds = field(default=STALL_AFTER_S, metadata=MAY_CHANGE)  # with no progress, until it says why
    keep_checkpoints: KeepCheckpoints = field(default="2", metadata=MAY_CHANGE)  # 2, "2 lowest:METRIC", all
    trackers: str = field(default="", metadata=MAY_CHANGE)  # wandb, trackio, mlflow, tensorboard; NAME:PROJECT, several
    enable_trace: bool = field(default=False, metadata=MAY_CHANGE)  # trace.json, for Perfetto: what ran when
    device: str | None = None  # of an engine in this process, as the next three; None: its default
    dtype: Literal["float32", "bfloat16"] | None = None  # of the base weights
    deterministic: bool | None = None  # sampler and trainer agree to the bit; True: refused where they cannot
    threads: Annotated[int, Whole(1, 1024)] | None = field(default=None, metadata=MAY_CHANGE)  # to compute with

    def run_options(self) -> dict[str, Any]:
        """Keywords of `open_run`."""
        return {
            "behavior_if_exists": self.behavior_if_exists,
            "stall_after_s": self.stall_after_s,
            "keep_checkpoints": self.keep_checkpoints,
            "trackers": self.trackers,
            "enable_trace": self.enable_trace,
        }

    def open_service(self, storage: str | Path | None = None) -> ServiceClient:
        """The service that these fields name. It saves under `storage`; None: into the folder of the run."""
        return ServiceClient(self.base_url, storage=storage or self.log_path, **self.engine_options())

    def engine_options(self) -> dict[str, Any]:
        """Those that are set, as keywords of `stovetop.ServiceClient`."""
        options = {name: getattr(self, name) for name in ENGINE_FIELDS}
        return {name: value for name, value in options.items() if value is not None}
