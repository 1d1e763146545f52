"""Which checkpoints stay, and that a run never loses one that it, or another run, needs. That killed runs of workflows
come to the same is tested in tests/kitchen: each of their outcomes names the checkpoints that are left."""

import asyncio
import json
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitchen.stages.configs import RLConfig, SupervisedConfig, write_chats, write_problems
from stovetop import durable, retention
from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.checkpoint_users import USED_BY_FILE, being_read, note_uses
from stovetop.checkpoints import (
    CheckpointRecord,
    load_checkpoints_file,
    resume_or_create,
    save_checkpoint,
)
from stovetop.durable import clear_leftovers, delete_folder, read_rows
from stovetop.errors import CheckpointNotFound, InvalidRequest
from stovetop.kitchen import RunConfig
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import REINFORCEMENT, SUPERVISED
from stovetop.recipes import sl_loop
from stovetop.retention import DELETED_FILE, Best, Keep, choose, parse_keep, paths_of, plan, remaining
from stovetop.run_folder import saved_folders
from stovetop.runs import open_run


@dataclass(frozen=True)
class NoConfig:
    pass


@dataclass(frozen=True)
class BegunFrom:
    load_checkpoint_path: str


def train(config: RunConfig, workflow: Workflow) -> None:
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False, **config.run_options()) as run,
    ):
        asyncio.run(workflow.run(config, service=service, run=run))


def supervised(folder: Path, keep_checkpoints: str = "2", **changed: object) -> SupervisedConfig:
    chats, run = write_chats(folder / "chats.jsonl"), str(folder / "run")
    config = SupervisedConfig(dataset=chats, log_path=run, num_epochs=1, save_every=1, eval_every=2)
    return replace(config, keep_checkpoints=keep_checkpoints, **changed)  # type: ignore[arg-type]  fields of its own


def names_there(log_path: str | Path) -> list[str]:
    """The checkpoints of a run that are whole."""
    records = load_checkpoints_file(log_path)
    return [record.name for record in records if all(Path(path).is_dir() for path in paths_of(record))]


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_the_field_says_how_many_stay_and_for_which_metrics_one_more() -> None:
    assert parse_keep("2") == Keep(2)
    assert parse_keep("all") == Keep(None)
    assert parse_keep(" 1  lowest:test/nll highest:a:b") == Keep(
        1, (Best("lowest", "test/nll"), Best("highest", "a:b"))
    )


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "two", "1.5", "all lowest:x", "lowest:x", "2 best:x", "2 lowest:", "²", "9" * 5000]
)
def test_a_field_of_another_form_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"keep_checkpoints must be all, or a number .* '2 lowest:test/nll'"):
        parse_keep(text)
    with pytest.raises(InvalidRequest, match="keep_checkpoints must be all"):
        sl_loop.Config(keep_checkpoints=text)


RECORDS = st.lists(
    st.builds(
        lambda state, sampler, final: (state or not sampler, sampler, final),
        st.booleans(), st.booleans(), st.booleans(),
    ),
    max_size=12,
)  # fmt: skip


@given(RECORDS, st.integers(1, 4), st.dictionaries(st.integers(0, 12), st.floats(width=16)), st.integers(0, 12))
def test_what_stays_has_the_last_with_a_state_the_final_ones_the_used_and_the_best(
    kinds: list[tuple[bool, bool, bool]], last: int, losses: dict[int, float], used: int
) -> None:
    records = [
        CheckpointRecord(
            name=f"{batch}", batch=batch, final=final or None,
            state_path=f"/{batch}" if state else None, sampler_path=f"/w{batch}" if sampler else None,
        )
        for batch, (state, sampler, final) in enumerate(kinds)
    ]  # fmt: skip
    values = {step: {"loss": loss} for step, loss in losses.items()}
    reasons = choose(records, Keep(last, (Best("lowest", "loss"),)), values, {f"/{used}": "/other"})
    kept = {records[index].name for index in reasons}
    assert kept >= {each.name for each in [each for each in records if each.state_path][-last:]}
    assert kept >= {each.name for each in records if each.final or each.state_path == f"/{used}"}
    finite = {batch: losses[batch] for batch in range(len(records)) if abs(losses.get(batch, float("nan"))) < 1e9}
    assert not finite or any(losses.get(int(name)) == min(finite.values()) for name in kept)
    assert len(kept) <= 2 * last + sum(final for *_, final in kinds) + 2


