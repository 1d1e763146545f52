"""A proxy between tenants and a server that does one request in ten a wrong: it is lost, or its answer is; it arrives
twice, later than others that were sent behind it, or late.
"""

import asyncio
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

from server_faults.kills import counted, fresh, tenants_of, undisturbed, wait_for
from server_faults.servers import killable

NUM_STEPS = 60  # of each tenant
ONE_IN = 10
PASS_S = 0.5  # that one which is overtaken waits for another at most
LATE_S = 0.5

Wrong = Literal["lost", "answer lost", "doubled", "overtaken", "late"]


def run(folder: Path, backend: str, seed: int, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    expected, storage = undisturbed(folder, backend, seed, num_steps), fresh(folder, "proxied", seed)
    with killable(storage, backend) as server:
        with proxied(server.port, seed) as proxy:
            tenants = tenants_of(proxy.url, seed, num_steps)
            wait_for(tenants)
        server.end(signal.SIGTERM)
    return {**counted(storage, expected, tenants), "requests": proxy.num_requests, "wrong": dict(proxy.done)}


class Proxy:
    """HTTP/1.1 with a length of the body, as the SDK and the server speak it; one connection a request."""

    def __init__(self, port: int, seed: int) -> None:
        self.url = ""
        self.num_requests = 0
        self.done = Counter[Wrong]()
        self._port = port  # of the server
        self._rng = random.Random(seed)
        self._passed = asyncio.Condition()  # told of each request that is passed on

    async def serve(self, loops: "list[asyncio.AbstractEventLoop]", ready: threading.Event) -> None:
        """Until it is cancelled."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loops.append(asyncio.get_running_loop())
        ready.set()
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _message(reader)) is not None:
                self.num_requests += 1
                wrong: Wrong | None = None
                if self._rng.randrange(ONE_IN) == 0:
                    wrong = self._rng.choice(get_args(Wrong))
                    self.done[wrong] += 1
                answer = await self._pass(request, wrong)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client, or the server, has gone away: so does this connection
        finally:
            writer.close()

    async def _pass(self, request: bytes, wrong: Wrong | None) -> bytes | None:
        """The server's answer; None where the client gets none."""
        match wrong:
            case "lost":
                return None
            case "answer lost":
                await self._ask(request)
                return None
            case "doubled":
                async with asyncio.TaskGroup() as both:
                    answers = [both.create_task(self._ask(request)) for _ in range(2)]
                return self._rng.choice(answers).result()
            case "overtaken":
                try:
                    async with asyncio.timeout(PASS_S), self._passed:
                        await self._passed.wait()
                except TimeoutError:
                    pass  # there is no other
            case "late":
                await asyncio.sleep(self._rng.uniform(0, LATE_S))
            case None:
                pass
        return await self._ask(request)

    async def _ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            answer = await _message(reader)
        finally:
            writer.close()
        async with self._passed:
            self._passed.notify_all()
        if answer is None:
            raise ConnectionResetError
        return answer


async def _message(reader: asyncio.StreamReader) -> bytes | None:
    """A whole request or answer; None where none comes any more."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if line)
    length = int(fields.get(b"content-length", b"0"))
    assert b"transfer-encoding" not in fields, "no message of these tenants is in pieces"
    return head + await reader.readexactly(length)


@contextmanager
def proxied(port: int, seed: int) -> Iterator[Proxy]:
    """One that runs, in a thread."""
    proxy, loops, ready = Proxy(port, seed), list[asyncio.AbstractEventLoop](), threading.Event()

    def serve() -> None:
        with suppress(asyncio.CancelledError):  # as it is told below
            asyncio.run(proxy.serve(loops, ready))

    thread = threading.Thread(target=serve, name="proxy", daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield proxy
    finally:
        (loop,) = loops
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join(10)
