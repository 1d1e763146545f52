import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.recording import Raises, open_service
from stovetop.checkpoints import (
    CheckpointKind,
    CheckpointRecord,
    PendingCheckpoint,
    Start,
    get_last_checkpoint,
    is_due,
    load_checkpoints_file,
    resume_or_create,
    save_checkpoint,
    save_final_checkpoint,
    submit_checkpoint,
)
from stovetop.durable import append_row, read_rows
from stovetop.errors import CheckpointError, InvalidRequest, RequestFailedError, StovetopError, WriteFailed
from stovetop.types import AdamParams, Datum, ModelInput

MODEL = "tiny"


def datum(batch: int) -> Datum:
    """Batches differ, so that weights tell which were trained."""
    tokens = list(f"batch {batch}".encode())
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})


# ---- rows


def test_a_row_has_what_is_known_and_extras_beside_it():
    record = CheckpointRecord(name="000002", batch=2, state_path="/s", extras={"cumulative_tokens": 7})
    assert record.to_dict() == {"name": "000002", "batch": 2, "state_path": "/s", "cumulative_tokens": 7}
    assert (record.has("state_path"), record.has("sampler_path"), record.has("cumulative_tokens")) == (
        True,
        False,
        True,
    )
    assert (record.get("batch"), record.get("cumulative_tokens"), record.get("epoch")) == (2, 7, None)


@given(
    st.builds(
        CheckpointRecord,
        name=st.text(max_size=3),
        batch=st.none() | st.integers(),
        epoch=st.none() | st.integers(),
        final=st.none() | st.booleans(),
        state_path=st.none() | st.just("/a"),
        sampler_path=st.none() | st.just("/b"),
        policy_paths=st.lists(st.sampled_from(["/c", "/d"])).map(tuple),
        trained_ahead=st.lists(st.integers(0, 9)).map(tuple),
        reference_path=st.none() | st.just("/e"),
        extras=st.dictionaries(st.sampled_from(["rolling", "tokens"]), st.booleans() | st.integers()),
    )
)
def test_every_row_survives_json(record: CheckpointRecord):
    assert CheckpointRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize(
    "row",
    [
        {"batch": 1},
        {"name": "a", "batch": "1"},
        {"name": "a", "batch": True},
        {"name": None},
        {"name": "a", "policy_paths": "/c"},
        {"name": "a", "policy_paths": ["/c", 3]},
        {"name": "a", "trained_ahead": [True]},
        {"name": "a", "reference_path": 3},
    ],
)
def test_a_row_that_is_none_is_refused(row: dict[str, object]):
    with pytest.raises(InvalidRequest, match=r"name|batch|policy_paths|trained_ahead|reference_path"):
        CheckpointRecord.from_dict(row)


def test_without_a_file_there_are_no_checkpoints(tmp_path: Path):
    assert load_checkpoints_file(tmp_path) == []
    assert get_last_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"3",
        b"{",
        b'{"name": 1}',
        b'{"name": "a", "batch": 1.5}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_damaged_row_is_named_by_file_and_line_where_a_run_is_resumed(tmp_path: Path, row: bytes):
    (tmp_path / "checkpoints.jsonl").write_bytes(b'{"name": "a", "batch": 1}\n' + row + b"\n")
    with (
        open_service(tmp_path) as service,
        pytest.raises(StovetopError, match=r"checkpoints\.jsonl, line 2: ") as damaged,
    ):
        asyncio.run(begin(service, tmp_path))
    assert len(str(damaged.value)) < 600


def test_the_last_row_that_has_the_key_counts(tmp_path: Path):
    for row in (
        {"name": "a", "state_path": "/a"},
        {"name": "b", "state_path": "/b"},
        {"name": "c", "sampler_path": "/c"},
    ):
        append_row(tmp_path / "checkpoints.jsonl", row)
    last_state, last_sampler = get_last_checkpoint(tmp_path), get_last_checkpoint(tmp_path, "sampler_path")
    assert last_state is not None
    assert last_sampler is not None
    assert (last_state.name, last_sampler.name) == ("b", "c")
    assert get_last_checkpoint(tmp_path, "epoch") is None


