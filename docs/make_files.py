"""Writes docs/files.md: what a run, a checkpoint, an adapter and a server keep on the disk.

    python docs/make_files.py

The files of a folder are those that the docstring of the module which writes them lists; the columns are those of its
dataclasses. A test fails when the page is not what this writes.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from stovetop import durable, run_folder, runs
from stovetop.checkpoints import CheckpointRecord
from stovetop.engine.files import adapter_files
from stovetop.kitchen import phases
from stovetop.server import rows

PAGE = Path(__file__).parent / "files.md"

INTRODUCTION = """\
# Files

This page is written by `python docs/make_files.py`, from the code.

All files are JSON, JSON lines, safetensors, PNG, HTML or text, but for a server's journal, which is an SQLite
database. What is written survives a crash: a row that was begun and not finished is cut off when the file is next
written to, and a folder of weights appears under its name when all of it is on the disk, or not at all.

## The folder of a run

`log_path` of a config, by default `runs/RECIPE`. It is a run by its mark, `stovetop-run.json`: a folder without it is neither
gone on with nor deleted. It may be moved or copied as a whole; paths of checkpoints are found again below it.
"""

METRICS = """\
### `metrics.jsonl`

```json
{"step": 0, "train_mean_nll": 3.06, "learning_rate": 0.0002, "grad_norm": 1.7, "time/step": 4.2}
```

One flat object a step, in order, each on the disk before the step is over. Which keys there are says
[metrics.md](metrics.md). A run that goes on drops the rows of steps that run again, and keeps a copy of the file as
it was, `metrics.jsonl.pre_resume_1`.

### `events.jsonl`

```json
{"time": 1767225600.0, "name": "stage.stop", "step": 0, "values": {"seconds": 0.8}, "labels": {"stage": "forward_backward"}}
```

Which events there are says [events.md](events.md). Rows are appended only.

### `config.json`

```json
{"class": "stovetop.recipes.sl_loop:Config", "config": {"model_name": "smollm2", "learning_rate": 0.0002}}
```

### `checkpoints.jsonl`

```json
{"name": "000020", "batch": 20, "state_path": "/home/me/runs/sl/checkpoints/...", "sampler_path": "/home/me/runs/sl/..."}
```

`batch` is the **next** batch: a run that goes on from this row repeats nothing and skips nothing. Rows stay when a checkpoint is
deleted; `deleted.jsonl` says which were.
"""

PHASES = """\
### A run of several phases

"""

CHECKPOINTS = """\
## A checkpoint

`save_state` and `save_weights_for_sampler` return the path of a folder:
"""

AFTER_ADAPTER = """\
PEFT and what reads its format load the folder as it is; `stovetop export CHECKPOINT FOLDER` merges it into its base model. In the
other direction, a folder that PEFT has written is a path for `create_training_client_from_state` and `create_sampling_client`.

`manifest.json` of every folder:

| key | what it is |
|---|---|
| `files` | by name: size in bytes, and SHA-256 |
| `sha256` | of the manifest without this key |
| `base_model`, `fingerprint` | the model that the adapter belongs to, by name and by a digest of its weights |
| `lora` | rank, seed and parts of the adapter |
| `with_optimizer` | whether one can go on training with the same moments |
| `run`, `user_metadata` | who saved it, and what the program said of it |

A folder whose files differ from its manifest is refused as a torn checkpoint when it is read. Beside a folder there
may be

"""

SERVER = """\
## A server's storage

`--storage` of `stovetop serve`, by default `~/.stovetop/server`. It may be moved or copied while the server is stopped.

| file | what it is |
|---|---|
| `journal.sqlite` | everything that was acknowledged: below |
| `keys.json` | who may use it: names, limits, and the SHA-256 of each key |
| `checkpoints/` | what clients have saved; folders of the form above |
| `samplers/` | weights that were frozen and have no path |
| `for_clients/` | tokenizers and configs in the layout of the hub's cache, for clients on this machine |
| `server.lock` | held by the server that runs |

A row of the journal has a checksum, which is compared whenever it is read. Columns that end in `_s` are seconds since
1970.

| table | one row for each | columns |
|---|---|---|
"""

MODELS = """\

## Models

`~/.stovetop/models/OWNER/NAME` is a folder as the hub has it: `config.json`, `*.safetensors`, the tokenizer. `stovetop fetch`
puts one there; any folder of this form, or a `.gguf` file, can be given by its path.
"""


def page() -> str:
    """The page as it should be."""
    parts = [
        INTRODUCTION,
        _table(_files(run_folder), _files(runs)),
        METRICS,
        "| key | what it is |\n|---|---|\n" + "".join(_fields(CheckpointRecord)) + "",
        PHASES + _table(_files(phases)),
        CHECKPOINTS,
        _table(_files(adapter_files)),
        AFTER_ADAPTER + _table(_files(durable)),
        SERVER + "".join(_journal()) + MODELS,
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _files(module: ModuleType) -> dict[str, str]:
    """What the indented lines of a module's docstring say: a name, two spaces or more, what it is."""
    listed = re.findall(r"^    (\S+) {2,}(\S.*)$", inspect.getdoc(module) or "", re.MULTILINE)
    assert listed, f"{module.__name__} lists no files"
    return {name: _without_modules(meaning) for name, meaning in listed}


def _without_modules(meaning: str) -> str:
    """Which module writes a file is said there for those who read code."""
    return re.sub(r": `[\w/]+\.py`$", "", meaning)


def _table(*listed: dict[str, str]) -> str:
    rows = {name: meaning for each in reversed(listed) for name, meaning in each.items()}
    return "| file | what it is |\n|---|---|\n" + "".join(f"| `{name}` | {rows[name]} |\n" for name in rows)


def _fields(of: type) -> Iterator[str]:
    for name, meaning in re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(of), re.MULTILINE):
        yield f"| `{name}` | {meaning} |\n"


def _journal() -> Iterator[str]:
    tables = re.findall(r"CREATE TABLE (\w+)", rows.SCHEMA)
    for row in vars(rows).values():
        if inspect.isclass(row) and dataclasses.is_dataclass(row) and row.__name__.endswith("Row"):
            name = row.__name__.removesuffix("Row").lower()
            assert name in tables, name
            columns = ", ".join(f"`{field.name}`" for field in dataclasses.fields(row))
            doc = " ".join((inspect.getdoc(row) or "").split()).partition(": see")[0].rstrip(".")
            yield f"| `{name}` | {doc} | {columns} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
