"""The bodies of requests, read within limits: of bytes as they come and as they are when decompressed, and of time, for
one that stalls or drips."""

import asyncio
import io
import time
from dataclasses import dataclass

import zstandard
from starlette.requests import Request

from stovetop.errors import APIStatusError, InvalidRequest

_PIECE_BYTES = 2**20


class TooLarge(APIStatusError):
    """More than a request may have."""

    status_code = 413


class Stalled(APIStatusError):
    """An upload in which nothing came for long. The client may send it again."""

    status_code = 408


@dataclass(frozen=True, slots=True)
class UploadLimits:
    max_bytes: int = 256 * 2**20  # as sent, and again as decompressed
    stall_s: float = 60.0  # without a byte
    within_s: float = 1800.0  # in all


async def read_upload(request: Request, limits: UploadLimits) -> bytes:
    """The body as it comes."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limits.max_bytes:
        raise _too_large(limits)
    pieces: list[bytes] = []
    num_bytes = 0
    stream = request.stream()
    give_up_s = time.monotonic() + limits.within_s
    while True:
        wait_s = min(limits.stall_s, give_up_s - time.monotonic())
        try:
            async with asyncio.timeout(wait_s):
                piece = await anext(stream, None)
        except TimeoutError:
            raise Stalled(
                f"nothing came for {limits.stall_s:g} s, or not all in {limits.within_s:g} s; send the request again"
            ) from None
        if piece is None:
            return b"".join(pieces)
        num_bytes += len(piece)
        if num_bytes > limits.max_bytes:
            raise _too_large(limits)
        pieces.append(piece)


def plain(body: bytes, encoding: str, limits: UploadLimits) -> bytes:
    """The body as it was before `Content-Encoding`. Takes time: not for an event loop. A frame is decompressed piece by
    piece whatever size it declares, for the library trusts that over its own limit."""
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case "zstd":
            return _decompressed(body, limits)
        case _:
            raise InvalidRequest(f"Content-Encoding must be zstd, or be left out: {encoding[:40]!r}")


def _decompressed(body: bytes, limits: UploadLimits) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
            while piece := reader.read(_PIECE_BYTES):
                num_bytes += len(piece)
                if num_bytes > limits.max_bytes:
                    raise _too_large(limits)
                pieces.append(piece)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body says that it is zstd, and is not: {error}") from error
    return b"".join(pieces)


def _too_large(limits: UploadLimits) -> TooLarge:
    return TooLarge(f"a request may have {limits.max_bytes:,} bytes, also when it is decompressed; send less at once")
