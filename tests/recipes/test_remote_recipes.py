"""Recipes on a server: `base_url=http://...` is all that changes. Each is interrupted, its server is started again, and
the run goes on to the rows and the weights of a run in one process."""

import gc
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from server_faults.servers import killable

from recipes.test_conformance import interrupted_before_row, num_rows, outcome, runs_in, words_of
from server.running import KEY, running
from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.backends.remote import service as remote_service
from stovetop.checkpoints import load_checkpoints_file
from stovetop.cli import main
from stovetop.runs import Run, load

MODELS = ["any/model"]


@pytest.fixture(autouse=True)
def as_a_users_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key, and the tokenizer of the server's model."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(remote_service, "tokenizer_of", lambda name, by_sdk: ByteTokenizer())


def on_server(storage: Path, words: list[str]) -> int:
    with running(storage, partial(recording.open_service, models=MODELS, preload=True)) as server:
        return main([word if word != "base_url=recording" else f"base_url={server.url}" for word in words])


def rows_of(folder: Path) -> list[list[dict[str, Any]]]:
    return [
        [{name: value for name, value in row.items() if not name.startswith("time/")} for row in load(run).metrics]
        for run in runs_in(folder)
    ]


@pytest.mark.parametrize(
    "name",
    [
        "sl_basic",
        pytest.param("rl_basic", marks=pytest.mark.slow),
        pytest.param("dpo", marks=pytest.mark.slow),
        pytest.param("on_policy_distillation", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_that_was_interrupted_with_its_server_comes_to_the_rows_and_weights_of_one_in_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(words_of(name, tmp_path / "here")) == 0
    words, storage = words_of(name, tmp_path / "there"), tmp_path / "storage"
    with monkeypatch.context() as patched:
        interrupted_before_row(2, tmp_path / "there", patched)
        assert on_server(storage, words) == 130
    gc.collect()  # asyncio logs the interrupted task as it is freed
    assert on_server(storage, words) == 0
    rows, weights = outcome(tmp_path / "here")  # type: ignore[misc]  a pair
    assert rows_of(tmp_path / "there") == rows
    saved = [file.read_bytes() for file in storage.rglob("checkpoints/**/final.*/*.safetensors")]
    assert set(weights) <= set(saved)


@pytest.mark.slow
def test_a_run_goes_on_while_its_server_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four seconds: a server in a process of its own is started twice."""
    words = [word if word != "model=any/model" else "model=tiny" for word in words_of("rl_basic", tmp_path / "here")]
    assert main(words) == 0
    log_metrics = Run.log_metrics
    with killable(tmp_path / "storage", "recording") as server:
        killed = list[int]()

        def killing(self: Run, metrics: Mapping[str, float], step: int) -> None:
            if num_rows(tmp_path / "there") == 1 and not killed:
                killed.append(server.end(signal.SIGKILL))
                server.start()
            log_metrics(self, metrics, step)

        monkeypatch.setattr(Run, "log_metrics", killing)
        there = [word if word != "base_url=recording" else f"base_url={server.url}" for word in words]
        assert main([word.replace(str(tmp_path / "here"), str(tmp_path / "there")) for word in there]) == 0
        assert killed == [-signal.SIGKILL]
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")


def test_of_a_run_on_a_server_the_same_checkpoints_stay_and_prune_frees_them_there(tmp_path: Path) -> None:
    run, storage = tmp_path / "run", tmp_path / "storage"
    given = [word for word in words_of("sl_basic", run) if not word.startswith("save_every")]
    with running(storage, partial(recording.open_service, models=MODELS, preload=True)) as server:
        words = [word if word != "base_url=recording" else f"base_url={server.url}" for word in given]
        assert main([*words, "save_every=1", "keep_checkpoints=2"]) == 0
        names = [record.name for record in load_checkpoints_file(run)]
        assert len(names) > 2
        assert names_at(storage) == set(names[-2:])
        assert main(["prune", str(run), "--keep", "1", "--yes"]) == 0
    assert names_at(storage) == {"final"}


def names_at(storage: Path) -> set[str]:
    """The checkpoints that a server has, without the snapshots that it makes for itself."""
    names = {folder.name.partition(".")[0] for folder in storage.glob("checkpoints/*/weights/*")}
    return names - {"snapshot"}
