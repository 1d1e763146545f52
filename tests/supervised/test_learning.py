"""Supervised learning on the recording backend, all of it together: chats to data, data to a lower held-out loss."""

import asyncio
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.supervised.data import ChatDataset, conversations_to_data
from stovetop.supervised.nll import NLLEvaluator, mean_nll
from stovetop.supervised.normalize import normalize_data
from stovetop.types import AdamParams

TOKENIZER = ByteTokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)


def chats(first: int, last: int) -> list[list[Message]]:
    return [
        [Message(role="user", content=f"question {number}"), Message(role="assistant", content=f"abab {number} abab")]
        for number in range(first, last)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loss_falls_on_what_is_trained_and_on_what_is_held_out(tmp_path: Path, seed: int):
    async def train() -> None:
        for epoch in range(4):
            dataset.set_epoch(seed=seed + epoch)
            for index in range(len(dataset)):
                data_D = normalize_data(dataset.get_batch(index), "token")
                output = trainer.forward_backward(data_D, "cross_entropy")
                trainer.optim_step(AdamParams(learning_rate=0.2))
                losses.append(mean_nll(await output, data_D))

    dataset = ChatDataset(chats(0, 16), 4, RENDERER, reduction="none")
    evaluate = NLLEvaluator(conversations_to_data(chats(16, 20), RENDERER, None), tokenizer=TOKENIZER)
    losses: list[float] = []
    with recording.open_service(tmp_path, seed=seed) as service:
        trainer = service.create_lora_training_client("any/name", seed=seed).result()
        before = asyncio.run(evaluate(trainer))
        asyncio.run(train())
        after = asyncio.run(evaluate(trainer))
    assert losses[-1] < losses[0] / 2
    assert after["test/nll"] < before["test/nll"] / 2
    assert after["test/bpb"] < before["test/bpb"] / 2
