# pyright: basic
"""The SDK's side of a service: its session, made when it is first needed; and the thread in which the SDK's results
become ours, so that what users do with a result never holds the SDK's own event loop.

This is the one file that goes below the SDK's public clients: for a request that no client of it has.
"""

import contextlib
import ipaddress
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from typing import Any, TypeVar
from urllib.parse import urlsplit

import tinker
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from stovetop.arguments import CloseStatus, UserMetadata
from stovetop.backends.callbacks import Callbacks
from stovetop.backends.endings import Crew
from stovetop.backends.remote.models import ServerModels
from stovetop.backends.remote.reaching import LOOK_AFTER_S, Silence, require_answering, why_silent
from stovetop.backends.remote.refusals import error_of
from stovetop.backends.remote.values import capabilities_of
from stovetop.errors import NotFoundError, RequestFailedError
from stovetop.futures import AnsweringThread, pending, when_done

log = logging.getLogger(__name__)

LOCAL_KEY = "tml-local"  # for a server on this machine, which has no keys
T = TypeVar("T")


class Connection:
    """To one server. May be used from any thread."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        *,
        user_metadata: UserMetadata | None,
        project_id: str | None,
        display_name: str | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self.crew = Crew()
        self.callbacks = Callbacks(self.crew)
        self._base_url = base_url
        self._api_key = api_key
        self._headers = headers
        self._labels = {"user_metadata": user_metadata, "project_id": project_id, "display_name": display_name}
        self._lock = threading.Lock()  # protects the next four: what is asked for is made once
        self._sdk: tinker.ServiceClient | None = None
        self._rest: tinker.RestClient | None = None
        self._models: ServerModels | None = None
        self._makers: ThreadPoolExecutor | None = None
        self._open: set[Future[Any]] = set()  # calls without a result
        self._open_lock = threading.Lock()  # protects it
        self._results: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: AnsweringThread | None = None
        self._silence = Silence(base_url)

    # ---- what is there ---------------------------------------------------------------------------------------------

    def rest(self) -> tinker.RestClient:
        """The SDK's client without a session."""
        with self._lock:
            return self._connected()

    def models(self) -> ServerModels:
        """What the server says of its models, asked once."""
        with self._lock:
            if self._models is None:
                rest = self._connected()
                self._models = ServerModels.of(self.capabilities(rest), self._said(rest))
            return self._models

    def capabilities(self, rest: tinker.RestClient) -> Any:
        """What the protocol tells of the models, as it is now."""
        waited = self.pending("service")
        try:
            return capabilities_of(rest.get_server_capabilities().result())
        except Exception as error:
            raise error_of(error, "get_server_capabilities") from error
        finally:
            waited.set_result(None)

    def sdk(self) -> tinker.ServiceClient:
        """The SDK's client with a session."""
        with self._lock:
            self._connected()
            if self._sdk is None:
                self._sdk = tinker.ServiceClient(
                    base_url=self._base_url,
                    api_key=self._api_key,
                    default_headers_overrides=self._headers,
                    **self._labels,
                )
            return self._sdk

    def _connected(self) -> tinker.RestClient:
        if self._rest is None:
            require_answering(self._base_url)
            try:
                self._rest = tinker.RestClient(base_url=self._base_url, api_key=self._api_key)
            except Exception as error:
                if not _is_keyless(error) or not _is_here(self._base_url):
                    raise error_of(error, "ServiceClient") from error
                self._api_key = LOCAL_KEY
                self._rest = tinker.RestClient(base_url=self._base_url, api_key=self._api_key)
        return self._rest

    def _said(self, rest: tinker.RestClient) -> Mapping[str, Any] | None:
        """What a server of ours says of itself; None of another."""
        if self._base_url is None:
            return None
        holder = rest.holder

        async def send() -> Any:
            with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
                return await client.get("/stovetop/v1/models", cast_to=object)

        async def ask() -> Any:
            return await holder.execute_with_retries(send)

        try:
            return holder.run_coroutine_threadsafe(ask()).result()
        except Exception as error:
            ours = error_of(error, "ServiceClient")
            if isinstance(ours, NotFoundError):
                return None
            raise ours from error

    # ---- results ---------------------------------------------------------------------------------------------------

    def pending(self, owner: str) -> "Future[Any]":
        """The future of a call that was accepted. While it waits, it is told if the server has gone."""
        future = pending(owner)
        with self._open_lock:
            self._open.add(future)
            self._start()
        when_done(future, self._done)
        return future

    def _done(self, future: "Future[Any]") -> None:
        with self._open_lock:
            self._open.discard(future)

    def bring(
        self,
        sdk_future: Any,
        to: "Future[Any]",
        make: Callable[[Any], Any],
        fail: Callable[[BaseException], BaseException],
    ) -> None:
        """When the SDK's future is done, so is ours: `make` makes its result, `fail` its error."""
        done: Future[Any] = sdk_future.future()

        def settle() -> None:
            if not done.cancelled() and done.exception() is None:
                self._silence.ended()
            _settle(done, to, make, fail)

        done.add_done_callback(lambda _: self.later(settle))

    def numbered(self, inner: tinker.TrainingClient) -> "Future[Any]":
        """Done when all that was handed to this client has its number. The SDK gives one at the call, but to
        `save_weights_for_sampler`, which gets it in the SDK's event loop: what is called next could be before it."""

        async def nothing() -> None:
            """Comes behind what the loop was given before."""

        return inner.holder.run_coroutine_threadsafe(nothing()).future()

    def later(self, work: Callable[[], None]) -> None:
        """Does it in the thread of results."""
        with self._open_lock:
            self._start()
        self._results.put(work)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = AnsweringThread(self._answer, "results of a server", self.callbacks.add)
            self._thread.start()

    def _answer(self) -> None:
        """Waits for results, makes ours of them; looks after the server where none come. Stopped by: `end`, when no
        call is left without a result."""
        ends = False
        while not (ends and not self._open):
            try:
                work = self._results.get(timeout=LOOK_AFTER_S)
            except queue.Empty:
                if self._open:
                    self._silence.look(lambda: len(self._open), self._results.put)
                continue
            if work is None:
                ends = True
            else:
                work()
        self._let_go()

    def make(self, work: Callable[[], None]) -> None:
        """Does what may wait for the session, in the order in which it was asked for, in a thread of its own."""
        with self._lock:
            if self._makers is None:
                self._makers = ThreadPoolExecutor(1, thread_name_prefix="creators of a server's clients")
        self._makers.submit(work)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits until all that was accepted has its result, and callbacks have returned."""
        while True:
            with self._open_lock:
                open_now = list(self._open)
            if not open_now:
                break
            wait_for_all(open_now)
        if not self.callbacks.run_here():
            self.callbacks.wait(lambda: False)

    def drop(self, error: BaseException) -> None:
        """What has no result yet gets none. What the server has, it may still do."""
        with self._open_lock:
            open_now = list(self._open)
        for future in open_now:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(
                    RequestFailedError(f"dropped because the service was closed after {error!r}", "user")
                )

    def close(self, status: CloseStatus, detail: str | None) -> None:
        """Tells the server that the session is over, and lets go of the SDK's connections."""
        with self._lock:
            sdk, makers = self._sdk, self._makers
        if makers is not None:
            makers.shutdown(wait=True)
        try:
            if sdk is not None:
                self._say_the_end(sdk.close(status, detail).future())
        except Exception as error:
            raise error_of(error, "close") from error
        finally:
            self.end()

    def _say_the_end(self, said: "Future[Any]") -> None:
        """To a server that is there. One that has gone is not waited for: all results are here, and it ends a session
        that it does not hear of by itself."""
        while True:
            try:
                said.result(timeout=LOOK_AFTER_S)
            except TimeoutError:
                if (why := why_silent(self._base_url)) is not None:
                    log.warning("the server does not answer (%s) and was not told that the session is over", why)
                    return
            else:
                return

    def end(self) -> None:
        """The thread of results ends when it has brought those that are there."""
        self._results.put(None)
        if self._thread is None:
            self._let_go()

    def _let_go(self) -> None:
        """Of the SDK's session. It would tell the server that this program lives for as long as it does, also when
        nobody has a client of it any more."""
        holder = None if self._sdk is None else vars(self._sdk).get("_session_holder")
        if holder is not None:
            holder.close()


def _settle(
    done: "Future[Any]", to: "Future[Any]", make: Callable[[Any], Any], fail: Callable[[BaseException], BaseException]
) -> None:
    try:
        result = make(done.result())
    except BaseException as error:  # it belongs to the one who waits
        with contextlib.suppress(InvalidStateError):  # it was dropped
            to.set_exception(fail(error))
    else:
        with contextlib.suppress(InvalidStateError):
            to.set_result(result)


def _is_keyless(error: Exception) -> bool:
    """Whether the SDK found no key, and had asked nothing."""
    return type(error) is tinker.TinkerError


def _is_here(base_url: str | None) -> bool:
    host = "" if base_url is None else urlsplit(base_url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
