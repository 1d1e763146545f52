"""The folders below a server's storage. Rows name them by where they lie in it, so that the storage as a whole may be
moved, or copied while the server is stopped."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Folders:
    """Of one storage, which is an absolute path without links."""

    storage: Path

    def at(self, name: str) -> Path:
        """Where the folder of this name is."""
        return self.storage / name

    def name_of(self, folder: str | Path) -> str:
        """What rows call it."""
        return str(Path(folder).relative_to(self.storage))

    def remove(self, name: str) -> None:
        """What cannot be removed is told in the log: nothing refers to it, and the next start tries again."""
        try:
            shutil.rmtree(self.at(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("a folder that is not needed any more stays: %s: %s", self.at(name), error)

    def remove_others(self, needed: set[str]) -> None:
        """All but these, of those that a server makes: what a kill has left of one that was being made or removed."""
        for folder in [*self.storage.glob("checkpoints/*/*/*"), *self.storage.glob("samplers/*")]:
            if self.name_of(folder) not in needed:
                self.remove(self.name_of(folder))
