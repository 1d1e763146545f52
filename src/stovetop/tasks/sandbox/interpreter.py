"""The Python that programs in a sandbox run on: which paths of this machine it needs. Nothing else of it is visible."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Interpreter(NamedTuple):
    """This one, without the packages installed for it."""

    executable: Path
    readable: tuple[Path, ...]  # files and folders that it needs
    links: tuple[Path, ...]  # symbolic links among them
    emptied: tuple[Path, ...]  # folders below these that programs do not see: packages may hold the tests of a problem


def this_interpreter(readable: tuple[Path, ...] = ()) -> Interpreter:
    """`readable` are further paths that programs may read; packages below them are left to be seen."""
    base = Path(sys.base_prefix)
    named = base / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    executable = (named if named.exists() else Path(sys.executable)).resolve()
    libraries = [
        base / "lib",
        base / "lib64",
        *(Path(root, name) for root in ("/usr", "/") for name in ("lib", "lib64", "lib32")),
    ]
    there = list(dict.fromkeys(path for path in libraries if path.exists()))
    folders = [path for path in there if not path.is_symlink()]
    shown = [path.resolve() for path in readable]
    emptied = [
        path for path in dict.fromkeys(_packages(folders)) if not any(path.is_relative_to(each) for each in shown)
    ]
    return Interpreter(
        executable,
        (executable, *folders, *shown),
        tuple(path for path in there if path.is_symlink()),
        tuple(emptied),
    )


def _packages(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted(folder.glob("python3*/*-packages")) if path.is_dir())
