"""The protocol's conformance list: retries, refusals, sessions (items 17, 31 to 36, 40, 41, 45, 61, 63), and the rules
for what a server must not guess. Each test names its items."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import tinker
import zstandard
from running import MODELS, Running, datum, logprobs, made, open_recording, running, train
from tinker import types
from tinker.proto import tinker_public_pb2

from stovetop.backends import recording
from stovetop.server import protocol


class Raw:
    """A client of one model that may send what the SDK would not."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": MODELS[0]}
        made = http.post("create_model", json={**body, "lora_config": {"rank": 4, "seed": 1}}).json()
        self.model_id = made["model_id"]
        assert "error" not in self.result(made)

    def result(self, submitted: dict[str, str]) -> dict[str, object]:
        return self.http.post("retrieve_future", json={"request_id": submitted["request_id"]}).json()

    def learn(self, seq_id: int, tokens: list[int] | None = None, loss_fn: str = "cross_entropy") -> httpx.Response:
        message = tinker_public_pb2.ForwardBackwardRequest(model_id=self.model_id, seq_id=seq_id, loss_fn=loss_fn)
        add_datum(message, [5, 17, 42, 8] if tokens is None else tokens)
        return self.post(message.SerializeToString())

    def post(self, data: bytes, **headers: str) -> httpx.Response:
        return self.http.post("forward_backward", content=data, headers=headers)

    def step(self, seq_id: int, **params: object) -> httpx.Response:
        body = {"model_id": self.model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1, **params}}
        return self.http.post("optim_step", json=body)


def add_datum(message: tinker_public_pb2.ForwardBackwardRequest, tokens: list[int]) -> None:
    each = message.data.add()
    num = len(tokens) - 1
    each.model_input.add().encoded_text.tokens = b"".join(token.to_bytes(4, "little") for token in tokens[:-1])
    target = each.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = b"".join(token.to_bytes(8, "little") for token in tokens[1:]), 2
    target.shape.append(num)
    weights = each.loss_fn_inputs["weights"]
    weights.dense, weights.dtype = b"\0\0\x80\x3f" * num, 1
    weights.shape.append(num)


@pytest.fixture
def raw(server: Running) -> Iterator[Raw]:
    with server.http() as http:
        yield Raw(http)


def test_item_17_and_35_chunks_in_another_order_and_gaps_of_refused_requests_are_taken(raw: Raw) -> None:
    assert raw.post(b"no protobuf").status_code == 400
    submitted = [raw.learn(seq_id).json() for seq_id in (3, 4, 2)]
    stepped = raw.step(6).json()
    assert all("error" not in str(raw.result(each)) for each in submitted)
    assert "metrics" in raw.result(stepped)


def test_item_31_a_request_that_is_sent_again_is_the_same_and_done_once(raw: Raw) -> None:
    first, again = raw.learn(1), raw.learn(1)
    assert first.json() == again.json()
    stepped, stepped_again = raw.step(2), raw.step(2)
    assert stepped.json() == stepped_again.json()
    norm = raw.result(stepped.json())["metrics"]
    other = Raw(raw.http)
    other.learn(1)
    assert other.result(other.step(2).json())["metrics"] == norm


def test_item_32_other_requests_that_are_sent_again(raw: Raw) -> None:
    body = {"session_id": raw.session, "model_seq_id": 0, "base_model": MODELS[0]}
    again = raw.http.post("create_model", json={**body, "lora_config": {"rank": 4, "seed": 1}})
    assert again.json()["request_id"] == f"{raw.model_id}:0"
    made = {"session_id": raw.session, "sampling_session_seq_id": 5, "base_model": MODELS[0]}
    answers = [raw.http.post("create_sampling_session", json=made).json() for _ in range(2)]
    assert answers[0] == answers[1]
    sample = {
        "sampling_session_id": answers[0]["sampling_session_id"],
        "seq_id": 7,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 2},
    }
    samples = [raw.http.post("asample", json=sample).json() for _ in range(2)]
    assert samples[0] == samples[1]


