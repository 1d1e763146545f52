"""What a model's name stands for at the OpenAI endpoint, for whom, and what is refused."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import openai as official
import pytest
import tinker
from openai import OpenAI
from openai_clients import HI, kept, openai, raw
from running import MODELS, Running, made, running, train
from tinker import types

from stovetop.backends import recording
from stovetop.model_store import FETCHABLE
from stovetop.server.rows import SamplerRow


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return openai(server)


def greedy(client: OpenAI, model: str) -> tuple[str, str]:
    """The id of an answer, and what it says."""
    answer = client.chat.completions.create(model=model, messages=HI, max_tokens=12, temperature=0)
    return answer.id, str(answer.choices[0].message.content)


def drawn(sampler: tinker.SamplingClient, prompt: list[int]) -> list[int]:
    params = types.SamplingParams(max_tokens=12, temperature=0, stop=[259])
    return list(sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0].tokens)


def test_base_models_are_listed_and_described(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} >= set(MODELS)
    assert client.models.retrieve(MODELS[0]).owned_by == "stovetop"


def test_a_live_adapters_id_means_what_was_frozen_of_it_last(
    server: Running, client: OpenAI, sdk: tinker.ServiceClient
) -> None:
    trainer = made(sdk)
    with pytest.raises(official.NotFoundError, match="has no frozen weights yet"):
        greedy(client, trainer.model_id)
    train(trainer)
    frozen = trainer.save_weights_and_get_sampling_client().result()
    train(trainer)
    train(trainer)
    answer_id, _ = greedy(client, trainer.model_id)
    record = kept(server, answer_id)
    assert record["choices"][0]["tokens"] == drawn(frozen, record["prompts"][0])
    assert record["base_model"] == MODELS[0]
    path = trainer.save_weights_for_sampler("openai").result().path
    answer_id, said = greedy(client, trainer.model_id)
    assert kept(server, answer_id)["weights"] == path
    assert said == greedy(client, path)[1]
    assert {path, trainer.model_id} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(path).id == path


def test_frozen_weights_are_not_answered_with_before_they_are_committed(server: Running) -> None:
    parts = server.server.doors.parts
    assert parts is not None
    row = SamplerRow("sess-x:sample:1", "sess-x", "local", MODELS[0], model_id="sess-x:train:0", n=10**9)
    committed: Future[None] = Future()
    parts.samplers.add_frozen(row, parts.service.create_sampling_client(base_model=MODELS[0]), committed)
    assert parts.samplers.newest_frozen("sess-x:train:0", "local") is None
    committed.set_result(None)
    assert parts.samplers.newest_frozen("sess-x:train:0", "local") == row
    assert parts.samplers.newest_frozen("sess-x:train:0", "another") is None


def test_a_base_model_answers_by_its_alias_as_by_its_name(tmp_path: Path) -> None:
    name = FETCHABLE["smollm2"].name

    def open_it(storage: Path) -> Any:
        return recording.open_service(storage, models=[name], preload=True)

    with running(tmp_path, open_it) as server:
        client = openai(server)
        answers = [greedy(client, each) for each in (name, "smollm2")]
        assert answers[0][1] == answers[1][1]
        assert client.models.retrieve("smollm2").id == name


def test_a_live_adapter_answers_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        trainer = made(first.sdk())
        train(trainer)
        trainer.save_weights_and_get_sampling_client().result()
        _, said = greedy(openai(first), trainer.model_id)
    with running(tmp_path) as second:
        assert greedy(openai(second), trainer.model_id)[1] == said


def test_another_owners_adapters_read_as_if_they_were_not_there(tmp_path: Path) -> None:
    with running(tmp_path, owner_of=str) as server:
        trainer = made(server.sdk(api_key="tml-alice"))
        path = trainer.save_weights_for_sampler("hers").result().path
        alice, bob = openai(server, "tml-alice"), openai(server, "tml-bob")
        assert greedy(alice, path)
        assert greedy(alice, trainer.model_id)
        assert {model.id for model in bob.models.list()} == set(MODELS)
        for name in (path, trainer.model_id):
            theirs = refusal(bob, name)
            assert theirs == refusal(bob, name.replace("sess-", "sess-0")).replace("sess-0", "sess-")
            with pytest.raises(official.NotFoundError):
                bob.models.retrieve(name)


def refusal(client: OpenAI, model: str) -> str:
    with pytest.raises(official.NotFoundError) as refused:
        greedy(client, model)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    return refused.value.message


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[Any]:
    with raw(server) as client:
        yield client


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("best_of", 2),
        ("max_token", 5),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 0),
        ("seed", -1),
        ("n", 0),
        ("n", 1000),
        ("stop", [""]),
        ("max_tokens", 0),
        ("top_logprobs", 21),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("functions", [{"name": "f"}]),
        ("renderer_name", "os:system"),
        ("reasoning_effort", "high"),
        ("stream_options", {"include": True}),
        ("messages", []),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("chat_template_kwargs", {}),
    ],
)
def test_what_would_change_an_answer_and_is_not_offered_is_refused_by_name(
    http: Any, param: str, value: object
) -> None:
    answer = http.post("chat/completions", json={"model": MODELS[0], "messages": HI, "max_tokens": 2, param: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "functions": []},
        {
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "tool_choice": "none",
            "parallel_tool_calls": True,
        },
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
        {"stop": None, "n": None, "seed": None, "logprobs": None, "tools": None, "stream": None},
    ],
)
def test_what_changes_nothing_is_taken(http: Any, body: dict[str, object]) -> None:
    answer = http.post("chat/completions", json={"model": MODELS[0], "messages": HI, "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"model": NaN}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(http: Any, data: bytes) -> None:
    for path in ("chat/completions", "completions"):
        answer = http.post(path, content=data)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("param", "value"),
    [("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", [5, "x"]), ("prompt", [-1]), ("max_tokens", 0)],
)
def test_a_text_that_cannot_be_continued_is_refused(http: Any, param: str, value: object) -> None:
    answer = http.post("completions", json={"model": MODELS[0], "prompt": "x", param: value})
    assert answer.status_code == 400, answer.text


def test_errors_are_those_of_the_protocol(server: Running, http: Any) -> None:
    with pytest.raises(official.AuthenticationError, match="OPENAI_API_KEY"):
        openai(server, "sk-other").models.list()
    unknown = http.get("embeddings")
    assert unknown.status_code == 404
    assert "this server has no GET /v1/embeddings" in unknown.json()["error"]["message"]
    parts, server.server.doors.parts = server.server.doors.parts, None
    try:
        waiting = http.get("models")
    finally:
        server.server.doors.parts = parts
    assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "10")
    assert waiting.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_that_fails_is_a_fault_of_the_server_and_among_its_last_failures(tmp_path: Path, stream: bool) -> None:
    faults = [recording.Raises("sample", 1, RuntimeError("broken"))]

    def open_service(storage: Path) -> Any:
        return recording.open_service(storage, models=MODELS, preload=True, faults=faults)

    with running(tmp_path, open_service) as server:
        with pytest.raises(official.APIError, match="broken"):
            list(openai(server).chat.completions.create(model=MODELS[0], messages=HI, max_tokens=12, stream=stream))
        (failure,) = server.parts.activity.recent_failures()
        assert (failure.verb, failure.outcome, failure.num_tokens) == ("chat_completion", "server", 0)
        assert "broken" in failure.message
        assert greedy(openai(server), MODELS[0])
