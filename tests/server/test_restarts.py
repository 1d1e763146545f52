"""What is there after a stop, and after the kill that a copy of the folder of a running server is the image of."""

import errno
import shutil
import sqlite3
from functools import partial
from pathlib import Path

import pytest
import tinker
from running import MODELS, Running, datum, logprobs, made, open_recording, running, train
from tinker import types

from costly import slow_but
from stovetop.backends import local, recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.recording.failing_disk import FailingDisk
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.server.ports import listen
from stovetop.server.rows import SamplerRow
from stovetop.server.serve import Server, ServerOptions

PROMPT = types.ModelInput.from_ints([5, 17, 42])


@pytest.fixture
def killed(tmp_path: Path) -> "Killed":
    return Killed(tmp_path)


class Killed:
    """A server that is left running, whose folder as of a moment is served by another one: what a kill at this moment
    would leave."""

    def __init__(self, folder: Path) -> None:
        self.before, self.after = folder / "before", folder / "after"

    def image(self) -> Path:
        # a copy takes a while: it may have a later mark than the journal
        shutil.copytree(self.before, self.after, ignore=shutil.ignore_patterns("server.lock", "journal.mark"))
        return self.after


def post(server: Running, path: str, /, **body: object) -> dict[str, object]:
    with server.http() as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def test_after_a_kill_all_that_was_acknowledged_is_there(killed: Killed) -> None:
    with running(killed.before) as first, first.sdk() as sdk:
        client = made(sdk)
        train(client)
        early = client.save_weights_and_get_sampling_client().result()
        path = client.save_state("kept").result().path
        train(client)
        scored, weights = early.compute_logprobs(PROMPT).result(), logprobs(client)
        client.forward_backward([datum()], "cross_entropy").result()
        with running(killed.image()) as second:
            step = post(second, "optim_step", model_id=client.model_id, seq_id=20, adam_params={"learning_rate": 0.1})
            metrics = post(second, "retrieve_future", request_id=step["request_id"])
            old = post(second, "retrieve_future", request_id=f"{client.model_id}:1")
            assert old["metrics"]
            with second.sdk() as sdk_of_second:
                again = sdk_of_second.create_training_client_from_state_with_optimizer(path).result()
                train(again)
                assert logprobs(again) == weights
        stepped = client.optim_step(types.AdamParams(learning_rate=0.1)).result()
        assert stepped.metrics == metrics["metrics"]
        assert early.compute_logprobs(PROMPT).result() == scored


def test_after_a_stop_nothing_is_replayed_and_frozen_weights_are_there(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        sdk = first.sdk()  # it is left open: closing it would finish the session
        client = made(sdk)
        train(client)
        early = client.save_weights_and_get_sampling_client().result()
        drawn = early.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, seed=1)).result().sequences[0].tokens
        train(client)
        weights = logprobs(client)
    journal = sqlite3.connect(tmp_path / "journal.sqlite")
    assert journal.execute("SELECT count(*) FROM request WHERE body IS NOT NULL").fetchall() == [(0,)]
    (sampler_id, folder), *_ = journal.execute("SELECT id, folder FROM sampler").fetchall()
    journal.close()
    assert (tmp_path / folder).is_dir()
    with running(tmp_path) as second:
        assert {call.verb for call in second.parts.service.calls} == {"create_sampling_client"}
        body = {
            "sampling_session_id": sampler_id,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 17, 42]}]},
            "sampling_params": {"max_tokens": 4, "seed": 1},
        }
        sample = post(second, "asample", **body)
        result = post(second, "retrieve_future", request_id=sample["request_id"])
        assert result["sequences"][0]["tokens"] == drawn  # type: ignore[index]
        path = post(second, "save_weights", model_id=client.model_id, seq_id=50, path="then")
        saved = post(second, "retrieve_future", request_id=path["request_id"])
        with second.sdk() as sdk_of_second:
            again = sdk_of_second.create_training_client_from_state_with_optimizer(str(saved["path"])).result()
            assert logprobs(again) == weights


