"""config.json of a run: the config that it was begun with, its class, and which changes it takes when it goes on."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar, cast

from stovetop.checkpoints import get_last_checkpoint, refuse_to_end_before
from stovetop.errors import InvalidRequest, StovetopError, UnknownName
from stovetop.run_folder import CONFIG_FILE, is_run
from stovetop.tracking.configs import ABSENT, Change, changeable_fields, changed_fields, class_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import JsonValue

    Settings = Mapping[str, JsonValue]  # a config as JSON

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


class StoredConfig(NamedTuple):
    """What a run was begun with."""

    path: Path  # of the run
    config_class: str  # "module:name"
    config: "Settings"

    def config_as(self, config_class: type[ConfigT]) -> ConfigT:
        """The config as a value again, checked field by field."""
        from pydantic import TypeAdapter, ValidationError

        names = [field.name for field in fields(config_class)]
        for name in self.config:
            if name not in names:
                raise UnknownName(f"field of {config_class.__name__}", name, names, hint=str(self.path))
        try:
            return TypeAdapter(config_class).validate_python(dict(self.config))
        except ValidationError as error:
            raise InvalidRequest(f"the config of {self.path} is no {config_class.__name__}: {error}") from error


def config_json(config_class: "type[DataclassInstance]", settings: "Settings") -> bytes:
    return json.dumps({"class": class_path(config_class), "config": settings}, indent=1).encode()


def read_config(path: Path) -> StoredConfig:
    """That of the run in this directory; its rows and events are not read. Where the run is part of a larger one, as a
    phase is, what lay in that lies there still: the larger one may have been moved."""
    file = path / CONFIG_FILE
    try:
        text = file.read_bytes()
        stored: object = json.loads(text)
    except FileNotFoundError as error:
        raise StovetopError(f"this is not a run, it has no {CONFIG_FILE}: {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise StovetopError(f"{file} cannot be read ({error}); restore it, or begin another run") from error
    entries = cast("dict[str, object]", stored) if isinstance(stored, dict) else {}
    config_class, config = entries.get("class"), entries.get("config")
    if not isinstance(config_class, str) or not isinstance(config, dict):
        raise StovetopError(
            f'{file}, line 1: a run\'s config is {{"class": "module:name", "config": {{...}}}}; restore it, or begin '
            f"another run. It holds: {text[:80]!r}"
        )
    return StoredConfig(path, config_class, _moved_with_the_whole(path, cast("Settings", config)))


def _moved_with_the_whole(path: Path, config: "Settings") -> "Settings":
    whole, before = path.resolve().parent, Path(str(config.get("log_path", ""))).parent
    if not before.is_absolute() or before == whole or not is_run(whole):
        return config
    return {
        name: str(whole / Path(value).relative_to(before))
        if isinstance(value, str) and Path(value).is_relative_to(before)
        else value
        for name, value in config.items()
    }


# ---- changes ---------------------------------------------------------------------------------------------------------


def takes(path: Path, config_class: "type[DataclassInstance]", stored: "Settings", settings: "Settings") -> bool:
    """Whether a run takes a changed config; refused where it would learn something else. A finished run that is asked
    for less than it has done keeps its own config: there is nothing to do."""
    changes = changed_fields(stored, settings)
    changeable = changeable_fields(config_class)
    last = get_last_checkpoint(path)
    sizes = {name: change for name, change in changes.items() if name in changeable and changeable[name].only_while}
    others = [name for name in changes if name not in changeable]
    if last is not None and last.final and sizes and not others and all(size.is_shorter for size in sizes.values()):
        return False
    unsafe = {
        name: change
        for name, change in changes.items()
        if name not in changeable or not changeable[name].allows(stored, settings)
    }
    if unsafe:
        _refuse(path, config_class, unsafe, may_begin_there="load_checkpoint_path" in settings)
    if "max_steps" in changes and last is not None and last.batch is not None and last.final is not True:
        max_steps = settings["max_steps"]
        if isinstance(max_steps, int):
            refuse_to_end_before(last.batch, max_steps)
    return True


def _refuse(
    path: Path, config_class: "type[DataclassInstance]", unsafe: Mapping[str, Change], *, may_begin_there: bool
) -> NoReturn:
    """With both values of each field; where the run is another recipe's, of those that both recipes have."""
    before, now, changeable = read_config(path).config_class, class_path(config_class), changeable_fields(config_class)
    of_another = "" if before == now else f" ({before}, not {now})"
    if before != now:
        unsafe = {name: change for name, change in unsafe.items() if ABSENT not in change} or unsafe
    listed = "\n".join(f"  {name}: {change}{_reason(name, changeable)}" for name, change in unsafe.items())
    last, onwards = get_last_checkpoint(path), ""
    if last is not None and may_begin_there:
        onwards = f" To train on from here in a new run: load_checkpoint_path={last.state_path} and a new log_path."
    raise InvalidRequest(
        f"this run was begun with another config{of_another}:\n{listed}\nTake the old values, choose another log_path "
        f"(of a sweep, another folder), or begin afresh with behavior_if_exists=delete.{onwards} The run: {path}"
    )


def _reason(name: str, changeable: Mapping[str, object]) -> str:
    return f" (it may change {changeable[name]} only)" if name in changeable else ""


def is_of_another_length(config_class: "type[DataclassInstance]", changes: Mapping[str, Change]) -> bool:
    """Whether a run that goes on is to be longer or shorter: it may have more behind it, which only its loop knows."""
    changeable = changeable_fields(config_class)
    return any(name in changeable and changeable[name].only_while for name in changes)
