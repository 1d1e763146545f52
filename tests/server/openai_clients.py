"""The official client of the OpenAI protocol, and a server whose models say what a test wants."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from running import KEY, Running, running

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.futures import APIFuture, ClientFuture, pending, resolved
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

HI = [{"role": "user", "content": "Hi"}]


def openai(server: Running, key: str = KEY) -> OpenAI:
    client = OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)
    return server.clients.enter_context(client)


def raw(server: Running, key: str = KEY) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"{server.url}/v1/", headers=headers, timeout=30)


def kept(server: Running, answer_id: str, key: str = KEY) -> dict[str, Any]:
    """The record of an answer."""
    with raw(server, key) as http:
        answer = http.get(f"answers/{answer_id}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@dataclass(eq=False)
class Saying:
    """A sampling client that always draws the tokens of these texts, each up to its end, one after the other."""

    tokenizer: Tokenizer
    answers: Sequence[str]
    delay_s: float = 0.0  # of each sample
    num_pieces: int = 0
    prompts: list[str] = field(default_factory=list[str])
    _num_begun: int = 0
    _left: list[int] = field(default_factory=list[int])

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, **_: object
    ) -> APIFuture[Any]:
        time.sleep(self.delay_s)
        self.num_pieces += 1
        if not self._left:
            self.prompts.append(self.tokenizer.decode(prompt.to_ints()))
            answer = self.answers[self._num_begun % len(self.answers)]
            self._left = self.tokenizer.encode(answer, add_special_tokens=False)
            self._num_begun += 1
        size = sampling_params.max_tokens or len(self._left)
        piece, self._left = self._left[:size], self._left[size:]
        reason = "length" if self._left else "stop"
        sequences = [SampledSequence(reason, piece, [-0.5] * len(piece)) for _ in range(num_samples)]
        return resolved(SampleResponse(sequences))

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer


@dataclass(eq=False)
class Silent:
    """A sampling client whose samples never end by themselves."""

    tokenizer: Tokenizer
    begun: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def sample(self, *_: object, **__: object) -> APIFuture[Any]:
        self.begun.set()
        return APIFuture(pending(), self.cancelled.set)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer


@dataclass(eq=False)
class OtherSampling:
    """The fake service, with another sampling client."""

    inner: Any
    client: Saying | Silent

    def in_queue(self, _queue: str | None) -> "OtherSampling":
        return self

    def create_sampling_client(self, **_: object) -> ClientFuture[Any]:
        return ClientFuture(resolved(self.client).future())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def saying(storage: Path, model: str, *answers: str) -> Iterator[tuple[Running, Saying]]:
    """A server of this model, which says that."""
    client = Saying(ByteTokenizer(), answers)
    with sampling(storage, model, client) as server:
        yield server, client


@contextmanager
def sampling(storage: Path, model: str, client: Saying | Silent) -> Iterator[Running]:
    """A server of this model, which samples with this client."""

    def open_service(folder: Path) -> Any:
        return OtherSampling(recording.open_service(folder, models=[model], preload=True), client)

    with running(storage, open_service) as server:
        yield server