# ---- of a run --------------------------------------------------------------------------------------------------------


def test_of_a_run_the_last_two_stay_and_all_rows(tmp_path: Path) -> None:
    config = supervised(tmp_path)
    train(config, SUPERVISED)
    names = [f"{number:06d}" for number in range(1, 4)]
    assert [record.name for record in load_checkpoints_file(config.log_path)] == [*names, "final"]
    assert names_there(config.log_path) == ["000003", "final"]
    assert {folder.name for folder in saved_folders(Path(config.log_path))} == {"000003", "final"}
    assert [row["name"] for row in read_rows(Path(config.log_path) / DELETED_FILE)] == names[:-1]
    assert [record.name for record in remaining(Path(config.log_path))] == ["000003", "final"]


def test_all_stay_where_that_is_asked_for_and_the_same_command_with_a_number_frees_them(tmp_path: Path) -> None:
    config = supervised(tmp_path, "all")
    train(config, SUPERVISED)
    assert len(names_there(config.log_path)) == 4
    train(replace(config, keep_checkpoints="3"), SUPERVISED)
    assert names_there(config.log_path) == ["000002", "000003", "final"]


def test_the_best_by_a_metric_stays_while_the_metric_gets_worse(tmp_path: Path) -> None:
    """Evaluated at every second step: of the other checkpoints nothing is known."""
    config = supervised(tmp_path, "1 highest:test/nll lowest:test/nll", num_epochs=2)
    train(config, SUPERVISED)
    rows = read_rows(Path(config.log_path) / "metrics.jsonl")
    nll = {row["step"]: row["test/nll"] for row in rows if "test/nll" in row and row["step"] > 0}
    assert names_there(config.log_path) == [f"{max(nll, key=nll.__getitem__):06d}", "final"]
    assert min(nll, key=nll.__getitem__) == 8  # which is the final one


def test_a_metric_that_no_checkpoint_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(supervised(tmp_path, "1 lowest:test/nll", num_epochs=2, save_every=3, eval_every=5), SUPERVISED)
    assert (
        "no checkpoint is kept for test/nll, for none has a value of it: so far only steps [0, 5] have it"
        in caplog.text
    )
    caplog.clear()
    (tmp_path / "other").mkdir()
    train(supervised(tmp_path / "other", "1 lowest:no/such"), SUPERVISED)
    assert caplog.text.count("no checkpoint is kept for no/such, for none has a value of it: so far no row has it") == 1


def test_the_flat_loop_keeps_the_same(tmp_path: Path) -> None:
    config = sl_loop.Config(
        dataset=write_chats(tmp_path / "chats.jsonl"), test_size=2, model_name="any/model", batch_size=2,
        log_path=str(tmp_path / "run"), num_epochs=1, lora_rank=4, save_every=1, keep_checkpoints="1",
    )  # fmt: skip
    with recording.open_service(config.log_path) as service:
        asyncio.run(sl_loop.train(config, service))
    assert names_there(config.log_path) == ["final"]


def test_the_policies_that_a_kept_row_names_stay_and_those_of_others_go(tmp_path: Path) -> None:
    problems, run = write_problems(tmp_path / "problems.jsonl"), tmp_path / "run"
    train(RLConfig(dataset=problems, log_path=str(run), max_steps_off_policy=2, save_every=1), REINFORCEMENT)
    kept = load_checkpoints_file(run)[-2:]
    assert names_there(run) == [record.name for record in kept]
    assert {str(path) for path in saved_folders(run)} == {path for record in kept for path in paths_of(record)}
    assert len(kept[0].policy_paths) == 3


def test_a_run_that_was_moved_keeps_what_rows_of_both_places_name(tmp_path: Path) -> None:
    """Rows of before name the folder where it was, those of after where it is: the final one has policies of before."""
    config = supervised(tmp_path, "all")
    train(config, SUPERVISED)
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = replace(config, log_path=str(tmp_path / "moved"), keep_checkpoints="1")
    train(moved, SUPERVISED)
    assert names_there(moved.log_path) == ["final"]


def test_a_copy_deletes_nothing_of_the_original(tmp_path: Path) -> None:
    config = supervised(tmp_path, "all")
    train(config, SUPERVISED)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", ignore=shutil.ignore_patterns("weights", ".lock"))
    train(replace(config, log_path=str(tmp_path / "copy"), keep_checkpoints="1"), SUPERVISED)
    assert len(names_there(config.log_path)) == 4


