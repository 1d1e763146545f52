import asyncio
from pathlib import Path

import numpy as np
import pytest

from engine import tiny
from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.checkpoints import save_checkpoint
from stovetop.client import SamplingClient
from stovetop.engine import ops
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.preference.datasets import comparison_to_pair
from stovetop.preference.loss_values import DPO
from stovetop.preference.losses import compute_dpo_loss, preference_loss_fn
from stovetop.preference.reference import (
    check_same_tokenizer,
    create_dpo_clients,
    create_reference_client,
)
from stovetop.supervised.logprobs import compute_reference_logprobs, full_sequence
from stovetop.types import AdamParams, Datum

from .examples import RENDERER, labeled

DATA = [datum for number in range(3) for datum in comparison_to_pair(labeled("A", f"q{number}"), RENDERER)]
STEP = AdamParams(learning_rate=0.1)


# ---- alignment -----------------------------------------------------------------------------------------------


def test_reference_logprobs_are_those_that_training_sees(tmp_path):
    async def gaps() -> list[float]:
        trainer = await service.create_lora_training_client("any/name")
        reference = await trainer.save_weights_and_get_sampling_client()
        ours = await compute_reference_logprobs(reference, DATA)
        theirs = (await trainer.forward(DATA, "cross_entropy")).loss_fn_outputs
        return [float(np.abs(p - q["logprobs"].array).max()) for p, q in zip(ours, theirs, strict=True)]

    with recording.open_service(tmp_path) as service:
        assert max(asyncio.run(gaps())) < 1e-5


def test_at_step_0_the_loss_is_ln_2_on_a_model_with_attention():
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    data = [tiny.datum(tiny.tokens(length, seed=length)) for length in (7, 12, 9, 30)]
    frozen = tiny.freeze(engine, adapter)
    logprobs = [tiny.run(engine, ops.ComputeLogprobs(tiny.named(frozen), full_sequence(datum))) for datum in data]
    reference = [np.float32(row[1:]) for row in logprobs]
    output = tiny.run_custom(engine, adapter, data, preference_loss_fn(DPO(), reference))
    assert output.metrics["dpo_loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert output.metrics["margin"] == pytest.approx(0, abs=1e-4)


def test_the_gradient_of_dpo_is_that_of_a_weighted_likelihood():
    """dL/dlogp is -β·σ(-βm)/P for the tokens of the chosen answer, and the opposite for the rejected one."""
    engine = tiny.engine()
    through_custom, direct = tiny.trained_adapter(engine), tiny.trained_adapter(engine)
    data = [tiny.datum(tiny.tokens(length, seed=length)) for length in (7, 12, 9, 30)]
    reference = [np.full(datum.model_input.length, -6.0, np.float32) for datum in data]
    output = tiny.run_custom(engine, through_custom, data, preference_loss_fn(DPO(beta=0.1), reference))
    sums = [float((out["logprobs"].array + 6.0).sum()) for out in output.loss_fn_outputs]
    weighted = []
    for index, datum in enumerate(data):
        margin = sums[index // 2 * 2] - sums[index // 2 * 2 + 1]
        slope = 0.1 / (1 + np.exp(0.1 * margin)) / 2 * (1 if index % 2 == 0 else -1)
        weights = datum.loss_fn_inputs["weights"].array * np.float32(slope)
        weighted.append(Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": weights}))
    tiny.run(engine, ops.ForwardBackward(direct, weighted, CrossEntropy()))
    assert through_custom.gradients.keys() == direct.gradients.keys()
    for name, gradient in direct.gradients.items():
        np.testing.assert_allclose(through_custom.gradients[name], gradient, rtol=1e-3, atol=1e-6, err_msg=name)


# ---- which model it is ---------------------------------------------------------------------------------------


async def scores_of(client: SamplingClient) -> list[list[float]]:
    return [row.tolist() for row in await compute_reference_logprobs(client, DATA)]


async def train(trainer, reference: SamplingClient, num_steps: int) -> None:
    loss_fn = preference_loss_fn(DPO(), await compute_reference_logprobs(reference, DATA))
    for _ in range(num_steps):
        trainer.forward_backward_custom(DATA, loss_fn)
        await trainer.optim_step(STEP)


def test_a_resumed_run_has_the_reference_that_it_always_had(tmp_path):
    async def run() -> None:
        sft = await service.create_lora_training_client("any/name")
        sft.forward_backward(DATA, "cross_entropy")
        sft.optim_step(STEP)
        path = (await sft.save_state("sft")).path

        first = await create_dpo_clients(service, tmp_path / "run", model_name="any/name", load_checkpoint_path=path)
        policy = first.start.training_client
        before = await scores_of(first.reference)
        assert before == await scores_of(await policy.save_weights_and_get_sampling_client())
        await train(policy, first.reference, num_steps=10)
        assert before == await scores_of(first.reference)
        await save_checkpoint(policy, "000010", tmp_path / "run", {"batch": 10})

        again = await create_dpo_clients(service, tmp_path / "run", model_name="any/name", load_checkpoint_path=path)
        resumed = again.start.training_client
        assert again.start.batch == 10
        assert before == await scores_of(again.reference)
        assert before != await scores_of(await resumed.save_weights_and_get_sampling_client())

    with recording.open_service(tmp_path / "storage") as service:
        asyncio.run(run())


def test_without_a_checkpoint_the_reference_is_the_base_model_or_the_one_that_is_named(tmp_path):
    async def run(reference_model_name: str | None) -> bool:
        clients = await create_dpo_clients(
            service, tmp_path / "run", model_name="any/name", reference_model_name=reference_model_name
        )
        base = await create_reference_client(service, reference_model_name or "any/name")
        policy = await clients.start.training_client.save_weights_and_get_sampling_client()
        assert await scores_of(clients.reference) == await scores_of(base)
        return await scores_of(clients.reference) == await scores_of(policy)

    with recording.open_service(tmp_path / "storage") as service:
        assert asyncio.run(run(None))
        assert not asyncio.run(run("any/other"))


def test_a_model_with_another_tokenizer_is_no_reference():
    check_same_tokenizer(ByteTokenizer(), ByteTokenizer(), "any/name")
    with pytest.raises(InvalidRequest, match="choose a model of the same family: 'any/llama'"):
        check_same_tokenizer(ByteTokenizer(), tiny.tokenizer(), "any/llama")


def test_dpo_loss_of_tensors_is_the_one_of_datums(tmp_path: Path):
    import torch

    logprobs = [torch.arange(float(datum.model_input.length)) / -100 for datum in DATA]
    reference = [np.zeros(datum.model_input.length, np.float32) for datum in DATA]
    loss, metrics = preference_loss_fn(DPO(beta=0.3), reference)(DATA, logprobs)
    sums = torch.stack(
        [(p * d.loss_fn_inputs["weights"].to_torch()).sum() for p, d in zip(logprobs, DATA, strict=True)]
    )
    zeros = torch.zeros(3)
    direct, direct_metrics = compute_dpo_loss(sums[0::2], sums[1::2], zeros, zeros, 0.3)
    assert loss.item() == pytest.approx(direct.item())
    assert metrics == pytest.approx(direct_metrics)
