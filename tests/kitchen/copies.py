"""Kills, simulated: copies of a run's folder, with all that was saved in it, at the boundaries of its stages."""

import shutil
from pathlib import Path

from stovetop.tracking.events import Event, Recorder

NUM_TRIES = 20


class Copier(Recorder):
    """Copies the run at every boundary, or at the end of one stage. The engine's thread goes on writing meanwhile: a
    copy in which something is amiss, as a folder got another name while it was copied, is made again."""

    def __init__(self, run: Path, after: str | None = None) -> None:
        super().__init__()
        self.run = run
        self.after = after
        self.copies: list[Path] = []
        self.num_boundaries = 0

    def receive(self, event: Event) -> None:
        is_boundary = event.name in ("stage.start", "stage.stop")
        if is_boundary and (self.after is None or (event.name, event.labels["stage"]) == ("stage.stop", self.after)):
            self.num_boundaries += 1
            self.copies.append(self._copy(self.run.with_name(f"{self.run.name}-killed-{len(self.copies)}")))

    def all_copies(self) -> list[Path]:
        """One for each boundary. A sink that fails does not stop a run, so this has to be asked."""
        assert len(self.copies) == self.num_boundaries
        return self.copies

    def _copy(self, path: Path) -> Path:
        for _ in range(NUM_TRIES):
            try:
                return shutil.copytree(self.run, path, ignore=shutil.ignore_patterns(".lock"))
            except shutil.Error:
                shutil.rmtree(path)
        raise AssertionError(f"no copy was whole in {NUM_TRIES} tries: {self.run}")
