"""What someone may try who reaches the port, with a key of their own or without one. One line an attack: a name, the
request, and the answers that are right. Each is run by `test_attacks.py`."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zstandard
from tinker.proto import tinker_public_pb2

from stovetop.server.protocol import PROTOCOL

MEGABYTE = "a" * 2**20
DEEP = b"[" * 100_000
ZEROS = bytes(3 * 2**20)  # over the limit of the server under attack, which is 2 MiB
LONG = "9" * 5_000


class Hers(NamedTuple):
    """What another owner has."""

    key: str
    session: str
    model: str
    sampler: str
    path: str
    request: str
    folder: str  # of the checkpoint, on the server's disk


@dataclass(frozen=True)
class Attack:
    """A request with the attacker's own key, unless headers have another one."""

    name: str
    path: str
    body: "Callable[[Hers, str], Any] | bytes" = (
        b"{}"  # bytes as they are, anything else as JSON; of hers and own session
    )
    allowed: tuple[int, ...] = (400,)
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def content(self, hers: Hers, own: str) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body(hers, own)).encode()


def sample(sampler: str, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    return {**body, **more}


def learn(model: str, *, seq_id: int = 1, **tensor: Any) -> bytes:
    """A forward_backward with one datum, whose targets are this tensor."""
    message = tinker_public_pb2.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\5\0\0\0"
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype = tensor.get("dtype", 2)
    target.shape.extend(tensor.get("shape", [1]))
    target.dense = tensor.get("dense", bytes(8))
    return message.SerializeToString()


WITHOUT_A_KEY = [
    Attack(
        f"no key: {each.method} {each.path}",
        re.sub(r"{.*?}", "x", each.path),
        b"{}",
        (401,),
        each.method,
        {"X-API-Key": ""},
    )
    for each in PROTOCOL
]

WITH_A_WRONG_KEY = [
    Attack(f"key {name}", "get_server_capabilities", b"", (401,), "GET", headers)
    for name, headers in {
        "of the time before keys": {"X-API-Key": "tml-local"},
        "that is only the prefix": {"X-API-Key": "tml-"},
        "of sixty thousand characters": {"X-API-Key": "tml-" + "a" * 60_000},
        "that is JSON": {"X-API-Key": '{"$ne": ""}'},
        "that is SQL": {"X-API-Key": "tml-' OR 1=1 --"},
        "as a cookie": {"X-API-Key": "", "Cookie": "X-API-Key=tml-local"},
        "of a proxy": {"X-API-Key": "", "X-Forwarded-User": "alice", "X-Remote-User": "alice"},
    }.items()
]

NOT_THEIRS = [
    Attack(
        "train hers", "optim_step", lambda hers, own: {"model_id": hers.model, "seq_id": 9, "adam_params": {}}, (404,)
    ),
    Attack("look at hers", "get_info", lambda hers, own: {"model_id": hers.model}, (404,)),
    Attack("keep hers alive", "session_heartbeat", lambda hers, own: {"session_id": hers.session}, (404,)),
    Attack("read her result", "retrieve_future", lambda hers, own: {"request_id": hers.request}, (404,)),
    Attack("cancel her request", "cancel_future", lambda hers, own: {"request_id": hers.request}, (404,)),
    Attack("save hers", "save_weights", lambda hers, own: {"model_id": hers.model, "seq_id": 9, "path": "x"}, (404,)),
    Attack(
        "freeze hers",
        "save_weights_for_sampler",
        lambda hers, own: {"model_id": hers.model, "seq_id": 9, "sampling_session_seq_id": 3},
        (404,),
    ),
    Attack("sample from hers", "asample", lambda hers, own: sample(hers.sampler), (404,)),
    Attack("join hers", "join_sampling_session", lambda hers, own: {"sampling_session_id": hers.sampler}, (404,)),
    Attack(
        "her samples",
        "retrieve_futures",
        lambda hers, own: {"target": {"sampling_session_id": hers.sampler}, "timeout": 0},
        (404,),
    ),
    Attack(
        "a model in her session",
        "create_model",
        lambda hers, own: {"session_id": hers.session, "model_seq_id": 5, "base_model": "tiny/model"},
        (404,),
    ),
    Attack(
        "a sampler in her session",
        "create_sampling_session",
        lambda hers, own: {"session_id": hers.session, "sampling_session_seq_id": 5, "base_model": "tiny/model"},
        (404,),
    ),
    Attack(
        "a model from her checkpoint",
        "load_weights",
        lambda hers, own: {"session_id": own, "model_seq_id": 5, "path": hers.path, "optimizer": True},
        (404,),
    ),
    Attack(
        "a sampler of her checkpoint",
        "create_sampling_session",
        lambda hers, own: {"session_id": own, "sampling_session_seq_id": 6, "model_path": hers.path},
        (404,),
    ),
    Attack("finish hers", "sessions/{hers.session}/finish", b'{"reason": {"type": "success"}}', (404,)),
    Attack("describe hers", "samplers/{hers.sampler}", b"", (404,), "GET"),
]

PATHS = [
    Attack(
        f"load {name}",
        "load_weights",
        lambda hers, own, path=path: {
            "session_id": own,
            "model_seq_id": 7,
            "path": path.format(hers=hers),
            "optimizer": True,
        },
        (404,),
    )
    for name, path in {
        "a file of the system": "/etc/passwd",
        "a folder above": "tinker://../../etc/weights/passwd",
        "dots": "tinker://x/weights/..",
        "a file's address": "file:///etc/passwd",
        "her folder": "{hers.folder}",
        "her folder by an address": "tinker://{hers.folder}",
        "her path, encoded": "tinker:%2f%2f{hers.model}/weights/hers",
        "a zero": "tinker://x/weights/\0",
    }.items()
] + [
    Attack("a sampler's id above", "samplers/..%2f..%2f..%2fetc%2fpasswd", b"", (404,), "GET"),
    Attack("a session's id above", "sessions/..%2f..%2fx/finish", b'{"reason": {"type": "success"}}', (404,)),
    Attack("a path above the routes", "../../etc/passwd", b"", (404,), "GET"),
    Attack("a route of the framework", "../../docs", b"", (404,), "GET"),
    Attack("sample from a file", "asample", lambda hers, own: sample("/etc/passwd"), (404,)),
]

BODIES = [
    Attack(f"a body of {name}", "optim_step", body, (400,), headers=headers)
    for name, body, headers in [
        ("nothing", b"", {}),
        ("a list", b"[]", {}),
        ("null", b"null", {}),
        ("depth", DEEP, {}),
        ("depth in a field", b'{"model_id": ' + DEEP, {}),
        ("no UTF-8", b'{"model_id": "\xff\xfe"}', {}),
        ("half a character", b'{"model_id": "\\ud800", "seq_id": 1, "adam_params": {}}', {}),
        ("five thousand digits", f'{{"model_id": "m", "seq_id": {LONG}}}'.encode(), {}),
        ("NaN", b'{"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": NaN}}', {}),
        ("infinity", b'{"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": 1e999}}', {}),
        ("a number as a name", b'{"model_id": 5, "seq_id": 1, "adam_params": {}}', {}),
        ("a name as a number", b'{"model_id": "m", "seq_id": "1", "adam_params": {}}', {}),
        ("an unknown optimizer", b'{"model_id": "m", "seq_id": 1, "optimizer_params": {"type": "dimuon"}}', {}),
        ("no zstd", b"none", {"Content-Encoding": "zstd"}),
        ("zstd that is cut off", zstandard.compress(b"{}" * 1000)[:12], {"Content-Encoding": "zstd"}),
        ("another compression", b"none", {"Content-Encoding": "br"}),
        ("two compressions", zstandard.compress(zstandard.compress(b"{}")), {"Content-Encoding": "zstd, zstd"}),
    ]
] + [
    Attack("a body that is too large", "optim_step", ZEROS, (413,)),
    Attack("a bomb", "optim_step", zstandard.compress(ZEROS), (413,), headers={"Content-Encoding": "zstd"}),
    Attack(
        "a bomb that does not say its size",
        "optim_step",
        zstandard.ZstdCompressor(write_content_size=False).compress(ZEROS),
        (413,),
        headers={"Content-Encoding": "zstd"},
    ),
    Attack(
        "a bomb in pieces",
        "optim_step",
        zstandard.compress(bytes(2**20)) * 3,
        (413,),
        headers={"Content-Encoding": "zstd"},
    ),
    Attack("NaN in what a user says", "create_session", b'{"user_metadata": {"a": NaN}}', (400,)),
    Attack("depth in what a user says", "create_session", b'{"user_metadata": {"a": ' + DEEP, (400,)),
    *(
        Attack(f"a megabyte of {name}", path, json.dumps(body).encode(), (400,))
        for name, path, body in [
            ("metadata", "create_session", {"user_metadata": {"a": MEGABYTE}}),
            ("many metadata", "create_session", {"user_metadata": {f"a{n}": 1 for n in range(2**17)}}),
            ("tags", "create_session", {"tags": ["a"] * 2**18}),
            ("name", "create_session", {"display_name": MEGABYTE}),
            ("project", "create_session", {"project_id": MEGABYTE}),
            ("version", "create_session", {"sdk_version": MEGABYTE}),
            ("reason", "sessions/x/finish", {"reason": {"type": "success"}, "detail": MEGABYTE}),
            (
                "metadata of a save",
                "save_weights",
                {
                    "model_id": "m",
                    "seq_id": 1,
                    "path": "x",
                    "user_metadata": {"a": MEGABYTE},
                },
            ),
        ]
    ),
]

VALUES = [
    Attack("a million samples", "asample", lambda hers, own: sample(own, num_samples=10**6)),
    Attack("a seq_id of 64 bits", "asample", lambda hers, own: sample(own, seq_id=2**63)),
    Attack("a token that is no integer of 64 bits", "asample", lambda hers, own: sample(
        own, prompt={"chunks": [{"type": "encoded_text", "tokens": [10**30]}]}
    ), (400, 404)),
    Attack("an image's address", "asample", lambda hers, own: sample(
        own, prompt={"chunks": [{"type": "image_asset_pointer", "location": "http://169.254.169.254/"}]}
    )),
    Attack("a wait of NaN", "retrieve_futures", b'{"target": {"sampling_session_id": "x"}, "timeout": NaN}'),
    Attack("a cursor below zero", "retrieve_futures", b'{"target": {"sampling_session_id": "x"}, "prev_cursor": -1}'),
    Attack("a name of a thousand letters", "get_info", lambda hers, own: {"model_id": "m" * 1000}),
    Attack("a rank of a million", "create_model", lambda hers, own: {
        "session_id": own, "model_seq_id": 8, "base_model": "tiny/model", "lora_config": {"rank": 10**9}
    }),
    Attack("a base model on the disk", "create_model", lambda hers, own: {
        "session_id": own, "model_seq_id": 8, "base_model": hers.folder
    }),
    Attack("protobuf without a model", "forward_backward", learn("")),
    Attack("protobuf of a seq_id below one", "forward_backward", learn("m", seq_id=-1)),
    Attack("protobuf that is cut off", "forward_backward", learn("m")[:-3]),
    Attack("protobuf of random bytes", "forward_backward", bytes(range(256)) * 8),
    Attack("protobuf of hers", "forward_backward", lambda hers, own: hers.model, (400,)),
]  # fmt: skip

HEADERS = [
    Attack(f"Host {host}", "client/config", b"{}", (400,), headers={"Host": host})
    for host in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "", "localhost.evil.example:8")
] + [
    Attack(f"method {method}", "client/config", b"", (404, 405), method)
    for method in ("OPTIONS", "TRACE", "PUT", "PATCH", "DELETE", "GET")
] + [
    Attack("a preflight", "asample", b"", (404, 405), "OPTIONS", {
        "Origin": "https://evil.example", "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-api-key",
    }),
    Attack("another page's request", "client/config", b"{}", (200,), headers={"Origin": "https://evil.example"}),
    Attack("an upgrade", "client/config", b"{}", (200, 400), headers={"Connection": "Upgrade", "Upgrade": "websocket"}),
    Attack("another method in a header", "sessions/x/finish", b"{}", (400, 404), headers={
        "X-HTTP-Method-Override": "DELETE"
    }),
    Attack("another path in a header", "client/config", b"{}", (200,), headers={"X-Original-URL": "/api/v1/asample"}),
]  # fmt: skip

ATTACKS = [*WITHOUT_A_KEY, *WITH_A_WRONG_KEY, *NOT_THEIRS, *PATHS, *BODIES, *VALUES, *HEADERS]
