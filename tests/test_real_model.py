"""A few checks on a real model, SmolLM2-135M-Instruct: what a tiny random one cannot show."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stovetop.backends import local
from stovetop.client import ServiceClient
from stovetop.recipes import sl_loop
from stovetop.renderers import get_renderer
from stovetop.renderers.messages import Message
from stovetop.runs import load
from stovetop.tasks import sort_digits
from stovetop.types import AdamParams, Datum, ModelInput, SamplingParams

pytestmark = [pytest.mark.real_model, pytest.mark.usefixtures("smollm2")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with local.open_service(storage=tmp_path_factory.mktemp("storage"), threads=1) as opened:
        yield opened


@pytest.mark.slow
def test_it_answers_a_question(service: ServiceClient) -> None:
    client = service.create_sampling_client(base_model="smollm2").result()
    renderer = get_renderer("chat_template", client.get_tokenizer())
    prompt = renderer.build_generation_prompt([Message(role="user", content="What is the capital of France?")])
    params = SamplingParams(max_tokens=16, temperature=0.0, stop=renderer.get_stop_sequences())
    message, termination = renderer.parse_response(client.sample(prompt, 1, params).result().sequences[0].tokens)
    assert "Paris" in str(message["content"])
    assert termination.is_clean


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow)])
def test_sampler_and_trainer_agree(service: ServiceClient, temperature: float) -> None:
    """After some training, so that the adapter matters; in float32 the gap is rounding."""
    trainer = service.create_lora_training_client("smollm2", rank=8, seed=0).result()
    prompt = trainer.get_tokenizer().encode("Once upon a time")
    warm_up = Datum(ModelInput.from_ints(prompt[:-1]), {"target_tokens": prompt[1:], "weights": [1.0] * 3})
    trainer.forward_backward([warm_up], "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=1e-3))
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = SamplingParams(max_tokens=12, seed=1, temperature=temperature)
    sequences = sampler.sample(ModelInput.from_ints(prompt), 4, params).result().sequences
    num_zeros = len(prompt) - 1
    data = [
        Datum(
            ModelInput.from_ints([*prompt, *sequence.tokens][:-1]),
            {
                "target_tokens": [*prompt, *sequence.tokens][1:],
                "logprobs": [0.0] * num_zeros + (sequence.logprobs or []),
                "advantages": [0.0] * num_zeros + [1.0] * len(sequence.tokens),
            },
        )
        for sequence in sequences
    ]
    output = trainer.forward(data, "importance_sampling", {"temperature": temperature}).result()
    for sequence, scored in zip(sequences, output.loss_fn_outputs, strict=True):
        assert scored["logprobs"].data[num_zeros:] == pytest.approx(sequence.logprobs, abs=1e-3)
    assert output.metrics["loss:sum"] == pytest.approx(-sum(len(s.tokens) for s in sequences), rel=1e-3)


@pytest.mark.slow
def test_the_held_out_loss_halves_within_four_steps(service: ServiceClient, tmp_path: Path) -> None:
    for name, rows in {"train": sort_digits.chats(), "test": sort_digits.test_chats()[:16]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = sl_loop.Config(
        dataset=str(tmp_path / "train.jsonl"),
        test_dataset=str(tmp_path / "test.jsonl"),
        log_path=str(tmp_path / "run"),
        learning_rate=5e-4,
        num_epochs=2,
        batch_size=16,
        lora_rank=16,
        train_unembed=False,
        eval_every=4,
    )
    asyncio.run(sl_loop.train(config, service))
    losses = load(config.log_path).series("test/nll").values
    assert losses[0] > 1.5
    assert losses[-1] < losses[0] / 2
