"""Many clients on one server: whether all are served, whether each gets its share, and what it costs.

    python benchmarks/tenants.py samples [--num 2000]       so many samples at once, with the SDK's flags and with
                                                            retrieve_futures
    python benchmarks/tenants.py shares [--tenants 50]      calls that differ tenfold in size, training and sampling at
                                                            once; the first tenant has ten adapters
    python benchmarks/tenants.py memory [--num 20000]       what the server's memory grows by over so many requests
    python benchmarks/tenants.py rude                       clients that are slow, stalled or vanish beside one that is
                                                            not: how long that one's requests take
    python benchmarks/tenants.py speed [--rounds 3]         steps and samples over the wire and in process, alternated

The server is `stovetop serve` in a process of its own, its model a random Llama of 0.3M parameters (`--model FOLDER`:
another one), the clients are the official SDK, all in this process. What the server has done is read from its
/metrics. Each part prints one line of JSON.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import tinker
from prometheus_client.parser import text_string_to_metric_families
from tinker import types

import stovetop as st
from stovetop.backends import local
from stovetop.server.keys import add_key
from stovetop.server.limits import OF_A_KEY

SEED, RANK = 1, 8
STEP = types.AdamParams(learning_rate=1e-3)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs."""

    url: str
    storage: Path
    operator: str  # a key
    model: Path

    def client(self, owner: str) -> tinker.ServiceClient:
        """The SDK's, of a new owner."""
        return tinker.ServiceClient(base_url=self.url, api_key=add_key(self.storage, owner, OF_A_KEY))

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Values by the name and the labels of a sample."""
        answer = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.operator}"}, timeout=30)
        answer.raise_for_status()
        families = text_string_to_metric_families(answer.text)
        return {
            (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
        }

    def tokens(self) -> dict[str, float]:
        """That were done for each owner."""
        return {
            labels[0]: value for (name, *labels), value in self.metrics().items() if name == "stovetop_tokens_total"
        }

    def resident_bytes(self) -> float:
        return self.metrics()["process_resident_memory_bytes",]


@contextmanager
def served(options: argparse.Namespace) -> Generator[Served]:
    with TemporaryDirectory() as folder:
        model = options.model or _tiny(Path(folder) / "model")
        storage = Path(folder) / "storage"
        operator = add_key(storage, "operator", is_operator=True)
        words = [sys.executable, "-m", "stovetop", "serve", f"tiny={model}", "--port", "0", "--storage", str(storage)]
        words += ["--threads", str(options.threads), "--no-restart"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip().removeprefix("export TINKER_BASE_URL=")
            try:
                _wait_until_it_serves(url)
                yield Served(url, storage, operator, model)
            finally:
                process.terminate()


def _wait_until_it_serves(url: str) -> None:
    give_up_s = time.monotonic() + 300
    while time.monotonic() < give_up_s:
        try:
            if httpx.get(f"{url}/healthz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(url)


def _tiny(folder: Path) -> Path:
    """A random Llama with the sizes of stories260K."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(SEED)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=511)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{token}>": token for token in range(512)}, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<511>").save_pretrained(folder)
    return folder


