"""What a `RestClient` and the `tinker` command ask for: runs, checkpoints, sessions, and what may be done with them.
Each path has a function here, and the table of them; training and sampling are in `protocol.py`.

An owner sees what is its own. What another one has not published reads like what does not exist. What is changed is
answered when it is committed, and done again it changes nothing: a client may send each of these twice.
"""

import hashlib
import json
import secrets
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from stovetop.concurrency import in_thread
from stovetop.errors import CheckpointNotFound, InvalidRequest, NotFoundError
from stovetop.server import bodies
from stovetop.server.downloads import GOOD_S, tar
from stovetop.server.program import Program
from stovetop.server.programs import model_id_of
from stovetop.server.protocol import Answer, Asked, Served, as_json, until_committed
from stovetop.server.recovery import Parts
from stovetop.server.rows import CheckpointRow, DeletionRow, ModelRow, SessionRow
from stovetop.tinker_paths import path_of

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}

T = TypeVar("T")


# ---- runs ------------------------------------------------------------------------------------------------------------


async def list_training_runs(parts: Parts, asked: Asked) -> Answer:
    page = bodies.read_query(bodies.ListedRuns, asked.query)
    programs = [
        program
        for program in parts.programs.owned(asked.owner)
        if page.project_id is None or parts.sessions.project_of(program.model.session_id) == page.project_id
    ]
    programs.sort(key=lambda program: program.last_request_s, reverse=True)
    saved = parts.checkpoints.owned(asked.owner)
    runs = [_run(program, saved) for program in _paged(programs, page)]
    return as_json({"training_runs": runs, "cursor": _cursor(page, len(programs))})


async def get_training_run(parts: Parts, asked: Asked) -> Answer:
    bodies.read_query(bodies.Listed, asked.query)
    program = parts.programs.find(asked.path["run_id"], asked.owner)
    return as_json(_run(program, parts.checkpoints.owned(asked.owner, program.model.id)))


def _run(program: Program, saved: Sequence[CheckpointRow]) -> dict[str, Any]:
    model = program.model
    mine = [row for row in saved if row.model_id == model.id]
    latest = {row.kind: _checkpoint(row) for row in reversed(mine)}
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model.lora_rank,
        "last_request_time": _time(program.last_request_s),
        "last_checkpoint": latest.get("weights"),
        "last_sampler_checkpoint": latest.get("sampler_weights"),
        "user_metadata": _texts(json.loads(model.user_metadata)),
    }


# ---- checkpoints -----------------------------------------------------------------------------------------------------


async def list_checkpoints(parts: Parts, asked: Asked) -> Answer:
    """Of one run: all of them, unless a part is asked for."""
    page = bodies.read_query(bodies.Listed, asked.query)
    program = parts.programs.find(asked.path["run_id"], asked.owner)
    rows = parts.checkpoints.owned(asked.owner, program.model.id)
    shown = _paged(rows, page) if {"limit", "offset"} & set(asked.query) else rows
    return as_json({"checkpoints": [_checkpoint(row) for row in shown]})


async def list_user_checkpoints(parts: Parts, asked: Asked) -> Answer:
    page = bodies.read_query(bodies.Listed, asked.query)
    rows = parts.checkpoints.owned(asked.owner)
    shown = [_checkpoint(row) for row in _paged(rows, page)]
    return as_json({"checkpoints": shown, "cursor": _cursor(page, len(rows))})


async def delete_checkpoint(parts: Parts, asked: Asked) -> Answer:
    """A request that is sent again has the same key: it deletes nothing that was saved since."""
    path, key = _named(asked), asked.idempotency_key or secrets.token_hex(16)
    digest = hashlib.sha256("\n".join((asked.owner, key, path)).encode()).hexdigest()
    request = DeletionRow(digest, time.time())
    was_done = partial(in_thread, partial(parts.checkpoints.was_deleted, request))
    if await was_done():
        return as_json({})
    try:
        row = _own(parts, asked)
    except CheckpointNotFound:
        if await was_done():  # while this one asked
            return as_json({})
        raise
    await until_committed(parts.checkpoints.delete(row, request))
    await in_thread(parts.checkpoints.remove_deleted)
    return as_json({})


