"""A folder in the layout of the Hugging Face hub's cache that holds tokenizers and configs, and no weights: programs
that train on a server look a tokenizer up by the name of the model, and with HF_HUB_CACHE set to this folder they find
it without a network.

    FOLDER/models--org--name/refs/main            the revision: a digest of the files
    FOLDER/models--org--name/snapshots/REVISION/  the files

A cache that others fill is never written: a model that was converted here must not pass for the one that the hub has
under its name.
"""

# transformers has next to no types:
# pyright: reportUnknownMemberType=false

import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from stovetop.durable import LOCAL_DISK, new_folder, write_file, writing
from stovetop.errors import CheckpointExists, InvalidRequest
from stovetop.gguf_files import is_gguf, load_gguf_config, load_gguf_tokenizer
from stovetop.model_families import tokenizer_source

MARK = "tokenizers_of_stovetop.txt"  # in every folder that this file has begun
_SAYS = "Tokenizers for clients of `stovetop serve`; written by stovetop, which may replace what is here.\n"

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def lay_out(models: Mapping[str, Path], folder: Path) -> None:
    """Writes what clients read of these models, each the folder or the GGUF file of a name. What is there already and
    the same stays; a program that reads at the same time finds the old files or the new ones, whole."""
    folder = folder.expanduser()
    _claim(folder)
    for name, place in models.items():
        repository = folder / f"models--{_repository(name).replace('/', '--')}"
        files = _of_gguf(place) if is_gguf(place) else _of_folder(place)
        if not files.keys() & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"}:
            raise InvalidRequest(f"there is no tokenizer beside this model, so clients need one of their own: {place}")
        revision = _digest(files)
        with suppress(CheckpointExists), new_folder(repository / "snapshots" / revision) as fresh:
            for file, data in files.items():
                LOCAL_DISK.write(fresh / file, data)
                LOCAL_DISK.sync(fresh / file)
        (repository / "refs").mkdir(exist_ok=True)
        write_file(repository / "refs" / "main", revision.encode())


def has_tokenizer(cache: Path, name: str) -> bool:
    """Whether a client with this cache finds one without a network."""
    repository = cache / f"models--{_repository(name).replace('/', '--')}"
    with suppress(OSError, UnicodeDecodeError):
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        return (snapshot / "tokenizer_config.json").exists() or (snapshot / "tokenizer.json").exists()
    return False


def is_looked_up(name: str) -> bool:
    """Whether clients would look for a tokenizer of this name in a cache: they read what is a path from there."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(_repository(name))
    except HFValidationError:
        return False
    return not name.startswith((".", "/", "~"))


def _repository(name: str) -> str:
    """Where the SDK and the cookbook look for the tokenizer of a model of this name."""
    name = name.partition(":")[0]
    organization_model = name.split("/")[:2] if name.count("/") == 2 else [name]
    return tokenizer_source("/".join(organization_model)).repository


def _claim(folder: Path) -> None:
    """Refuses a folder that another program fills."""
    from huggingface_hub import constants

    if (folder / MARK).is_file():
        return
    default = Path(constants.HF_HOME).expanduser() / "hub"
    caches = {Path(constants.HF_HUB_CACHE).expanduser().resolve(), default.resolve()}
    if folder.resolve() in caches or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InvalidRequest(
            f"tokenizers for clients need a folder of their own, so that no cache of another program is changed; "
            f"choose an empty one: {folder}"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / MARK, _SAYS.encode())


def _of_folder(place: Path) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in FILES if (place / name).is_file()}


def _of_gguf(place: Path) -> dict[str, bytes]:
    config = load_gguf_config(place)
    with tempfile.TemporaryDirectory() as made:
        config.save_pretrained(made)
        load_gguf_tokenizer(place, config).save_pretrained(made)
        return _of_folder(Path(made))


def _digest(files: Mapping[str, bytes]) -> str:
    """Of the length of a commit's."""
    digest = hashlib.sha1(usedforsecurity=False)
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return digest.hexdigest()
