"""Clients of a server over the official SDK, each with a program that its seed gives: all kinds of requests, several
under way at once. What one sees, and what it leaves in the server's folder, are the same in every run of a seed.
"""

import hashlib
import json
import random
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from stovetop.durable import MANIFEST

KEY = "tml-tenant"
VOCABULARY = 250  # tokens that every model here has
TTL_S = 86_400 * 800  # more than clocks jump by: what expires goes, as it was asked for

Seen = list[Any]  # JSON


@dataclass
class Tenant:
    """Runs in a thread of its own, on which `join` waits."""

    url: str
    seed: int
    num_steps: int
    seen: Seen = field(default_factory=list[Any])
    error: BaseException | None = None

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"tenant {self.seed}", daemon=True)
        self.thread.start()

    @property
    def is_done(self) -> bool:
        return not self.thread.is_alive()

    def _run(self) -> None:
        try:
            with tinker.ServiceClient(base_url=self.url, api_key=KEY, user_metadata={"tenant": str(self.seed)}) as sdk:
                _Program(sdk, tinker.RestClient(base_url=self.url, api_key=KEY), self.seed, self.seen).run(
                    self.num_steps
                )
        except BaseException as error:
            self.error = error


class _Program:
    def __init__(self, sdk: tinker.ServiceClient, rest: tinker.RestClient, seed: int, seen: Seen) -> None:
        self.sdk, self.rest, self.seen = sdk, rest, seen
        self.rng = random.Random(seed)
        self.client = sdk.create_lora_training_client("tiny", rank=4, seed=seed).result()
        self.samplers = [sdk.create_sampling_client(base_model="tiny").result()]
        self.saved: list[str] = []

    def run(self, num_steps: int) -> None:
        others = (
            self.saves, self.saves_for_sampling, self.freezes, self.samples, self.scores, self.goes_back, self.lists,
            self.custom_loss, self.forwards, self.changes,
        )  # fmt: skip
        for step in range(num_steps):
            self.learns(step)
            self.rng.choice(others)(step)
        for sampler in self.samplers:
            self.samples_from(sampler)
        self.see("end", self.logprobs())
        for kind in ("save_state", "save_weights_for_sampler"):
            getattr(self.client, kind)("final").result()

    def see(self, *what: Any) -> None:
        self.seen.append(list(what))

    # ---- training ----------------------------------------------------------------------------------------------------

    def learns(self, step: int) -> None:
        """Two calls and a step, none of which waits for the one before."""
        loss = self.rng.choice(("cross_entropy", "importance_sampling", "ppo"))
        learnt = [self.client.forward_backward(self.data(loss), loss) for _ in range(2)]  # type: ignore[arg-type]  a name
        stepped = self.client.optim_step(types.AdamParams(learning_rate=0.01 * (1 + step % 3)))
        for future in learnt:
            output = future.result()
            self.see(loss, dict(output.metrics), *(each["logprobs"].tolist() for each in output.loss_fn_outputs))
        self.see("step", dict(stepped.result().metrics or {}))

    def custom_loss(self, step: int) -> None:
        def loss(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
            total = sum((each**2).sum() for each in logprobs)
            return total, {"total": float(total.detach())}

        output = self.client.forward_backward_custom(self.data("cross_entropy"), loss).result()
        self.see("custom", dict(output.metrics))

    def forwards(self, step: int) -> None:
        self.see("forward", self.logprobs())

    def logprobs(self) -> list[float]:
        output = self.client.forward([_datum([5, 17, 42, 8, 99, 3])], "cross_entropy").result()
        return output.loss_fn_outputs[0]["logprobs"].tolist()

    def data(self, loss: str) -> list[types.Datum]:
        rng = self.rng
        lengths = [rng.randrange(3, 24) for _ in range(rng.randrange(1, 4))]
        return [_datum([rng.randrange(VOCABULARY) for _ in range(length)], loss, rng) for length in lengths]

    # ---- saving ------------------------------------------------------------------------------------------------------

    def saves(self, step: int) -> None:
        name = self.rng.choice(("kept", f"state-{step}"))
        saving = self.client.save_state(name, overwrite=True)
        self.client.forward_backward(self.data("cross_entropy"), "cross_entropy")  # behind it, and not waited for
        self.saved.append(saving.result().path)
        self.see("saved", self.saved[-1].rpartition("/")[2])

    def saves_for_sampling(self, step: int) -> None:
        path = self.client.save_weights_for_sampler(f"sampler-{step}").result().path
        self.samplers.append(self.sdk.create_sampling_client(path).result())
        self.samples_from(self.samplers[-1])

    def goes_back(self, step: int) -> None:
        """A further model from what was saved, which goes on in place of the first."""
        if self.saved:
            path = self.rng.choice(sorted(self.saved))
            self.client = self.sdk.create_training_client_from_state_with_optimizer(path).result()
        self.see("back", self.logprobs())

    def changes(self, step: int) -> None:
        """What a client does with a checkpoint, besides reading it."""
        path = self.client.save_weights_for_sampler(f"changed-{step}").result().path
        self.rest.publish_checkpoint_from_tinker_path(path).result()
        self.rest.set_checkpoint_ttl_from_tinker_path(path, TTL_S).result()
        self.rest.unpublish_checkpoint_from_tinker_path(path).result()
        if self.rng.random() < 0.5:
            self.rest.delete_checkpoint_from_tinker_path(path).result()

    def lists(self, step: int) -> None:
        found = self.rest.list_checkpoints(self.client.model_id).result().checkpoints
        self.see("listed", sorted((each.checkpoint_id, each.public) for each in found))

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def freezes(self, step: int) -> None:
        self.samplers.append(self.client.save_weights_and_get_sampling_client().result())
        self.samples_from(self.samplers[-1])

    def samples(self, step: int) -> None:
        for sampler in self.samplers[-3:]:
            self.samples_from(sampler)

    def samples_from(self, sampler: tinker.SamplingClient) -> None:
        params = types.SamplingParams(max_tokens=6, seed=self.rng.randrange(1000))
        prompts = [[self.rng.randrange(VOCABULARY) for _ in range(4)] for _ in range(3)]
        drawn = [sampler.sample(types.ModelInput.from_ints(prompt), 2, params) for prompt in prompts]
        for future in drawn:
            sequences = future.result().sequences
            self.see("sample", [[each.tokens, each.logprobs, each.stop_reason] for each in sequences])

    def scores(self, step: int) -> None:
        prompt = types.ModelInput.from_ints([self.rng.randrange(VOCABULARY) for _ in range(9)])
        self.see("scores", self.rng.choice(self.samplers).compute_logprobs(prompt).result())


def _datum(tokens: Sequence[int], loss: str = "cross_entropy", rng: random.Random | None = None) -> types.Datum:
    """Each token predicts the next."""
    num = len(tokens) - 1
    inputs: dict[str, Any] = {"target_tokens": list(tokens[1:])}
    if loss == "cross_entropy":
        inputs["weights"] = [1.0] * num
    else:
        assert rng is not None
        inputs["logprobs"] = [-rng.random() * 5 for _ in range(num)]
        inputs["advantages"] = [rng.uniform(-1, 1) for _ in range(num)]
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


# ---- what they leave behind ------------------------------------------------------------------------------------------


def left_behind(storage: Path) -> dict[str, dict[str, Any]]:
    """By the tenant that its session names, of a server that has stopped: the calls of its models, in order, and the
    digests of all that it has saved, moments included."""
    journal = sqlite3.connect(f"file:{storage / 'journal.sqlite'}?mode=ro", uri=True)
    try:
        models = journal.execute("SELECT id, session_id, user_metadata FROM model").fetchall()
        return {
            f"{_tenant_of(metadata)}/{model_id.rpartition(':')[2]}": {
                "calls": journal.execute(
                    "SELECT seq, kind FROM request WHERE model_id = ? ORDER BY seq", (model_id,)
                ).fetchall(),
                "saved": {
                    f"{kind}/{name}": _digests(storage / folder)
                    for kind, name, folder in journal.execute(
                        "SELECT kind, name, folder FROM checkpoint WHERE model_id = ?", (model_id,)
                    )
                },
            }
            for model_id, _, metadata in models
        }
    finally:
        journal.close()


def _tenant_of(metadata: str) -> str:
    return str(json.loads(metadata).get("tenant"))


def _digests(folder: Path) -> dict[str, str]:
    """Of its tensors: the manifest has times and ids in it."""
    files = [file for file in sorted(folder.iterdir()) if file.name != MANIFEST]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Where two of these, or two lists of what was seen, are not the same."""
    keys = [*expected, *(key for key in found if key not in expected)]
    return [f"{key}: {_first_difference(expected.get(key), found.get(key))}" for key in keys
            if expected.get(key) != found.get(key)]  # fmt: skip


def _first_difference(one: Any, other: Any) -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        key = next(key for key in [*one, *other] if one.get(key) != other.get(key))
        return f"{key}: {_first_difference(one.get(key), other.get(key))}"
    if isinstance(one, list) and isinstance(other, list):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            if left != right:
                return f"[{index}] {_first_difference(left, right)}"
        return f"{len(one)} and {len(other)} long"
    return f"{str(one)[:120]} and {str(other)[:120]}"
