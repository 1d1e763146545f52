"""The verbs of the Tinker protocol: what each request does and is answered with. One function a path, and a table of
them; HTTP itself is in `app.py`, lists of runs and checkpoints are another table.

A function that waits for the disk, a model or many tokens does so in a thread, and what it answers is committed.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stovetop.concurrency import in_thread
from stovetop.errors import StovetopError
from stovetop.server import bodies, codec
from stovetop.server.programs import model_id_of
from stovetop.server.recovery import Parts
from stovetop.server.requests import Gone, Request, Result, digest_of
from stovetop.server.rows import ModelRow
from stovetop.server.sampler import is_sample, session_of
from stovetop.server.samplers import describe
from stovetop.server.verbs import Freeze, Load, Make, MakeFrom, Save, Step, Verb, call, call_of
from stovetop.types import LoraConfig

HOLD_S = 30.0  # that a question for a result waits for it; the client gives up at 45
INLINE_BYTES = 2**20  # of a result that is larger, a client that can be asked is first told the size

PROTOBUF, JSON = "application/x-protobuf", "application/json"

# Copies of a sampling client, in other processes, ask for a number. One question for all samples of a session
# (sample_use_retrieve_futures) is answered to those who ask it, and clients are not told to.
# One request for a call, whatever its size, so that it is whole or not at all, and its sums have one order.
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "fwdbwd_max_chunk_len": 1_000_000,
    "fwdbwd_max_chunk_bytes_count": 200_000_000,
    "fwdbwd_dispatch_bytes_semaphore_size": 400_000_000,
    "proto_compress_fwdbwd": True,
    "sample_join_sampling_session": True,
}

Of = TypeVar("Of", bound=bodies.Body)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose key was good."""

    owner: str
    body: bytes = b""
    path: Mapping[str, str] = field(default_factory=dict[str, str])  # parameters of the path
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    accept: str = ""
    base_url: str = ""  # of the server, as the client knows it
    idempotency_key: str = ""

    def read(self, kind: type[Of]) -> Of:
        return bodies.read_body(kind, self.body)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request is answered with: these bytes, or a file, or pieces that are made while they are sent."""

    body: bytes | AsyncIterator[bytes] | Iterator[bytes]  # pieces are sent as they come
    media_type: str = JSON
    status: int = 200
    file: Path | None = None
    sent: Callable[[], object] | None = None  # called when it is sent, or its client has gone; it may wait for the disk
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def bearer_of(headers: Mapping[str, str]) -> str | None:
    """The key that is sent as `Authorization: Bearer KEY`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


@dataclass(frozen=True, slots=True)
class Dialect:
    """How clients of one kind write what is around a request: where paths begin, where the key is, what a refusal looks
    like."""

    prefix: str  # of paths
    key_of: Callable[[Mapping[str, str]], str | None]  # in the headers
    refused: Callable[[int, str, StovetopError | None], Answer]  # of a status, a message, and the error behind it


def as_json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(json.dumps(value, allow_nan=False).encode(), status=status, headers=headers or {})


def _refused(status: int, message: str, error: StovetopError | None) -> Answer:
    kind = {} if error is None else {"type": type(error).__name__}  # a client of ours raises the same
    return as_json({"detail": message, **kind}, status)


TINKER = Dialect(prefix="/api/v1/", key_of=lambda headers: headers.get("x-api-key"), refused=_refused)

