"""Bodies with which one caller could read what is the machine's, hold up everybody else, or make the server fail: each
is refused with the parameter that it is about, at once."""

import json
import random
import time
from typing import Any

import httpx
import pytest
from running import KEY, MODELS, Running
from test_attacks import mutated

from stovetop.completers import without_beginning
from stovetop.renderers import supported_renderers
from stovetop.server.bodies import MAX_STOP_CHARACTERS, MAX_STOPS
from stovetop.server.openai.bodies import MAX_PROMPTS, BadParameter, CompletionAsked, read

CHAT, TEXT = "chat/completions", "completions"
ODD_SCHEMAS: list[Any] = [
    {"type": ["a", {}]},
    {"type": 5},
    {"properties": [1]},
    {"properties": {"a": 7}},
    {"properties": {"a": {"type": "array", "items": 3}}},
    {"properties": {"a": {"oneOf": 9}}},
    {"properties": {"a": {"oneOf": ["x"]}}},
    {"properties": {"a": {"type": "string", "enum": 3}}},
    {"properties": {"a": {}}, "required": 5},
]


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    asked = {"model": MODELS[0], "max_tokens": 3, **body}
    if path == CHAT:
        asked.setdefault("messages", [{"role": "user", "content": "hi"}])
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{server.url}/v1/{path}", content=json.dumps(asked), headers=headers, timeout=30)


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a stop string of a million letters": (CHAT, {"stop": "a" * 10**6}, "stop"),
    "that, streamed": (CHAT, {"stop": ["a" * 10**6], "stream": True}, "stop"),
    "many stop strings": (TEXT, {"prompt": "a", "stop": [f"x{n}" for n in range(MAX_STOPS + 1)]}, "stop"),
    "long stop strings": (TEXT, {"prompt": "a", "stop": ["x" * (MAX_STOP_CHARACTERS // 2 + 1)] * 2}, "stop"),
    "a text of two megabytes": (TEXT, {"prompt": "ab" * 2**20}, "prompt"),
    "a text of two megabytes among others": (TEXT, {"prompt": ["a", "ab" * 2**20]}, "prompt"),
    "a chat of two megabytes": (CHAT, {"messages": [{"role": "user", "content": "ab" * 2**20}]}, "messages"),
    "many prompts": (TEXT, {"prompt": ["a"] * (MAX_PROMPTS + 1)}, None),
    "a renderer that needs what no request can bring": (CHAT, {"renderer_name": "qwen3_vl"}, "renderer_name"),
    "a token below zero": (TEXT, {"prompt": [-1]}, "prompt"),
    "a token that is no integer of 32 bits": (TEXT, {"prompt": [[5], [2**40]]}, "prompt"),
    **{
        f"an image of {name}": (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": kind, kind: path}]}], "renderer_name": "qwen3"},
            "messages",
        )
        for name, kind, path in [
            ("the machine's", "image", "/etc/hostname"),
            ("the machine's that is not there", "image", "/nothing/here.png"),
            ("the machine's, by its address", "image_url", "file:///etc/hostname"),
            ("another machine", "image_url", "http://169.254.169.254/"),
        ]
    },
    **{
        f"tools of {json.dumps(schema)}": (CHAT, {"tools": [tool(schema)], "renderer_name": renderer}, "tools")
        for schema in ODD_SCHEMAS
        for renderer in ("gpt_oss_no_sysprompt",)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_harms_others_is_refused_by_its_parameter(server: Running, name: str) -> None:
    path, body, param = REFUSED[name]
    began_s = time.monotonic()
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert time.monotonic() - began_s < 5


def test_a_token_that_no_tokenizer_can_read_never_comes_to_one() -> None:
    for prompt in ([-1], [2**31], [[1], [-7]]):
        with pytest.raises(BadParameter, match="prompt"):
            read(CompletionAsked, json.dumps({"model": "m", "prompt": prompt}).encode())


def test_the_stop_strings_of_the_sdk_have_the_same_limit(server: Running) -> None:
    with server.http() as http:
        session = http.post("create_session", json={"user_metadata": {}, "tags": [], "sdk_version": "x"}).json()
        made = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": MODELS[0]}
        body = {
            "sampling_session_id": http.post("create_sampling_session", json=made).json()["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 2, "stop": ["x"] * (MAX_STOPS + 1)},
        }
        answer = http.post("asample", json=body)
    assert answer.status_code == 400
    assert f"{MAX_STOPS} stop strings at most" in answer.text


def test_the_beginning_of_a_long_string_is_looked_for_in_no_time() -> None:
    stops = ["a" * 100_000, "bc", "c"]
    assert without_beginning("xaab", stops) == "xaa"
    assert without_beginning("xaa", stops) == "x"
    assert without_beginning("xc", stops) == "xc"
    assert without_beginning("", stops) == ""


@pytest.mark.slow
def test_tools_that_are_no_schema_are_refused_or_told_of_by_every_family(server: Running) -> None:
    for renderer in supported_renderers():
        odd = {"type": "object", "properties": {"a": 7, "b": None}, "required": 3}
        answer = post(server, CHAT, tools=[tool(odd)], renderer_name=renderer)
        assert answer.status_code in (200, 400), (renderer, answer.text)


# ---- mutations -----------------------------------------------------------------------------------------------------

GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["x"], "seed": 3, "temperature": 0.5,
        "renderer_name": "qwen3", "tools": [tool({"type": "object", "properties": {}})],
    }),
    (CHAT, {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "renderer_name": "gpt_oss_no_sysprompt", "tools": [tool({"properties": {"a": {"oneOf": [{"type": "null"}]}}})],
        "stream": True,
    }),
    (TEXT, {"prompt": ["ab", "c"], "logprobs": 2, "echo": True, "stream": True, "stream_options": {}}),
    (TEXT, {"prompt": [[1, 2], [3]], "top_k": 5, "top_p": 0.5}),
]  # fmt: skip


def try_mutations(server: Running, number: int) -> None:
    """The first byte that answers otherwise is found again by its seed."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"{server.url}/v1/", headers=headers, timeout=30) as http:
        for seed in range(number):
            random_ = random.Random(seed)
            path, body = random_.choice(GOOD)
            whole = json.dumps({"model": MODELS[0], "max_tokens": 3, **body}).encode()
            answer = http.post(path, content=mutated(whole, random_))
            assert answer.status_code < 500, (seed, answer.text)
            assert '"server_error"' not in answer.text, (seed, answer.text)


def test_mutated_bodies_are_answered(server: Running) -> None:
    try_mutations(server, 30)


@pytest.mark.slow
def test_two_thousand_mutated_bodies_are_answered(server: Running) -> None:
    try_mutations(server, 2000)