def test_item_32_an_ephemeral_sampler_that_is_asked_for_again_with_a_new_number_is_the_first_one(raw: Raw) -> None:
    """The SDK draws its number anew at each retry."""
    body = {"model_id": raw.model_id, "seq_id": 1}
    path = "save_weights_for_sampler"
    first = raw.http.post(path, json={**body, "sampling_session_seq_id": 20}).json()
    again = raw.http.post(path, json={**body, "sampling_session_seq_id": 21}).json()
    assert first == again
    expected = {"sampling_session_id": f"{raw.session}:sample:20", "path": None}
    assert raw.result(first) == raw.result(again) == expected
    assert raw.http.get(f"samplers/{raw.session}:sample:21").status_code == 404


def test_item_33_another_request_under_the_same_number_is_refused(raw: Raw) -> None:
    raw.learn(1)
    for answer in (raw.learn(1, [9, 9, 9]), raw.step(1)):
        assert answer.status_code == 400
        assert "was used by another request" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("loss_fn", "tokens", "reason"),
    [
        ("cross_entropy", [5, 100_000, 7], "token id 100000 at position 1 is outside the vocabulary of tiny/model"),
        ("croos_entropy", [5, 6, 7], "did you mean 'cross_entropy'"),
        ("ppo", [5, 6, 7], "datum 0 lacks logprobs, advantages"),
        ("stable_reinforce", [5, 6, 7], "has no public definition"),
    ],
)
def test_item_34_and_61_bad_data_fail_in_their_turn_and_so_does_the_step(
    raw: Raw, loss_fn: str, tokens: list[int], reason: str
) -> None:
    good = raw.learn(1).json()
    bad = raw.learn(2, tokens, loss_fn)
    stepped = raw.step(3).json()
    assert bad.status_code == 200
    assert "error" not in raw.result(good)
    for submitted, name in ((bad.json(), "forward_backward (seq_id 2"), (stepped, "optim_step (seq_id 3")):
        failed = raw.result(submitted)
        assert failed["category"] == "user"
        assert str(failed["error"]).startswith(f"{name} of {raw.model_id}) failed: ")
        assert reason in str(failed["error"])
    raw.learn(4)
    assert "metrics" in raw.result(raw.step(5).json())


def test_a_call_in_chunks_whose_last_one_is_bad_fails_and_leaves_no_gradient(
    server: Running, sdk: tinker.ServiceClient
) -> None:
    client, twin = made(sdk), made(sdk)
    for each in (client, twin):
        train(each)
    bad = datum([5, 100_000, 7])
    learnt = client.forward_backward([datum(), datum([1, 2, 3]), bad], "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=0.1))
    for future in (learnt, stepped):
        with pytest.raises(tinker.RequestFailedError, match="outside the vocabulary"):
            future.result()
    for each in (client, twin):
        train(each)
    assert logprobs(client) == logprobs(twin)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("optim_step", {"model_id": "nobody", "seq_id": 1, "adam_params": {}}, 404),
        ("get_info", {"model_id": "nobody"}, 404),
        ("create_model", {"session_id": "nobody", "model_seq_id": 0, "base_model": MODELS[0]}, 404),
        ("session_heartbeat", {"session_id": "nobody"}, 404),
        ("retrieve_future", {"request_id": "nobody:1"}, 404),
        ("retrieve_future", {"request_id": "sample-of-before"}, 410),
        ("optim_step", {}, 400),
        ("optim_step", [], 400),
        ("optim_step", {"model_id": "m", "seq_id": 0, "adam_params": {}}, 400),
        ("optim_step", {"model_id": "m", "seq_id": 1, "adam_params": {"type": "dimuon"}}, 400),
        ("optim_step", {"model_id": "m", "seq_id": 1, "optimizer_params": {"type": "dimuon", "beta1": 0.9}}, 400),
        ("nothing", {}, 404),
        ("client/config/../x", {}, 404),
    ],
)
def test_item_35_and_63_what_cannot_be_accepted_is_answered_with_json(
    server: Running, path: str, body: object, status: int
) -> None:
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["detail"]


