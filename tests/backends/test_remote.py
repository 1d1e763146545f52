"""What is true of the client of a server alone: what it asks of which server, and what is left of a call where the
connection, the session or the SDK ends. That it is a backend like the others, the conformance suite says."""

import asyncio
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from custom_losses import total
from examples import datum, logprobs, policy_datum, train

from server.running import KEY, Running, running
from stovetop.backends import recording, remote
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.backends.remote.models import UNKNOWN, ServerModels
from stovetop.backends.remote.refusals import error_of
from stovetop.checkpoints import resume_or_create, save_checkpoint
from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import (
    CheckpointExists,
    CheckpointNotFound,
    InvalidRequest,
    NotFoundError,
    RequestFailedError,
    ServiceClosed,
    UnknownName,
)
from stovetop.losses import parse_loss
from stovetop.server.rows import SessionRow
from stovetop.types import (
    AdamParams,
    GetServerCapabilitiesResponse,
    ModelInput,
    SamplingParams,
    SupportedModel,
)

STEP = AdamParams(learning_rate=0.05)
PROMPT = ModelInput.from_ints([1, 2, 3])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    def open_two(storage: Path) -> Any:
        return recording.open_service(storage, models=["tiny", "other"], preload=True)

    with running(tmp_path_factory.mktemp("server"), open_two) as started:
        yield started


def connected(server: Running, **options: Any) -> ServiceClient:
    return remote.open_service(server.url, api_key=KEY, tokenizer=lambda _: ByteTokenizer(), **options)


@pytest.fixture
def service(server: Running) -> Iterator[ServiceClient]:
    with connected(server) as opened:
        yield opened


@pytest.fixture
def trainer(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1).result()


def as_other_servers_are(service: Any) -> None:
    """One that speaks the protocol and says nothing of itself."""
    connection = service.connection
    said = connection.models()
    vars(connection)["_models"] = replace(said, described={}, reads_temperature=False, spoils=False)


# ---- what a server says of itself ------------------------------------------------------------------------------------

OF_OTHERS = ServerModels.of(GetServerCapabilitiesResponse([SupportedModel("a/model", 4096), SupportedModel("b")]), None)


def test_of_a_server_that_says_nothing_of_itself_the_names_and_contexts_are_known() -> None:
    assert OF_OTHERS.name_of("a/model") == "a/model"
    assert OF_OTHERS.description("a/model").limits.context_length == 4096
    assert OF_OTHERS.description("b").limits.context_length == UNKNOWN
    assert OF_OTHERS.description("a/model").limits.vocab_size == UNKNOWN
    with pytest.raises(UnknownName, match="did you mean 'a/model'"):
        OF_OTHERS.name_of("a/modle")


def test_the_temperature_of_a_loss_goes_to_servers_that_say_that_they_read_it() -> None:
    config = {"temperature": 0.5, "clip_low_threshold": 0.9}
    assert replace(OF_OTHERS, reads_temperature=True).sent_config(parse_loss("ppo", config), config) == config
    at_one = {**config, "temperature": 1.0}
    assert OF_OTHERS.sent_config(parse_loss("ppo", at_one), at_one) == {"clip_low_threshold": 0.9}
    with pytest.raises(InvalidRequest, match=r"does not say that it reads the temperature.*0\.5"):
        OF_OTHERS.sent_config(parse_loss("ppo", config), config)


def test_a_temperature_that_the_server_does_not_read_is_refused_by_the_call(
    service: ServiceClient, trainer: TrainingClient
) -> None:
    def loss(temperature: float) -> float:
        config = {"temperature": temperature}
        return trainer.forward([policy_datum()], "importance_sampling", config).result().metrics["loss:sum"]

    assert loss(0.5) != loss(1.0)
    as_other_servers_are(service)
    loss(1.0)
    with pytest.raises(InvalidRequest, match="forward: loss_fn_config: this server does not say"):
        loss(0.5)


def test_an_alias_is_known_by_the_servers_name() -> None:
    full = "HuggingFaceTB/SmolLM2-135M-Instruct"
    models = ServerModels.of(GetServerCapabilitiesResponse([SupportedModel(full)]), None)
    assert models.name_of("smollm2") == models.name_of(full) == full