def test_a_checkpoint_that_has_lost_its_state_or_a_policy_is_none_of_the_last(tmp_path: Path) -> None:
    problems, run = write_problems(tmp_path / "problems.jsonl"), tmp_path / "run"
    config = RLConfig(dataset=problems, log_path=str(run), max_steps_off_policy=1, save_every=1, keep_checkpoints="all")
    train(config, REINFORCEMENT)
    records = load_checkpoints_file(run)
    shutil.rmtree(records[-2].policy_paths[0])
    shutil.rmtree(str(records[-3].state_path))
    kept = plan(run, Keep(2)).kept
    assert [each.record.name for each in kept] == [records[-4].name, records[-2].name, records[-1].name]
    assert [record.name for record in remaining(run)] == [record.name for record in records]


def test_of_a_long_run_the_disk_is_not_asked_for_what_was_deleted_nor_rows_for_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = supervised(tmp_path, "1 lowest:test/nll", num_epochs=2)
    train(config, SUPERVISED)
    run = Path(config.log_path)
    asked, read = list[str](), list[int]()
    locate, from_row = retention.located, retention.metrics_from_row
    monkeypatch.setattr(retention, "located", lambda path, log_dir: (asked.append(path), locate(path, log_dir))[1])
    monkeypatch.setattr(retention, "metrics_from_row", lambda row: (read.append(row["step"]), from_row(row))[1])
    assert [each.record.name for each in plan(run, parse_keep("1 lowest:test/nll")).kept] == names_there(run)
    assert {Path(path).name for path in asked} == {*names_there(run)}
    assert read == [load_checkpoints_file(run)[-1].batch]


# ---- what cannot be deleted ------------------------------------------------------------------------------------------


async def save(service: InProcessServiceClient, run: Path, num: int, kept: int = 1) -> list[str]:
    """So many checkpoints of a loop, and where they are."""
    with open_run(run, NoConfig(), console=False, keep_checkpoints=str(kept)) as opened:
        start = await resume_or_create(service, run, model_name="any/model", lora_rank=4, seed=0)
        for batch in range(start.batch + 1, start.batch + num + 1):
            await save_checkpoint(start.training_client, f"{batch:06d}", run, {"batch": batch})
            await opened.retain(service)
    return [str(record.state_path) for record in load_checkpoints_file(run)]


def test_a_deletion_that_fails_stops_no_run_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(path: Path) -> None:
        raise OSError(13, "Permission denied", str(path))

    run = tmp_path / "run"
    with recording.open_service(run) as service:
        with monkeypatch.context() as patched:
            patched.setattr("stovetop.backends.saved_runs.delete_folder", fails)
            asyncio.run(save(service, run, 2))
        assert names_there(run) == ["000001", "000002"]
        assert caplog.text.count("a checkpoint that is not needed any more stays, as may others: ") == 1
        asyncio.run(save(service, run, 1))
    assert names_there(run) == ["000003"]


def test_a_deletion_that_was_killed_before_its_row_is_done_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recording.open_service(run) as service:
        asyncio.run(save(service, run, 3))
        (run / DELETED_FILE).unlink()
        asyncio.run(save(service, run, 1))
        assert names_there(run) == ["000004"]


def test_a_folder_whose_deletion_is_killed_half_way_is_gone_and_what_is_left_of_it_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "000001"
    durable.write_folder(path, {"a": b"a", "b": b"b"}, {})
    with monkeypatch.context() as patched:
        patched.setattr(durable.shutil, "rmtree", lambda *_, **__: None)
        delete_folder(path)
    with pytest.raises(CheckpointNotFound):
        durable.read_folder(path)
    assert [each.name.startswith(".000001.deleted-") for each in tmp_path.iterdir()] == [True]
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_is_being_made_from_a_checkpoint_gets_it(tmp_path: Path) -> None:
    """A deletion waits for the loads that were asked for before."""
    with recording.open_service(tmp_path, latency_s=lambda _: 0.01) as service:
        client = service.create_lora_training_client("any/model", rank=4, seed=0).result()
        path = client.save_state("one").result().path
        made = [service.create_sampling_client(path), service.create_training_client_from_state(path)]
        loaded = client.load_state(path)
        deleted = service.create_rest_client().delete_checkpoint_from_tinker_path(path)
        for each in (*made, loaded, deleted):
            each.result()
        assert not Path(path).exists()


