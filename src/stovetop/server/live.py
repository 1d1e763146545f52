"""A model that is in memory: its client, which does the verbs, and its snapshots. When its requests come, and how they
are kept, is in `program.py`."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from stovetop.backends.training_client import InProcessTrainingClient
from stovetop.client import TrainingClient
from stovetop.errors import InvalidRequest, NotFoundError, QueueFull, RequestFailedError, StovetopError
from stovetop.futures import ClientFuture, pending, when_done
from stovetop.server import codec
from stovetop.server.checkpoints import row_of
from stovetop.server.codec import ForwardBackward
from stovetop.server.keys import queue_of
from stovetop.server.requests import Outcome, Result
from stovetop.server.rows import Change, CheckpointRow, ModelRow, SamplerRow, SnapshotRow, put
from stovetop.server.shared import Shared
from stovetop.server.snapshots import Snapshots
from stovetop.server.verbs import Freeze, Load, Make, MakeFrom, Refused, Save, Step, Verb, learns, num_tokens_of
from stovetop.tinker_paths import path_of
from stovetop.types import AdamParams, ForwardBackwardOutput

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """A verb that was called: what will come of it, how that is written down, and what is committed with the call."""

    future: "Future[Any]"
    written: Callable[[Any], Outcome]
    changes: tuple[Change, ...] = ()
    committed: "Future[None]" = field(default_factory=pending)  # the call, with these


class Live:
    """Used under the lock of the model's program."""

    def __init__(self, model: ModelRow, shared: Shared) -> None:
        self.client: ClientFuture[InProcessTrainingClient] | None = None  # from request 0 on, or a snapshot
        self.snapshots = Snapshots(model, shared)
        self._service = shared.service.in_queue(queue_of(model.owner))
        self._model = model
        self._shared = shared

    def restore(self, snapshot: SnapshotRow) -> None:
        """The model as it was behind its request `snapshot.n`."""
        metadata = {key: str(value) for key, value in json.loads(self._model.user_metadata).items()}
        place = str(self._shared.folders.at(snapshot.folder))
        self.client = self._service.create_training_client_from_state_with_optimizer(
            place, self._model.base_model, metadata, model_id=self._model.id
        )
        self.snapshots.restored(snapshot)

    def fail(self, reason: str) -> None:
        """The request that was to make it has failed, and stays so: there is no client, and what is asked of it fails
        too."""
        future: Future[InProcessTrainingClient] = pending()
        future.set_exception(RequestFailedError(reason))
        self.client = ClientFuture(future)

    def release(self) -> None:
        """Out of memory, with what was called done."""
        if self.client is not None and self.client.future().exception() is None:
            self._shared.service.release(self.client.result())
        self.client = None

    def call(self, n: int, verb: Verb, words: dict[str, str]) -> Called:
        """Does a verb, as the model's request `n`. `words` gets what messages are to call otherwise."""
        if isinstance(verb, MakeFrom | Load):
            words[str(self._shared.folders.at(verb.folder))] = verb.path
        words[f"{self._shared.folders.storage}/"] = ""  # where a save could not be written, say
        if isinstance(verb, Make | MakeFrom):
            return self._make(verb)
        try:
            return self._call_on(self.made(), n, verb)
        except QueueFull:  # nothing was called: the client asks again when there is room
            raise
        except StovetopError as error:  # in the place of what it refuses
            if learns(verb):
                self.spoil(str(error))
            return _failing(error)

    def made(self) -> InProcessTrainingClient:
        """Its client. Waits until that is made."""
        if self.client is None:
            raise NotFoundError(f"there is no model of this id: {self._model.id!r}")
        return made(self.client)

    def _make(self, verb: Make | MakeFrom) -> Called:
        service, model_id = self._service, self._model.id
        metadata = {key: str(value) for key, value in verb.user_metadata.items()}
        match verb:
            case Make():
                self.client = service.create_lora_training_client(
                    verb.base_model,
                    verb.rank,
                    verb.seed,
                    verb.train_mlp,
                    verb.train_attn,
                    verb.train_unembed,
                    metadata,
                    model_id=model_id,
                )
                answer = {"type": "create_model", "model_id": model_id}
            case MakeFrom():
                create = (
                    service.create_training_client_from_state_with_optimizer
                    if verb.with_optimizer
                    else service.create_training_client_from_state
                )
                self.client = create(
                    str(self._shared.folders.at(verb.folder)),
                    verb.base_model,
                    metadata,
                    model_id=model_id,
                )
                self.snapshots.reads(verb.folder)
                answer = {"type": "load_weights", "model_id": model_id, "path": verb.path}
            case _:
                assert_never(verb)
        return Called(self.client.future(), lambda _: Outcome(Result.of(answer)))

    def _call_on(self, client: TrainingClient, n: int, verb: Verb) -> Called:
        match verb:
            case Make() | MakeFrom():
                raise AssertionError("a model is made once")
            case Refused():
                raise InvalidRequest(verb.reason)
            case ForwardBackward():
                ask = client.forward if verb.forward_only else client.forward_backward
                asked = ask(verb.data, verb.loss_fn, verb.loss_fn_config)
                return Called(asked.future(), partial(_output_written, num_tokens_of(verb)))
            case Step():
                params = AdamParams(**verb.params.model_dump(exclude={"type"}))
                return Called(client.optim_step(params).future(), _step_written)
            case Save():
                return self._save(client, n, verb)
            case Freeze():
                return self._freeze(client, n, verb)
            case Load():
                return self._load(client, verb)
            case _:
                assert_never(verb)

    def spoil(self, reason: str) -> None:
        """The next optim_step fails with this reason."""
        try:
            self.made().spoil(reason)
        except StovetopError as error:  # there is no model, which the optim_step will say
            log.debug("nothing to spoil: %s", error)

    def _save(self, client: TrainingClient, n: int, verb: Save) -> Called:
        """Each save has a folder of its own, so that overwriting is replacing a row, and a replay never overwrites."""
        checkpoints, path = self._shared.checkpoints, path_of(self._model.id, verb.kind, verb.name)
        self._shared.limits.require_bytes(self._model.owner, checkpoints.bytes_of(self._model.owner))
        checkpoints.reserve(self._model.id, verb)
        try:
            name, ttl, metadata = f"{verb.name}.{n}", verb.ttl_seconds, verb.user_metadata
            saving = (
                client.save_state(name, ttl, overwrite=True, user_metadata=metadata)
                if verb.with_optimizer
                else client.save_weights_for_sampler(name, ttl, user_metadata=metadata)
            )
        except BaseException:
            checkpoints.release(path)
            raise

        def appear(row: CheckpointRow) -> None:
            replaced = checkpoints.appear(row)
            checkpoints.release(path)
            if replaced is not None:
                self._shared.requests.later(lambda: checkpoints.remove_folder(replaced))

        def written(saved: Any) -> Outcome:
            name = self._shared.folders.name_of(saved.path)
            if not checkpoints.is_latest(path, n):
                checkpoints.release(path)
                self._shared.requests.later(lambda: checkpoints.remove_folder(name))
                return Outcome(Result.of({"path": path}))
            row = row_of(self._model.id, self._model.owner, n, verb, Path(saved.path), name)
            return Outcome(Result.of({"path": path}), (put(row),), partial(appear, row))

        def release(ended: "Future[Any]") -> None:
            if ended.exception() is not None:
                checkpoints.release(path)

        future: Future[Any] = saving.future()
        when_done(future, release)
        return Called(future, written)

    def _freeze(self, client: TrainingClient, n: int, verb: Freeze) -> Called:
        frozen = client.save_weights_and_get_sampling_client()
        row = SamplerRow(
            verb.sampler_id,
            self._model.session_id,
            self._model.owner,
            self._model.base_model,
            model_id=self._model.id,
            n=n,
        )
        called = Called(
            frozen.future(),
            lambda _: Outcome(Result.of({"sampling_session_id": verb.sampler_id, "path": None})),
            (put(row),),
        )
        self._shared.samplers.add_frozen(row, frozen, called.committed)
        return called

    def _load(self, client: TrainingClient, verb: Load) -> Called:
        load = client.load_state_with_optimizer if verb.with_optimizer else client.load_state
        loading = load(str(self._shared.folders.at(verb.folder)))
        self.snapshots.reads(verb.folder)
        return Called(loading.future(), lambda _: Outcome(Result.of({"path": verb.path})))


def made(client: ClientFuture[InProcessTrainingClient]) -> InProcessTrainingClient:
    """The client. Waits until it is made."""
    try:
        return client.result()
    except StovetopError as error:
        raise InvalidRequest(f"the model could not be made: {error}") from error


def _failing(error: BaseException) -> Called:
    future: Future[Any] = pending()
    future.set_exception(error)
    return Called(future, lambda _: Outcome(Result.of({})))


def _output_written(num_tokens: int, output: ForwardBackwardOutput) -> Outcome:
    return Outcome(Result("forward_backward", codec.write_forward_backward(output)), num_tokens=num_tokens)


def _step_written(response: Any) -> Outcome:
    return Outcome(Result.of({"metrics": codec.finite(response.metrics)}), num_steps=1)