# ---- gradients that should be dropped --------------------------------------------------------------------------------


def explode(data: Any, scored: Any) -> Any:
    raise ZeroDivisionError("a bug in the user's loss")


def test_at_another_server_a_step_after_a_failed_loss_fails_and_training_goes_on(service: ServiceClient) -> None:
    failed, twin = (service.create_lora_training_client("tiny", rank=4, seed=1).result() for _ in range(2))
    as_other_servers_are(service)
    failed.forward_backward_custom([datum()], explode)
    with pytest.raises(RequestFailedError, match=r"optim_step \(call 2 of .*its gradients are dropped.*a bug in"):
        failed.optim_step(STEP).result()
    for client in (failed, twin):
        client.forward_backward_custom([datum()], total)
        client.optim_step(STEP).result()
    assert np.array_equal(logprobs(failed), logprobs(twin))


def test_at_another_server_gradients_that_cannot_be_dropped_stop_training_until_a_load(
    service: ServiceClient, trainer: TrainingClient
) -> None:
    as_other_servers_are(service)
    path = trainer.save_state("before").result().path
    before = logprobs(trainer)
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.spoil("half of it is missing").result()
    with pytest.raises(RequestFailedError, match="half of it is missing"):
        trainer.optim_step(STEP).result()
    for refused in (trainer.forward_backward([datum()], "cross_entropy"), trainer.optim_step(STEP)):
        with pytest.raises(RequestFailedError, match=r"no way to drop them; load a state.*half of it is missing"):
            refused.result()
    assert np.array_equal(logprobs(trainer), before)
    trainer.load_state_with_optimizer(path)
    with pytest.raises(RequestFailedError, match="no gradient"):
        trainer.optim_step(STEP).result()
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(STEP).result()


# ---- the SDK ---------------------------------------------------------------------------------------------------------


def use_everything(service: ServiceClient, trainer: TrainingClient) -> None:
    train(trainer, 1, 0.1)
    trainer.forward_backward_custom([datum()], total, loss_type_input="logprobs").result()
    path = trainer.save_state("all").result().path
    trainer.load_state(path).result()
    trainer.get_info()
    sampler = trainer.save_weights_and_get_sampling_client(name="named").result()
    sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2)).result()
    sampler.compute_logprobs(PROMPT).result()
    service.create_training_client_from_state(path).result()
    service.create_sampling_client(path).result()
    service.create_rest_client().get_server_capabilities().result()
    service.get_server_capabilities()