async def publish_checkpoint(parts: Parts, asked: Asked) -> Answer:
    await until_committed(parts.checkpoints.publish(_own(parts, asked), public=True))
    return as_json({})


async def unpublish_checkpoint(parts: Parts, asked: Asked) -> Answer:
    await until_committed(parts.checkpoints.publish(_own(parts, asked), public=False))
    return as_json({})


async def set_checkpoint_ttl(parts: Parts, asked: Asked) -> Answer:
    row, ttl_seconds = _own(parts, asked), asked.read(bodies.SetTtl).ttl_seconds
    await until_committed(parts.checkpoints.expire(row, _expiry(ttl_seconds)))
    return as_json({})


async def refuse_bare_id(_parts: Parts, asked: Asked) -> Answer:
    raise InvalidRequest(
        "a checkpoint's id has its kind before its name, as in weights/0001; pass the checkpoint_id of a list: "
        f"{asked.path['name']!r}"
    )


async def weights_info(parts: Parts, asked: Asked) -> Answer:
    row = parts.checkpoints.find(asked.read(bodies.WeightsInfo).tinker_path, asked.owner)
    state = await in_thread(partial(parts.checkpoints.described, row))
    return as_json(
        {
            "base_model": state.base_model,
            "is_lora": True,
            "lora_rank": state.lora.rank,
            "train_unembed": state.lora.train_unembed,
            "train_mlp": state.lora.train_mlp,
            "train_attn": state.lora.train_attn,
            "optimizer_config": {"type": "adamw"},
        }
    )


async def copy_weights(parts: Parts, asked: Asked) -> Answer:
    """A request that is sent again has the same key, and is answered with the same copy."""
    body = asked.read(bodies.CopyWeights)
    source = parts.checkpoints.find(body.source_path, asked.owner)
    if body.session_id is not None and body.model_seq_id is not None:
        parts.sessions.at_work(body.session_id, asked.owner)
        run_id, session_id = model_id_of(body.session_id, body.model_seq_id), body.session_id
    else:
        key = asked.idempotency_key or secrets.token_hex(16)
        digest = hashlib.sha256("\n".join((asked.owner, key)).encode()).hexdigest()
        run_id = f"copy-{digest[:16]}:train:0"
        session_id = ""
    state = await in_thread(partial(parts.checkpoints.described, source))
    metadata = json.dumps({"copied_from": body.source_path})
    run = ModelRow(run_id, session_id, asked.owner, state.base_model, state.lora.rank, metadata, time.time())
    parts.programs.add_run(run)
    path = path_of(run_id, source.kind, source.name)
    if not any(row.path == path for row in parts.checkpoints.owned(asked.owner, run_id)):
        row = await in_thread(partial(parts.checkpoints.copied, source, run, _expiry(body.ttl_seconds)))
        await until_committed(parts.checkpoints.commit_copy(row, run))
    return as_json({"tinker_path": path})


def _own(parts: Parts, asked: Asked) -> CheckpointRow:
    """The checkpoint that the path of the request names."""
    return parts.checkpoints.find_own(_named(asked), asked.owner)


def _named(asked: Asked) -> str:
    return path_of(asked.path["run_id"], asked.path["kind"], asked.path["name"])


def _expiry(ttl_seconds: int | None) -> float | None:
    return None if ttl_seconds is None else time.time() + ttl_seconds


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": KINDS[row.kind],
        "time": _time(row.created_s),
        "tinker_path": row.path,
        "size_bytes": row.size_bytes,
        "public": bool(row.public),
        "user_metadata": _texts(json.loads(row.user_metadata)),
        "expires_at": None if row.expires_s is None else _time(row.expires_s),
    }


# ---- downloads -------------------------------------------------------------------------------------------------------


