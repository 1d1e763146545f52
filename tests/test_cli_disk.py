"""`stovetop runs --du` and `stovetop prune`: what takes the room; what is freed was said before, and is not needed."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.checkpoint_users import being_read
from stovetop.checkpoints import get_last_checkpoint, load_checkpoints_file, resume_or_create, save_checkpoint
from stovetop.cli import main
from stovetop.retention import paths_of
from stovetop.run_folder import claimed, saved_folders
from stovetop.runs import open_run


@dataclass(frozen=True)
class Config:
    log_path: str
    keep_checkpoints: str = "2"


async def save(run: Path, storage: Path, num: int = 4, keep_checkpoints: str = "2") -> None:
    """A run that keeps all of its checkpoints, as a killed one may, and saves one thing that no row names."""
    config = Config(str(run), keep_checkpoints)
    with recording.open_service(storage) as service, open_run(run, config, console=False) as opened:
        start = await resume_or_create(service, run, model_name="any/model", lora_rank=4, seed=0)
        for batch in range(1, num + 1):
            opened.log_metrics({"loss": float(batch)}, batch - 1)
            await save_checkpoint(start.training_client, f"{batch:06d}", run, {"batch": batch}, "both")
        await start.training_client.save_state("by-the-way")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    asyncio.run(save(tmp_path / "run", tmp_path / "run"))
    return tmp_path / "run"


def names_of(run: Path) -> list[str]:
    return sorted(f"{folder.parent.name}/{folder.name}" for folder in saved_folders(run))


LAST_TWO = ["sampler_weights/000003", "sampler_weights/000004", "weights/000003", "weights/000004"]


def test_a_dry_run_says_what_goes_and_what_stays_and_deletes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names_of(run)
    assert main(["prune", str(run), "--dry-run"]) == 0
    said = capsys.readouterr().out
    stays, _, goes = said.partition("would be deleted:")
    assert [name for name in ("000001", "000002", "000003", "000004") if name in stays] == ["000003", "000004"]
    assert "one of the last 2" in stays
    assert goes.count("checkpoint 000001") == goes.count("checkpoint 000002") == 2
    assert "weights/by-the-way" in goes
    assert "together: 5 folders, " in goes
    assert names_of(run) == before


def test_what_was_said_is_deleted_and_the_run_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--yes"]) == 0
    assert "deleted 5 folders, " in capsys.readouterr().out
    assert names_of(run) == LAST_TWO
    asyncio.run(save(run, run, num=0))
    assert main(["prune", str(run), "--yes"]) == 0
    assert main(["prune", str(run), "--yes"]) == 0
    assert "there is nothing to delete" in capsys.readouterr().out
    assert len(load_checkpoints_file(run)) == 4


def test_another_number_may_be_kept(run: Path) -> None:
    assert main(["prune", str(run), "--yes", "--keep", "1 lowest:loss"]) == 0
    assert names_of(run) == ["sampler_weights/000001", "sampler_weights/000004", "weights/000001", "weights/000004"]


def test_without_a_terminal_it_wants_a_yes_and_a_wrong_number_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names_of(run)
    assert main(["prune", str(run)]) == 1
    assert "--yes deletes without asking" in capsys.readouterr().err
    assert main(["prune", str(run), "--keep", "none"]) == 2
    assert main(["prune", str(run.parent)]) == 2
    assert names_of(run) == before


def test_a_run_that_is_written_to_is_not_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(run, Config(str(run)), console=False):
        assert main(["prune", str(run), "--yes"]) == 1
    assert "writes to this run" in capsys.readouterr().err


def test_runs_within_a_run_that_save_into_its_folder_keep_theirs_also_when_all_was_moved(tmp_path: Path) -> None:
    """As the two runs of the demo do."""
    whole = tmp_path / "whole"
    with claimed(whole, "resume"):
        for name in ("first", "second"):
            asyncio.run(save(whole / name, whole, num=3))
    moved = whole.rename(tmp_path / "moved")
    assert main(["prune", str(moved), "--yes", "--keep", "1"]) == 0
    assert names_of(moved) == 2 * ["sampler_weights/000003"] + 2 * ["weights/000003"]
    for name in ("first", "second"):
        last = get_last_checkpoint(moved / name)
        assert last is not None
        assert all(Path(path).is_dir() and moved in Path(path).parents for path in paths_of(last))


def test_a_copy_that_lacks_its_checkpoints_frees_nothing_of_the_original(run: Path) -> None:
    before = names_of(run)
    copy = shutil.copytree(run, run.with_name("copy"), ignore=shutil.ignore_patterns("checkpoints", ".lock"))
    assert main(["prune", str(copy), "--yes"]) == 0
    assert names_of(run) == before


def test_a_copy_frees_nothing_at_a_server_while_the_original_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with open_run(run, Config(str(run)), console=False):
        rows = [
            {"name": f"{batch}", "batch": batch, "state_path": f"tinker://s/weights/{batch}"} for batch in (1, 2, 3)
        ]
        (run / "checkpoints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    copy = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns(".lock"))
    for folder, says in ((copy, "there is nothing to delete"), (run, "tinker://s/weights/1")):
        assert main(["prune", str(folder), "--dry-run"]) == 0
        assert says in capsys.readouterr().out
    shutil.rmtree(run)
    assert main(["prune", str(copy), "--dry-run"]) == 0
    assert "tinker://s/weights/1" in capsys.readouterr().out


def test_what_takes_the_room_is_listed_the_largest_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    with open_run(small, Config(str(small)), console=False):
        (small / "iteration_000001").mkdir()
        (small / "iteration_000001" / "train.html").write_bytes(b"x" * 5000)
    assert main(["runs", str(tmp_path), "--du", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["run"], second["run"]) == (str(run), str(small))
    assert (first["num_checkpoints"], second["num_checkpoints"], second["pages"]) == (9, 0, 5000)
    assert first["total"] == sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    assert all(
        each["total"] == sum(each[k] for k in ("checkpoints", "pages", "records", "other")) for each in (first, second)
    )
    assert main(["runs", str(tmp_path), "--du"]) == 0
    assert "stovetop prune RUN frees what a run does not need" in capsys.readouterr().out


def test_of_a_run_that_has_lost_its_rows_what_their_copy_names_stays(run: Path) -> None:
    before = names_of(run)
    (run / "checkpoints.jsonl").unlink()
    assert main(["prune", str(run), "--yes"]) == 0
    assert names_of(run) == [name for name in before if name != "weights/by-the-way"]


def test_what_a_process_reads_is_left_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = str(load_checkpoints_file(run)[0].state_path)
    with being_read(first):
        assert main(["prune", str(run), "--yes"]) == 0
    assert "1 are in use now and stay; the same command deletes them later" in capsys.readouterr().out
    assert names_of(run) == [*LAST_TWO[:2], "weights/000001", *LAST_TWO[2:]]


def test_what_a_deletion_that_was_killed_half_way_has_left_goes_with_the_next(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("stovetop.durable.shutil.rmtree", lambda *_, **__: None)
        assert main(["prune", str(run), "--yes"]) == 0
    assert any(".deleted-" in each.name for each in run.rglob("*"))
    assert main(["prune", str(run), "--yes"]) == 0
    assert not any(".deleted-" in each.name for each in run.rglob("*"))
    assert names_of(run) == LAST_TWO
