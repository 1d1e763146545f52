import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from engine.tiny import VOCAB_SIZE
from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import SamplingClient
from stovetop.completers import SamplingMessageCompleter
from stovetop.distillation.losses import GeneralizedJSD, divergence_loss_fn
from stovetop.distillation.off_policy import (
    compute_teacher_topk,
    mean_topk_kl,
    sample_teacher_chats,
    topk_cross_entropy_datum,
    topk_divergence_datum,
)
from stovetop.errors import RequestFailedError
from stovetop.futures import APIFuture, resolved
from stovetop.renderers.messages import Message, get_text_content
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.supervised.data import conversations_to_data
from stovetop.types import AdamParams, Datum, ModelInput, SampledSequence, SampleResponse, SamplingParams
from tiny_service import TinyService, open_tiny

RENDERER = ChatTemplateRenderer(ByteTokenizer())
PROMPTS = [[Message(role="user", content=f"q{index}")] for index in range(2)]


def datum(*tokens: int) -> Datum:
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)},
    )


class Shows:
    """A teacher that answers with fixed alternatives."""

    def __init__(self, topk: list[list[tuple[int, float]] | None] | None) -> None:
        self.topk = topk

    def sample(self, *_: object, **__: object) -> APIFuture[SampleResponse]:
        return resolved(SampleResponse([SampledSequence("length", [1])], topk_prompt_logprobs=self.topk))


# ---- alignment -------------------------------------------------------------------------------------------------------


def test_the_alternatives_stand_beside_the_targets(tmp_path):
    data = [datum(65, 66, 67, 68), datum(70, 71)]
    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/teacher").result()
        teacher = service.create_sampling_client(base_model="any/teacher").result()
        made = asyncio.run(compute_teacher_topk(teacher, data, 260))
        logprobs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    for one, topk, output in zip(data, made, logprobs, strict=True):
        targets = one.loss_fn_inputs["target_tokens"].array
        at_target = topk.logprobs_NK[topk.tokens_NK == targets[:, None]]
        assert np.allclose(at_target, output["logprobs"].array, atol=1e-5)


@pytest.mark.parametrize("topk", [None, [None, [(1, -1.0)]], [None, [(1, -1.0), (2, -2.0)], None]])
def test_alternatives_that_do_not_fit_are_an_error(topk):
    with pytest.raises(RequestFailedError, match="a datum of 2 positions needs 2 alternatives at each"):
        asyncio.run(compute_teacher_topk(Shows(topk), [datum(1, 2, 3)], 2))