# ---- what others use -------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_another_run_began_with_stays_and_its_folder_says_whose_it_is(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    with recording.open_service(run) as service:
        first = asyncio.run(save(service, run, 1))[0]
        for _ in range(2):
            with open_run(other, BegunFrom(first), console=False):
                pass
        asyncio.run(save(service, run, 3))
    assert names_there(run) == ["000001", "000004"]
    rows = read_rows(run / USED_BY_FILE)
    assert [(row["path"], row["user"]) for row in rows] == [(str(Path(first).relative_to(run)), str(other))]


def test_what_lies_behind_a_link_may_be_known_to_others_by_where_it_is_and_stays(tmp_path: Path) -> None:
    config = supervised(tmp_path, "all")
    train(config, SUPERVISED)
    run = Path(config.log_path)
    shutil.move(run / "checkpoints", tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    planned = plan(run, Keep(1))
    assert planned.doomed == []
    assert "others, maybe: it lies behind a link" in planned.kept[0].reason
    begun_from = next(path for path in paths_of(load_checkpoints_file(run)[0]))
    note_uses(tmp_path / "user", {"load_checkpoint_path": begun_from})
    assert [row["path"] for row in read_rows(run / USED_BY_FILE)] == [str(Path(begun_from).relative_to(run))]


def test_a_run_is_found_that_saved_a_checkpoint_at_a_server(tmp_path: Path) -> None:
    path, runs = "tinker://some/weights/000001", tmp_path / "runs"
    for name in ("saver", "bystander"):
        with open_run(runs / name, NoConfig(), console=False):
            pass
    (runs / "saver" / "checkpoints.jsonl").write_text(json.dumps({"name": "1", "batch": 1, "state_path": path}) + "\n")
    note_uses(runs / "other", {"teachers": [{"load_checkpoint_path": path}], "text": "no://checkpoint"})
    assert [row["path"] for row in read_rows(runs / "saver" / USED_BY_FILE)] == [path]
    assert not (runs / "bystander" / USED_BY_FILE).exists()


def test_a_note_that_cannot_be_written_is_said_and_the_run_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with recording.open_service(run) as service:
        first = asyncio.run(save(service, run, 1))[0]
    (run / USED_BY_FILE).mkdir()
    with open_run(tmp_path / "other", BegunFrom(first), console=False), caplog.at_level(logging.WARNING):
        pass
    assert "may be deleted by its run, which cannot be told of this one" in caplog.text


def test_a_checkpoint_stays_while_a_process_reads_it_and_goes_with_the_next_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recording.open_service(run) as service:
        first = asyncio.run(save(service, run, 1))[0]
        with being_read(first):
            asyncio.run(save(service, run, 1))
            assert names_there(run) == ["000001", "000002"]
        asyncio.run(save(service, run, 1))
    assert names_there(run) == ["000003"]
    with being_read(first), being_read("tinker://some/weights/000001"):
        pass  # one that is gone, and a server's


def test_where_it_cannot_be_told_what_is_used_all_stay_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with recording.open_service(run) as service:
        asyncio.run(save(service, run, 1))
        (run / USED_BY_FILE).write_text('{"path": "x"\n')
        asyncio.run(save(service, run, 2))
    assert names_there(run) == ["000001", "000002", "000003"]
    assert caplog.text.count("no checkpoint is deleted, for it cannot be told which are needed: ") == 1
    assert "used_by.jsonl, line 1" in caplog.text


# ---- what no row names -----------------------------------------------------------------------------------------------


def test_what_a_killed_run_saved_without_a_row_goes_when_it_is_saved_again(tmp_path: Path) -> None:
    """And what was saved by hand, or is used, stays."""
    run = tmp_path / "run"
    with recording.open_service(run) as service:
        asyncio.run(save(service, run, 1, kept=2))
        client = service.create_lora_training_client("any/model", rank=4, seed=0).result()
        lost, used, by_hand = [client.save_state(name).result().path for name in ("000002", "000003", "mine")]
        note_uses(tmp_path / "other", {"load_checkpoint_path": used})
        asyncio.run(save(service, run, 1, kept=2))
        assert [Path(path).is_dir() for path in (lost, used, by_hand)] == [False, True, True]
        asyncio.run(save(service, run, 1, kept=2))
    assert [Path(path).is_dir() for path in (lost, used, by_hand)] == [False, True, True]
    assert names_there(run) == ["000002", "000003"]
    assert next(row["path"] for row in read_rows(run / DELETED_FILE)) == lost
