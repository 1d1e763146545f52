"""The protocol's conformance list: lists, and what is done with checkpoints (items 42, 46 to 51, 55). Each test names
its items."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from running import MODELS, Running, logprobs, made, open_recording, running, train
from tinker.types import (
    AccessibleSearchOwner,
    ActiveSessionStatusQuery,
    ClientFinishedSessionStatusQuery,
    FailedSessionStatusQuery,
    SessionSearchRequest,
)

from stovetop.errors import AuthenticationError

HOUR_S = 3600


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as server:
        yield server


def by_key(key: str | None) -> str:
    """Each key is an owner."""
    if key is None:
        raise AuthenticationError("no key")
    return key


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """By two owners."""
    with running(tmp_path_factory.mktemp("shared"), owner_of=by_key) as server:
        yield server


def test_item_46_runs_are_listed_in_parts_the_last_used_first(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk(user_metadata={"who": "me"}) as sdk:
        clients = [made(sdk, rank=rank) for rank in (1, 2, 3)]
        train(clients[0])
        logprobs(clients[0])
        ids = [clients[index].model_id for index in (0, 2, 1)]
        whole = rest.list_training_runs().result()
        assert [run.training_run_id for run in whole.training_runs] == ids
        part = rest.list_training_runs(limit=1, offset=1).result()
        assert [run.training_run_id for run in part.training_runs] == ids[1:2]
        assert (part.cursor.limit, part.cursor.offset, part.cursor.total_count) == (1, 1, 3)
        run = rest.get_training_run(ids[1], access_scope="accessible").result()
        assert (run.base_model, run.is_lora, run.lora_rank, run.model_owner) == (MODELS[0], True, 3, "local")
        assert run.user_metadata == {"who": "me"}
        assert abs(run.last_request_time.timestamp() - time.time()) < 60
        with pytest.raises(tinker.NotFoundError, match="no model of this id"):
            rest.get_training_run("sess-0:train:0").result()


@pytest.mark.parametrize(
    "query", ["limit=-5", "limit=1001", "offset=-1", "limit=many", "limit=1.5", "access_scope=all", "limit="]
)
@pytest.mark.parametrize("path", ["training_runs", "checkpoints", "sessions"])
def test_item_46_a_part_of_a_list_has_bounds(server: Running, path: str, query: str) -> None:
    with server.http() as http:
        answer = http.get(f"{path}?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["detail"]


def test_item_46_runs_of_a_project(alone: Running) -> None:
    with alone.sdk(project_id="mine") as sdk, alone.sdk() as other:
        client = made(sdk)
        made(other)
        found = alone.rest().list_training_runs(project_id="mine").result()
        assert [run.training_run_id for run in found.training_runs] == [client.model_id]


def test_item_47_checkpoints_are_listed_with_all_that_is_known_of_them(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk() as sdk:
        client = made(sdk)
        client.save_state("first", user_metadata={"note": "ünicode"}).result()
        client.save_weights_for_sampler("second", ttl_seconds=HOUR_S).result()
        client.save_weights_external("third").result()
        made(sdk).save_state("other").result()
        found = rest.list_checkpoints(client.model_id).result().checkpoints
        kinds = [(each.checkpoint_id, each.checkpoint_type) for each in found]
        assert kinds == [
            ("external_weights/third", "external"),
            ("sampler_weights/second", "sampler"),
            ("weights/first", "training"),
        ]
        third, second, first = found
        parsed = tinker.types.ParsedCheckpointTinkerPath.from_tinker_path(first.tinker_path)
        assert (parsed.training_run_id, parsed.checkpoint_id) == (client.model_id, first.checkpoint_id)
        assert first.user_metadata == {"note": "ünicode"}
        assert all((each.size_bytes or 0) > 0 and not each.public for each in found)
        assert second.expires_at is not None
        assert abs(second.expires_at.timestamp() - time.time() - HOUR_S) < 60
        assert (first.expires_at, third.expires_at) == (None, None)
        every = rest.list_user_checkpoints(limit=2).result()
        assert [each.checkpoint_id for each in every.checkpoints] == ["weights/other", "external_weights/third"]
        assert every.cursor is not None
        assert every.cursor.total_count == 4
        run = rest.get_training_run(client.model_id).result()
        assert run.last_checkpoint == first
        assert run.last_sampler_checkpoint == second


def test_item_48_what_is_deleted_is_gone_from_lists_and_from_the_disk(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk() as sdk:
        client = made(sdk)
        paths = [client.save_state(name).result().path for name in ("a", "b")]
        rest.delete_checkpoint_from_tinker_path(paths[0]).result()
        (left,) = rest.list_checkpoints(client.model_id).result().checkpoints
        assert left.tinker_path == paths[1]
        assert [folder.name[0] for folder in alone.storage.glob("checkpoints/*/weights/*")] == ["b"]
        with pytest.raises(tinker.NotFoundError, match="no checkpoint at this path"):
            rest.delete_checkpoint_from_tinker_path(paths[0]).result()
        with pytest.raises(tinker.NotFoundError, match="no checkpoint at this path"):
            sdk.create_training_client_from_state(paths[0]).result()
        with pytest.raises(tinker.BadRequestError, match="weights/0001"):
            rest.delete_checkpoint(client.model_id, "b").result()
        rest.delete_checkpoint(client.model_id, left.checkpoint_id).result()
        assert client.save_state("a").result().path == paths[0]


def test_item_48_a_checkpoint_that_a_replay_would_read_stays_on_the_disk_until_none_does(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk() as sdk:
        path = made(sdk).save_state("base").result().path
        client = sdk.create_training_client_from_state(path).result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        (folder,) = alone.storage.glob("checkpoints/*/weights/base.*")
        alone.parts.programs.find(client.model_id, "local").rest().result(10)
        assert not folder.exists()


def test_item_49_publishing_is_done_again_without_harm(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk() as sdk:
        client = made(sdk)
        path = client.save_weights_for_sampler("p").result().path
        for publish, public in (
            (rest.publish_checkpoint_from_tinker_path, True),
            (rest.unpublish_checkpoint_from_tinker_path, False),
        ):
            for _ in range(2):
                publish(path).result()
                (found,) = rest.list_checkpoints(client.model_id).result().checkpoints
                assert found.public is public


def test_item_49_what_is_published_others_may_read_and_not_change(shared: Running) -> None:
    alice, bob = shared.rest("tml-alice"), shared.rest("tml-bob")
    with (
        tinker.ServiceClient(base_url=shared.url, api_key="tml-alice") as of_alice,
        tinker.ServiceClient(base_url=shared.url, api_key="tml-bob") as of_bob,
    ):
        client = made(of_alice)
        train(client)
        path = client.save_state("mine").result().path
        reads = [
            partial(of_bob.create_training_client_from_state, path),
            partial(bob.get_weights_info_by_tinker_path, path),
        ]
        for read in reads:
            with pytest.raises(tinker.NotFoundError, match="no checkpoint at this path"):
                read().result()
        alice.publish_checkpoint_from_tinker_path(path).result()
        taken = of_bob.create_training_client_from_state(path).result()
        assert logprobs(taken) == logprobs(client)
        changes: list[Any] = [
            partial(bob.delete_checkpoint_from_tinker_path, path),
            partial(bob.unpublish_checkpoint_from_tinker_path, path),
            partial(bob.set_checkpoint_ttl_from_tinker_path, path, HOUR_S),
            partial(bob.get_training_run, client.model_id),
            partial(bob.list_checkpoints, client.model_id),
        ]
        for change in changes:
            with pytest.raises(tinker.NotFoundError):
                change().result()
        assert bob.list_user_checkpoints().result().checkpoints == []
        assert [run.training_run_id for run in bob.list_training_runs().result().training_runs] == [taken.model_id]


def test_item_49_a_time_to_live_is_set_and_taken_back(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk() as sdk, alone.http() as http:
        client = made(sdk)
        path = client.save_state("t").result().path
        rest.set_checkpoint_ttl_from_tinker_path(path, HOUR_S).result()
        (found,) = rest.list_checkpoints(client.model_id).result().checkpoints
        assert found.expires_at is not None
        rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
        (found,) = rest.list_checkpoints(client.model_id).result().checkpoints
        assert found.expires_at is None
        url = f"training_runs/{client.model_id}/checkpoints/weights/t/ttl"
        for body in ({"ttl_seconds": HOUR_S - 1}, {"ttl_seconds": 4 * 10**8}, {"ttl_seconds": "3600"}, {}):
            answer = http.put(url, json=body)
            assert answer.status_code == 400
            assert "ttl_seconds" in answer.json()["detail"]


def test_item_50_weights_info_says_rank_and_modules(server: Running, sdk: tinker.ServiceClient) -> None:
    client = made(sdk, rank=6, train_mlp=False)
    path = client.save_state("info").result().path
    info = server.rest().get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (MODELS[0], True, 6)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)
    with pytest.raises(tinker.NotFoundError):
        server.rest().get_weights_info_by_tinker_path("tinker://x/weights/..").result()


def test_a_checkpoint_that_is_damaged_is_told_by_its_path(alone: Running) -> None:
    with alone.sdk() as sdk:
        path = made(sdk).save_state("torn").result().path
        (folder,) = alone.storage.glob("checkpoints/*/weights/torn.*")
        (folder / "manifest.json").write_text("{")
        with pytest.raises(tinker.BadRequestError, match=path) as refused:
            alone.rest().get_weights_info_by_tinker_path(path).result()
        assert str(alone.storage) not in str(refused.value)


def test_item_51_sessions_and_samplers(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk(user_metadata={"a": "ü"}, display_name="the second") as sdk, alone.http() as http:
        first = http.post("create_session", json={"user_metadata": {"n": 3}}).json()["session_id"]
        client = made(sdk)
        sampler = sdk.create_sampling_client(base_model=MODELS[1]).result()
        session_id = client.model_id.partition(":")[0]
        assert set(rest.list_sessions().result().sessions) == {first, session_id}
        assert len(rest.list_sessions(limit=1, offset=1).result().sessions) == 1
        session = rest.get_session(session_id).result()
        assert session.training_run_ids == [client.model_id]
        assert (session.user_metadata, session.display_name) == ({"a": "ü"}, "the second")
        (sampler_id,) = session.sampler_ids
        assert rest.get_sampler(sampler_id).result().base_model == sampler.get_base_model()
        assert rest.get_session(first).result().user_metadata == {"n": "3"}
        with pytest.raises(tinker.NotFoundError):
            rest.get_session("sess-0").result()


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
def test_item_51_sessions_are_searched_in_parts_the_newest_first(alone: Running) -> None:
    def found(**asked: Any) -> list[str]:
        page = rest.search_sessions(SessionSearchRequest(**asked)).result()
        return [names[each.session_id] for each in page.sessions]

    rest = alone.rest()
    with alone.http() as http:
        bodies = [
            {"display_name": "Nightly run", "user_metadata": {"a": "1"}, "project_id": "mine"},
            {"display_name": "nightly other", "user_metadata": {"a": "2", "b": "3"}},
            {"user_metadata": {"n": 3}},
        ]
        ids = [http.post("create_session", json=body).json()["session_id"] for body in bodies]
        names = dict(zip(ids, ("first", "second", "third"), strict=True))
        http.post(f"sessions/{ids[1]}/finish", json={"reason": {"type": "errored"}, "detail": "why"})
    assert found() == found(owner=AccessibleSearchOwner()) == ["third", "second", "first"]
    assert found(display_name="RUN nightly") == ["first"]
    assert found(display_name="nightly", session_id=ids[2]) == ["third", "second", "first"]
    assert found(session_id=ids[0]) == found(project_ids=["mine"]) == found(user_metadata={"a": "1"}) == ["first"]
    assert found(user_metadata={"n": "3"}) == ["third"]
    assert found(statuses=[ActiveSessionStatusQuery()]) == ["third", "first"]
    errored = ClientFinishedSessionStatusQuery(reasons=["errored"])
    assert found(statuses=[errored, FailedSessionStatusQuery()]) == ["second"]
    assert found(statuses=[ClientFinishedSessionStatusQuery(reasons=["success"])]) == []
    request, pages = SessionSearchRequest(limit=2), []
    while True:
        page = rest.search_sessions(request).result()
        pages.append([names[each.session_id] for each in page.sessions])
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert pages == [["third", "second"], ["first"]]


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
def test_item_51_a_session_found_says_how_it_ended_and_what_it_saved(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk(user_metadata={"a": "ü"}, project_id="before") as sdk:
        client = made(sdk)
        client.save_state("kept").result()
        session_id = client.model_id.partition(":")[0]
        rest.assign_session_project(session_id, "after").result()
        (running,) = rest.search_sessions(SessionSearchRequest(project_ids=["after"])).result().sessions
        assert (running.checkpoints_count, running.owner, running.user_metadata) == (1, "local", {"a": "ü"})
        assert (running.checkpoint_storage_bytes or 0) > 0
        assert running.status is not None
        assert running.status.type == "active"
        assert [run.training_run_id for run in rest.list_training_runs(project_id="after").result().training_runs] == [
            client.model_id
        ]
        assert rest.list_training_runs(project_id="before").result().training_runs == []
        with pytest.raises(tinker.NotFoundError, match="no session of this id"):
            rest.assign_session_project("sess-0", "after").result()
    (over,) = rest.search_sessions(SessionSearchRequest()).result().sessions
    assert over.status is not None
    assert over.status.type == "client_finished"
    assert over.status.reason.type == "success"


def test_item_51_others_find_nothing(shared: Running) -> None:
    with shared.http("tml-alice") as alice, shared.http("tml-bob") as bob:
        session_id = alice.post("create_session", json={}).json()["session_id"]
        assert bob.post("sessions/search", json={"session_id": session_id}).json() == {"sessions": []}
        assert bob.put(f"sessions/{session_id}/project", json={"project_id": "p"}).status_code == 404
        assert alice.post("sessions/search", json={"owner": {"type": "user", "owner_urns": ["x"]}}).status_code == 400


def test_item_42_after_a_restart_all_is_listed_as_before(tmp_path: Path) -> None:
    def listed(rest: tinker.RestClient) -> list[Any]:
        (session,) = rest.list_sessions().result().sessions
        found = [rest.list_training_runs(), rest.list_user_checkpoints(), rest.get_session(session)]
        return [each.result() for each in found]

    with running(tmp_path) as first:
        sdk = first.sdk()  # it is left open: closing it would finish the session
        client = made(sdk)
        path = client.save_state("kept", ttl_seconds=HOUR_S, user_metadata={"k": "v"}).result().path
        first.rest().publish_checkpoint_from_tinker_path(path).result()
        client.save_state("gone").result()
        first.rest().delete_checkpoint_from_tinker_path(path.replace("kept", "gone")).result()
        before = listed(first.rest())
    with running(tmp_path) as second:
        assert listed(second.rest()) == before


def test_item_55_a_copy_is_made_once_for_a_key_and_outlives_its_source(alone: Running) -> None:
    rest = alone.rest()
    with alone.sdk() as sdk, alone.http() as http:
        client = made(sdk)
        train(client)
        path = client.save_state("source").result().path
        weights = logprobs(client)
        copied = rest.copy_weights(path, "archive", ttl_seconds=HOUR_S).result()
        assert copied.endswith("/weights/source")
        body = {"source_path": path, "destination_project_id": "archive"}
        twice = [http.post("copy_weights", json=body, headers={"X-Idempotency-Key": "k"}).json() for _ in range(2)]
        assert twice[0] == twice[1] != {"tinker_path": copied}
        rest.delete_checkpoint_from_tinker_path(path).result()
        taken = sdk.create_training_client_from_state_with_optimizer(copied).result()
        assert logprobs(taken) == weights
        run = rest.get_training_run_by_tinker_path(copied).result()
        assert run.last_checkpoint is not None
        assert run.last_checkpoint.expires_at is not None
        assert (run.base_model, run.lora_rank) == (MODELS[0], 4)
        step = {"model_id": run.training_run_id, "seq_id": 1, "adam_params": {}}
        assert http.post("optim_step", json=step).status_code == 404


def test_item_55_a_copy_may_belong_to_a_session(alone: Running) -> None:
    with alone.sdk() as sdk, alone.http() as http:
        client = made(sdk)
        session, _, number = client.model_id.partition(":train:")
        path = client.save_state("source").result().path
        body = {"source_path": path, "session_id": session, "model_seq_id": 7}
        assert http.post("copy_weights", json=body).json() == {
            "tinker_path": f"tinker://{session}:train:7/weights/source"
        }
        taken = http.post("copy_weights", json={**body, "model_seq_id": int(number)})
        assert "model_seq_id was used" in taken.json()["detail"]
        assert http.post("copy_weights", json={"source_path": path}).status_code == 400


def test_no_path_is_made_of_what_a_client_sends(alone: Running) -> None:
    (alone.storage / "secret").write_text("s")
    with alone.http() as http:
        for name in ("..%2f..%2fsecret", "%2e%2e", "x%00", "x" * 5000):
            for method, path in (("DELETE", f"weights/{name}"), ("GET", f"weights/{name}/archive")):
                assert http.request(method, f"training_runs/r/checkpoints/{path}").status_code in (400, 404)
        for name in ("tinker://../../secret", str(alone.storage / "secret"), "\0"):
            assert http.post("weights_info", json={"tinker_path": name}).status_code == 404


def test_item_63_what_is_not_there_is_answered_with_json(server: Running) -> None:
    with server.http() as http:
        for method, path in (("GET", "audit"), ("GET", "sessions/s/trace_export"), ("GET", "billing/usage/events")):
            answer = http.request(method, path)
            assert answer.status_code in (404, 405)
            assert "this server has no" in answer.json()["detail"]


def test_a_folder_that_cannot_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(source: str, target: str) -> None:
        raise PermissionError("no links on this disk")

    with running(tmp_path, open_recording) as server, server.sdk() as sdk:
        path = made(sdk).save_state("s").result().path
        monkeypatch.setattr("os.link", unable)
        copied = server.rest().copy_weights(path, "p").result()
        assert logprobs(sdk.create_training_client_from_state(copied).result())