def test_a_model_whose_metadata_are_not_strings_is_there_after_a_stop(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        session = post(first, "create_session", user_metadata={"n": 3})["session_id"]
        made = post(first, "create_model", session_id=session, model_seq_id=0, base_model=MODELS[0])
        assert "error" not in post(first, "retrieve_future", request_id=made["request_id"])
    with running(tmp_path) as second:
        assert post(second, "get_info", model_id=made["model_id"])["model_name"] == MODELS[0]


def test_item_36_and_42_a_sample_of_before_is_gone_and_a_retry_of_before_is_known(killed: Killed) -> None:
    with running(killed.before) as first, first.sdk() as sdk:
        client = made(sdk)
        train(client)
        client.save_state("a").result()
        with running(killed.image()) as second, second.http() as http:
            assert http.post("retrieve_future", json={"request_id": "sample-0123"}).status_code == 410
            body = {"model_id": client.model_id, "seq_id": 3, "path": "other"}
            assert "was used by another request" in http.post("save_weights", json=body).json()["detail"]


def test_what_a_kill_left_half_made_is_removed_and_what_rows_name_stays(killed: Killed) -> None:
    with running(killed.before) as first, first.sdk() as sdk:
        client = made(sdk)
        client.save_state("kept").result()
        image = killed.image()
        (kept,) = image.glob("checkpoints/*/weights/kept.*")
        orphan = kept.with_name("orphan.9")
        shutil.copytree(kept, orphan)
        with running(image):
            assert kept.is_dir()
            assert not orphan.exists()


def test_a_refused_datum_is_refused_again_and_so_is_the_step(killed: Killed) -> None:
    with running(killed.before) as first, first.sdk() as sdk:
        client = made(sdk)
        train(client)
        before = logprobs(client)
        client.forward_backward([datum()], "cross_entropy")
        bad = client.forward_backward([datum([5, 100_000, 7])], "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match="outside the vocabulary"):
            bad.result()
        with running(killed.image()) as second:
            step = post(second, "optim_step", model_id=client.model_id, seq_id=6, adam_params={})
            failed = post(second, "retrieve_future", request_id=step["request_id"])
            assert "outside the vocabulary" in str(failed["error"])
        assert logprobs(client) == before


def test_a_fault_of_the_server_stays_a_failure_when_it_is_replayed(killed: Killed) -> None:
    """The fault would not come again, and the client was told of it."""
    faulty = partial(open_recording, faults=[recording.Raises("forward_backward", 1, OSError("a stray cosmic ray"))])
    with running(killed.before, faulty) as first, first.sdk() as sdk:
        client = made(sdk)
        with pytest.raises(tinker.RequestFailedError, match="a stray cosmic ray") as failure:
            client.forward_backward([datum()], "cross_entropy").result()
        assert "server" in str(failure.value.category)
        with running(killed.image()) as second:
            step = post(second, "optim_step", model_id=client.model_id, seq_id=2, adam_params={})
            failed = post(second, "retrieve_future", request_id=step["request_id"])
            assert "a stray cosmic ray" in str(failed["error"])


def test_a_model_that_could_not_be_made_is_none_after_a_restart_either(tmp_path: Path) -> None:
    """Its client was told of the fault of the server; what it asks later is told again, also by a server that stops."""
    faulty = partial(open_recording, faults=[recording.Raises("create_lora_training_client", 1, OSError("no memory"))])
    step = {"seq_id": 1, "adam_params": {}}
    with running(tmp_path, faulty) as first:
        body = {"session_id": post(first, "create_session")["session_id"], "model_seq_id": 0, "base_model": MODELS[0]}
        model_id = str(post(first, "create_model", **body)["model_id"])
        told = [post(first, "retrieve_future", request_id=f"{model_id}:0")]
    for seq_id in (1, 2):
        with running(tmp_path) as again:
            told.append(post(again, "retrieve_future", request_id=f"{model_id}:0"))
            submitted = post(again, "optim_step", model_id=model_id, **{**step, "seq_id": seq_id})
            failed = post(again, "retrieve_future", request_id=str(submitted["request_id"]))
            assert "the model could not be made" in str(failed["error"])
            assert "no memory" in str(failed["error"])
            again.parts.programs.rest(1)
    assert told == [told[0]] * 3
    assert "no memory" in str(told[0]["error"])


def test_a_request_during_which_the_server_ended_three_times_is_failed(killed: Killed) -> None:
    with running(killed.before) as first, first.sdk() as sdk:
        client = made(sdk)
        client.forward_backward([datum()], "cross_entropy").result()
        image = killed.image()
        journal = sqlite3.connect(image / "journal.sqlite")
        journal.execute("DELETE FROM result WHERE n > 1")
        journal.execute("UPDATE request SET attempts = 3 WHERE seq = 1")
        journal.commit()
        journal.close()
        with running(image) as second:
            failed = post(second, "retrieve_future", request_id=f"{client.model_id}:1")
            assert failed["category"] == "server"
            assert "the server ended 3 times while it did this request" in str(failed["error"])


@pytest.mark.parametrize(
    "damaged",
    slow_but(2, ["first.*/adapter.safetensors", "snapshot.*/adapter.safetensors", "snapshot.*/manifest.json"]),
)
def test_a_model_whose_replay_reads_what_is_damaged_is_refused_by_name_and_others_are_served(
    killed: Killed, damaged: str
) -> None:
    with running(killed.before) as first, first.sdk() as sdk:
        other = made(sdk)
        train(other)
        path = other.save_state("first").result().path
        client = sdk.create_training_client_from_state_with_optimizer(path).result()
        train(client)
        logprobs(client)
        first.parts.programs.find(other.model_id, "local").rest().result(timeout=10)
        other.forward_backward([datum()], "cross_entropy").result()
        image = killed.image()
        (file,) = image.glob(f"checkpoints/*/weights/{damaged}")
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        broken, whole = (client, other) if damaged.startswith("first") else (other, client)
        with running(image) as second, second.http() as http:
            answers = [
                http.post("optim_step", json={"model_id": each.model_id, "seq_id": 50, "adam_params": {}})
                for each in (broken, whole)
            ]
    assert [answer.status_code for answer in answers] == [400, 200]
    detail = answers[0].json()["detail"]
    assert "cannot be brought back" in detail
    assert str(image) not in detail


def test_a_sampler_whose_weights_are_damaged_is_refused_by_the_name_that_its_client_knows(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        sdk = first.sdk()
        path = made(sdk).save_weights_for_sampler("kept").result().path
        sampler = sdk.create_sampling_client(path).result()
        sampler.compute_logprobs(PROMPT).result()
        (sampler_id,) = (row.id for row in first.parts.journal.rows(SamplerRow) if row.model_path == path)
    (file,) = tmp_path.glob("checkpoints/*/sampler_weights/kept.*/adapter.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"max_tokens": 4}}
    with running(tmp_path) as second, second.http() as http:
        answer = http.post("asample", json={**body, "sampling_session_id": sampler_id, "seq_id": 0})
    assert answer.status_code == 400
    assert path in answer.json()["detail"]
    assert str(tmp_path) not in answer.json()["detail"]


def test_a_deletion_that_is_sent_again_is_answered_the_same_and_deletes_nothing_that_came_since(tmp_path: Path) -> None:
    key = {"X-Idempotency-Key": "the-same"}
    with running(tmp_path) as first, first.http() as http:
        client = made(first.sdk())
        client.save_state("kept").result()
        path = f"training_runs/{client.model_id}/checkpoints/weights/kept"
        answers = [http.delete(path, headers=key).status_code for _ in range(2)]
        assert http.delete(path).status_code == 404
        client.save_state("kept").result()
    with running(tmp_path) as second, second.http() as http:
        answers.append(http.delete(path, headers=key).status_code)
        assert http.delete(path).status_code == 200
    assert answers == [200, 200, 200]


def test_a_save_that_the_disk_refuses_fails_with_the_reason_and_without_the_place(tmp_path: Path) -> None:
    disk = FailingDisk()
    with running(tmp_path, partial(open_recording, disk=disk)) as server, server.sdk() as sdk:
        client = made(sdk)
        disk.fail("write", 1, OSError(errno.EMFILE, "Too many open files"))
        with pytest.raises(tinker.RequestFailedError, match="Too many open files") as failure:
            client.save_state("kept").result()
        assert str(tmp_path) not in str(failure.value)
        assert client.save_state("kept").result().path.endswith("/weights/kept")


def test_a_request_that_was_answered_is_not_failed_by_ends_of_the_server(killed: Killed) -> None:
    """The steps behind it are those of a model that has done it."""
    with running(killed.before) as first, first.sdk() as sdk:
        client = made(sdk)
        train(client)
        logprobs(client)
        image = killed.image()
        journal = sqlite3.connect(image / "journal.sqlite")
        assert journal.execute("SELECT count(*) FROM result").fetchone()[0] > 1
        journal.execute("UPDATE request SET attempts = 3 WHERE seq = 1")
        journal.commit()
        journal.close()
        with running(image) as second, second.http() as http:
            answer = http.post("optim_step", json={"model_id": client.model_id, "seq_id": 50, "adam_params": {}})
            assert "the server ended 3 times while it did seq_id 1 again" in answer.json()["detail"]


def test_a_server_that_was_killed_from_outside_counts_no_attempt(killed: Killed) -> None:
    with running(killed.before) as first, first.sdk() as sdk:
        client = made(sdk)
        metrics = client.forward_backward([datum()], "cross_entropy").result().metrics
        image = killed.image()
        journal = sqlite3.connect(image / "journal.sqlite")
        journal.execute("DELETE FROM result WHERE n > 1")
        journal.execute("UPDATE request SET attempts = 3 WHERE seq = 1")
        journal.commit()
        journal.close()
        with running(image, was_killed=True) as second:
            assert post(second, "retrieve_future", request_id=f"{client.model_id}:1")["metrics"] == metrics


def test_a_second_server_on_one_folder_is_refused_by_name(tmp_path: Path) -> None:
    with running(tmp_path):
        second = Server(open_recording, listen("127.0.0.1", 0), ServerOptions(storage=tmp_path))
        with pytest.raises(InvalidRequest, match="another server is at work in this folder"):
            second.run()


def test_a_folder_in_which_others_have_saved_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InvalidRequest, match="choose an empty folder"), running(tmp_path):
        pass


def test_a_model_that_cannot_be_loaded_keeps_the_server_from_starting(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    def broken(storage: Path) -> InProcessServiceClient:
        return local.open_service(storage=storage, models={"mine": folder}, preload=True, download=None)

    with pytest.raises(StovetopError, match="mine"), running(tmp_path / "storage", broken):
        pass


def test_models_are_the_ones_that_are_served(tmp_path: Path) -> None:
    with running(tmp_path) as server, server.http() as http:
        supported = http.get("get_server_capabilities").json()["supported_models"]
        assert sorted(model["model_name"] for model in supported) == sorted(MODELS)


def test_what_comes_while_the_server_closes_is_to_be_asked_again(tmp_path: Path) -> None:
    with running(tmp_path) as server, server.http() as http:
        session = http.post("create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        server.parts.service.close()
        body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny/model"}
        answer = http.post("create_sampling_session", json=body)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "10"), answer.text
