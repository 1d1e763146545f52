import asyncio
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.errors import RequestFailedError
from stovetop.futures import APIFuture, resolved
from stovetop.supervised.logprobs import compute_logprobs_by, compute_reference_logprobs, full_sequence
from stovetop.types import Datum, ModelInput


def datum(text: bytes) -> Datum:
    return Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": list(text[1:]), "weights": [1.0] * (len(text) - 1)})


def test_a_frozen_model_says_of_each_target_what_a_forward_pass_says(tmp_path: Path):
    data = [datum(b"abc"), datum(b"zy")]
    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/name").result()
        forward = trainer.forward(data, "cross_entropy").result()
        frozen = trainer.save_weights_and_get_sampling_client().result()
        logprobs_D = asyncio.run(compute_reference_logprobs(frozen, data))
    for logprobs, outputs in zip(logprobs_D, forward.loss_fn_outputs, strict=True):
        assert logprobs.tolist() == pytest.approx(outputs["logprobs"].tolist(), abs=1e-6)


def test_each_datum_can_have_a_model_of_its_own(tmp_path: Path):
    data = [datum(b"abc"), datum(b"abc")]
    with recording.open_service(tmp_path) as service:
        clients = [service.create_sampling_client(base_model=name).result() for name in ("one/model", "another/model")]
        first, second = asyncio.run(compute_logprobs_by(clients, data))
        assert first.tolist() == asyncio.run(compute_reference_logprobs(clients[0], data))[0].tolist()
    assert first.tolist() != second.tolist()


def test_the_full_sequence_has_the_last_target_too():
    assert full_sequence(datum(b"abc")) == ModelInput.from_ints(b"abc")


class Stingy:
    """A sampling client that leaves out a logprob."""

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        return resolved([None, -1.0, None])


def test_a_logprob_that_is_missing_is_an_error_and_never_a_zero():
    with pytest.raises(RequestFailedError, match="returned 3, 2 of them empty"):
        asyncio.run(compute_reference_logprobs(Stingy(), [datum(b"abc")]))
