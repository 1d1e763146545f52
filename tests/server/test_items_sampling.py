"""The protocol's conformance list: what sampling means (items 22 to 26, 43, 60). Each test names its items."""

import pickle
from functools import partial

import httpx
import pytest
import tinker
import torch
from running import MODELS, Running, made
from tinker import types

PROMPT = types.ModelInput.from_ints([5, 17, 42])


@pytest.fixture(scope="module")
def sampler(sdk: tinker.ServiceClient) -> tinker.SamplingClient:
    return sdk.create_sampling_client(base_model=MODELS[0]).result()


def drawn(sampler: tinker.SamplingClient, num_samples: int = 1, **params: object) -> list[list[int]]:
    return [sequence.tokens for sequence in answered(sampler, num_samples, **params).sequences]


def answered(sampler: tinker.SamplingClient, num_samples: int = 1, **params: object) -> types.SampleResponse:
    return sampler.sample(PROMPT, num_samples, types.SamplingParams(**{"max_tokens": 8, "seed": 3, **params})).result()


def test_item_23_greedy_and_seeded_samples_repeat_and_the_samples_of_one_request_differ(
    sampler: tinker.SamplingClient,
) -> None:
    assert drawn(sampler, temperature=0.0, seed=1) == drawn(sampler, temperature=0.0, seed=2)
    several = drawn(sampler, 4)
    assert several == drawn(sampler, 4)
    assert len({tuple(tokens) for tokens in several}) == 4
    assert several != drawn(sampler, 4, seed=4)


def test_item_24_stops(sampler: tinker.SamplingClient) -> None:
    (full,) = drawn(sampler, max_tokens=6, stop=[])
    assert len(full) == 6
    for stop in (chr(full[2]), [chr(full[2])], [full[2]]):
        response = answered(sampler, max_tokens=6, stop=stop)
        assert response.sequences[0].tokens == full[: full.index(full[2]) + 1]
        assert response.sequences[0].stop_reason == "stop"
    assert answered(sampler, max_tokens=6, stop=[]).sequences[0].stop_reason == "length"


def test_item_24_top_k_of_one_is_greedy(sampler: tinker.SamplingClient) -> None:
    assert drawn(sampler, top_k=1) == drawn(sampler, temperature=0.0) == drawn(sampler, top_p=1e-6)