def datum(num_tokens: int, kind: Any = types, first: int = 0) -> Any:
    """Of the SDK's types, or of ours. Data that begin with the same token begin alike, which is computed once."""
    tokens = [token % 500 for token in range(first, first + num_tokens + 1)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * num_tokens}
    return kind.Datum(model_input=kind.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def made(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    return sdk.create_lora_training_client("tiny", rank=RANK, seed=SEED).result()


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# ---- many samples ----------------------------------------------------------------------------------------------------


def samples(options: argparse.Namespace) -> None:
    prompt, params = types.ModelInput.from_ints(list(range(20))), types.SamplingParams(max_tokens=16, temperature=1.0)
    with served(options) as server:
        for joined in (False, True):
            with server.client(f"samples-{joined}") as sdk:
                if joined:
                    _use_retrieve_futures(sdk)
                client = sdk.create_sampling_client(base_model="tiny").result()
                client.sample(prompt, 1, params).result()
                begun_s = time.monotonic()
                drawn = [client.sample(prompt, 1, params) for _ in range(options.num or 2000)]
                results = [each.result() for each in drawn]
                seconds = time.monotonic() - begun_s
            num_ended = sum(len(result.sequences) == 1 for result in results)
            report(part="samples", retrieve_futures=joined, asked=len(drawn), answered=num_ended, seconds=seconds)


def _use_retrieve_futures(sdk: tinker.ServiceClient) -> None:
    """The flag that this server does not tell clients to use."""
    holder: Any = sdk.holder
    config = holder._client_config
    holder._client_config = config.model_copy(update={"sample_use_retrieve_futures": True})


# ---- shares ----------------------------------------------------------------------------------------------------------


def shares(options: argparse.Namespace) -> None:
    """Each tenant has more in the queue than is done in its turn, so that all are busy."""
    with served(options) as server, ExitStack() as closing:
        stop, threads = threading.Event(), list[threading.Thread]()
        for number in range(options.tenants):
            sdk = closing.enter_context(server.client(f"tenant-{number:02}"))
            size = 10 if number % 2 else 1
            for _ in range(10 if number == 0 else 1):
                client = made(sdk)
                threads.append(threading.Thread(target=_keep_training, args=(client, size, stop)))
            sampler = client.save_weights_and_get_sampling_client().result()
            threads.append(threading.Thread(target=_keep_sampling, args=(sampler, size, stop)))
        for thread in threads:
            thread.start()
        time.sleep(options.seconds / 3)
        before, begun_s = server.tokens(), time.monotonic()
        queued = [value for (name, *_), value in server.metrics().items() if name == "stovetop_queued_requests"]
        time.sleep(options.seconds)
        after, seconds = server.tokens(), time.monotonic() - begun_s
        stop.set()
        for thread in threads:
            thread.join()
    names = sorted(name for name in after if name.startswith("tenant"))
    tokens = [after[name] - before.get(name, 0) for name in names]
    report(
        part="shares",
        tenants=len(names),
        jain=jain(tokens),
        fewest=min(tokens),
        most=max(tokens),
        tokens_small=statistics.mean(tokens[2::2]),
        tokens_large=statistics.mean(tokens[1::2]),
        tokens_of_ten_adapters=tokens[0],
        tokens_per_s=sum(tokens) / seconds,
        fewest_queued=min(queued[1:]),
        seconds=seconds,
    )


def jain(values: list[float]) -> float:
    """Jain, Chiu & Hawe 1984: 1 where all are equal, 1/n where one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def _keep_training(client: tinker.TrainingClient, size: int, stop: threading.Event) -> None:
    data = [datum(32, first=first) for first in range(4 * size)]
    waiting: list[Any] = []
    while not stop.is_set():
        for _ in range(2):
            waiting.append(client.forward_backward(data, "cross_entropy"))
        waiting.append(client.optim_step(STEP))
        while len(waiting) > 30 // size + 6:
            waiting.pop(0).result()
    for each in waiting:
        each.result()


def _keep_sampling(sampler: tinker.SamplingClient, size: int, stop: threading.Event) -> None:
    prompt, params = types.ModelInput.from_ints(list(range(8))), types.SamplingParams(max_tokens=24)
    waiting: list[Any] = []
    while not stop.is_set():
        waiting.append(sampler.sample(prompt, size, params))
        while len(waiting) > 20 // size:
            waiting.pop(0).result()
    for each in waiting:
        each.result()


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> None:
    """A step and some samples again and again; a result is kept for minutes, so requests come as fast as they go."""
    num_all, at_first = options.num or 20_000, 2000
    prompt, params = types.ModelInput.from_ints(list(range(8))), types.SamplingParams(max_tokens=4)
    with served(options) as server, server.client("memory") as sdk:
        client = made(sdk)
        sampler = sdk.create_sampling_client(base_model="tiny").result()
        num_done, found = 0, list[tuple[int, float]]()
        while num_done < num_all:
            waiting: list[Any] = [sampler.sample(prompt, 1, params) for _ in range(90)]
            for _ in range(5):
                waiting += [client.forward_backward([datum(32)], "cross_entropy"), client.optim_step(STEP)]
            for each in waiting:
                each.result()
            num_done += len(waiting)
            if num_done % 1000 == 0:
                found.append((num_done, server.resident_bytes()))
    first = next(size for num, size in found if num >= at_first)
    growth = found[-1][1] / first - 1
    report(
        part="memory", requests=num_done, growth=growth, resident_mb={num: round(size / 1e6, 1) for num, size in found}
    )


# ---- rude clients ----------------------------------------------------------------------------------------------------


def rude(options: argparse.Namespace) -> None:
    with served(options) as server, server.client("polite") as sdk:
        client = made(sdk)
        alone_ms = _step_times(client)
        host, _, port = server.url.removeprefix("http://").partition(":")
        rudes: dict[str, Callable[[], Any]] = {
            "stalled in a header": lambda: _sends(host, port, b"POST /api/v1/asample HTTP/1.1\r\nHost: "),
            "stalled in a body": lambda: _sends(host, port, _head(server) + b"Content-Length: 100000\r\n\r\n{"),
            "does not read": lambda: _sends(host, port, _head(server, "GET", "metrics") + b"\r\n"),
            "vanished": lambda: _sends(host, port, _head(server) + b"Content-Length: 2\r\n\r\n{}").close(),
        }
        for name, begin in rudes.items():
            opened = [begin() for _ in range(options.rude)]
            report(part="rude", clients=options.rude, what=name, alone_ms=alone_ms, beside_ms=_step_times(client))
            for each in opened:
                if each is not None:
                    each.close()


def _head(server: Served, method: str = "POST", path: str = "api/v1/asample") -> bytes:
    host = server.url.removeprefix("http://")
    return f"{method} /{path} HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {server.operator}\r\n".encode()


def _sends(host: str, port: str, content: bytes) -> socket.socket:
    opened = socket.create_connection((host, int(port)))
    opened.sendall(content)
    return opened


def _step_times(client: tinker.TrainingClient, num: int = 30) -> dict[str, float]:
    times_ms: list[float] = []
    for _ in range(num):
        begun_s = time.monotonic()
        client.forward_backward([datum(32)], "cross_entropy").result()
        times_ms.append(1000 * (time.monotonic() - begun_s))
    return {"median": statistics.median(times_ms), "longest": max(times_ms)}


# ---- speed -----------------------------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> None:
    """Pipelined: a step is submitted before the one before it has ended."""
    ratios: dict[str, list[float]] = {"steps": [], "samples": []}
    with (
        served(options) as server,
        server.client("speed") as sdk,
        local.open_service(
            storage=server.storage.parent / "in_process",
            models={"tiny": str(server.model)},
            preload=True,
            threads=options.threads,
            download=None,
        ) as service,
    ):
        ours: Any = service.create_lora_training_client("tiny", rank=RANK, seed=SEED).result()
        theirs = made(sdk)
        for number in range(options.rounds + 1):
            took_s: dict[str, float] = {}
            for name, client, kind in (("wire", theirs, types), ("in process", ours, st)):
                took_s[name] = _steps(client, kind, options.datums)
                sampler = client.save_weights_and_get_sampling_client().result()
                took_s[f"{name} samples"] = _samples(sampler, kind)
            if number > 0:  # the first warms up
                ratios["steps"].append(took_s["in process"] / took_s["wire"])
                ratios["samples"].append(took_s["in process samples"] / took_s["wire samples"])
                report(part="speed", round=number, **took_s)
    report(part="speed", **{f"{name}_ratio": statistics.median(values) for name, values in ratios.items()})


def _steps(client: Any, kind: Any, num_datums: int, num: int = 4) -> float:
    data, step = [datum(256, kind, first) for first in range(num_datums)], kind.AdamParams(learning_rate=1e-3)
    waiting: list[Any] = []
    begun_s = time.monotonic()
    for _ in range(num):
        waiting += [client.forward_backward(data, "cross_entropy"), client.optim_step(step)]
    for each in waiting:
        each.result()
    return (time.monotonic() - begun_s) / num


def _samples(sampler: Any, kind: Any, num: int = 200) -> float:
    prompt, params = kind.ModelInput.from_ints(list(range(20))), kind.SamplingParams(max_tokens=16)
    begun_s = time.monotonic()
    for each in [sampler.sample(prompt, 1, params) for _ in range(num)]:
        each.result()
    return time.monotonic() - begun_s


PARTS = {"samples": samples, "shares": shares, "memory": memory, "rude": rude, "speed": speed}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--num", type=int)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--datums", type=int, default=64)
    parser.add_argument("--rude", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    PARTS[given.part](given)
