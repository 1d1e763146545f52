"""A connection on which a request begins in time, with headers of a size, and whose answers are read: the HTTP library,
which parses and writes them, sets no bounds to these. Bodies have bounds of their own (`uploads.py`)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds, not tuned numbers. Between two requests a connection is kept for as long as uvicorn keeps it."""

    max_header_bytes: int = 2**16  # of the first line and the headers; the SDK sends about one thousand
    headers_s: float = 90.0  # from the connection, or the first byte of a later request, until its headers are there
    reading_s: float = 60.0  # that a client reads nothing of an answer


class Bounded(asyncio.Protocol):
    """A connection of uvicorn's, which is closed where it is over these limits."""

    def __init__(self, inner: HttpToolsProtocol, limits: ConnectionLimits) -> None:
        self._inner = inner
        self._limits = limits
        self._num_bytes = 0  # that came since the last request began
        self._headers = _Timer(limits.headers_s, self._close)
        self._reading = _Timer(limits.reading_s, self._close)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a connection, which may be written to"
        self._inner.connection_made(transport)
        self._headers.start()

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)
        cycle = cast("RequestResponseCycle | None", self._inner.cycle)  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._num_bytes = 0
            self._headers.stop()
            return
        self._num_bytes += len(data)
        self._headers.start()
        if self._num_bytes > self._limits.max_header_bytes:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers.stop()
        self._reading.stop()
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._reading.start()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._reading.stop()
        self._inner.resume_writing()

    def _close(self) -> None:
        self._inner.transport.abort()


class _Timer:
    """Calls a function when it has run for so long."""

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self._seconds = seconds
        self._function = function
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """It goes on where it runs already."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._function)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def bounded(limits: ConnectionLimits) -> Callable[..., Any]:
    """What uvicorn makes a connection with, in place of a class of protocols."""

    def make(**options: Any) -> Bounded:
        return Bounded(HttpToolsProtocol(**options), limits)

    return make
