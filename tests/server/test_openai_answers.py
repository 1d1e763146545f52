"""Chats and texts, asked for with the official client of the OpenAI protocol: what is answered, and that its record has
the same tokens."""

import math
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from openai import OpenAI, RateLimitError
from openai_clients import HI, Saying, Silent, kept, openai, raw, sampling, saying
from running import MODELS, Running, made, running
from tinker import types

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.server.limits import OwnerLimits
from stovetop.server.openai.kept import KEPT_S
from stovetop.server.sweeping import sweep


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return openai(server)


# ---- what is drawn -------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_with_the_tokens_that_the_sdk_would_have_drawn(
    server: Running, client: OpenAI, sdk: tinker.ServiceClient
) -> None:
    asked = client.chat.completions.with_raw_response.create(
        model=MODELS[0], messages=HI, max_completion_tokens=6, seed=3, logprobs=True, n=2
    )
    answer = asked.parse()
    record = kept(server, answer.id)
    prompt = types.ModelInput.from_ints(record["prompts"][0])
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[259])
    drawn = sdk.create_sampling_client(base_model=MODELS[0]).result().sample(prompt, 2, params).result()
    assert [choice["tokens"] for choice in record["choices"]] == [each.tokens for each in drawn.sequences]
    assert [choice["logprobs"] for choice in record["choices"]] == [each.logprobs for each in drawn.sequences]
    assert [choice["stop_reason"] for choice in record["choices"]] == [each.stop_reason for each in drawn.sequences]
    assert asked.headers["x-request-id"] == answer.id
    told = [choice.logprobs.content for choice in answer.choices if choice.logprobs]
    assert [[token.logprob for token in each or []] for each in told] == [each.logprobs for each in drawn.sequences]


def test_usage_counts_a_prompt_once_and_every_token_that_was_drawn(server: Running, client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODELS[0], messages=HI, max_tokens=4, n=3)
    record = kept(server, answer.id)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(record["prompts"][0])
    assert answer.usage.completion_tokens == sum(len(choice["tokens"]) for choice in record["choices"])