def test_a_row_that_a_crash_cut_off_is_left_out_and_a_broken_one_is_named_by_its_line(tmp_path: Path):
    file = tmp_path / "checkpoints.jsonl"
    file.write_text('{"name": "a", "state_path": "/a"}\n{"name": "b", "sta')
    assert [record.name for record in load_checkpoints_file(tmp_path)] == ["a"]
    file.write_text('{"name": "a"}\n{"name": 3}\n')
    with pytest.raises(StovetopError, match=r"checkpoints.jsonl, line 2: 'name'"):
        load_checkpoints_file(tmp_path)


# ---- saving


@pytest.mark.parametrize(
    ("kind", "verbs", "keys"),
    [
        ("state", ["save_state"], ["state_path"]),
        ("sampler", ["save_weights_for_sampler"], ["sampler_path"]),
        ("both", ["save_state", "save_weights_for_sampler"], ["state_path", "sampler_path"]),
    ],
)
def test_each_kind_submits_its_saves_at_once_and_then_writes_one_row(
    tmp_path: Path, kind: CheckpointKind, verbs: list[str], keys: list[str]
):
    with open_service(tmp_path) as service:
        client = service.create_lora_training_client(MODEL).result()
        pending = submit_checkpoint(client, "000003", {"batch": 3, "epoch": 1}, kind)
        assert [call.verb for call in service.calls[1:]] == verbs
        assert not (tmp_path / "checkpoints.jsonl").exists()
        record = asyncio.run(pending.record(tmp_path))
    assert read_rows(tmp_path / "checkpoints.jsonl") == [record.to_dict()]
    assert list(record.to_dict()) == ["name", "batch", "epoch", *keys]
    assert load_checkpoints_file(tmp_path) == [record]


@pytest.mark.parametrize("loop_state", [{"batch": "3"}, {"state_path": "/x"}, {"name": "x"}, {"policy_paths": "/x"}])
def test_a_loop_state_that_is_none_is_refused_before_anything_is_saved(tmp_path: Path, loop_state: dict[str, str]):
    with open_service(tmp_path) as service:
        client = service.create_lora_training_client(MODEL).result()
        with pytest.raises(InvalidRequest, match=r"batch|state_path|name|policy_paths"):
            submit_checkpoint(client, "a", loop_state)
        assert [call.verb for call in service.calls] == ["create_lora_training_client"]


def test_a_save_that_fails_leaves_no_row(tmp_path: Path):
    with open_service(tmp_path, faults=[Raises("save_state", 1, OSError("no space left"))]) as service:
        client = service.create_lora_training_client(MODEL).result()
        with pytest.raises(RequestFailedError, match="no space left"):
            asyncio.run(save_checkpoint(client, "a", tmp_path, {"batch": 1}))
    assert load_checkpoints_file(tmp_path) == []


def test_saves_are_due_every_so_many_batches_and_never_at_zero():
    assert [done for done in range(1, 10) if is_due(done, 3)] == [3, 6, 9]
    assert not any(is_due(done, 0) for done in range(10))


# ---- where a run begins


async def begin(service: InProcessServiceClient, log_dir: Path, load_checkpoint_path: str | None = None) -> Start:
    return await resume_or_create(
        service, log_dir, model_name=MODEL, lora_rank=8, seed=1, load_checkpoint_path=load_checkpoint_path
    )


def saved_row(service: InProcessServiceClient, log_dir: Path, batch: int) -> CheckpointRecord:
    client = service.create_lora_training_client(MODEL, rank=8).result()
    return asyncio.run(save_checkpoint(client, f"{batch:06d}", log_dir, {"batch": batch}))


def constructors(service: InProcessServiceClient) -> list[str]:
    return [call.verb for call in service.calls if call.client == "service"]


def test_a_run_without_checkpoints_begins_with_a_new_adapter(tmp_path: Path):
    with open_service(tmp_path) as service:
        start = asyncio.run(begin(service, tmp_path))
        assert constructors(service) == ["create_lora_training_client"]
        assert service.calls[0].arguments["config"].rank == 8
    assert (start.batch, start.record) == (0, None)


