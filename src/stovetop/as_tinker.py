"""Programs that import the Tinker SDK run on stovetop as they are: `import stovetop.as_tinker` before they are imported
makes `import tinker` give this package, in the whole process. Or, without a line of Python:

    python -m stovetop.as_tinker -m tinker_cookbook.recipes.sl_loop model_name=... log_path=...
    python -m stovetop.as_tinker train.py --my-option 3

Nothing else in the package knows of this file. Names of the SDK that we do not have can be imported too, so that a
module that mentions one loads; to make one is refused, with the reason that `sdk_differences.py` gives.
"""

import importlib.machinery
import re
import runpy
import sys
from collections.abc import Mapping, MutableSequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import stovetop
from stovetop import client, errors, futures, types
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.sdk_differences import NAMES

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")


def install() -> None:
    """Fills `sys.modules`. Refused where the SDK itself has been imported: two halves of a program would not understand
    each other's values."""
    found = sys.modules.get("tinker")
    if found is None:
        sys.modules.update(_modules())
    elif vars(found).get("ServiceClient") is not stovetop.ServiceClient:
        raise StovetopError(
            "the Tinker SDK has been imported already; import stovetop.as_tinker before it, and before everything that "
            f"imports tinker: {found.__file__}"
        )


class _Alias(ModuleType):
    """A module whose names are those of another."""

    def __init__(self, name: str, names: Mapping[str, object]) -> None:
        super().__init__(name, f"{name}, as stovetop has it")
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        self.__path__: MutableSequence[str] = []
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"stovetop has no {self.__name__}.{name}")


def _modules() -> dict[str, ModuleType]:
    """Every import path of the SDK that published programs use."""
    missing = {name: _placeholder(name, reason) for name, reason in NAMES.items()}
    public = {name: getattr(stovetop, name) for name in (*stovetop.__all__, "__version__")}
    clients = {name: getattr(client, name) for name in CLIENTS} | {"APIFuture": futures.APIFuture}
    of_types = missing | {name: value for name, value in vars(types).items() if not name.startswith("_")}
    named: dict[str, Mapping[str, object]] = {
        "tinker": missing | public,
        "tinker.types": of_types,
        "tinker.lib": {},
        "tinker.lib.public_interfaces": missing | clients,
        "tinker.lib.public_interfaces.api_future": clients,
        "tinker._exceptions": vars(errors),
    }
    for name in CLIENTS:
        named[f"tinker.lib.public_interfaces.{_file_of(name)}"] = {name: clients[name]}
    for name, value in of_types.items():
        if not isinstance(value, ModuleType):
            named[f"tinker.types.{_file_of(name)}"] = {name: value}
    modules = {path: _Alias(path, names) for path, names in named.items()}
    for path, module in modules.items():
        package, _, name = path.rpartition(".")
        if package:
            setattr(modules[package], name, module)
    return dict(modules)


def _file_of(name: str) -> str:
    """The SDK keeps `TensorData` in `tensor_data.py`, and so on."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _placeholder(name: str, reason: str) -> type:
    def refuse(cls: type, *args: object, **kwargs: object) -> NoReturn:
        raise InvalidRequest(f"tinker.{name} is not offered: {reason}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not offered: {reason}."})


def _main(arguments: list[str]) -> None:
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest] if not script.startswith("-"):
            sys.argv = [script, *rest]
            sys.path[0] = str(Path(script).resolve().parent)  # where Python looks for what lies beside a script
            runpy.run_path(script, run_name="__main__")
        case _:
            sys.exit("usage: python -m stovetop.as_tinker (-m MODULE | SCRIPT) [ARGUMENT ...]")


install()

if __name__ == "__main__":
    _main(sys.argv[1:])
