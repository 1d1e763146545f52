"""What a machine may lack: packages of the extras, and a sandbox. A test that needs one is skipped, with a reason that
says how to get it; with `--require-all`, as in CI, it fails."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from stovetop.errors import MissingExtra, SandboxUnavailable

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
NEXT_STEP = "to install it: pip install -e '.[dev]'"
COOKBOOK = "tinker_cookbook"  # in no extra: make .venv/installed-test installs it, without its dependencies


def _modules(requirements: list[str]) -> set[str]:
    """The names of modules, which those of these packages are but for the dashes."""
    names = (re.match(r"[\w-]+", requirement) for requirement in requirements)
    return {name[0].replace("-", "_").lower() for name in names if name}


CORE = _modules(PROJECT["dependencies"])
OPTIONAL = {"pyarrow", COOKBOOK}.union(*map(_modules, PROJECT["optional-dependencies"].values())) - CORE - {"stovetop"}


def reason_to_skip(error: BaseException | None) -> str | None:
    """Why a test that ended in this error could not run here; None if it is the error of a test."""
    for link in _chain(error):
        match link:
            case MissingExtra():
                return f"needs an extra: {link}"
            case SandboxUnavailable():
                return f"needs a sandbox: {link}"
            case ModuleNotFoundError() if _root(link) in OPTIONAL:
                return f"needs {_root(link)}; {NEXT_STEP}"
            case _:
                pass
    return None


def _root(error: ModuleNotFoundError) -> str:
    return str(error.name).partition(".")[0].replace("-", "_").lower()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
