"""The protocol's conformance list, items 1 to 12: without these nothing works. Each test names its items."""

import re
import time

import httpx
import numpy as np
import pytest
import tinker
from running import KEY, MODELS, Running, datum, made
from tinker import types


def test_item_1_and_2_the_clients_config_is_an_object_and_touches_no_session(server: Running) -> None:
    with server.http() as http:
        for path in ("client/config", "client/dynamic_config"):
            answer = http.post(path, json={"sdk_version": "0.38.0"})
            assert answer.status_code == 200
            assert isinstance(answer.json(), dict)


def test_item_3_a_session_takes_what_the_sdk_sends_and_passes_over_what_it_does_not_know(server: Running) -> None:
    body = {"tags": ["a"], "user_metadata": {"täg": "ü"}, "sdk_version": "9.9", "project_id": "p", "display_name": "d"}
    with server.http() as http:
        answer = http.post("create_session", json={**body, "type": "create_session", "of_a_later_version": [1]})
        assert answer.status_code == 200
        assert answer.json()["session_id"]


@pytest.mark.parametrize("key", [None, "", "sk-other", "Bearer tml-x"])
def test_item_4_a_wrong_key_is_answered_401_with_json(server: Running, key: str | None) -> None:
    headers = {} if key is None else {"X-API-Key": key}
    answer = httpx.post(f"{server.url}/api/v1/client/config", json={"sdk_version": "x"}, headers=headers)
    assert answer.status_code == 401
    assert "tml-" in answer.json()["detail"]


def test_item_5_the_models_id_is_the_one_that_the_sdk_computes(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    assert re.fullmatch(r"sess-[0-9a-f]+:train:\d+", client.model_id)
    info = client.get_info()
    assert (info.model_data.model_name, info.model_data.tokenizer_id, info.lora_rank) == (MODELS[0], MODELS[0], 4)


def test_item_6_a_job_of_a_second_costs_one_question(tmp_path_factory: pytest.TempPathFactory, server: Running) -> None:
    """The answer is held back until the result is there."""
    with server.http() as http:
        session = http.post("create_session", json={}).json()["session_id"]
        made = http.post("create_model", json={"session_id": session, "model_seq_id": 0, "base_model": MODELS[0]})
        answer = http.post("retrieve_future", json={"request_id": made.json()["request_id"]})
        assert answer.json() == {"type": "create_model", "model_id": f"{session}:train:0"}


def test_item_7_and_8_training_lowers_the_loss(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    losses: list[float] = []
    for _ in range(5):
        learnt = client.forward_backward([datum()], "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=0.5))
        losses.append(learnt.result().metrics["loss:sum"])
        assert stepped.result().metrics is not None
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2


def test_item_7_without_protobuf_in_accept_a_result_is_json(server: Running, sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    sent = client.forward([datum()], "cross_entropy").result()
    with server.http() as http:
        answer = http.post("retrieve_future", json={"request_id": f"{client.model_id}:1"})
    assert answer.headers["content-type"] == "application/json"
    output = answer.json()["loss_fn_outputs"][0]["logprobs"]
    assert output["shape"] == [len(output["data"])]
    np.testing.assert_array_equal(np.float32(output["data"]), sent.loss_fn_outputs[0]["logprobs"].data)


def test_item_9_every_sample_has_an_id_of_its_own_and_its_sequences(sdk: tinker.ServiceClient) -> None:
    sampler = sdk.create_sampling_client(base_model=MODELS[0]).result()
    params = types.SamplingParams(max_tokens=3, seed=1)
    drawn = [sampler.sample(types.ModelInput.from_ints([5]), 3, params) for _ in range(2)]
    ids = [sequence.sequence_id for each in drawn for sequence in each.result().sequences]
    assert len(set(ids)) == 6


def test_item_10_a_sampling_session_is_of_a_base_model_or_of_a_path(server: Running, sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    path = client.save_weights_for_sampler("ten").result().path
    of_path = sdk.create_sampling_client(model_path=path).result()
    of_base = sdk.create_sampling_client(base_model=MODELS[1]).result()
    assert (of_path.get_base_model(), of_base.get_base_model()) == (MODELS[0], MODELS[1])
    session = client.model_id.partition(":")[0]
    with server.http() as http:
        body = {"session_id": session, "sampling_session_seq_id": 900, "model_path": path}
        sampler_id = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
        described = http.get(f"samplers/{sampler_id}").json()
    assert described == {"sampler_id": sampler_id, "base_model": MODELS[0], "model_path": path}


def test_item_11_every_metric_has_a_reduction_and_the_loss_is_among_them(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    for ask in (client.forward, client.forward_backward):
        metrics = ask([datum()], "cross_entropy").result().metrics
        assert "loss:sum" in metrics
        assert all(re.fullmatch(r"[^:]+:(sum|mean|min|max|slack|hash2|unique)", name) for name in metrics)


def test_item_12_and_13_logprobs_come_in_order_shaped_like_the_targets_and_make_the_loss(
    sdk: tinker.ServiceClient,
) -> None:
    client = made(sdk)
    data = [datum(weight=0.0), datum([1, 2, 3], weight=-0.25), datum([9, 8, 7, 6], weight=1.5)]
    output = client.forward_backward(data, "cross_entropy").result()
    logprobs_D = [np.array(each["logprobs"].data) for each in output.loss_fn_outputs]
    assert [each["logprobs"].dtype for each in output.loss_fn_outputs] == ["float32"] * 3
    assert [each["logprobs"].shape for each in output.loss_fn_outputs] == [[6], [2], [3]]
    expected = sum(
        -float(np.dot(logprobs, each.loss_fn_inputs["weights"].data))
        for logprobs, each in zip(logprobs_D, data, strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_while_models_load_the_port_is_open_and_says_when_to_ask_again(server: Running) -> None:
    parts, server.server.doors.parts = server.server.doors.parts, None
    try:
        answer = httpx.post(f"{server.url}/api/v1/create_session", json={}, headers={"X-API-Key": KEY})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert httpx.get(f"{server.url}/healthz").status_code == 503
    finally:
        server.server.doors.parts = parts
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "ok"}


def test_a_request_for_another_host_is_refused(server: Running) -> None:
    answer = httpx.post(f"{server.url}/api/v1/client/config", json={}, headers={"Host": "evil.example"})
    assert answer.status_code == 400


def test_a_key_is_asked_for_before_a_body_is_read(server: Running) -> None:
    begun_s = time.monotonic()
    answer = httpx.post(f"{server.url}/api/v1/forward_backward", content=b"x" * 10_000_000)
    assert answer.status_code == 401
    assert time.monotonic() - begun_s < 5