def test_a_checkpoint_to_load_gives_its_weights_and_a_fresh_optimizer(tmp_path: Path):
    with open_service(tmp_path) as service:
        record = saved_row(service, tmp_path / "other", 5)
        start = asyncio.run(begin(service, tmp_path / "run", record.state_path))
        assert constructors(service)[1:] == ["create_training_client_from_state"]
    assert (start.batch, start.record) == (0, None)


def test_a_row_wins_over_a_checkpoint_to_load_and_keeps_its_optimizer(tmp_path: Path):
    with open_service(tmp_path) as service:
        saved_row(service, tmp_path, 5)
        record = saved_row(service, tmp_path, 10)
        start = asyncio.run(begin(service, tmp_path, "/somewhere/else"))
        assert constructors(service)[2:] == ["create_training_client_from_state_with_optimizer"]
        assert service.calls[-1].arguments["path"] == record.state_path
    assert (start.batch, start.record) == (10, record)


def test_a_torn_row_and_a_lost_one_are_skipped_with_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with open_service(tmp_path) as service:
        rows = [saved_row(service, tmp_path, batch) for batch in (5, 10, 15)]
        assert rows[1].state_path is not None
        assert rows[2].state_path is not None
        next(Path(rows[1].state_path).glob("*.safetensors")).write_bytes(b"torn")
        shutil.rmtree(rows[2].state_path)
        with caplog.at_level(logging.WARNING):
            start = asyncio.run(begin(service, tmp_path))
    assert start.batch == 5
    messages = [entry.getMessage() for entry in caplog.records]
    assert ["'000015' cannot be used" in messages[0], "'000010' cannot be used" in messages[1]] == [True, True]


async def save_with_policies(service: InProcessServiceClient, log_dir: Path, batch: int) -> CheckpointRecord:
    """As a loop does that samples ahead of training: the row names the policies that the next batches need."""
    client = await service.create_lora_training_client(MODEL, rank=8)
    saved = submit_checkpoint(client, f"{batch:06d}", {"batch": batch})
    names = [f"policy-{batch}-{index}" for index in range(2)]
    paths = [(await client.save_weights_for_sampler(name)).path for name in names]
    return await saved.record(log_dir, policy_paths=paths, trained_ahead=[7, 9], reference_path=paths[0])


def test_a_row_names_what_else_a_run_needs_to_go_on(tmp_path: Path):
    with open_service(tmp_path) as service:
        record = asyncio.run(save_with_policies(service, tmp_path, 5))
        assert [Path(path).name for path in record.policy_paths] == ["policy-5-0", "policy-5-1"]
        assert (record.trained_ahead, record.reference_path) == ((7, 9), record.policy_paths[0])
        assert asyncio.run(begin(service, tmp_path)).record == record
        client = service.create_lora_training_client(MODEL, rank=8).result()
        final = save_final_checkpoint(
            client, tmp_path, start=Start(client), num_batches=6, policy_paths=record.policy_paths, reference_path="/e"
        )
        asyncio.run(final)
    last = get_last_checkpoint(tmp_path, "policy_paths")
    assert last is not None
    assert (last.name, last.policy_paths, last.reference_path) == ("final", record.policy_paths, "/e")


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda path: next(path.glob("*.safetensors")).write_bytes(b"torn")])
def test_a_row_with_a_torn_policy_or_a_lost_one_is_skipped_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lose: Callable[[Path], object]
):
    with open_service(tmp_path) as service:
        first, second = (asyncio.run(save_with_policies(service, tmp_path, batch)) for batch in (5, 10))
        lose(Path(second.policy_paths[1]))
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(begin(service, tmp_path)).record == first
    assert "'000010' cannot be used" in caplog.records[0].getMessage()


def test_a_run_directory_may_be_moved_with_its_policies(tmp_path: Path):
    with open_service(tmp_path / "old") as service:
        asyncio.run(save_with_policies(service, tmp_path / "old", 5))
    (tmp_path / "old").rename(tmp_path / "new")
    with open_service(tmp_path / "new") as service:
        record = asyncio.run(begin(service, tmp_path / "new")).record
    assert record is not None
    moved = [*record.policy_paths, record.reference_path]
    assert all(str(path).startswith(str(tmp_path / "new" / "checkpoints")) for path in moved)
    assert all(Path(str(path)).is_dir() for path in moved)


