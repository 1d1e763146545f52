"""A client that speaks the protocol itself: it sends a request again at once, and knows which ones were answered. Its
program is the same each time: two models, and every kind of request that changes something.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tinker.proto import tinker_public_pb2

HEADERS = {"X-API-Key": "tml-wire"}
LIMIT_S = 300.0  # that one request is sent again

Json = dict[str, Any]


class Unanswered(Exception):
    """No answer came in `LIMIT_S`, or `give_up` said so."""


class Refused(Exception):
    """The server's answer is that it does not do this."""


@dataclass
class Wire:
    """Asks until it is answered."""

    url: str
    name: str = "wire"
    give_up: Callable[[], bool] = lambda: False
    moment: Callable[[], int] = lambda: 0  # asked for with each answer
    session: str = ""
    futures: dict[str, Json] = field(default_factory=dict[str, Json])  # those that were answered, by id, with results

    submitted: dict[str, int] = field(default_factory=dict[str, int])  # ids of training requests: when accepted
    told: dict[str, int] = field(default_factory=dict[str, int])  # the same: when the result was there
    failed: list[str] = field(default_factory=list[str])  # saves, and why

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=f"{self.url}/api/v1/", headers=HEADERS, timeout=30)

    def ask(self, method: str, path: str, **how: Any) -> httpx.Response:
        """The answer: of the server, not that it is not there."""
        give_up_s = time.monotonic() + LIMIT_S
        while time.monotonic() < give_up_s and not self.give_up():
            try:
                answer = self.http.request(method, path, **how)
            except httpx.TransportError:
                time.sleep(0.01)
                continue
            if answer.status_code not in (500, 502, 503, 408):
                return answer
            time.sleep(0.01)
        raise Unanswered(path)

    def post(self, path: str, body: Json) -> Json:
        answer = self.ask("POST", path, json=body)
        if answer.status_code != 200:
            raise Refused(f"{path}: {answer.status_code} {answer.text}")
        return self._noted(answer.json())

    def _noted(self, answer: Json) -> Json:
        if "request_id" in answer and "model_id" in answer:  # that of a training request
            self.submitted.setdefault(answer["request_id"], self.moment())
        return answer

    def result(self, submitted: Json) -> Json:
        """Of a training request, whose id is known for good."""
        result = self.post("retrieve_future", {"request_id": submitted["request_id"]})
        self.futures[submitted["request_id"]] = result
        self.told.setdefault(submitted["request_id"], self.moment())
        return result

    def save(self, path: str, body: Json) -> Json:
        """The result of a save, which is asked for again under another number where the disk has failed."""
        result = self.result(self.post(path, body))
        if "error" in result:
            self.failed.append(result["error"])
            return self.save(path, {**body, "seq_id": body["seq_id"] + 40})
        return result

    def sample(self, sampler_id: str, seq_id: int) -> Json:
        """Of a sample, which a restart forgets: it is asked for anew."""
        body = {
            "sampling_session_id": sampler_id, "seq_id": seq_id, "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 17, 42]}]},
            "sampling_params": {"max_tokens": 5, "seed": seq_id},
        }  # fmt: skip
        while True:
            submitted = self.post("asample", body)
            answer = self.ask("POST", "retrieve_future", json={"request_id": submitted["request_id"]})
            if answer.status_code != 410:
                assert answer.status_code == 200, answer.text
                return answer.json()

    def learn(self, model: str, seq_id: int, tokens: Sequence[int]) -> Json:
        message = tinker_public_pb2.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
        num = len(tokens) - 1
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"".join(token.to_bytes(4, "little") for token in tokens[:-1])
        target, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
        target.dense, target.dtype = b"".join(token.to_bytes(8, "little") for token in tokens[1:]), 2
        weights.dense, weights.dtype = b"\0\0\x80\x3f" * num, 1
        target.shape.append(num)
        weights.shape.append(num)
        answer = self.ask("POST", "forward_backward", content=message.SerializeToString())
        if answer.status_code != 200:
            raise Refused(f"forward_backward: {answer.status_code} {answer.text}")
        return self._noted(answer.json())

    def step(self, model: str, seq_id: int) -> Json:
        return self.post("optim_step", {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1}})


