# pyright: basic
"""TensorBoard: event files in RUN/tensorboard, or in the folder that the config names, `tensorboard:logs`."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from stovetop.extras import import_extra
from stovetop.tracking.trackers import Place


class TensorBoardTracker:
    """See `Tracker`."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._step = 0

    def log_hparams(self, config: Mapping[str, float | str]) -> None:
        rows = [f"| {name} | {_cell(value)} |" for name, value in config.items()]
        self._writer.add_text("config", "\n".join(["| field | value |", "| --- | --- |", *rows]), self._step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._step = step

    def log_long_text(self, title: str, text: str) -> None:
        self._writer.add_text(title, text, self._step)

    def log_file(self, path: Path) -> None:
        """It shows no pages: of one it has the place."""
        if path.suffix == ".png":
            from PIL import Image

            pixels = np.asarray(Image.open(path).convert("RGB"))
            self._writer.add_image(path.stem, pixels, self._step, dataformats="HWC")
        else:
            self._writer.add_text(path.stem, f"`{escape(str(path))}`", self._step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()

    def get_logger_url(self) -> str | None:
        return None


def open_tensorboard(place: Place) -> TensorBoardTracker:
    module = import_extra("tensorboardX", "tensorboard")
    folder = place.folder / "tensorboard" if place.project is None else Path(place.project).expanduser() / place.name
    suffix = f".{len(list(folder.glob('events.*'))):04d}"  # files of one second are different ones, in order
    return TensorBoardTracker(module.SummaryWriter(str(folder), filename_suffix=suffix))


def _cell(value: float | str) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