def test_item_63_what_administrators_of_the_hosted_service_ask_is_not_here(server: Running) -> None:
    admin = tinker.AdminClient(base_url=server.url, api_key="tml-test")
    asked = admin.get_current_checkpoint_storage_usage()
    with pytest.raises(tinker.NotFoundError, match="this server has no GET"):
        asked.result()


def test_item_61_an_optimizer_and_a_loss_that_are_not_here_are_refused_by_name(
    server: Running, sdk: tinker.ServiceClient
) -> None:
    with pytest.raises(tinker.BadRequestError, match="type: Input should be 'adamw'"):
        sdk.create_lora_training_client(MODELS[0], optimizer=types.DimuonOptimizerConfig()).result()
    with server.http() as http:
        answer = http.post("create_custom_loss", json={})
    assert answer.status_code == 404
    assert "this server has no POST" in answer.json()["detail"]


def test_item_56_training_data_in_json_is_refused_with_the_version_to_take(server: Running) -> None:
    with server.http() as http:
        answer = http.post("forward_backward", json={"model_id": "m", "forward_backward_input": {}})
    assert answer.status_code == 400
    assert "as the SDK sends it since 0.25" in answer.json()["detail"]


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"model_id": NaN}', b'{"seq_id": 1e999}'])
def test_item_35_bodies_that_are_no_json_are_refused(server: Running, data: bytes) -> None:
    with server.http() as http:
        answer = http.post("optim_step", content=data)
    assert answer.status_code == 400
    assert "cannot be read" in answer.json()["detail"]


def test_a_model_that_there_cannot_be_is_refused_at_once_and_leaves_its_number_free(raw: Raw) -> None:
    body = {"session_id": raw.session, "model_seq_id": 1}
    for wrong in ({"base_model": "no/such"}, {"base_model": MODELS[0], "lora_config": {"rank": 0}}):
        answer = raw.http.post("create_model", json={**body, **wrong})
        assert answer.status_code == 400
    dimuon = {"base_model": MODELS[0], "optimizer_config": {"type": "dimuon"}}
    assert raw.http.post("create_model", json={**body, **dimuon}).status_code == 400
    assert raw.http.post("create_model", json={**body, "base_model": MODELS[0]}).status_code == 200


def test_item_36_a_result_may_be_asked_for_again(raw: Raw) -> None:
    submitted = raw.learn(1).json()
    assert raw.result(submitted) == raw.result(submitted)


def test_item_40_compressed_bodies_are_read_and_one_that_grows_too_large_is_not(raw: Raw) -> None:
    message = tinker_public_pb2.ForwardBackwardRequest(model_id=raw.model_id, seq_id=1, loss_fn="cross_entropy")
    add_datum(message, [5, 17, 42])
    packed = zstandard.compress(message.SerializeToString())
    answer = raw.post(packed, **{"Content-Encoding": "zstd"})
    assert answer.status_code == 200
    assert "error" not in raw.result(answer.json())
    bomb = zstandard.compress(bytes(300 * 2**20), 1)  # its header declares the size, which the library trusts
    assert raw.post(bomb, **{"Content-Encoding": "zstd"}).status_code == 413
    assert raw.post(b"none", **{"Content-Encoding": "zstd"}).status_code == 400
    assert raw.post(packed, **{"Content-Encoding": "br"}).status_code == 400


def test_item_41_a_session_finishes_once_and_its_heart_beats_no_more(server: Running) -> None:
    with server.http() as http:
        session = http.post("create_session", json={}).json()["session_id"]
        assert http.post("session_heartbeat", json={"session_id": session}).status_code == 200
        for kind in ("errored", "success"):
            answer = http.post(f"sessions/{session}/finish", json={"reason": {"type": kind}, "detail": "why"})
            assert answer.status_code == 200
        assert http.post("session_heartbeat", json={"session_id": session}).status_code == 410
        made = {"session_id": session, "model_seq_id": 0, "base_model": MODELS[0]}
        assert http.post("create_model", json=made).status_code == 410