def test_a_seed_gives_the_same_answer_streamed_or_not(client: OpenAI) -> None:
    asked = {"model": MODELS[0], "messages": HI, "max_tokens": 12, "seed": 7}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole == client.chat.completions.create(**asked).choices[0]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_the_alternatives_are_of_the_distribution_that_was_drawn_from(client: OpenAI) -> None:
    for temperature in (0.0, 0.4, 1.0, 2.0):
        answer = client.chat.completions.create(
            model=MODELS[0],
            messages=HI,
            max_tokens=8,
            seed=1,
            temperature=temperature,
            logprobs=True,
            top_logprobs=20,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        for token in logprobs.content or []:
            others = {other.token: other.logprob for other in token.top_logprobs}
            assert len(others) == 20
            assert list(others.values()) == sorted(others.values(), reverse=True)
            assert sum(map(math.exp, others.values())) < 1.00001
            if token.token in others:
                assert others[token.token] == pytest.approx(token.logprob, abs=1e-4)


def test_a_stop_string_ends_the_answer_and_is_in_the_record_alone(tmp_path: Path) -> None:
    with saying(tmp_path, "any/model", "one, two; three<|im_end|>") as (server, _):
        for stream in (False, True):
            asked = openai(server).chat.completions.create(
                model="any/model", messages=HI, stop=["; ", "!"], max_tokens=20, seed=1, stream=stream
            )
            text = (
                "".join(chunk.choices[0].delta.content or "" for chunk in asked)
                if stream
                else asked.choices[0].message.content
            )
            assert text == "one, two"


def test_messages_as_clients_send_them_back_are_taken(client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODELS[0], messages=HI, max_tokens=3).choices[0].message
    chat = [{"role": "developer", "content": [{"type": "text", "text": "Be brief"}]}, *HI, first.model_dump(), *HI]
    assert client.chat.completions.create(model=MODELS[0], messages=chat, max_tokens=3).choices


# ---- streams -------------------------------------------------------------------------------------------------------


def test_an_answer_comes_as_it_is_drawn_and_its_events_add_up(tmp_path: Path) -> None:
    said = "ein Gruß, the longer of two é"
    with saying(tmp_path, "any/model", f"{said}<|im_end|>") as (server, _):
        chunks = list(
            openai(server).chat.completions.create(
                model="any/model",
                messages=HI,
                stream=True,
                logprobs=True,
                stream_options={"include_usage": True},
            )
        )
        record = kept(server, chunks[0].id)
    *parts, last = chunks
    deltas = [chunk.choices[0].delta.content or "" for chunk in parts]
    assert "".join(deltas) == said
    assert len([delta for delta in deltas if delta]) > 5
    assert parts[-1].choices[0].finish_reason == "stop"
    told = [token for chunk in parts if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content or []]
    assert last.usage is not None
    assert len(told) == last.usage.completion_tokens == len(record["choices"][0]["tokens"])


def test_a_text_comes_as_it_is_drawn_up_to_its_stop(tmp_path: Path) -> None:
    with saying(tmp_path, "any/model", "zwölf, thirteen. Q: four<|im_end|>", "over<|im_end|>") as (server, _):
        client = openai(server)
        chunks = list(
            client.completions.create(model="any/model", prompt="ten", max_tokens=40, stop=" Q:", stream=True)
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == "zwölf, thirteen."
        assert chunks[-1].choices[0].finish_reason == "stop"
        record = kept(server, chunks[0].id)
        assert bytes(record["choices"][0]["tokens"]).decode() == "zwölf, thirteen. Q:"


def test_a_client_that_goes_away_ends_what_is_drawn_for_it(tmp_path: Path) -> None:
    silent = Silent(ByteTokenizer())
    with sampling(tmp_path, "any/model", silent) as server, raw(server) as http:
        body = {"model": "any/model", "messages": HI, "seed": 1}
        with pytest.raises(httpx.ReadTimeout):
            http.post("chat/completions", json=body, timeout=0.4)
        assert silent.begun.is_set()
        assert silent.cancelled.wait(10)


@pytest.mark.slow  # it waits for what does not happen
def test_a_client_that_leaves_a_stream_ends_the_drawing_with_its_piece(tmp_path: Path) -> None:
    saying_much = Saying(ByteTokenizer(), ["x" * 5000], delay_s=0.01)
    with sampling(tmp_path, "any/model", saying_much) as server, raw(server) as http:
        body = {"model": "any/model", "messages": HI, "stream": True}
        with http.stream("POST", "chat/completions", json=body) as stream:
            next(stream.iter_lines())
        time.sleep(0.3)
        num_pieces = saying_much.num_pieces
        time.sleep(0.3)
        assert saying_much.num_pieces == num_pieces < 100


def test_what_is_refused_is_refused_before_the_first_event(client: OpenAI) -> None:
    with pytest.raises(Exception, match="max_tokens is 100000") as refused:
        client.chat.completions.create(model=MODELS[0], messages=HI, max_tokens=100_000, stream=True)
    assert refused.value.__class__.__name__ == "BadRequestError"


# ---- texts ---------------------------------------------------------------------------------------------------------


def test_echo_scores_a_prompt_as_the_sdk_does(client: OpenAI, sdk: tinker.ServiceClient) -> None:
    tokens = [5, 17, 42, 8]
    answer = client.completions.create(
        model=MODELS[0], prompt=tokens, max_tokens=0, echo=True, logprobs=2, temperature=0
    )
    sampler = sdk.create_sampling_client(base_model=MODELS[0]).result()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert [row and len(row) for row in logprobs.top_logprobs or []] == [None, 2, 2, 2]
    assert logprobs.text_offset == [0, 1, 2, 3]


def test_several_prompts_with_several_answers_each(server: Running, client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODELS[0], prompt=["to be", "or"], n=2, max_tokens=3, echo=True, logprobs=1, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in answer.choices] == ["to", "to", "or", "or"]
    record = kept(server, answer.id)
    assert [choice["prompt"] for choice in record["choices"]] == [0, 0, 1, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        prompt = ["to be", "or"][choice.index // 2]
        places = choice.logprobs.text_offset or []
        assert places[: len(prompt) + 2] == [0, *range(len(prompt) + 1)]  # the token of the beginning has no place
        assert places == sorted(places)


@pytest.mark.parametrize("asked", [{"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 3, "logprobs": 1}])
def test_echo_is_streamed_as_it_is_told_whole(client: OpenAI, asked: dict[str, Any]) -> None:
    asked = {**asked, "model": MODELS[0], "prompt": "to be", "echo": True, "temperature": 0}
    chunks = list(client.completions.create(**asked, stream=True))
    whole = client.completions.create(**asked).choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert whole.text.startswith("to be")
    assert chunks[-1].choices[0].logprobs == whole.logprobs


# ---- records -------------------------------------------------------------------------------------------------------


def test_a_record_is_there_after_a_kill_for_its_owner_alone_and_for_a_day(tmp_path: Path) -> None:
    """A copy of the folder of a running server is what a kill at this moment would leave."""
    before, after = tmp_path / "before", tmp_path / "after"
    with running(before, owner_of=str) as first:
        answer = openai(first, "tml-alice").chat.completions.create(model=MODELS[0], messages=HI, max_tokens=3)
        shutil.copytree(before, after, ignore=shutil.ignore_patterns("server.lock"))
        record = kept(first, answer.id, "tml-alice")
    with running(after, owner_of=str) as second:
        assert kept(second, answer.id, "tml-alice") == record
        assert record["expires_at"] - record["created"] == KEPT_S
        with pytest.raises(Exception, match="there is no answer of this id") as refused:
            openai(second, "tml-bob").get(f"/answers/{answer.id}", cast_to=object)
        assert refused.value.__class__.__name__ == "NotFoundError"
        parts = second.server.doors.parts
        assert parts is not None
        sweep(parts, record["created"] + KEPT_S + 2)
        with pytest.raises(Exception, match="there is no answer of this id"):
            openai(second, "tml-alice").get(f"/answers/{answer.id}", cast_to=object)


def test_a_record_can_be_trained_on_as_it_is(server: Running, client: OpenAI, sdk: tinker.ServiceClient) -> None:
    """The program of docs/openai.md: the trainer finds the same logprobs as the sampler did."""
    trainer = made(sdk)
    trainer.save_weights_and_get_sampling_client().result()
    answer = client.chat.completions.create(model=trainer.model_id, messages=HI, max_tokens=6)
    record: Any = client.get(f"/answers/{answer.id}", cast_to=object)
    prompt, choice = record["prompts"][0], record["choices"][0]
    num_before = len(prompt) - 1
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(prompt + choice["tokens"][:-1]),
        loss_fn_inputs={
            "target_tokens": (prompt + choice["tokens"])[1:],
            "logprobs": [0.0] * num_before + choice["logprobs"],
            "advantages": [0.0] * num_before + [1.0] * len(choice["tokens"]),
        },
    )
    output = trainer.forward_backward([datum], "importance_sampling").result()
    assert output.loss_fn_outputs[0]["logprobs"].tolist()[num_before:] == pytest.approx(choice["logprobs"], abs=1e-5)


# ---- limits of a key -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_over_the_limits_of_its_key_is_refused_until_there_is_room(tmp_path: Path, stream: bool) -> None:
    limits = OwnerLimits(max_tokens=40)
    with running(tmp_path, limits_of=lambda owner: limits) as server:
        parts = server.server.doors.parts
        assert parts is not None
        client = openai(server)
        asked = {"model": MODELS[0], "messages": HI, "max_tokens": 6, "stream": stream}
        with parts.limits.entered("local", 39), pytest.raises(RateLimitError, match="40 tokens") as refused:
            client.chat.completions.create(**asked)
        assert refused.value.response.headers["retry-after"] == "1"
        answer = client.chat.completions.create(**asked)
        if stream:
            assert list(answer)
        give_up_s = time.monotonic() + 30
        while parts.limits.load.num_requests and time.monotonic() < give_up_s:
            time.sleep(0.01)  # a stream has ended for the client before it has for the server
        assert parts.limits.load.num_requests == 0
        assert parts.activity.done.num_tokens > 6  # those of the prompt too
