"""How the name of a base model becomes a folder."""

from pathlib import Path

import pytest

from stovetop.errors import UnknownName
from stovetop.model_store import FETCHABLE, canonical_name, find_model, known_models, model_home, require_model


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def _make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_model_is_found_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _make_model(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert find_model(str(folder)) == find_model("mine") == folder


def test_a_fetched_model_is_found_by_name_and_by_alias() -> None:
    model = FETCHABLE["smollm2"]
    folder = _make_model(model_home() / model.name)
    assert find_model(model.name) == find_model("smollm2") == folder
    assert known_models() == [model.name]


def test_an_alias_stands_for_the_full_name_and_other_names_for_themselves() -> None:
    assert canonical_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert canonical_name("someone/else") == "someone/else"


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert find_model(str(tmp_path / "empty")) is None


def test_an_unknown_model_is_refused_with_the_nearest_and_the_next_step() -> None:
    _make_model(model_home() / "org" / "small-chat")
    with pytest.raises(UnknownName, match=r"did you mean 'org/small-chat'.*stovetop fetch smollm2"):
        require_model("org/smal-chat")


def test_a_model_that_is_not_here_comes_from_the_hub(tmp_path: Path) -> None:
    asked: list[str] = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path / "cache"

    assert require_model("someone/small", download) == tmp_path / "cache"
    here = _make_model(model_home() / "org" / "here")
    assert require_model("org/here", download) == here
    for no_name_of_the_hub in ("smollm2", "./folder", "a/b/c", "../x"):
        with pytest.raises(UnknownName):
            require_model(no_name_of_the_hub, download)
    assert asked == ["someone/small"]


def test_what_the_hub_says_is_part_of_the_error() -> None:
    def download(name: str) -> Path:
        raise FileNotFoundError("check your internet connection\nand so on")

    with pytest.raises(UnknownName, match=r"not on this machine.*check your internet connection\)\. .*stovetop fetch"):
        require_model("someone/small", download)


def test_a_gguf_file_is_found_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    assert find_model(str(file)) is None
    file.write_bytes(b"GGUF")
    assert find_model(str(file)) == file


def test_without_any_model_the_next_step_is_still_named() -> None:
    assert known_models() == []
    with pytest.raises(UnknownName, match=r"none is known.*stovetop fetch smollm2"):
        require_model("org/model")