def test_item_6_and_37_what_takes_longer_than_a_question_is_held_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HOLD_S", 0.05)
    slow = partial(open_recording, latency_s=lambda verb: 0.25 if verb == "forward_backward" else 0.0)
    with running(tmp_path, slow) as server, server.http() as http:
        raw = Raw(http)
        submitted = raw.learn(1).json()
        waits = http.post("retrieve_future", json={"request_id": submitted["request_id"]})
        assert waits.status_code == 408
        assert waits.json()["queue_state"] == "active"
        with server.sdk() as sdk:
            assert made(sdk).forward_backward([datum()], "cross_entropy").result().metrics


def test_owners_see_only_what_is_theirs_and_what_is_not_reads_like_what_is_not_there(tmp_path: Path) -> None:
    def owner_of(key: str | None) -> str:
        return str(key).removeprefix("tml-")

    with (
        running(tmp_path, owner_of=owner_of) as server,
        server.http("tml-alice") as alice,
        server.http("tml-bob") as bob,
    ):
        raw = Raw(alice)
        made = {"session_id": raw.session, "sampling_session_seq_id": 5, "base_model": MODELS[0]}
        sampler = alice.post("create_sampling_session", json=made).json()["sampling_session_id"]
        saved = alice.post("save_weights", json={"model_id": raw.model_id, "seq_id": 1, "path": "hers"}).json()
        path = raw.result(saved)["path"]
        adam = {"seq_id": 2, "adam_params": {}}
        questions = [
            ("optim_step", {"model_id": raw.model_id, **adam}, {"model_id": "none:train:0", **adam}),
            ("get_info", {"model_id": raw.model_id}, {"model_id": "none:train:0"}),
            ("session_heartbeat", {"session_id": raw.session}, {"session_id": "none"}),
            ("retrieve_future", {"request_id": f"{raw.model_id}:1"}, {"request_id": "none:train:0:1"}),
        ]
        for verb, hers, nothing in questions:
            answers = [bob.post(verb, json=body) for body in (hers, nothing)]
            assert [answer.status_code for answer in answers] == [404, 404]
            (name, hers_named), (_, none_named) = next(iter(hers.items())), next(iter(nothing.items()))
            said = answers[0].json()["detail"].replace(str(hers_named), str(none_named))
            assert said == answers[1].json()["detail"], name
        assert bob.get(f"samplers/{sampler}").status_code == 404
        own = bob.post("create_session", json={}).json()["session_id"]
        stolen = {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True}
        assert bob.post("load_weights", json=stolen).status_code == 404
        assert bob.post("create_model", json={**made, "model_seq_id": 7}).status_code == 404


def test_item_45_a_step_whose_numbers_are_not_finite_is_answered_in_json_that_the_sdk_reads(tmp_path: Path) -> None:
    faulty = partial(open_recording, faults=[recording.NonFiniteGradient(1)])
    with running(tmp_path, faulty) as server, server.sdk() as sdk:
        client = made(sdk)
        client.forward_backward([datum()], "cross_entropy").result()
        metrics = client.optim_step(types.AdamParams()).result().metrics
    assert metrics is not None
    assert metrics["skipped_nonfinite"] == 1.0
    assert "grad_norm" not in metrics


def test_no_message_tells_where_the_server_keeps_things(server: Running, sdk: tinker.ServiceClient) -> None:
    """What is refused because of a folder is told by its tinker:// path."""
    path = made(sdk).save_weights_for_sampler("kept").result().path
    other = sdk.create_lora_training_client(MODELS[1], rank=4).result()
    with server.http() as http:
        body = {"model_id": other.model_id, "seq_id": 1, "path": path, "optimizer": True}
        submitted = http.post("load_weights", json=body).json()
        failed = http.post("retrieve_future", json={"request_id": submitted["request_id"]}).json()
    assert failed["category"] == "user"
    assert path in failed["error"]
    assert str(server.storage) not in failed["error"]