async def external_weights_urls(parts: Parts, asked: Asked) -> Answer:
    """A link for each file. The weights are those of PEFT, whatever the kind of the checkpoint."""
    row = _readable(parts, asked)
    files = await in_thread(partial(parts.checkpoints.files, row))
    expires_s = int(time.time()) + GOOD_S
    urls = {file.name: parts.links.sign(asked.base_url, row, file.name, expires_s) for file in files}
    return as_json({"urls": urls, "expires": _time(expires_s)})


async def archive_url(parts: Parts, asked: Asked) -> Answer:
    """A link to all files in one, which clients before 0.36 ask for."""
    row = _readable(parts, asked)
    expires_s = int(time.time()) + GOOD_S
    return as_json({"url": parts.links.sign(asked.base_url, row, "", expires_s), "expires": _time(expires_s)})


async def download(parts: Parts, asked: Asked) -> Answer:
    """What a link leads to. No key is asked for. The files stay until they are sent, if the checkpoint is deleted or
    overwritten meanwhile. Before they are sent they are compared with their digests; that of a single file goes with it
    (RFC 9530)."""
    link = bodies.read_query(bodies.Download, asked.query)
    parts.links.check(link)
    row = parts.checkpoints.find_signed(link.path, link.n)
    parts.checkpoints.use(row.folder)
    sent = partial(parts.checkpoints.unuse, row.folder)
    try:
        files = await in_thread(partial(parts.checkpoints.files, row))
        if not link.file:
            for file in files:
                await in_thread(partial(parts.checkpoints.checked, row, file))
            shown = {"content-disposition": f'attachment; filename="{row.name}.tar"'}
            return Answer(tar(files), "application/x-tar", headers=shown, sent=sent)
        for file in files:
            if file.name == link.file:
                digest = b64encode(await in_thread(partial(parts.checkpoints.checked, row, file))).decode()
                headers = {"repr-digest": f"sha-256=:{digest}:"}
                return Answer(b"", "application/octet-stream", file=file, sent=sent, headers=headers)
        raise NotFoundError(f"this checkpoint has no file of this name: {link.file!r}")
    except BaseException:
        await in_thread(sent)
        raise


def _readable(parts: Parts, asked: Asked) -> CheckpointRow:
    return parts.checkpoints.find(_named(asked), asked.owner)


# ---- sessions --------------------------------------------------------------------------------------------------------


async def list_sessions(parts: Parts, asked: Asked) -> Answer:
    page = bodies.read_query(bodies.Listed, asked.query)
    rows = parts.sessions.owned(asked.owner)
    return as_json({"sessions": [row.id for row in _paged(rows, page)], "cursor": _cursor(page, len(rows))})


async def get_session(parts: Parts, asked: Asked) -> Answer:
    bodies.read_query(bodies.Listed, asked.query)
    session = parts.sessions.find(asked.path["session_id"], asked.owner)
    programs = parts.programs.of_session(session.id)
    return as_json(
        {
            "training_run_ids": [program.model.id for program in programs],
            "sampler_ids": parts.samplers.of_session(session.id),
            "user_metadata": _texts(parts.sessions.metadata_of(session)),
            "display_name": json.loads(session.body)["display_name"],
        }
    )


async def assign_session_project(parts: Parts, asked: Asked) -> Answer:
    project_id = asked.read(bodies.AssignProject).project_id
    await until_committed(parts.sessions.assign(asked.path["session_id"], project_id, asked.owner))
    return as_json({})


async def search_sessions(parts: Parts, asked: Asked) -> Answer:
    """The newest first. A cursor names the last session of the page before."""
    body = asked.read(bodies.SearchSessions)
    before = body.cursor and (body.cursor.last_created_at, body.cursor.last_session_id)
    found = [
        row
        for row in parts.sessions.owned(asked.owner)
        if (before is None or (_moment(row.created_s), row.id) < before) and _matches(parts, row, body)
    ]
    page = found[: body.limit]
    answer: dict[str, Any] = {"sessions": [_summary(parts, row) for row in page]}
    if len(found) > len(page):
        last = page[-1]
        answer["next_cursor"] = {"last_created_at": _time(last.created_s), "last_session_id": last.id}
    return as_json(answer)