def test_item_25_logprobs_of_samples_and_prompts(sampler: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    response = sampler.sample(PROMPT, 2, params, include_prompt_logprobs=True).result()
    assert [len(sequence.logprobs or []) for sequence in response.sequences] == [4, 4]
    assert response.prompt_logprobs == sampler.compute_logprobs(PROMPT).result()
    assert [each is None for each in response.prompt_logprobs or []] == [True, False, False]


def test_item_26_the_most_probable_tokens_of_a_prompt_and_only_the_last_logprobs(
    sampler: tinker.SamplingClient,
) -> None:
    params = types.SamplingParams(max_tokens=1, seed=1)
    response = sampler.sample(PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    rows = response.topk_prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    assert [len(row) for row in rows[1:] if row is not None] == [3, 3]
    last = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result()
    assert last == [None, None, (response.prompt_logprobs or [])[2]]


def test_item_26_the_most_probable_tokens_in_place_of_each_that_is_drawn(sampler: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
    greedy = sampler.sample(PROMPT, 2, params, topk_sample_logprobs=3).result()
    for sequence in greedy.sequences:
        assert sequence.topk_logprobs is not None
        assert [len(row or ()) for row in sequence.topk_logprobs] == [3] * 5
        best = [row[0] for row in sequence.topk_logprobs if row]
        assert best == list(zip(sequence.tokens, sequence.logprobs or (), strict=True))
    assert sampler.sample(PROMPT, 1, params).result().sequences[0].topk_logprobs is None


@pytest.mark.parametrize("sparse", [False, True])
def test_item_26_named_tokens_of_a_prompt_are_scored(sampler: tinker.SamplingClient, sparse: bool) -> None:
    params = types.SamplingParams(max_tokens=1, seed=1)
    rows = sampler.sample(PROMPT, 1, params, topk_prompt_logprobs=2).result().topk_prompt_logprobs or []
    (second, logprob) = (rows[1] or [])[1]
    ids = torch.full((2, 50), -1)
    ids[0, 0], ids[1, 1], ids[0, 9] = 17, 42, second
    make = partial(types.TensorData.from_torch_sparse, pad_value=-1) if sparse else types.TensorData.from_torch
    response = sampler.sample(PROMPT, 1, params, True, target_prompt_logprobs=make(ids)).result()
    told = response.target_prompt_logprobs
    assert told is not None
    assert (told.sparse_crow_indices is not None) is sparse
    logprobs_TK = told.to_torch()
    assert logprobs_TK.shape == (2, 50)
    assert [logprobs_TK[0, 0].item(), logprobs_TK[1, 1].item()] == (response.prompt_logprobs or [])[1:]
    assert logprobs_TK[0, 9].item() == logprob
    assert int((logprobs_TK != 0).sum()) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": [2, 1]}, "must be int64 of shape (1, K)"),
        ({"data": [-1]}, "must name a token"),
        ({"data": [10**6]}, "outside the vocabulary"),
        ({"data": [2**70]}, "no token and no index"),
        ({"data": [1, 2]}, "do not fill its shape"),
        ({"dtype": "float32"}, "dtype"),
        ({"sparse_crow_indices": [0, 1]}, "sparse_col_indices"),
        ({"sparse_crow_indices": [0, 9], "sparse_col_indices": [0]}, "not those of a sparse matrix"),
        ({"shape": [2**27, 2**27]}, "cells at most"),
    ],
)
def test_item_26_what_names_no_tokens_is_refused(server: Running, changes: dict[str, object], reason: str) -> None:
    named = {"data": [3], "dtype": "int64", "shape": [1, 1], **changes}
    if changes.get("shape") == [2, 1]:
        named["data"] = [3, 3]
    answer = asked(server, target_prompt_logprobs=named)
    assert answer.status_code == 400
    assert reason in answer.json()["detail"]


def asked(server: Running, **changes: object) -> httpx.Response:
    """A sample of a prompt of two tokens, by a raw request."""
    with server.http() as http:
        session = http.post("create_session", json={}).json()["session_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODELS[0]}
        body = {
            "sampling_session_id": http.post("create_sampling_session", json=made).json()["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 1},
        }
        return http.post("asample", json={**body, **changes})


def test_a_prompt_that_fills_the_context_is_scored(sampler: tinker.SamplingClient) -> None:
    """The SDK asks with a sample of one token, for which there is no room."""
    full = types.ModelInput.from_ints([5] * 8192)
    assert len(sampler.compute_logprobs(full).result()) == 8192
    with pytest.raises(tinker.BadRequestError, match="has 8193 tokens; the context of tiny/model is 8192"):
        sampler.compute_logprobs(types.ModelInput.from_ints([5] * 8193)).result()


def test_item_43_seq_ids_of_63_bits_and_a_sampler_in_another_process(
    server: Running, sampler: tinker.SamplingClient
) -> None:
    sampler_id = sampler.get_sampler_handle()
    copy = pickle.loads(pickle.dumps(sampler))
    assert drawn(copy) == drawn(sampler)
    assert str(sampler_id)
    with server.http() as http:
        session = http.post("create_session", json={}).json()["session_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODELS[0]}
        body = {
            "sampling_session_id": http.post("create_sampling_session", json=made).json()["sampling_session_id"],
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 1},
        }
        assert http.post("asample", json={**body, "seq_id": 2**63 - 1}).status_code == 200
        assert http.post("asample", json={**body, "seq_id": 2**63}).status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topk_sample_logprobs", -1),
        ("topk_sample_logprobs", 10**6),
        ("record_stability_info", True),
        ("num_samples", 100_000),
        ("prompt", {"chunks": [{"type": "image", "data": "AAAA", "format": "png"}]}),
        ("sampling_params", {"temperature": -1}),
        ("sampling_params", {"temperature": "hot"}),
    ],
)
def test_item_60_what_is_not_offered_is_refused_by_name(server: Running, field: str, value: object) -> None:
    answer = asked(server, **{field: value})
    assert answer.status_code == 400
    name = "temperature" if field == "sampling_params" else field
    assert name in answer.json()["detail"]


def test_item_59_alternatives_that_are_drawn_for_a_prompt_are_refused(sampler: tinker.SamplingClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k: Input should be 0"):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), prompt_alt_tokens_k=2).result()


def test_item_58_weights_in_flight_are_refused(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    with pytest.raises(tinker.BadRequestError, match="kind: Input should be 'snapshot'"):
        client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert client.save_weights_and_get_sampling_client().result().compute_logprobs(PROMPT).result()


def test_item_61_stability_info_is_refused_with_the_losses_to_pass_instead(server: Running) -> None:
    """Before any rollout is paid for: the cookbook asks for it where it will train with stable_reinforce."""
    answer = asked(server, record_stability_info=True)
    assert answer.status_code == 400
    assert "pass loss_fn='importance_sampling', 'ppo' or 'cispo'" in answer.json()["detail"]
    assert asked(server, record_stability_info=False).status_code == 200
