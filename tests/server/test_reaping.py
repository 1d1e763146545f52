"""Clients that are silent or have finished: what they took is free, and one that comes back goes on where it was."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tinker
from running import Running, datum, logprobs, made, open_recording, running, train
from tinker import types

from stovetop.server.limits import OwnerLimits
from stovetop.server.rows import RequestRow, ResultRow, SamplerRow, ServedRow, SessionRow, SnapshotRow, put
from stovetop.server.sweeping import KEPT_S, QUIET_S, sweep

PROMPT = types.ModelInput.from_ints([5, 17, 42])
DRAWN = types.SamplingParams(max_tokens=4, seed=1)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as server:
        yield server


def silent(server: Running, model_id: str, silent_s: float = QUIET_S) -> str:
    """As if nothing had been heard of its session for so long."""
    session_id = model_id.partition(":")[0]
    server.parts.sessions.last_seen_s[session_id] -= silent_s + 1
    return session_id


def swept(server: Running, until: Callable[[], bool]) -> None:
    """A sweep waits for nothing, so what it begins a later one ends."""
    give_up_s = time.monotonic() + 10
    while not until():
        assert time.monotonic() < give_up_s, "the sweeps have not come to this"
        sweep(server.parts, time.time())
        time.sleep(0.01)


def asleep(server: Running, model_id: str) -> Callable[[], bool]:
    return lambda: not server.parts.programs.find(model_id, "local").is_in_memory


def test_a_client_that_was_suspended_goes_on_where_it_was(alone: Running) -> None:
    with alone.sdk() as sdk, alone.sdk() as undisturbed:
        client, other = made(sdk), made(undisturbed)
        for each in (client, other):
            train(each)
            logprobs(each)
        silent(alone, client.model_id)
        swept(alone, asleep(alone, client.model_id))
        assert not asleep(alone, other.model_id)()
        assert client.get_info().lora_rank == 4
        for each in (client, other):
            train(each)
        assert logprobs(client) == logprobs(other)
        assert not asleep(alone, client.model_id)()


def test_a_gradient_survives_that_its_client_is_suspended(alone: Running) -> None:
    """A snapshot has none, so the model is made by a replay."""
    with alone.sdk() as sdk:
        client, other = made(sdk), made(sdk)
        for each in (client, other):
            train(each)
            each.forward_backward([datum([9, 8, 7, 6])], "cross_entropy").result()
            if each is client:
                silent(alone, client.model_id)
                swept(alone, asleep(alone, client.model_id))
        stepped = [each.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics for each in (client, other)]
        assert stepped[0] == stepped[1]
        assert logprobs(client) == logprobs(other)


def test_a_request_that_was_done_before_is_not_done_again_after(alone: Running) -> None:
    with alone.sdk() as sdk, alone.http() as http:
        client = made(sdk)
        train(client)
        weights = logprobs(client)
        metrics = http.post("retrieve_future", json={"request_id": f"{client.model_id}:2"}).json()["metrics"]
        silent(alone, client.model_id)
        swept(alone, asleep(alone, client.model_id))
        again = http.post("retrieve_future", json={"request_id": f"{client.model_id}:2"}).json()
        assert again["metrics"] == metrics
        assert asleep(alone, client.model_id)()
        assert logprobs(client) == weights


def test_a_model_that_is_at_work_is_not_put_to_sleep(tmp_path: Path) -> None:
    with running(tmp_path, partial(open_recording, latency_s=0.3)) as server, server.sdk() as sdk:
        client = made(sdk)
        learning = client.forward_backward([datum()], "cross_entropy")
        while not server.parts.programs.find(client.model_id, "local").find(1):
            time.sleep(0.005)
        silent(server, client.model_id)
        sweep(server.parts, time.time())
        assert not asleep(server, client.model_id)()
        assert learning.result().metrics["loss:sum"] > 0


def test_frozen_weights_of_a_silent_client_are_written_and_come_back(alone: Running) -> None:
    with alone.sdk() as sdk:
        client = made(sdk)
        train(client)
        frozen = client.save_weights_and_get_sampling_client().result()
        drawn = frozen.sample(PROMPT, 1, DRAWN).result().sequences[0]
        client.forward_backward([datum()], "cross_entropy").result()  # so that no snapshot would write them
        silent(alone, client.model_id)
        swept(alone, lambda: all(row.folder for row in alone.parts.journal.rows(SamplerRow, "model_id IS NOT NULL")))
        swept(alone, asleep(alone, client.model_id))
        assert len(list(alone.storage.glob("samplers/*"))) == 1
        again = frozen.sample(PROMPT, 1, DRAWN).result().sequences[0]
        assert (again.tokens, again.logprobs) == (drawn.tokens, drawn.logprobs)
        logprobs(client)  # the replay does not freeze them again
        (sampler_id,) = alone.parts.samplers.of_session(client.model_id.partition(":")[0])
        assert alone.parts.samplers.find(sampler_id, "local").folder is not None


def test_frozen_weights_of_a_client_that_stays_away_are_deleted_after_a_day(alone: Running) -> None:
    sdk = alone.sdk()
    client = made(sdk)
    train(client)
    weights = logprobs(client)
    frozen = client.save_weights_and_get_sampling_client().result()
    silent(alone, client.model_id)
    swept(alone, lambda: asleep(alone, client.model_id)() and len(list(alone.storage.glob("samplers/*"))) == 1)
    silent(alone, client.model_id, KEPT_S)
    swept(alone, lambda: not list(alone.storage.glob("samplers/*")))
    assert alone.parts.journal.rows(SamplerRow, "model_id IS NOT NULL") == []
    with pytest.raises(tinker.NotFoundError, match="no sampling session of this id"):
        frozen.sample(PROMPT, 1, DRAWN).result()
    assert logprobs(client) == weights  # its model is there


def test_a_sampler_that_is_not_used_is_out_of_memory_while_its_client_lives(alone: Running) -> None:
    with alone.sdk() as sdk:
        client = made(sdk)
        train(client)
        frozen = client.save_weights_and_get_sampling_client().result()
        scored = frozen.compute_logprobs(PROMPT).result()
        samplers = alone.parts.samplers
        for sampler in samplers._by_id.values():
            sampler.used_s -= QUIET_S + 1
        swept(alone, lambda: all(each.client is None for each in samplers._by_id.values()))
        assert not asleep(alone, client.model_id)()
        assert frozen.compute_logprobs(PROMPT).result() == scored


def test_samples_of_a_silent_client_are_gone_so_that_it_draws_them_again(alone: Running) -> None:
    with alone.http() as http:
        session = http.post("create_session", json={}).json()["session_id"]
        made_with = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/model"}
        sampler_id = http.post("create_sampling_session", json=made_with).json()["sampling_session_id"]
        body = {
            "sampling_session_id": sampler_id,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 2, "seed": 1},
        }
        first = http.post("asample", json=body).json()["request_id"]
        silent(alone, session)
        sweep(alone.parts, time.time())
        assert http.post("retrieve_future", json={"request_id": first}).status_code == 410
        again = http.post("asample", json=body).json()["request_id"]
        assert http.post("retrieve_future", json={"request_id": again}).json()["sequences"]


def test_item_41_finishing_deletes_what_only_the_session_could_use(alone: Running) -> None:
    with alone.sdk() as sdk, alone.http() as http:
        client = made(sdk)
        train(client)
        path = client.save_state("kept").result().path
        client.save_weights_and_get_sampling_client().result()
        session = client.model_id.partition(":")[0]
        (sampler_id,) = alone.parts.samplers.of_session(session)
    swept(alone, lambda: asleep(alone, client.model_id)() and not alone.parts.samplers.of_session(session))
    with alone.http() as http:
        body = {
            "sampling_session_id": sampler_id,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 2},
        }
        assert http.post("asample", json=body).status_code == 410
        assert http.post("session_heartbeat", json={"session_id": session}).status_code == 410
    silent(alone, session, KEPT_S)
    journal = alone.parts.journal
    swept(alone, lambda: not journal.rows(RequestRow))
    assert (journal.rows(ResultRow), journal.rows(SnapshotRow)) == ([], [])
    assert [folder.name.partition(".")[0] for folder in alone.storage.glob("checkpoints/*/weights/*")] == ["kept"]
    assert list(alone.storage.glob("samplers/*")) == []
    (run,) = alone.rest().list_training_runs().result().training_runs
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path


def test_after_a_restart_what_has_ended_stays_ended(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        with first.sdk() as sdk:
            client = made(sdk)
            train(client)
            logprobs(client)
        swept(first, asleep(first, client.model_id))
        silent(first, client.model_id, KEPT_S)
        swept(first, lambda: not first.parts.journal.rows(RequestRow))
    with running(tmp_path) as second, second.http() as http:
        assert asleep(second, client.model_id)()
        sweep(second.parts, time.time())
        assert http.post("get_info", json={"model_id": client.model_id}).status_code == 410


def test_how_long_a_client_was_silent_is_known_after_a_restart_and_the_pause_does_not_count(tmp_path: Path) -> None:
    with running(tmp_path) as first, first.http() as http:
        ids = [http.post("create_session", json={}).json()["session_id"] for _ in range(2)]
        first.parts.sessions.last_seen_s[ids[0]] -= 500
        now_s = time.time()
        sweep(first.parts, now_s)
        rows = first.parts.journal.rows(SessionRow)
        assert all(row.seen_s is not None for row in rows)
        earlier = [replace(row, seen_s=(row.seen_s or 0) - 3000) for row in rows]
        first.parts.journal.put(put(ServedRow(1, now_s - 3000)), *map(put, earlier)).result()
        first.parts.sessions.keep = lambda now_s: None  # it is killed
    with running(tmp_path) as second:
        silences = [second.parts.sessions.silence_s(session_id) for session_id in ids]
        assert 500 <= silences[0] < 530
        assert silences[1] < 30
        assert [row.id for row, _ in second.parts.sessions.quiet(400)] == ids[:1]


def test_of_weights_without_a_path_the_longest_unused_are_deleted_when_there_are_too_many(tmp_path: Path) -> None:
    limits = OwnerLimits(max_sampler_bytes=1)
    with running(tmp_path, limits_of=lambda owner: limits) as server, server.sdk() as sdk:
        client = made(sdk)
        frozen = [client.save_weights_and_get_sampling_client().result() for _ in range(3)]
        samplers = server.parts.samplers
        session_id = client.model_id.partition(":")[0]
        ids = samplers.of_session(session_id)
        for each in samplers.write_all(client.model_id, 10**6):
            each.future.result(10)
            server.parts.journal.put(put(samplers.written(each))).result()
        rows = server.parts.journal.rows(SamplerRow)
        assert all(row.size_bytes > 1000 for row in rows)
        sweep(server.parts, time.time())
        assert samplers.of_session(session_id) == ids  # used a moment ago
        for index in (0, 2):
            samplers._by_id[ids[index]].used_s -= 1000  # pyright: ignore[reportPrivateUsage]  time is not to be waited for
        sweep(server.parts, time.time())
        assert samplers.of_session(session_id) == ids[1:2]
        assert len(list(server.storage.glob("samplers/*"))) == 1
        frozen[1].sample(PROMPT, 1, DRAWN).result()
        with pytest.raises(tinker.NotFoundError, match="or no more; make another one"):
            frozen[0].sample(PROMPT, 1, DRAWN).result()


def test_a_checkpoint_whose_time_is_over_is_deleted(alone: Running) -> None:
    with alone.sdk() as sdk:
        client = made(sdk)
        client.save_state("short", ttl_seconds=3600).result()
        client.save_state("long", ttl_seconds=10 * 3600).result()
        sweep(alone.parts, time.time() + 7200)
        (left,) = alone.rest().list_checkpoints(client.model_id).result().checkpoints
        assert left.checkpoint_id == "weights/long"
        (folder,) = alone.storage.glob("checkpoints/*/weights/*")
        assert folder.name.startswith("long.")


def test_a_sampler_is_not_found_before_its_row_is_committed(alone: Running) -> None:
    committing, goes_on = threading.Event(), threading.Event()

    def hold(_connection: object) -> None:
        committing.set()
        goes_on.wait(10)

    with alone.sdk() as sdk, alone.http() as http:
        client = made(sdk)
        session = client.model_id.partition(":")[0]
        alone.parts.journal.read(hold)
        committing.wait(10)
        frozen = client.save_weights_and_get_sampling_client()
        while not (ids := alone.parts.samplers.of_session(session)):
            time.sleep(0.005)
        assert http.get(f"samplers/{ids[0]}").status_code == 404
        goes_on.set()
        frozen.result()
        assert http.get(f"samplers/{ids[0]}").json()["base_model"] == "tiny/model"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_a_client_does_it_sees_the_same_if_it_is_suspended_in_between(alone: Running, seed: int) -> None:
    random = Random(seed)
    with alone.sdk() as sdk, alone.sdk() as undisturbed:
        clients = [made(sdk), made(undisturbed)]
        frozen: list[list[tinker.SamplingClient]] = []
        has_learnt = False
        for step in range(12):
            doing = random.choice(["learn", "learn", "step", "freeze", "sample", "save"])
            tokens = [random.randrange(200) for _ in range(5)]
            seen: list[Any] = []
            if doing == "freeze":
                frozen.append([client.save_weights_and_get_sampling_client().result() for client in clients])
            elif doing == "sample" and frozen:
                seen = [sampler.compute_logprobs(PROMPT).result() for sampler in random.choice(frozen)]
            elif doing == "save":
                saved = [client.save_state(f"s{step}").result().path for client in clients]
                seen = [path.rpartition("/")[2] for path in saved]
            elif doing == "step" and has_learnt:
                has_learnt = False
                seen = [client.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics for client in clients]
            else:
                seen = [
                    client.forward_backward([datum(tokens)], "cross_entropy").result().metrics for client in clients
                ]
            assert seen == [] or seen[0] == seen[1]
            if random.random() < 0.4:
                silent(alone, clients[0].model_id)
                swept(alone, asleep(alone, clients[0].model_id))
        assert logprobs(clients[0]) == logprobs(clients[1])
