"""A server in a thread of the test's process, and the SDK as its client."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker import types
from tinker.lib import internal_client_holder
from tinker.lib.internal_client_holder import InternalClientHolder

from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.server.ports import listen
from stovetop.server.recovery import Parts
from stovetop.server.serve import Server, ServerOptions

KEY = "tml-test"
MODELS = ["tiny/model", "other/model"]


@dataclass(frozen=True, slots=True)
class Running:
    """A server, and how to talk to it."""

    url: str
    storage: Path
    server: Server
    clients: ExitStack = field(default_factory=ExitStack)  # those that have no end of their own end before it

    def sdk(self, **more: Any) -> tinker.ServiceClient:
        """The official client. One that the test does not close ends before the server does, as if it were killed: the
        server is not told, and it sends no heartbeats to whoever has the port then."""
        client = tinker.ServiceClient(**{"base_url": self.url, "api_key": KEY, **more})
        self.clients.callback(lambda: let_go(vars(client)["_session_holder"]))
        return client

    def rest(self, key: str = KEY) -> tinker.RestClient:
        """The official client of lists and checkpoints, which makes no session."""
        client = tinker.RestClient(base_url=self.url, api_key=key)
        self.clients.callback(lambda: forget(client.holder))
        return client

    @property
    def parts(self) -> Parts:
        """What it works with."""
        assert self.server.doors.parts is not None
        return self.server.doors.parts

    def http(self, key: str = KEY) -> httpx.Client:
        """A raw one."""
        return httpx.Client(base_url=f"{self.url}/api/v1/", headers={"X-API-Key": key}, timeout=30)


def let_go(holder: InternalClientHolder | None) -> None:
    """Ends what the SDK does in the background for a client, and its connections. Nothing is sent."""
    if holder is not None:
        holder.run_coroutine_threadsafe(holder.aclose()).result(10)


def forget(holder: InternalClientHolder) -> None:
    """Likewise of what the SDK shares among all clients of one key, and would keep for the life of the process."""
    let_go(holder)
    shared = vars(internal_client_holder.sessionless_holder_cache)["_holders"]
    for key in [key for key, each in shared.items() if each is holder]:
        del shared[key]


TOKENS = [5, 17, 42, 8, 99, 3, 61]


def datum(tokens: Sequence[int] = TOKENS, weight: float = 1.0) -> types.Datum:
    """Each token predicts the next."""
    weights = [weight] * (len(tokens) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": weights},
    )


def made(sdk: tinker.ServiceClient, **more: Any) -> tinker.TrainingClient:
    """A training client; all have the same weights unless their seeds differ."""
    return sdk.create_lora_training_client(MODELS[0], **{"rank": 4, "seed": 1, **more}).result()


def train(client: tinker.TrainingClient) -> None:
    """One step, which is not waited for."""
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.1))


def logprobs(client: tinker.TrainingClient) -> list[float]:
    """Equal lists mean equal weights, as far as this datum can tell."""
    output = client.forward([datum()], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].tolist()


def open_recording(storage: Path, **options: Any) -> InProcessServiceClient:
    return recording.open_service(storage, models=MODELS, preload=True, **options)


@contextmanager
def running(
    storage: Path,
    open_service: Callable[[Path], InProcessServiceClient] = open_recording,
    port: int = 0,
    **options: Any,
) -> Iterator[Running]:
    """On a free port unless one is given, from when it serves until it has stopped."""
    listening = listen("127.0.0.1", port)
    server = Server(open_service, listening, ServerOptions(storage=storage, end=_fail, **options))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="server under test")
    thread.start()
    try:
        give_up_s = time.monotonic() + 30
        while server.doors.parts is None and not failures and time.monotonic() < give_up_s:
            time.sleep(0.005)
        if not failures:
            with ExitStack() as clients:
                yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", storage.resolve(), server, clients)
    finally:
        server.stop()
        thread.join(30)
    if failures:
        raise failures[0]


def _fail(code: int) -> None:
    os.write(2, f"the server under test ended with {code}\n".encode())
