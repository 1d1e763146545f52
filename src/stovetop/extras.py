"""Packages that an extra brings: imported where they are needed, and asked for by name where they are missing."""

import importlib
from importlib.util import find_spec
from typing import Any

from stovetop.errors import MissingExtra


def import_extra(module: str, extra: str, why: str = "") -> Any:
    """The module. Where it, or what it needs, is not installed, a MissingExtra names that; `why` begins the sentence.
    Any other ImportError, as of two versions that do not fit together, stays as it is."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(_package_of(error.name or module), extra, why) from error


def require_extra(extra: str, *modules: str, why: str = "") -> None:
    """Raises the MissingExtra that `import_extra` would raise for the first of these that is not installed. Nothing is
    imported."""
    for module in modules:
        if not is_installed(module):
            raise MissingExtra(_package_of(module), extra, why)


def is_installed(module: str) -> bool:
    """Whether the module can be imported; it is not."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what it lies in is not installed
        return False


def _package_of(module: str) -> str:
    """As an index of packages names it."""
    return {"google": "protobuf"}.get(name := module.partition(".")[0], name.replace("_", "-"))