def test_nothing_is_used_that_the_sdk_deprecates(
    service: ServiceClient, trainer: TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_everything(service, trainer)
    assert [record.message for record in caplog.records if "DEPRECATED" in record.message] == []


def test_a_state_is_loaded_also_by_an_sdk_that_has_no_load_state(
    service: ServiceClient, trainer: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(trainer, 2, 0.1)
    before = logprobs(trainer)
    path = trainer.save_state("here").result().path
    monkeypatch.delattr(tinker.TrainingClient, "_load_state_impl")
    train(trainer, 1, 0.1)
    loaded = trainer.load_state_with_optimizer(path)
    after = trainer.forward([datum()], "cross_entropy")  # not before the load, which makes another client
    train(trainer, 1, 0.1)
    assert loaded.result().path == path
    scored = after.result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert np.array_equal(scored, before[: len(scored)])
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    train(resumed, 1, 0.1)
    assert np.array_equal(logprobs(trainer), logprobs(resumed))


def test_a_load_that_fails_leaves_the_client_as_it_was(
    trainer: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logprobs(trainer)
    for _ in range(2):  # in place, and by another client
        with pytest.raises(CheckpointNotFound, match="there is no checkpoint at this path"):
            trainer.load_state("tinker://nothing/weights/here").result()
        assert np.array_equal(logprobs(trainer), before)
        monkeypatch.delattr(tinker.TrainingClient, "_load_state_impl", raising=False)


# ---- the end ---------------------------------------------------------------------------------------------------------


def sessions_of(server: Running) -> dict[str, Any]:
    """Why each has finished, by its display name."""
    parts = server.server.doors.parts
    assert parts is not None
    rows = vars(parts.sessions)["_rows"].values()
    ended = [row for row in rows if isinstance(row, SessionRow) and row.finished is not None]
    return {json.loads(row.body)["display_name"]: json.loads(row.finished)["reason"]["type"] for row in ended}


def test_a_session_says_how_it_ended(server: Running) -> None:
    def leave(name: str, error: BaseException | None) -> None:
        with connected(server, display_name=name) as service:
            service.create_lora_training_client("tiny").result()
            if error is not None:
                raise error

    leave("well", None)
    for name, error in {"badly": KeyError("mine"), "stopped": KeyboardInterrupt()}.items():
        with pytest.raises(type(error)):
            leave(name, error)
    ended = sessions_of(server)
    assert [ended[name] for name in ("well", "badly", "stopped")] == ["success", "errored", "interrupted"]


def test_closing_waits_for_what_was_accepted_and_refuses_what_comes_then(server: Running) -> None:
    service = connected(server)
    trainer = service.create_lora_training_client("tiny", rank=4).result()
    trainer.forward_backward([datum()], "cross_entropy")
    saved = trainer.save_state("last")
    service.close().result()
    assert saved.result(0).path == f"tinker://{trainer.model_id}/weights/last"
    for call in (
        lambda: trainer.forward([datum()], "cross_entropy"),
        lambda: trainer.get_info(),
        lambda: service.create_sampling_client(base_model="tiny"),
        lambda: service.__enter__(),
    ):
        with pytest.raises(ServiceClosed, match="the service is closed"):
            call()
    service.close().result()


def test_what_is_refused_early_was_never_sent(service: ServiceClient, trainer: TrainingClient) -> None:
    with pytest.raises(InvalidRequest, match="model_id is chosen by the server"):
        service.create_lora_training_client("tiny", model_id="mine")
    with pytest.raises(CheckpointNotFound, match="begin with tinker://"):
        trainer.load_state("/a/folder")
    trainer.save_state("once").result()
    with pytest.raises(CheckpointExists, match=r"'once' exists.*overwrite=True"):
        trainer.save_state("once")
    frozen = trainer.save_weights_and_get_sampling_client().result()
    with pytest.raises(InvalidRequest, match="save_weights_for_sampler of their training client"):
        frozen.save("anywhere")


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_the_row_before_where_the_server_has_no_such_state(
    service: ServiceClient, trainer: TrainingClient, tmp_path: Path
) -> None:
    kept = asyncio.run(save_checkpoint(trainer, "000001", tmp_path, {"batch": 1}))
    rows = tmp_path / "checkpoints.jsonl"
    gone = {"name": "000002", "batch": 2, "state_path": "tinker://gone/weights/000002"}
    rows.write_text(rows.read_text() + json.dumps(gone) + "\n")
    start = asyncio.run(resume_or_create(service, tmp_path, model_name="tiny", lora_rank=4))
    assert (start.batch, start.record) == (1, kept)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_failure_is_told_in_the_words_of_the_call_that_was_made() -> None:
    said = (
        "Request failed: save_weights (seq_id 3 of sess-1:train:0) failed: {} for self.request_id='x' and expected "
        "type self.model_cls=<class 'y'>"
    )
    torn = tinker.RequestFailedError(said.format("TornCheckpoint: use an earlier one"), "x", "user")  # type: ignore[arg-type]
    ours = error_of(torn, "save_state (call 2 of m)")
    assert (type(ours).__name__, str(ours)) == ("TornCheckpoint", "use an earlier one")
    full = tinker.RequestFailedError(said.format("no space left"), "x", "server")  # type: ignore[arg-type]
    ours = error_of(full, "save_state (call 2 of m)")
    assert isinstance(ours, RequestFailedError)
    assert (str(ours), ours.category) == ("save_state (call 2 of m) failed: no space left", "server")
    assert ours.__cause__ is full


def test_what_is_not_there_is_not_found(service: ServiceClient) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint at this path"):
        service.create_sampling_client("tinker://nothing/sampler_weights/here").result()
    with pytest.raises(CheckpointNotFound):
        service.create_training_client_from_state("tinker://nothing/weights/here").result()