@contextmanager
def wire(url: str, **more: Any) -> Iterator[Wire]:
    client = Wire(url, **more)
    with client.http:
        yield client


def program(client: Wire, num_rounds: int = 1, lora_seed: int = 1) -> Json:
    """All that the client is answered, by what it asked. When it is run again, with its session, the server is sent
    again what it has done already."""
    seen: Json = {}
    if not client.session:
        client.session = client.post("create_session", {"user_metadata": {"tenant": client.name}})["session_id"]
    made = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny"}
    model = client.post("create_model", {**made, "lora_config": {"rank": 4, "seed": lora_seed}})
    seen["made"] = client.result(model)
    for number in range(num_rounds):
        _round(client, model["model_id"], number, seen)
    plain = json.dumps(seen).replace(client.session, "SESSION")
    return json.loads(plain)


def _round(client: Wire, model: str, number: int, seen: Json) -> None:
    """25 requests under numbers of their own."""
    seq, name = 100 * number, f"round-{number}"
    learnt = [client.learn(model, seq + place, [5, 17 + place, 42, 8, number]) for place in (1, 2)]
    stepped = client.step(model, seq + 3)
    seen[f"{name} learnt"] = [client.result(each) for each in (*learnt, stepped)]
    saved = client.save("save_weights", {"model_id": model, "seq_id": seq + 4, "path": name})
    frozen = {"model_id": model, "seq_id": seq + 5, "sampling_session_seq_id": 2 * number + 1}
    frozen = client.result(client.post("save_weights_for_sampler", frozen))
    client.learn(model, seq + 6, [9, 9, 8, 7])
    client.step(model, seq + 7)
    seen[f"{name} frozen"] = client.sample(frozen["sampling_session_id"], 1)
    body = {"model_id": model, "seq_id": seq + 8, "path": f"{name}-sampler"}
    path = client.save("save_weights_for_sampler", body)["path"]
    body = {"session_id": client.session, "sampling_session_seq_id": 2 * number + 2, "model_path": path}
    opened = client.post("create_sampling_session", body)
    seen[f"{name} opened"] = client.sample(opened["sampling_session_id"], 1)
    body = {"session_id": client.session, "model_seq_id": number + 1, "path": saved["path"], "optimizer": True}
    other = client.post("load_weights", body)
    seen[f"{name} other"] = [client.result(other)]
    learnt, stepped = client.learn(other["model_id"], 1, [1, 2, 3, 4]), client.step(other["model_id"], 2)
    seen[f"{name} other"] += [client.result(learnt), client.result(stepped)]
    body = {"model_id": model, "seq_id": seq + 9, "path": saved["path"], "optimizer": True}
    seen[f"{name} back"] = client.result(client.post("load_weights", body))
    learnt, stepped = client.learn(model, seq + 10, [1, 2, 3, 4]), client.step(model, seq + 11)
    seen[f"{name} went on"] = [client.result(learnt), client.result(stepped)]
    body = {"model_id": model, "seq_id": seq + 12, "path": "last", "overwrite": True}
    seen[f"{name} last"] = client.save("save_weights", body)
    client.ask("POST", f"training_runs/{model}/checkpoints/weights/last/publish")


def still_known(client: Wire, futures: Mapping[str, Json]) -> list[str]:
    """Which of these, that were answered, the server does not know any more, or answers otherwise."""
    faults: list[str] = []
    for request_id, result in futures.items():
        answer = client.ask("POST", "retrieve_future", json={"request_id": request_id})
        if answer.status_code != 200 or answer.json() != result:
            faults.append(f"{request_id}: {answer.status_code} {answer.text[:200]} instead of {str(result)[:200]}")
    return faults
