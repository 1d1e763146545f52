"""Who may use a server: its keys. Of a key only the digest is kept, so that who reads the file cannot use it.

They are in a file of their own beside the journal, not in it. The journal belongs to one process, which holds it
exclusively; a key must be added, and above all revoked, whether the server runs, is stopped, or does not answer. The
file is small and is replaced as a whole; a server looks at it with every request and reads it again when it changes.

A folder that has such a file is served to those that have one of its keys, and to no others, from the moment at which
the first key is added. Each key is of one owner, by name. What an owner has made stays when the key is revoked: the
next key of this name reaches it.
"""

import hashlib
import hmac
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from stovetop.durable import make_folders, write_file, writing
from stovetop.errors import AuthenticationError, InvalidRequest, StovetopError
from stovetop.server.limits import OF_A_KEY, UNLIMITED, OwnerLimits

log = logging.getLogger(__name__)

OwnerOf = Callable[[str | None], str]  # of the key that a request has; raises AuthenticationError

FILE = "keys.json"
PREFIX = "tml-"  # what the SDK asks of a key
LOCAL = "local"  # the owner while there are no keys; a key of this name reaches what was made before

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_Stamp = tuple[int, int, int]  # of a file: it changes with its contents


class Key(BaseModel):
    """One key, as the file has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # of its owner
    digest: str  # SHA-256 of the key, in hexadecimal; a key has 256 random bits, so that needs no salt
    created_s: float  # since the epoch
    limits: OwnerLimits
    is_operator: bool = False  # may see what all owners do


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int = 1
    keys: list[Key]


def local_owner(key: str | None) -> str:
    """Without a file of keys, whoever reaches the port is the owner. The SDK wants a key of this form."""
    if key is None or not key.startswith(PREFIX):
        raise AuthenticationError("set TINKER_API_KEY to a key that begins with tml-, such as tml-local")
    return LOCAL


def queue_of(owner: str) -> str | None:
    """In which calls of this owner wait for their turns, whichever client they are of. Clients of a server without keys
    may be of anybody, so each has turns of its own, and so have those of a key that is named `local`."""
    return None if owner == LOCAL else f"owner:{owner}"


def local_operator(_key: str | None) -> str:
    """Without a file of keys, whoever reaches the port runs the server. A browser has no key to show."""
    return LOCAL


class Keys:
    """Those of one storage folder, for the server that serves it. May be used from any thread."""

    def __init__(self, storage: Path) -> None:
        """Raises StovetopError where the file cannot be read."""
        self._path = storage / FILE
        self._lock = threading.Lock()  # protects what follows
        self._stamp: _Stamp | None = None
        self._keys: tuple[Key, ...] | None = None  # None: there has been no file
        self._look()

    @property
    def are_asked_for(self) -> bool:
        """Whether a request needs one of them."""
        return self._look() is not None

    def owner_of(self, key: str | None) -> str:
        """Raises AuthenticationError, in the same words whatever is wrong with the key."""
        keys = self._look()
        if keys is None:
            return local_owner(key)
        found = _found(keys, key)
        if found is None:
            raise AuthenticationError(
                "this server wants a key of its own; set TINKER_API_KEY to one that begins with tml- and that "
                "`stovetop serve keys add` has printed"
            )
        return found.name

    def operator_of(self, key: str | None) -> str:
        """The name of an operator. Raises AuthenticationError for every other key, and in the same words for none."""
        keys = self._look()
        if keys is None:
            return local_operator(key)
        found = _found(keys, key)
        if found is None or not found.is_operator:
            raise AuthenticationError(
                "this shows what all owners do, so it wants an operator's key, as a Bearer token or as the password of "
                "any name; `stovetop serve keys add NAME --operator` makes one"
            )
        return found.name

    def limits_of(self, owner: str) -> OwnerLimits:
        keys = self._look()
        if keys is None:
            return UNLIMITED
        return next((key.limits for key in keys if key.name == owner), OF_A_KEY)

    def _look(self) -> tuple[Key, ...] | None:
        """What is in the file now. One that was there and is not any more, or that cannot be read, lets nobody in."""
        with self._lock:
            stamp = _stamp_of(self._path)
            if stamp == self._stamp:
                return self._keys
            if stamp is None:
                log.error("the file of keys has vanished, so that no key is good: %s", self._path)
            try:
                self._keys = () if stamp is None else read_keys(self._path)
            except StovetopError as error:
                if self._keys is None:
                    raise
                log.error("no key is good: %s", error)
                self._keys = ()
            self._stamp = stamp
            return self._keys


# ---- the file ------------------------------------------------------------------------------------------------------


def add_key(storage: Path, name: str, limits: OwnerLimits = OF_A_KEY, *, is_operator: bool = False) -> str:
    """Makes a key for this owner and returns it: it is nowhere else. Refuses a name that has one."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"a name has letters, digits and ._- and at most 64 of them: {name!r}")
    key = f"{PREFIX}{secrets.token_urlsafe(32)}"
    with _changing(storage) as keys:
        if any(each.name == name for each in keys):
            raise InvalidRequest(f"there is a key of this name; revoke it first, which removes nothing else: {name!r}")
        keys.append(
            Key(name=name, digest=digest_of(key), created_s=time.time(), limits=limits, is_operator=is_operator)
        )
    return key


def revoke_key(storage: Path, name: str) -> None:
    """The key of this owner is good no more, from the next request on."""
    with _changing(storage) as keys:
        left = [each for each in keys if each.name != name]
        if len(left) == len(keys):
            raise InvalidRequest(f"there is no key of this name; `stovetop serve keys list` shows them: {name!r}")
        keys[:] = left


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises StovetopError where it is none."""
    try:
        return tuple(_File.model_validate_json(path.read_bytes()).keys)
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as error:
        raise StovetopError(f"the file of keys cannot be read; put back a copy of it: {path}") from error


def _found(keys: tuple[Key, ...], key: str | None) -> Key | None:
    digest = digest_of(key or "")
    found: Key | None = None
    for each in keys:  # all of them, in the same time whichever it is
        if hmac.compare_digest(each.digest, digest):
            found = each
    return found


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def _changing(storage: Path) -> Generator[list[Key]]:
    """The keys, which are written when the block is left. One process at a time."""
    with writing(storage):
        make_folders(storage)
    path = storage / FILE
    with FileLock(storage / "keys.lock", timeout=30):
        keys = list(read_keys(path))
        yield keys
        write_file(path, _File(keys=keys).model_dump_json(indent=1).encode())
        path.chmod(0o600)


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
