"""The server as an ASGI application: routes, keys, limits, what errors are answered with, and the log of what was
answered. What requests do is in tables of functions that know no HTTP (`protocol.py`, `rest.py`).

While models load and the journal is replayed, every request but a health check is answered 503 with `retry-after`, for
which the SDK waits longer than for a port that is closed.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
from starlette.types import Receive, Scope, Send

from stovetop.concurrency import in_thread, started
from stovetop.errors import APIStatusError, RequestFailedError, ServiceClosed, StovetopError
from stovetop.server.journal import JournalFailed
from stovetop.server.keys import OwnerOf, local_operator, local_owner
from stovetop.server.openai.routes import openai_table
from stovetop.server.ours import OURS
from stovetop.server.page import PAGES
from stovetop.server.protocol import PROTOCOL, TINKER, Answer, Asked, Dialect, Served
from stovetop.server.recovery import Parts
from stovetop.server.rest import REST
from stovetop.server.uploads import UploadLimits, plain, read_upload

log = logging.getLogger(__name__)

RETRY_AFTER_S = 10
BUSY_RETRY_AFTER_S = 1  # of what is over a limit that passes by itself
AGAIN = (408, 429)  # statuses of what the client asks again by itself, as often as it takes
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


@dataclass(frozen=True, slots=True, eq=False)
class _Entrance:
    """What every request passes."""

    doors: Doors
    owner_of: OwnerOf
    operator_of: OwnerOf
    limits: UploadLimits

    def let_in(self, served: Served, request: Request) -> str:
        """Whose request it is."""
        if served.is_signed:
            return ""
        of = self.operator_of if served.is_for_operators else self.owner_of
        return of(served.dialect.key_of(request.headers))


def make_app(
    doors: Doors,
    *,
    hosts: list[str],
    owner_of: OwnerOf = local_owner,
    operator_of: OwnerOf = local_operator,
    limits: UploadLimits | None = None,
    tables: Iterable[Served] | None = None,
) -> Starlette:
    """`hosts`: for which Host headers requests are served, against pages that make a browser send some here."""
    entrance = _Entrance(doors, owner_of, operator_of, limits or UploadLimits())
    served = [*PROTOCOL, *REST, *OURS, *PAGES, *openai_table()] if tables is None else list(tables)
    routes = [
        Route(f"{each.dialect.prefix}{each.path}", partial(_serve, entrance, each), methods=[each.method])
        for each in served
    ]
    dialects = {each.dialect.prefix: each.dialect for each in served if each.dialect.prefix != "/"}
    routes += [Route(path, partial(_health, doors)) for path in ("/healthz", "/api/v1/healthz")]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={HTTPException: partial(_no_route, dialects)},
    )


async def _serve(entrance: _Entrance, served: Served, request: Request) -> "Response | _Sending":
    dialect, owner, begun_s = served.dialect, "", time.monotonic()
    try:
        owner = entrance.let_in(served, request)
        if entrance.doors.parts is None:
            return _not_now(dialect, entrance.doors.state)
        body = await _body(request, entrance.limits)
        serving = served.serve(entrance.doors.parts, _asked(owner, body, request))
        answer = await (_while_connected(request, serving) if served.ends_with_client else serving)
    except ClientDisconnect:  # amid its upload: there is no client to answer
        answer = dialect.refused(400, "the upload was broken off", None)
    except (JournalFailed, ServiceClosed):  # the process is about to end; what was asked is asked again after it
        return _not_now(dialect, "stopping")
    except StovetopError as error:
        answer = dialect.refused(_status_of(error), str(error), error)
    except Exception:
        log.exception("%s %s failed", request.method, request.url.path)
        answer = dialect.refused(500, "the server failed; its log says why", None)
    response = _response(answer)
    _log(served, owner, response, time.monotonic() - begun_s)
    return response if answer.sent is None else _Sending(response, answer.sent)


@dataclass(frozen=True, slots=True, eq=False)
class _Sending:
    """A response, and what is to be done when it is sent or its client has gone."""

    response: Response
    sent: Callable[[], object]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.response(scope, receive, send)
        finally:
            asyncio.get_running_loop().run_in_executor(None, self.sent)


def _log(served: Served, owner: str, response: Response, seconds: float) -> None:
    """A line for what was answered, unless its line is written when it has ended (`activity.py`), or it is asked again
    and again. Of its path only what is in the table is told: the rest is the client's."""
    if response.status_code in AGAIN or (served.is_quiet and response.status_code < 400):
        return
    request_id = response.headers.setdefault("x-request-id", f"http-{secrets.token_hex(6)}")
    status = response.status_code
    log.info("id=%s owner=%s verb=%s ms=%.0f status=%d", request_id, owner or "-", served.verb, 1000 * seconds, status)


class _ClientLeft(StovetopError):
    """There is no one to be answered."""


async def _while_connected(request: Request, serving: Awaitable[Answer]) -> Answer:
    async def watch() -> Answer:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise _ClientLeft("the client has gone away")

    async def serve() -> Answer:
        return await serving

    async with started([serve(), watch()], name=request.url.path) as (served, _):
        return await served


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
    headers = dict(answer.headers)
    if answer.status == 429:
        headers["retry-after"] = str(BUSY_RETRY_AFTER_S)
    if answer.file is not None:
        return FileResponse(answer.file, answer.status, headers, answer.media_type)
    if isinstance(answer.body, bytes):
        return Response(answer.body, answer.status, headers, answer.media_type)
    return StreamingResponse(answer.body, answer.status, headers, answer.media_type)


async def _body(request: Request, limits: UploadLimits) -> bytes:
    sent, encoding = await read_upload(request, limits), request.headers.get("content-encoding", "")
    if len(sent) < LARGE_BYTES and not encoding:
        return sent
    return await in_thread(partial(plain, sent, encoding, limits))


def _status_of(error: StovetopError) -> int:
    """Of a request that was not done. 409 is never among the answers: the SDK would send it again for minutes."""
    if isinstance(error, RequestFailedError) and error.category == "server":
        return 500
    status = error.status_code if isinstance(error, APIStatusError) else 400
    return 400 if status == 409 else status


def _not_now(dialect: Dialect, state: str) -> Response:
    response = _response(dialect.refused(503, f"the server is {state}; ask again", None))
    response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


async def _health(doors: Doors, _request: Request) -> Response:
    return JSONResponse({"status": doors.state}, 200 if doors.parts is not None else 503)


async def _no_route(dialects: Mapping[str, Dialect], request: Request, error: Any) -> Response:
    path = request.url.path
    dialect = next((dialect for prefix, dialect in dialects.items() if path.startswith(prefix)), TINKER)
    return _response(dialect.refused(error.status_code, f"this server has no {request.method} {path}", None))
