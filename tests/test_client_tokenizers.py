"""Tokenizers for clients of a server, in the layout of the hub's cache."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from engine import tiny
from stovetop import cli
from stovetop.client_tokenizers import MARK, has_tokenizer, is_looked_up, lay_out
from stovetop.errors import InvalidRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["kitchen/boxing", "boxing", "kitchen/boxing:of-today", "kitchen/boxing/variant"])
def test_a_tokenizer_is_found_by_the_models_name_without_a_network(name: str, model: Path, tmp_path: Path) -> None:
    lay_out({name: model}, tmp_path)
    looked_up = "boxing" if name == "boxing" else "kitchen/boxing"  # as the SDK does
    found = AutoTokenizer.from_pretrained(looked_up, cache_dir=tmp_path, local_files_only=True)
    assert found.encode("It is 3.") == tiny.tokenizer().encode("It is 3.")
    assert has_tokenizer(tmp_path, name)
    assert not has_tokenizer(tmp_path, "kitchen/other")


def test_llamas_tokenizer_lies_where_the_sdk_looks_for_it(model: Path, tmp_path: Path) -> None:
    lay_out({"meta-llama/Llama-3.2-1B": model}, tmp_path)
    assert has_tokenizer(tmp_path, "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer")


def test_weights_are_not_laid_out_and_what_is_there_stays(model: Path, tmp_path: Path) -> None:
    lay_out({"kitchen/boxing": model}, tmp_path)
    before = files_of(tmp_path)
    assert not [name for name in before if "safetensors" in name]
    lay_out({"kitchen/boxing": model}, tmp_path)
    assert files_of(tmp_path) == before


def test_another_tokenizer_under_the_name_is_the_one_that_is_found(model: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path / "other")
    lay_out({"a/b": model}, tmp_path / "cache")
    changed = (other / "tokenizer_config.json").read_text().replace("<|im_end|>", "<|im_start|>")
    (other / "tokenizer_config.json").write_text(changed)
    lay_out({"a/b": other}, tmp_path / "cache")
    found = AutoTokenizer.from_pretrained("a/b", cache_dir=tmp_path / "cache", local_files_only=True)
    assert found.eos_token == "<|im_start|>"


def test_the_cache_of_another_program_is_not_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "filled" / "models--a--b").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for folder in (tmp_path / "filled", tmp_path / "home" / "hub", tmp_path / "hub"):
        with pytest.raises(InvalidRequest, match="choose an empty one"):
            lay_out({"a/b": model}, folder)
        assert not (folder / MARK).exists()
    lay_out({"a/b": model}, tmp_path / "own")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "own"))  # the line was exported
    lay_out({"c/d": model}, tmp_path / "own")


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no tokenizer beside this model"):
        lay_out({"a/b": tmp_path}, tmp_path / "cache")


def test_paths_are_not_looked_up() -> None:
    names = ["a/b", "b", "/models/qwen", "./qwen", "~/qwen", "a/b/c/d", "a b"]
    assert [name for name in names if is_looked_up(name)] == ["a/b", "b"]


def test_the_command_prints_the_line_to_export(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", f"a/b={model}", "--for-clients", str(tmp_path / "cache")]) == 0
    assert capsys.readouterr().out == f"export HF_HUB_CACHE={tmp_path / 'cache'}\n"
    assert has_tokenizer(tmp_path / "cache", "a/b")
    assert cli.main(["fetch", str(model), "--for-clients", str(tmp_path / "cache")]) == 1
    assert "as in NAME=FOLDER" in capsys.readouterr().err
    assert cli.main(["fetch", f"a/b={model}"]) == 2
    assert "model to fetch" in capsys.readouterr().err
