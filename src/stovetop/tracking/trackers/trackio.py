# pyright: basic
"""Trackio: a database of this machine (`trackio show`), or a Space where TRACKIO_SPACE_ID names one."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from stovetop.extras import import_extra
from stovetop.tracking.trackers import PROJECT, Place


class TrackioTracker:
    """See `Tracker`."""

    def __init__(self, run: Any, module: Any) -> None:
        self._run = run
        self._trackio = module
        self._step = 0

    def log_hparams(self, config: Mapping[str, float | str]) -> None:
        self._run.config.update(config)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)
        self._step = step

    def log_long_text(self, title: str, text: str) -> None:
        self._run.log({f"text/{title}": self._trackio.Markdown(text)}, step=self._step)

    def log_file(self, path: Path) -> None:
        media = (
            self._trackio.Image(str(path))
            if path.suffix == ".png"
            else self._trackio.Html(path.read_text(), inject=False)
        )
        self._run.log({f"files/{path.stem}": media}, step=self._step)

    def sync(self) -> None:
        pass  # its own thread writes

    def close(self, *, failed: bool = False) -> None:
        self._run.finish()

    def get_logger_url(self) -> str | None:
        return self._run.url


def open_trackio(place: Place) -> TrackioTracker:
    # Trackio looks at each value for a figure of matplotlib, and leaves values out while another thread imports that.
    import_module("matplotlib.figure")
    trackio = import_extra("trackio", "trackio")
    run = trackio.init(
        project=place.project or PROJECT,
        name=f"{place.name}-{place.key}",
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioTracker(run, trackio)
