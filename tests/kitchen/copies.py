"""Kills, simulated: copies of a run's folder, with all that was saved in it, at the boundaries of its stages."""

import shutil
from collections.abc import Callable
from pathlib import Path

from stovetop.tracking.events import Event, Recorder

NUM_TRIES = 20


def number_of(copy: Path) -> int:
    """Of the boundary at which it was made."""
    return int(copy.name.rpartition("-")[2])


class Copier(Recorder):
    """Copies the run at every boundary, or at the end of one stage. The engine's thread goes on writing meanwhile: a
    copy in which something is amiss, as a folder got another name while it was copied, is made again. `wanted` says of
    which boundaries, by number, there is to be one."""

    def __init__(
        self, run: Path, after: str | None = None, wanted: Callable[[int], bool] = lambda number: True
    ) -> None:
        super().__init__()
        self.run = run
        self.after = after
        self.wanted = wanted
        self.copies: list[Path] = []
        self.num_boundaries = self.num_wanted = 0

    def receive(self, event: Event) -> None:
        is_boundary = event.name in ("stage.start", "stage.stop")
        if is_boundary and (self.after is None or (event.name, event.labels["stage"]) == ("stage.stop", self.after)):
            number = self.num_boundaries
            self.num_boundaries += 1
            if self.wanted(number):
                self.num_wanted += 1
                self.copies.append(self._copy(self.run.with_name(f"{self.run.name}-killed-{number}")))

    def all_copies(self) -> list[Path]:
        """One for each boundary that is wanted. A sink that fails does not stop a run, so this has to be asked."""
        assert len(self.copies) == self.num_wanted
        return self.copies

    def _copy(self, path: Path) -> Path:
        for _ in range(NUM_TRIES):
            try:
                return shutil.copytree(self.run, path, ignore=shutil.ignore_patterns(".lock"))
            except shutil.Error:
                shutil.rmtree(path)
        raise AssertionError(f"no copy was whole in {NUM_TRIES} tries: {self.run}")