def _matches(parts: Parts, row: SessionRow, body: bodies.SearchSessions) -> bool:
    session = json.loads(row.body)
    name, words = (session["display_name"] or "").casefold(), (body.display_name or "").casefold().split()
    is_named = [body.session_id == row.id] if body.session_id is not None else []
    if body.display_name is not None:
        is_named.append(all(word in name for word in words))
    metadata = _texts(parts.sessions.metadata_of(row))
    return (
        (not is_named or any(is_named))
        and (body.project_ids is None or session["project_id"] in body.project_ids)
        and body.user_metadata.items() <= metadata.items()
        and (body.statuses is None or any(_has_status(parts, row, status) for status in body.statuses))
    )


def _has_status(parts: Parts, row: SessionRow, asked: bodies.StatusQuery) -> bool:
    status = _status(parts, row)
    if status is None or status["type"] != asked.type:
        return False
    return asked.reasons is None or asked.type != "client_finished" or status["reason"]["type"] in asked.reasons


def _status(parts: Parts, row: SessionRow) -> dict[str, Any] | None:
    """None of one that has not finished and is silent."""
    if row.finished is not None:
        return {"type": "client_finished", **json.loads(row.finished)}
    return {"type": "active"} if parts.sessions.is_alive(row.id) else None


def _summary(parts: Parts, row: SessionRow) -> dict[str, Any]:
    session = json.loads(row.body)
    models = {program.model.id for program in parts.programs.of_session(row.id)}
    saved = [each for each in parts.checkpoints.owned(row.owner) if each.model_id in models]
    return {
        "session_id": row.id,
        "created_at": _time(row.created_s),
        "owner": row.owner,
        "project_id": session["project_id"] or "",
        "status": _status(parts, row),
        "checkpoints_count": len(saved),
        "checkpoint_storage_bytes": sum(each.size_bytes for each in saved),
        "display_name": session["display_name"],
        "user_metadata": _texts(parts.sessions.metadata_of(row)),
    }


# ---- lists -----------------------------------------------------------------------------------------------------------


def _paged(entries: Sequence[T], page: bodies.Listed) -> Sequence[T]:
    return entries[page.offset : page.offset + page.limit]


def _cursor(page: bodies.Listed, num_all: int) -> dict[str, int]:
    return {"offset": page.offset, "limit": page.limit, "total_count": num_all}


def _time(time_s: float) -> str:
    return _moment(time_s).isoformat()


def _moment(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """As clients read it, for whom every value is text."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in metadata.items()
    }


_RUN = "training_runs/{run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"

REST = [
    Served("GET", "training_runs", list_training_runs),
    Served("GET", _RUN, get_training_run),
    Served("GET", f"{_RUN}/checkpoints", list_checkpoints),
    Served("GET", "checkpoints", list_user_checkpoints),
    Served("DELETE", f"{_RUN}/checkpoints/{{name}}", refuse_bare_id),
    Served("DELETE", _CHECKPOINT, delete_checkpoint),
    Served("POST", f"{_CHECKPOINT}/publish", publish_checkpoint),
    Served("DELETE", f"{_CHECKPOINT}/publish", unpublish_checkpoint),
    Served("PUT", f"{_CHECKPOINT}/ttl", set_checkpoint_ttl),
    Served("GET", f"{_CHECKPOINT}/external_weights_urls", external_weights_urls),
    Served("GET", f"{_CHECKPOINT}/archive", archive_url),
    Served("GET", "download", download, is_signed=True),
    Served("POST", "weights_info", weights_info),
    Served("POST", "copy_weights", copy_weights),
    Served("GET", "sessions", list_sessions),
    Served("GET", "sessions/{session_id}", get_session),
    Served("PUT", "sessions/{session_id}/project", assign_session_project),
    Served("POST", "sessions/search", search_sessions),
]
