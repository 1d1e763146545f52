"""Services and programs that show runs: W&B, Trackio, MLflow, TensorBoard. What one has to do, and which there are.

    trackers=wandb                      the project is "stovetop"
    trackers="wandb:mine tensorboard"   several; behind the colon, the project, for MLflow also the server's address

The record of a run is in its folder; a tracker gets a copy (`sending.py`). Keys and addresses are read from where the
libraries look for them (WANDB_API_KEY, MLFLOW_TRACKING_URI ...).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.extras import require_extra

PROJECT = "stovetop"


class Tracker(Protocol):
    """One run at a tracker. Steps go up; what is raised is said once by the caller, and tried again later."""

    def log_hparams(self, config: Mapping[str, float | str]) -> None:
        """The fields of the config, nested ones with dots; again where a run goes on."""
        ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """The row of a step. A number may be NaN or infinite."""
        ...

    def log_long_text(self, title: str, text: str) -> None:
        """`text` is Markdown."""
        ...

    def log_file(self, path: Path) -> None:
        """A plot (.png) or a page (.html) of the run."""
        ...

    def sync(self) -> None:
        """Returns when all of it is with the tracker, or on this disk where the library sends it by itself."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """The run ended, or stopped with an error."""
        ...

    def get_logger_url(self) -> str | None:
        """Where a person can look at it; None where that is no address."""
        ...


class Place(NamedTuple):
    """Where a run is to be found at a tracker. The same place again is the same run."""

    project: str | None  # None: the tracker's default
    name: str  # of the run, for people
    key: str  # of the run, unique
    folder: Path  # of the run on this machine


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """How a tracker is opened, `package.module:function`, and what that needs."""

    opened_by: str
    extra: str
    modules: tuple[str, ...]


_HERE = "stovetop.tracking.trackers"
TRACKERS = {
    "wandb": TrackerKind(f"{_HERE}.wandb:open_wandb", "wandb", ("wandb",)),
    "trackio": TrackerKind(f"{_HERE}.trackio:open_trackio", "trackio", ("trackio",)),
    "tensorboard": TrackerKind(f"{_HERE}.tensorboard:open_tensorboard", "tensorboard", ("tensorboardX",)),
    "mlflow": TrackerKind(f"{_HERE}.mlflow:open_mlflow", "mlflow", ("mlflow",)),
}
_ENDED = (
    "the service of Neptune was shut down on 5 March 2026, and what it had is deleted; choose wandb, trackio, mlflow "
    "or tensorboard: {word!r}"
)


class TrackerChoice(NamedTuple):
    """A word of the config field `trackers`."""

    name: str
    project: str | None


def parse_trackers(text: str) -> list[TrackerChoice]:
    """What the config field says; nothing is imported."""
    choices: list[TrackerChoice] = []
    for word in text.split():
        name, _, project = word.partition(":")
        if name == "neptune":
            raise InvalidRequest(_ENDED.format(word=word))
        if name not in TRACKERS:
            raise UnknownName("tracker", name, TRACKERS)
        if any(choice.name == name for choice in choices):
            raise InvalidRequest(f"a run is sent to each tracker once, and {name} is named twice: {text!r}")
        choices.append(TrackerChoice(name, project or None))
    return choices


def check_trackers(text: str) -> list[TrackerChoice]:
    """The same; refused where what one needs is not installed."""
    choices = parse_trackers(text)
    for choice in choices:
        kind = TRACKERS[choice.name]
        require_extra(kind.extra, *kind.modules, why=f"for the tracker {choice.name},")
    return choices


def open_tracker(choice: TrackerChoice, place: Place) -> Tracker:
    """Imports the library, and opens the run there. May take seconds, and fail as networks do."""
    module, _, function = TRACKERS[choice.name].opened_by.partition(":")
    opens: Callable[[Place], Tracker] = getattr(import_module(module), function)
    return opens(place)