Serve = Callable[[Parts, Asked], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Served:
    """A path and what serves it."""

    method: str
    path: str
    serve: Serve
    is_for_operators: bool = False  # it shows what all owners do
    is_quiet: bool = False  # not in the log: asked again and again, or what it begins is there when it has ended
    is_signed: bool = False  # the request says itself what it may: no key is asked for, and there is no owner
    dialect: Dialect = TINKER
    ends_with_client: bool = False  # what is done for a client that goes away is for nothing, and is cancelled

    @property
    def verb(self) -> str:
        """For the log."""
        return f"{self.method}:{self.dialect.prefix}{self.path}"


# ---- sessions ------------------------------------------------------------------------------------------------------


async def client_config(_parts: Parts, _asked: Asked) -> Answer:
    return as_json(CLIENT_CONFIG)


async def client_dynamic_config(_parts: Parts, _asked: Asked) -> Answer:
    return as_json({"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64})


async def create_session(parts: Parts, asked: Asked) -> Answer:
    session, committed = parts.sessions.create(asked.read(bodies.CreateSession), asked.owner)
    await until_committed(committed)
    return as_json({"type": "create_session", "session_id": session.id})


async def session_heartbeat(parts: Parts, asked: Asked) -> Answer:
    parts.sessions.at_work(asked.read(bodies.Heartbeat).session_id, asked.owner)
    return as_json({"type": "session_heartbeat"})


async def finish_session(parts: Parts, asked: Asked) -> Answer:
    await until_committed(
        parts.sessions.finish(asked.path["session_id"], asked.read(bodies.FinishSession), asked.owner)
    )
    return as_json({})


async def telemetry(_parts: Parts, _asked: Asked) -> Answer:
    """Accepted and dropped."""
    return as_json({"status": "accepted"})


async def get_server_capabilities(parts: Parts, _asked: Asked) -> Answer:
    supported = parts.service.get_server_capabilities().supported_models
    return as_json({"supported_models": [model.model_dump() for model in supported]})


# ---- training ------------------------------------------------------------------------------------------------------


async def create_model(parts: Parts, asked: Asked) -> Answer:
    body = asked.read(bodies.CreateModel)
    lora = body.lora_config or bodies.Lora()
    config = LoraConfig(**lora.model_dump())  # refuses ranks and flags that no model could have
    seed = secrets.randbits(63) if config.seed is None else config.seed
    verb = Make(
        base_model=body.base_model,
        rank=config.rank,
        seed=seed,
        train_unembed=config.train_unembed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
        user_metadata=_metadata(parts, asked, body.session_id, body.user_metadata),
    )
    return await _make(parts, asked, body.session_id, body.model_seq_id, body.base_model, config.rank, verb)


async def load_weights(parts: Parts, asked: Asked) -> Answer:
    body = asked.read(bodies.LoadWeights)
    if body.session_id is None or body.model_seq_id is None:
        return await _load_into(parts, asked, body)
    checkpoint = parts.checkpoints.find(body.path, asked.owner)
    verb = MakeFrom(
        path=body.path,
        folder=checkpoint.folder,
        with_optimizer=body.optimizer,
        base_model=body.base_model,
        user_metadata=_metadata(parts, asked, body.session_id, body.user_metadata),
    )
    saved = await in_thread(partial(parts.checkpoints.described, checkpoint))
    base_model = body.base_model or saved.base_model
    return await _make(parts, asked, body.session_id, body.model_seq_id, base_model, saved.lora.rank, verb)


async def _load_into(parts: Parts, asked: Asked, body: bodies.LoadWeights) -> Answer:
    assert body.model_id is not None, "the body names one of both"
    assert body.seq_id is not None, "the same"
    checkpoint = parts.checkpoints.find(body.path, asked.owner)
    verb = Load(path=body.path, folder=checkpoint.folder, with_optimizer=body.optimizer)
    return await _accept(parts, asked, body.model_id, body.seq_id, verb)


async def get_info(parts: Parts, asked: Asked) -> Answer:
    model = parts.programs.find(asked.read(bodies.ModelQuery).model_id, asked.owner)
    parts.sessions.at_work(model.model.session_id, asked.owner)
    info = await in_thread(model.info)
    data = {"arch": info.model_data.arch, "model_name": info.model_name, "tokenizer_id": info.model_name}
    return as_json(
        {
            "type": "get_info",
            "model_id": model.model.id,
            "model_data": data,
            "model_name": info.model_name,
            "is_lora": True,
            "lora_rank": info.lora_rank,
            "optimizer_config": {"type": "adamw"},
        }
    )


async def forward_backward(parts: Parts, asked: Asked) -> Answer:
    """Its data are read in a thread, in any order; the model's turn is in the order in which they were read."""
    envelope = await in_thread(partial(codec.read_envelope, asked.body))
    program = parts.programs.find(envelope.model_id, asked.owner)
    parts.sessions.at_work(program.model.session_id, asked.owner)
    request = await program.accept(await in_thread(partial(call_of, envelope)))
    return as_json(request.submitted())


async def optim_step(parts: Parts, asked: Asked) -> Answer:
    body = asked.read(bodies.OptimStep)
    return await _accept(parts, asked, body.model_id, body.seq_id, Step(params=body.params))


async def save_weights(parts: Parts, asked: Asked) -> Answer:
    body = asked.read(bodies.SaveWeights)
    verb = Save(
        name=body.path,
        kind="weights",
        overwrite=body.overwrite,
        ttl_seconds=body.ttl_seconds,
        user_metadata=body.user_metadata or {},
    )
    return await _accept(parts, asked, body.model_id, body.seq_id, verb)


async def save_weights_for_sampler(parts: Parts, asked: Asked) -> Answer:
    """An ephemeral sampler's number is drawn anew when the request is sent again, so it tells no two requests apart."""
    body = asked.read(bodies.SaveWeightsForSampler)
    if body.path is None:
        session_id = parts.programs.find(body.model_id, asked.owner).model.session_id
        verb: Verb = Freeze(sampler_id=f"{session_id}:sample:{body.sampling_session_seq_id}")
        identity = body.model_dump_json(exclude={"sampling_session_seq_id"}).encode()
        return await _accept(parts, asked, body.model_id, body.seq_id, verb, identity)
    verb = Save(
        name=body.path,
        kind="sampler_weights",
        overwrite=False,
        ttl_seconds=body.ttl_seconds,
        user_metadata=body.user_metadata or {},
    )
    return await _accept(parts, asked, body.model_id, body.seq_id, verb)


async def save_weights_external(parts: Parts, asked: Asked) -> Answer:
    body = asked.read(bodies.SaveWeightsExternal)
    verb = Save(
        name=body.path, kind="external_weights", overwrite=False, ttl_seconds=body.ttl_seconds, user_metadata={}
    )
    return await _accept(parts, asked, body.model_id, body.seq_id, verb)


async def _make(
    parts: Parts, asked: Asked, session_id: str, model_seq_id: int, base_model: str, rank: int, verb: Make | MakeFrom
) -> Answer:
    parts.sessions.at_work(session_id, asked.owner)
    model_id = model_id_of(session_id, model_seq_id)
    if not parts.programs.is_there(model_id):
        owned = parts.programs.owned(asked.owner)
        num_alive = sum(parts.sessions.is_alive(program.model.session_id) for program in owned)
        parts.limits.require_model(asked.owner, num_alive)
    metadata = json.dumps(verb.user_metadata)
    row = ModelRow(model_id, session_id, asked.owner, base_model, rank, metadata, time.time())
    request = await parts.programs.make(row, call(0, verb, asked.body))
    return as_json(request.submitted())


async def _accept(
    parts: Parts, asked: Asked, model_id: str, seq_id: int, verb: Verb, identity: bytes | None = None
) -> Answer:
    program = parts.programs.find(model_id, asked.owner)
    parts.sessions.at_work(program.model.session_id, asked.owner)
    request = await program.accept(call(seq_id, verb, asked.body if identity is None else identity))
    return as_json(request.submitted())


def _metadata(parts: Parts, asked: Asked, session_id: str, own: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the user said of the session, and of the model, as strings: a service takes no others."""
    session = parts.sessions.at_work(session_id, asked.owner)
    return {key: str(value) for key, value in {**parts.sessions.metadata_of(session), **(own or {})}.items()}


# ---- sampling ------------------------------------------------------------------------------------------------------


async def create_sampling_session(parts: Parts, asked: Asked) -> Answer:
    body = asked.read(bodies.CreateSamplingSession)
    parts.sessions.at_work(body.session_id, asked.owner)
    sampler_id, committed = await in_thread(partial(parts.samplers.create, body, asked.owner))
    await until_committed(committed)
    return as_json({"type": "create_sampling_session", "sampling_session_id": sampler_id})


async def get_sampler(parts: Parts, asked: Asked) -> Answer:
    return as_json(describe(parts.samplers.find(asked.path["sampler_id"], asked.owner)))


async def asample(parts: Parts, asked: Asked) -> Answer:
    def begin() -> Request:
        body = asked.read(bodies.Sample)
        parts.sessions.at_work(session_of(body.sampling_session_id), asked.owner)
        return parts.samplers.sample(body, digest_of(asked.body), asked.owner)

    request = await in_thread(begin)
    await until_committed(request.committed)
    return as_json(request.submitted())


# ---- futures -------------------------------------------------------------------------------------------------------


async def retrieve_future(parts: Parts, asked: Asked) -> Answer:
    """Waits for the result, for `HOLD_S` seconds at most: then the client asks again."""
    body = asked.read(bodies.RetrieveFuture)
    request_id = body.request_id
    request = await _find_request(parts, request_id, asked.owner)
    try:
        async with asyncio.timeout(HOLD_S):
            result = await asyncio.wrap_future(request.finished)
    except TimeoutError:
        state = parts.limits.queue_state(asked.owner)
        return as_json({"type": "try_again", "request_id": request_id, **state}, status=408)
    if body.allow_metadata_only and len(result.body) > INLINE_BYTES:
        return as_json({"status": "complete_metadata", "response_payload_size": len(result.body)})
    request.delivered_s = time.monotonic()
    return await in_thread(partial(_payload, result, asked.accept))


async def retrieve_futures(parts: Parts, asked: Asked) -> Answer:
    """Waits until a sample of this client has ended, for `HOLD_S` seconds at most, and tells which have since its last
    question."""
    body = asked.read(bodies.RetrieveFutures)
    target = body.target
    parts.samplers.release(target.sampling_session_id, body.retrieved_request_ids, asked.owner)
    ask = partial(parts.samplers.ask, target.sampling_session_id, target.cloned_sampler_id, asked.owner)
    completions, committed = await in_thread(ask)
    await until_committed(committed)
    ended, cursor, more = completions.after(body.prev_cursor)
    hold_s = HOLD_S if body.timeout is None else min(body.timeout, HOLD_S)
    if not ended and hold_s > 0:
        try:
            async with asyncio.timeout(hold_s):
                await asyncio.wrap_future(more)
        except TimeoutError:
            pass
        ended, cursor, _ = completions.after(body.prev_cursor)
    return as_json({"completions": [each.as_json() for each in ended], "cursor": cursor})


async def join_sampling_session(parts: Parts, asked: Asked) -> Answer:
    sampler_id = asked.read(bodies.JoinSamplingSession).sampling_session_id
    number = await in_thread(partial(parts.samplers.join, sampler_id, asked.owner))
    return as_json({"type": "join_sampling_session", "client_counter": number})


async def cancel_future(parts: Parts, asked: Asked) -> Answer:
    """Ends a sample that is drawn. What trains goes on."""
    request = await _find_request(parts, asked.read(bodies.RetrieveFuture).request_id, asked.owner)
    request.cancel()
    return as_json({})


async def _find_request(parts: Parts, request_id: str, owner: str) -> Request:
    """A training request from the journal, where it is not in memory any more; a sample is then gone."""
    request = parts.requests.find(request_id, owner)
    if request is not None:
        return request
    if is_sample(request_id):
        raise Gone(f"this sample is not here, or no more; ask for it again: {request_id!r}")
    return await in_thread(partial(parts.programs.request, request_id, owner))


def _payload(result: Result, accept: str) -> Answer:
    match result.form:
        case "forward_backward" | "sample" if PROTOBUF in accept:
            return Answer(result.body, PROTOBUF)
        case "forward_backward":
            return as_json(codec.forward_backward_as_json(result.body))
        case "sample":
            return as_json(codec.sample_as_json(result.body))
        case "json" | "failed":
            return Answer(result.body)


async def until_committed(committed: "Future[None]") -> None:
    """What a client is answered after this is there after a kill."""
    await asyncio.wrap_future(committed)


PROTOCOL = [
    Served("POST", "client/config", client_config),
    Served("POST", "client/dynamic_config", client_dynamic_config),
    Served("POST", "create_session", create_session),
    Served("POST", "session_heartbeat", session_heartbeat, is_quiet=True),
    Served("POST", "sessions/{session_id}/finish", finish_session),
    Served("POST", "telemetry", telemetry, is_quiet=True),
    Served("GET", "get_server_capabilities", get_server_capabilities),
    Served("POST", "create_model", create_model, is_quiet=True),
    Served("POST", "load_weights", load_weights, is_quiet=True),
    Served("POST", "get_info", get_info),
    Served("POST", "forward_backward", forward_backward, is_quiet=True),
    Served("POST", "optim_step", optim_step, is_quiet=True),
    Served("POST", "save_weights", save_weights, is_quiet=True),
    Served("POST", "save_weights_for_sampler", save_weights_for_sampler, is_quiet=True),
    Served("POST", "save_weights_external", save_weights_external, is_quiet=True),
    Served("POST", "create_sampling_session", create_sampling_session),
    Served("GET", "samplers/{sampler_id}", get_sampler),
    Served("POST", "asample", asample, is_quiet=True),
    Served("POST", "retrieve_future", retrieve_future, is_quiet=True),
    Served("POST", "retrieve_futures", retrieve_futures, is_quiet=True),
    Served("POST", "join_sampling_session", join_sampling_session),
    Served("POST", "cancel_future", cancel_future),
]