def test_a_run_whose_checkpoints_are_all_lost_is_an_error_and_no_fresh_start(tmp_path: Path):
    with open_service(tmp_path) as service:
        saved_row(service, tmp_path, 5)
        shutil.rmtree(tmp_path / "checkpoints")
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
            asyncio.run(begin(service, tmp_path))


@pytest.mark.parametrize("lose", [Path.unlink, lambda file: file.write_text("")])
def test_a_run_that_lost_its_rows_but_not_its_states_is_refused_with_the_way_to_go_on(
    tmp_path: Path, lose: Callable[[Path], object]
):
    with open_service(tmp_path) as service:
        saved_row(service, tmp_path, 5)
        record = saved_row(service, tmp_path, 10)
        lose(tmp_path / "checkpoints.jsonl")
        with pytest.raises(
            CheckpointError, match=r"names no checkpoint.*2 were made.*from '000010' \(batch 10, "
        ) as lost:
            asyncio.run(begin(service, tmp_path))
        assert str(record.state_path) in str(lost.value)
        copy, rows = re.findall(r"copy (\S+) to (\S+);", str(lost.value))[0]
        shutil.copy(tmp_path / copy, tmp_path / rows)
        assert asyncio.run(begin(service, tmp_path)).record == record


def test_a_run_that_was_stopped_before_its_first_row_begins_again_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with open_service(tmp_path) as service:
        client = service.create_lora_training_client(MODEL, rank=8).result()
        path = client.save_state("000005").result().path
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(begin(service, tmp_path)).batch == 0
    assert f"no row of checkpoints.jsonl names what was saved in {path}" in caplog.text


def test_a_row_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path):
    with open_service(tmp_path) as service:
        client = service.create_lora_training_client(MODEL, rank=8).result()
        (tmp_path / "run" / "checkpoints.jsonl").mkdir(parents=True)
        with pytest.raises(WriteFailed, match=r"cannot write .*/run/checkpoints\.jsonl: Is a directory"):
            asyncio.run(save_checkpoint(client, "000005", tmp_path / "run", {"batch": 5}))


def test_a_row_without_a_batch_is_no_place_to_go_on_from(tmp_path: Path):
    with open_service(tmp_path) as service:
        saved_row(service, tmp_path, 5)
        client = service.create_lora_training_client(MODEL, rank=8).result()
        asyncio.run(save_checkpoint(client, "souvenir", tmp_path, {}))
        assert asyncio.run(begin(service, tmp_path)).batch == 5


def test_another_rank_than_the_saved_one_is_refused(tmp_path: Path):
    with open_service(tmp_path) as service:
        saved_row(service, tmp_path, 5)
        with pytest.raises(InvalidRequest, match=r"rank 8.*: 32"):
            asyncio.run(resume_or_create(service, tmp_path, model_name=MODEL))


def test_an_adapter_to_start_from_with_another_say_on_the_head_is_refused(tmp_path: Path):
    with open_service(tmp_path) as service:
        saved = saved_row(service, tmp_path / "before", 1).state_path
        with pytest.raises(InvalidRequest, match=r"has the output head too; set train_unembed to True: False"):
            asyncio.run(
                resume_or_create(
                    service, tmp_path / "run", model_name=MODEL, lora_rank=8, train_unembed=False,
                    load_checkpoint_path=saved,
                )
            )  # fmt: skip


def test_a_run_directory_may_be_moved(tmp_path: Path):
    with open_service(tmp_path / "old") as service:
        saved_row(service, tmp_path / "old", 5)
    (tmp_path / "old").rename(tmp_path / "new")
    with open_service(tmp_path / "new") as service:
        assert asyncio.run(begin(service, tmp_path / "new")).batch == 5
    last = get_last_checkpoint(tmp_path / "new")
    assert last is not None
    assert str(last.state_path).startswith(str(tmp_path / "new" / "checkpoints"))


