# pyright: basic
"""Whether anybody answers at the address of a server. The SDK asks for minutes, and says nothing meanwhile: so it is
handed to the SDK only when somebody answers, and calls that wait for a server that has gone are told of in the log.
"""

import logging
import threading
import time
from collections.abc import Callable

import httpx
from tinker.lib.base_url import resolve_base_url

from stovetop.backends.remote.refusals import unreachable

log = logging.getLogger(__name__)

CONNECTING_S, ANSWERING_S = 5.0, 10.0  # a server that is let in by a busy one may wait for its answer
LOOK_AFTER_S = 10.0  # without any result, while calls wait
TELL_EVERY_S = 60.0  # while a server is away
_TRIES, _PAUSE_S = 3, 0.5  # of a connection that is cut: the server may be restarting


def require_answering(base_url: str | None) -> None:
    """Refuses an address at which nobody answers. A server that starts is waited for, by the SDK; None is the address
    that the SDK knows."""
    url = resolve_base_url(base_url)
    for left in reversed(range(_TRIES)):
        try:
            answer = _ask(url, ANSWERING_S)
        except httpx.ReadTimeout:
            log.warning("%s lets in and has not answered for %.0f s; it is waited for", url, ANSWERING_S)
            return
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL) as error:
            raise unreachable("ServiceClient", f"{url} ({_why(error)})") from error
        except httpx.TransportError as error:
            if left == 0:
                why = f"what listens there ends the connection: {_why(error)}"
                raise unreachable("ServiceClient", f"{url} ({why})") from error
            time.sleep(_PAUSE_S)
        else:
            if answer is not None and answer.status_code == 503:
                log.warning("the server at %s is not ready and is waited for: %s", url, answer.text[:200])
            return


def why_silent(base_url: str | None) -> str | None:
    """Why a server does not answer; None of one that does, be it with an error."""
    try:
        answer = _ask(resolve_base_url(base_url), CONNECTING_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return _why(error)
    return "it starts" if answer is not None and answer.status_code == 503 else None


def _ask(url: str, answering_s: float) -> httpx.Response | None:
    """The answer to the cheapest question, whatever it is; None where this cannot be asked. No key is sent, so who
    answers need not be proven."""
    try:
        timeout = httpx.Timeout(answering_s, connect=CONNECTING_S)
        return httpx.get(f"{url}/api/v1/healthz", timeout=timeout, verify=False)
    except ImportError:  # a SOCKS proxy, and no package for it: the SDK will say so
        return None


def _why(error: BaseException | None) -> str:
    """In the system's words, where it has some."""
    reason = str(error) or type(error).__name__
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return reason


class Silence:
    """Of the server that calls wait for. All but `look` is called in one thread."""

    def __init__(self, base_url: str | None) -> None:
        self._base_url = base_url
        self._since_s: float | None = None
        self._told_s: float | None = None
        self._is_looking = False

    def look(self, num_waiting: Callable[[], int], hand_back: Callable[[Callable[[], None]], None]) -> None:
        """Asks the server whether it is there, in a thread of its own, unless that is being asked; what comes of it is
        told by what is handed back."""
        if self._is_looking:
            return
        self._is_looking = True

        def ask() -> None:
            why = why_silent(self._base_url)
            hand_back(lambda: self._heard(why, num_waiting()))

        threading.Thread(target=ask, name="look at a server", daemon=True).start()

    def ended(self) -> None:
        """The server has answered."""
        if self._since_s is not None and self._told_s is not None:
            away_s = time.monotonic() - self._since_s
            log.warning("the server at %s answers again, after %.0f s", resolve_base_url(self._base_url), away_s)
        self._since_s = self._told_s = None

    def _heard(self, why: str | None, num_waiting: int) -> None:
        self._is_looking = False
        if why is None:
            self.ended()
            return
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if num_waiting and (self._told_s is None or now_s - self._told_s >= TELL_EVERY_S):
            self._told_s = now_s
            log.warning(
                "the server at %s does not answer (%s): %d calls wait, and go on when it is back; check that it runs",
                resolve_base_url(self._base_url), why, num_waiting,
            )  # fmt: skip