def test_a_teacher_shows_its_twenty_likeliest_tokens_unless_told_otherwise(tmp_path):
    with recording.open_service(tmp_path) as service:
        teacher = service.create_sampling_client(base_model="any/teacher").result()
        [twenty], [three] = (asyncio.run(compute_teacher_topk(teacher, [datum(65, 66)], *k)) for k in ((), (3,)))
    assert (twenty.tokens_NK.shape, three.tokens_NK.shape) == ((1, 20), (1, 3))
    assert twenty.tokens_NK[0, :3].tolist() == three.tokens_NK[0].tolist()


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_teacher_samples_are_chats_to_train_on(tmp_path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/teacher").result()
        teacher = SamplingMessageCompleter(client, RENDERER, max_tokens=8, temperature=0.7, seed=3)
        chats = asyncio.run(sample_teacher_chats(teacher, PROMPTS, limit=2))
    assert [chat[:-1] for chat in chats] == PROMPTS
    assert all(chat[-1]["role"] == "assistant" and get_text_content(chat[-1]) for chat in chats)
    assert len(conversations_to_data(chats, RENDERER, max_length=None)) == 2


@pytest.mark.parametrize(("options", "most"), [({}, 64), ({"limit": 5}, 5)])
def test_no_more_answers_than_the_limit_are_asked_for_at_a_time(options: dict[str, int], most: int):
    asked = [0, 0]  # now, at most

    async def teacher(messages: Sequence[Message]) -> Message:
        asked[0] += 1
        asked[1] = max(asked)
        await asyncio.sleep(0)
        asked[0] -= 1
        return Message(role="assistant", content="a")

    asyncio.run(sample_teacher_chats(teacher, PROMPTS * 40, **options))
    assert asked == [0, most]


# ---- learning --------------------------------------------------------------------------------------------------------


async def student_kl(
    student: SamplingClient, teacher: SamplingClient, data: Sequence[Datum], vocab_size: int = 260
) -> float:
    """KL(teacher ‖ student) over the whole vocabulary, as a mean over the trained positions."""
    theirs, ours = [await compute_teacher_topk(client, data, vocab_size) for client in (teacher, student)]
    total = count = 0.0
    for one, p, q in zip(data, theirs, ours, strict=True):
        trained = one.loss_fn_inputs["weights"].array > 0
        by_token = [np.take_along_axis(each.logprobs_NK, each.tokens_NK.argsort(axis=1), axis=1) for each in (p, q)]
        p_NV, q_NV = (each[trained] for each in by_token)
        total += float((np.exp(p_NV) * (p_NV - q_NV)).sum())
        count += trained.sum()
    return total / count


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyService]:
    with open_tiny(tmp_path_factory.mktemp("tiny")) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_kl_of_a_transformer_to_another_falls_by_half(tiny: TinyService, seed: int):
    async def train() -> tuple[float, float]:
        teacher = await tiny.service.create_sampling_client(base_model=tiny.other)
        trainer = await tiny.service.create_lora_training_client(tiny.model, rank=8, seed=seed)
        params = SamplingParams(max_tokens=12, seed=seed)
        samples = (await teacher.sample(ModelInput.from_ints([65]), 6, params)).sequences
        data = [datum(65, *sample.tokens) for sample in samples]
        topk = await compute_teacher_topk(teacher, data, 64)
        soft = [topk_cross_entropy_datum(one, own) for one, own in zip(data, topk, strict=True)]
        before = await student_kl(await trainer.save_weights_and_get_sampling_client(), teacher, data, VOCAB_SIZE)
        for _ in range(12):
            trainer.forward_backward(soft, "cross_entropy")
            trainer.optim_step(AdamParams(learning_rate=0.02))
        after = await student_kl(await trainer.save_weights_and_get_sampling_client(), teacher, data, VOCAB_SIZE)
        return before, after

    before, after = asyncio.run(train())
    assert after < before / 2


@pytest.mark.parametrize("by", ["cross_entropy", "jsd"])
def test_the_kl_to_a_teacher_falls_by_half_on_its_own_samples(tmp_path, by):
    async def train() -> tuple[float, float, list[float]]:
        teacher = await service.create_sampling_client(base_model="any/teacher")
        completer = SamplingMessageCompleter(teacher, RENDERER, max_tokens=16, seed=0)
        data = conversations_to_data(await sample_teacher_chats(completer, PROMPTS), RENDERER, None, reduction="none")
        topk = await compute_teacher_topk(teacher, data, 128 if by == "cross_entropy" else 20)
        before = await student_kl(await trainer.save_weights_and_get_sampling_client(), teacher, data)
        history = []
        for _ in range(10):
            if by == "cross_entropy":
                soft = [topk_cross_entropy_datum(one, own) for one, own in zip(data, topk, strict=True)]
                output = trainer.forward_backward(soft, "cross_entropy")
                trainer.optim_step(AdamParams(learning_rate=0.3))
                history.append(mean_topk_kl(await output, soft))
            else:
                shown = [topk_divergence_datum(one, own) for one, own in zip(data, topk, strict=True)]
                output = trainer.forward_backward_custom(shown, divergence_loss_fn(GeneralizedJSD()))
                trainer.optim_step(AdamParams(learning_rate=0.3))
                history.append((await output).metrics["divergence"])
        after = await student_kl(await trainer.save_weights_and_get_sampling_client(), teacher, data)
        return before, after, history

    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/student").result()
        before, after, history = asyncio.run(train())
    assert after < before / 2
    assert history[-1] < history[0] / 2
