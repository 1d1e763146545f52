"""The word of a command that says which weights: a model, a checkpoint, or a run, whose last checkpoint is meant."""

import re
from pathlib import Path
from typing import NamedTuple

from stovetop.arguments import is_local
from stovetop.backends import check_base_url
from stovetop.checkpoints import CheckpointRecord, get_last_checkpoint
from stovetop.errors import CheckpointError, InvalidRequest, StovetopError
from stovetop.model_store import check_model_name, find_model
from stovetop.run_folder import CONFIG_FILE, is_run
from stovetop.saved_states import describe
from stovetop.stored_configs import read_config


class Weights(NamedTuple):
    """What a sampling client is made of: one of the two."""

    model_path: str | None
    base_model: str | None
    label: str  # a short name, good for a folder

    @property
    def shown(self) -> str:
        return self.model_path or self.base_model or ""


def weights_of(word: str, base_url: str | None = "local") -> Weights:
    """A run's folder is its last checkpoint; any other folder without a model is a checkpoint, and so is a path of a
    service (`tinker://...`); what else there is, is the name of a model. What is none is refused, as far as can be
    known without the model."""
    check_base_url(base_url)
    folder = Path(word)
    if is_run(folder):
        return _of_run(folder)
    label = re.sub(r"[^\w.-]+", "-", "-".join(folder.parts[-2:])).strip("-.")
    is_here = is_local(base_url)
    if "://" in word or (find_model(word) is None and folder.is_dir()):
        if is_here:
            _refuse_no_checkpoint(word)
        return Weights(word, None, label)
    if is_here:
        _check_model(word, folder)
    return Weights(None, word, label)


def last_checkpoint(folder: Path) -> CheckpointRecord | None:
    """Of a run, that of its last phase if it has several; None where nothing was saved yet."""
    from stovetop.kitchen.phases import phases_in

    folders = [folder, *(phase.folder for phase in phases_in(folder))]
    found = [get_last_checkpoint(each, "sampler_path") or get_last_checkpoint(each) for each in folders]
    return next((record for record in reversed(found) if record is not None), None)


def _of_run(folder: Path) -> Weights:
    record = last_checkpoint(folder)
    path = None if record is None else record.sampler_path or record.state_path
    if record is None or path is None:
        raise InvalidRequest(f"this run has no checkpoint yet; go on with it, or give a model: {str(folder)!r}")
    return Weights(path, None, f"{folder.resolve().name}-{record.name}")


def checkpoint_of(word: str) -> str:
    """Where a checkpoint is wanted and a run is named, the last of the run; any other word as it is."""
    return _of_run(Path(word)).shown if is_run(Path(word)) else word


def renderer_of(checkpoint: str) -> str | None:
    """How the run in whose folder a checkpoint lies wrote chats; None where its config leaves that to the model."""
    run = next((folder for folder in Path(checkpoint).resolve().parents if is_run(folder)), None)
    name = None if run is None or not (run / CONFIG_FILE).is_file() else read_config(run).config.get("renderer_name")
    return name if isinstance(name, str) else None


def _check_model(word: str, folder: Path) -> None:
    """In a folder that is there, a name that is not is one of a run that is misspelt, rather than of a model."""
    try:
        check_model_name(word)
    except InvalidRequest as error:
        if len(folder.parts) == 1 or not folder.parent.is_dir():
            raise
        raise InvalidRequest(
            f"there is no run, checkpoint or model here; `stovetop runs {folder.parent}` lists the runs there: {word!r}"
        ) from error


def _refuse_no_checkpoint(word: str) -> None:
    try:
        describe(Path(word))
    except (StovetopError, OSError) as error:
        raise CheckpointError(
            f"this is neither a model nor a checkpoint nor a run ({error}); checkpoints are the paths in a run's "
            f"checkpoints.jsonl: {word!r}"
        ) from error
