"""The server as an ASGI application: routes, keys, limits, and what errors are answered with. What requests do is in
tables of functions that know no HTTP (`protocol.py`, `rest.py`).

While models load and the journal is replayed, every request but a health check is answered 503 with `retry-after`, for
which the SDK waits longer than for a port that is closed.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stovetop.concurrency import in_thread
from stovetop.errors import APIStatusError, StovetopError
from stovetop.server.journal import JournalFailed
from stovetop.server.keys import OwnerOf, local_owner
from stovetop.server.protocol import PROTOCOL, Answer, Asked, Served, as_json
from stovetop.server.recovery import Parts
from stovetop.server.rest import REST
from stovetop.server.uploads import UploadLimits, plain, read_upload

log = logging.getLogger(__name__)

RETRY_AFTER_S = 10
BUSY_RETRY_AFTER_S = 1  # of what is over a limit that passes by itself
LARGE_BYTES = 2**16  # what is decompressed in a thread


@dataclass(slots=True, eq=False)
class Doors:
    """Whether requests are let in: there are `parts` while they are. Changed by one thread, that which starts and stops
    the server."""

    state: str = "loading"  # what a health check says
    parts: Parts | None = None

    def open(self, parts: Parts) -> None:
        self.parts, self.state = parts, "ok"

    def close(self) -> None:
        self.parts, self.state = None, "stopping"


def make_app(
    doors: Doors,
    *,
    hosts: list[str],
    owner_of: OwnerOf = local_owner,
    limits: UploadLimits | None = None,
    tables: Iterable[Served] = (*PROTOCOL, *REST),
) -> Starlette:
    """`hosts`: for which Host headers requests are served, against pages that make a browser send some here."""
    serve = partial(_serve, doors, owner_of, limits or UploadLimits())
    routes = [Route(f"/api/v1/{each.path}", partial(serve, each), methods=[each.method]) for each in tables]
    routes += [Route(path, partial(_health, doors)) for path in ("/healthz", "/api/v1/healthz")]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={HTTPException: _no_route},
    )


async def _serve(doors: Doors, owner_of: OwnerOf, limits: UploadLimits, served: Served, request: Request) -> Response:
    try:
        owner = "" if served.is_signed else owner_of(request.headers.get("x-api-key"))
        if doors.parts is None:
            return _not_now(doors.state)
        body = await _body(request, limits)
        answer = await served.serve(doors.parts, _asked(owner, body, request))
    except ClientDisconnect:  # amid its upload: there is no client to answer
        answer = as_json({"detail": "the upload was broken off"}, status=400)
    except JournalFailed:  # the process is about to end; what was asked is asked again after it
        return _not_now("stopping")
    except StovetopError as error:
        answer = _refused(error)
    except Exception:
        log.exception("%s %s failed", request.method, request.url.path)
        answer = as_json({"detail": "the server failed; its log says why"}, status=500)
    return _response(answer)


def _asked(owner: str, body: bytes, request: Request) -> Asked:
    headers = request.headers
    return Asked(
        owner,
        body,
        request.path_params,
        request.query_params,
        headers.get("accept", ""),
        str(request.base_url),
        headers.get("x-idempotency-key", ""),
    )


def _response(answer: Answer) -> Response:
    if answer.file is not None:
        return FileResponse(answer.file, media_type=answer.media_type)
    if answer.pieces is not None:
        shown = {"content-disposition": f'attachment; filename="{answer.name}"'}
        return StreamingResponse(answer.pieces, media_type=answer.media_type, headers=shown)
    headers = {"retry-after": str(BUSY_RETRY_AFTER_S)} if answer.status == 429 else None
    return Response(answer.body, answer.status, headers, answer.media_type)


async def _body(request: Request, limits: UploadLimits) -> bytes:
    sent, encoding = await read_upload(request, limits), request.headers.get("content-encoding", "")
    if len(sent) < LARGE_BYTES and not encoding:
        return sent
    return await in_thread(partial(plain, sent, encoding, limits))


def _refused(error: StovetopError) -> Answer:
    """Of a request that was not accepted. 409 is never among the answers: the SDK would send it again for minutes."""
    status = error.status_code if isinstance(error, APIStatusError) else 400
    return as_json({"detail": str(error)}, status=400 if status == 409 else status)


def _not_now(state: str) -> Response:
    return JSONResponse({"detail": f"the server is {state}; ask again"}, 503, {"retry-after": str(RETRY_AFTER_S)})


async def _health(doors: Doors, _request: Request) -> Response:
    return JSONResponse({"status": doors.state}, 200 if doors.parts is not None else 503)


async def _no_route(request: Request, error: Any) -> Response:
    detail = f"this server has no {request.method} {request.url.path}"
    return JSONResponse({"detail": detail}, error.status_code)
