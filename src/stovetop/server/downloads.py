"""Links to the files of a checkpoint that need no key: each names one file, or all of them in an archive, and the time
until which it is good, and is signed. The signature is good for one process: after a restart a client asks for new
links.

    {server}/api/v1/download?path=tinker://...&n=7&file=adapter_config.json&expires=1767225600&signature=...
"""

import hashlib
import hmac
import secrets
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from stovetop.errors import PermissionDeniedError
from stovetop.server.bodies import Download
from stovetop.server.rows import CheckpointRow

GOOD_S = 3600  # a link; a download that has begun goes on

_PIECE_BYTES = 2**20
_BLOCK_BYTES = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class Links:
    """Signs links and knows its own."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def sign(self, base_url: str, row: CheckpointRow, file: str, expires_s: int) -> str:
        """The link to this file of the checkpoint; to an archive of all of them, if no file is named."""
        signature = self._signature(row.path, row.n, file, expires_s)
        query = {"path": row.path, "n": row.n, "file": file, "expires": expires_s, "signature": signature}
        return f"{base_url.rstrip('/')}/api/v1/download?{urlencode(query)}"

    def check(self, link: Download) -> None:
        """Refuses one that was not signed here, or whose time is over."""
        expected = self._signature(link.path, link.n, link.file, link.expires)
        if not hmac.compare_digest(expected.encode(), link.signature.encode()) or link.expires < time.time():
            raise PermissionDeniedError("this link is not good, or no more; ask for the links of the checkpoint again")

    def _signature(self, path: str, n: int, file: str, expires_s: int) -> str:
        signed = "\n".join((path, str(n), file, str(expires_s)))
        return hmac.new(self.secret, signed.encode(), hashlib.sha256).hexdigest()


def tar(files: Iterable[Path]) -> Iterator[bytes]:
    """A tar file of these, under their names, piece by piece."""
    for file in files:
        with file.open("rb") as opened:
            info = tarfile.TarInfo(file.name)
            info.size = file.stat().st_size
            info.mtime = int(file.stat().st_mtime)
            yield info.tobuf(tarfile.PAX_FORMAT)
            while piece := opened.read(_PIECE_BYTES):
                yield piece
            yield bytes(-info.size % _BLOCK_BYTES)
    yield bytes(2 * _BLOCK_BYTES)
