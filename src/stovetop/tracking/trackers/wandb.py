# pyright: basic
"""Weights & Biases. Without a network, `WANDB_MODE=offline` keeps the run in wandb/ for `wandb sync`."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from stovetop.errors import InvalidRequest
from stovetop.extras import import_extra
from stovetop.tracking.trackers import PROJECT, Place


class WandbTracker:
    """See `Tracker`. Steps are W&B's own, which takes none that it has."""

    def __init__(self, run: Any, module: Any) -> None:
        self._run = run
        self._wandb = module
        self._step = int(run.step)

    def log_hparams(self, config: Mapping[str, float | str]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)
        self._step = step

    def log_long_text(self, title: str, text: str) -> None:
        page = self._wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)
        self._run.log({f"text/{title}": page}, step=self._step)

    def log_file(self, path: Path) -> None:
        media = (
            self._wandb.Image(str(path)) if path.suffix == ".png" else self._wandb.Html(path.read_text(), inject=False)
        )
        self._run.log({f"files/{path.stem}": media}, step=self._step)

    def sync(self) -> None:
        pass  # it is in W&B's own files when `log` returns, from which W&B sends it

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))

    def get_logger_url(self) -> str | None:
        return self._run.url


def open_wandb(place: Place) -> WandbTracker:
    wandb = import_extra("wandb", "wandb")
    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):  # it would ask on the terminal
        raise InvalidRequest("W&B has no key of yours; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
    settings = wandb.Settings(console="off", silent=True, disable_git=True, init_timeout=30)
    run = wandb.init(
        project=place.project or PROJECT,
        name=place.name,
        id=place.key,
        resume="allow",
        dir=str(place.folder),
        settings=settings,
        reinit="create_new",
    )
    return WandbTracker(run, wandb)