# ---- a whole loop


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Loop:
    """A pipelined loop with one step of look-ahead, killed after `kill_after` of them."""

    log_dir: Path
    num_batches: int = 7
    save_every: int = 2
    kill_after: int | None = None

    async def run(self, service: InProcessServiceClient) -> Start:
        start = await begin(service, self.log_dir)
        client = start.training_client
        pending: PendingCheckpoint | None = None
        for batch in range(start.batch, self.num_batches):
            step = client.forward_backward([datum(batch)], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=0.1))
            saves = is_due(batch + 1, self.save_every)
            saved = submit_checkpoint(client, f"{batch + 1:06d}", {"batch": batch + 1}) if saves else None
            if pending is not None:
                await pending.record(self.log_dir)
            self._maybe_killed()
            await step
            pending = saved
        if pending is not None:
            await pending.record(self.log_dir)
        self._maybe_killed()
        await save_final_checkpoint(client, self.log_dir, start=start, num_batches=self.num_batches)
        return start

    def _maybe_killed(self) -> None:
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                raise Killed


def state_files(log_dir: Path) -> dict[str, bytes]:
    last = get_last_checkpoint(log_dir)
    assert last is not None
    assert (last.name, last.final) == ("final", True)
    assert last.has("sampler_path")
    return {file.name: file.read_bytes() for file in Path(str(last.state_path)).glob("*.safetensors")}


def test_a_checkpoint_holds_exactly_the_batches_before_the_one_it_names(tmp_path: Path):
    with open_service(tmp_path) as service:
        asyncio.run(Loop(tmp_path).run(service))
        calls = [call for call in service.calls if call.client != "service"]
        rows = {record.name: record.batch for record in load_checkpoints_file(tmp_path)}
        assert rows == {"000002": 2, "000004": 4, "000006": 6, "final": 7}
        for position, call in enumerate(calls):
            if call.verb == "save_state":
                before = [earlier.verb for earlier in calls[:position]]
                assert before.count("forward_backward") == before.count("optim_step") == rows[call.arguments["name"]]


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_killed_and_begun_again_ends_as_one_that_never_was(tmp_path: Path, seed: int):
    kills = random.Random(seed)
    with open_service(tmp_path / "whole") as service:
        asyncio.run(Loop(tmp_path / "whole").run(service))
    for kill_after in [kills.randrange(8) for _ in range(3)] + [None]:
        with open_service(tmp_path / "killed") as service, contextlib.suppress(Killed):
            asyncio.run(Loop(tmp_path / "killed", kill_after=kill_after).run(service))
    assert state_files(tmp_path / "killed") == state_files(tmp_path / "whole")


def test_a_finished_run_trains_nothing_saves_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with open_service(tmp_path) as service:
        asyncio.run(Loop(tmp_path).run(service))
        rows = load_checkpoints_file(tmp_path)
        service.calls.clear()
        with caplog.at_level(logging.INFO):
            start = asyncio.run(Loop(tmp_path).run(service))
        assert [call.verb for call in service.calls] == ["create_training_client_from_state_with_optimizer"]
    assert start.batch == 7
    assert load_checkpoints_file(tmp_path) == rows
    assert "already complete: 7 of 7 batches" in caplog.text


def test_a_run_cannot_end_before_what_it_has_trained(tmp_path: Path):
    """Without a final checkpoint it would pass for complete, and for ever not be so."""
    record = CheckpointRecord(name="000006", batch=6, state_path="/a")
    with open_service(tmp_path) as service:
        client = service.create_lora_training_client("any/model", 4).result()
    with pytest.raises(InvalidRequest, match="has trained 6 batches, and cannot end after 4; ask for 6 or more"):
        Start(client, 6, record).is_complete(4)
    assert not Start(client, 6, record).is_complete(6)
    assert Start(client, 6, dataclasses.replace(record, final=True)).is_complete(4)


def test_a_finished_run_that_is_made_longer_goes_on(tmp_path: Path):
    with open_service(tmp_path) as service:
        asyncio.run(Loop(tmp_path).run(service))
        start = asyncio.run(Loop(tmp_path, num_batches=9).run(service))
    assert start.batch == 7
    assert [record.batch for record in load_checkpoints_file(tmp_path)][-2:] == [8, 9]
