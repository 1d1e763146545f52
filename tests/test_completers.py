import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import SamplingClient, ServiceClient
from stovetop.completers import SamplingMessageCompleter, SamplingTokenCompleter, StopCondition, TokensWithLogprobs
from stovetop.concurrency import map_together
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.futures import APIFuture, resolved
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

BYTES = ByteTokenizer()
PROMPT = ModelInput.from_ints(b"12345678")
QUESTION = [Message(role="user", content="q")]


@dataclass
class Scripted:
    """A sampling client that says what it is told to, and keeps the params it was called with."""

    tokens: list[int]
    logprobs: list[float] | None = None
    asked: list[SamplingParams] = field(default_factory=list[SamplingParams])
    prompts: list[ModelInput] = field(default_factory=list[ModelInput])

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        self.asked.append(sampling_params)
        self.prompts.append(prompt)
        return resolved(SampleResponse([SampledSequence("length", self.tokens, self.logprobs)] * num_samples))

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        return resolved([None] * prompt.length)

    def get_tokenizer(self) -> ByteTokenizer:
        return BYTES

    def get_base_model(self) -> str:
        return "scripted"


def test_logprobs_that_are_not_there_are_asked_for_in_vain() -> None:
    assert TokensWithLogprobs([1, 2], [-1.0, -2.0]).logprobs == [-1.0, -2.0]
    with pytest.raises(InvalidRequest, match="carry no logprobs"):
        TokensWithLogprobs([1, 2], None).logprobs  # noqa: B018  the point of the test


def test_each_token_has_one_logprob() -> None:
    with pytest.raises(InvalidRequest, match="2 tokens and 1 logprobs"):
        TokensWithLogprobs([1, 2], [-1.0])


def test_a_token_completer_passes_on_how_to_sample_and_what_came_back() -> None:
    client = Scripted([7, 8], [-1.0, -2.0])
    completer = SamplingTokenCompleter(client, max_tokens=5, temperature=0.5, seed=3)
    completed = asyncio.run(completer(PROMPT, ["\n"]))
    assert completed == TokensWithLogprobs([7, 8], [-1.0, -2.0], "length")
    own_seed = client.asked[0].seed
    assert client.asked == [SamplingParams(max_tokens=5, seed=own_seed, stop=["\n"], temperature=0.5)]
    assert client.prompts == [PROMPT]


def test_with_a_seed_answers_to_one_prompt_are_the_same_and_to_others_drawn_with_other_numbers() -> None:
    client = Scripted([7, 8], [-1.0, -2.0])
    other = ModelInput.from_ints([*PROMPT.to_ints(), 1])
    for seed, prompt in ((3, PROMPT), (3, other), (3, PROMPT), (4, PROMPT)):
        asyncio.run(SamplingTokenCompleter(client, max_tokens=5, seed=seed)(prompt, []))
    first, of_other, again, of_other_seed = [params.seed for params in client.asked]
    assert first == again
    assert len({first, of_other, of_other_seed, None}) == 4


def test_temperature_is_one_unless_said_otherwise() -> None:
    client = Scripted([7], [-1.0])
    asyncio.run(SamplingTokenCompleter(client, max_tokens=5)(PROMPT, [1]))
    asyncio.run(SamplingMessageCompleter(client, ChatTemplateRenderer(BYTES), max_tokens=5)(QUESTION))
    assert [params.temperature for params in client.asked] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("own", "window", "asked", "budget"),
    [(5, None, None, 5), (5, None, 3, 3), (5, None, 9, 5), (5, 10, None, 2), (5, 20, None, 5), (5, 10, 1, 1)],
)
def test_the_smallest_of_three_budgets_holds(own: int, window: int | None, asked: int | None, budget: int) -> None:
    client = Scripted([7], [-1.0])
    completer = SamplingTokenCompleter(client, max_tokens=own, context_window=window)
    asyncio.run(completer(PROMPT, [1], max_tokens=asked))
    assert client.asked[0].max_tokens == budget


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    completer = SamplingTokenCompleter(Scripted([7], [-1.0]), max_tokens=5, context_window=8)
    with pytest.raises(InvalidRequest, match="it has 8 tokens, and the context window is 8"):
        asyncio.run(completer(PROMPT, [1]))


def test_strings_and_token_ids_do_not_mix_in_a_stop_condition() -> None:
    mixed: StopCondition = [*["\n"], 1]  # pyright: ignore[reportAssignmentType]  the point of the test
    with pytest.raises(InvalidRequest, match="strings or token ids, not both"):
        asyncio.run(SamplingTokenCompleter(Scripted([7], [-1.0]), max_tokens=5)(PROMPT, mixed))


def test_tokens_without_logprobs_are_an_error_never_zeros() -> None:
    with pytest.raises(RequestFailedError, match="without logprobs"):
        asyncio.run(SamplingTokenCompleter(Scripted([7]), max_tokens=5)(PROMPT, [1]))


def test_a_message_completer_stops_where_its_renderer_stops_unless_told_otherwise() -> None:
    client, renderer = Scripted([*b"yes", BYTES.eos_token_id]), ChatTemplateRenderer(BYTES)
    message = asyncio.run(SamplingMessageCompleter(client, renderer, max_tokens=5)(QUESTION))
    asyncio.run(SamplingMessageCompleter(client, renderer, max_tokens=5, stop_condition=["."])(QUESTION))
    assert message == {"role": "assistant", "content": "yes"}
    assert [params.stop for params in client.asked] == [[BYTES.eos_token_id], ["."]]
    assert client.prompts[0] == renderer.build_generation_prompt(QUESTION)


def test_both_completers_talk_to_a_real_client(service: ServiceClient) -> None:
    client = service.create_sampling_client(base_model="some/model").result()
    tokens = asyncio.run(SamplingTokenCompleter(client, max_tokens=4, seed=0)(PROMPT, []))
    assert len(tokens.tokens) == len(tokens.logprobs) == 4
    message = asyncio.run(SamplingMessageCompleter(client, ChatTemplateRenderer(BYTES), max_tokens=4)(QUESTION))
    assert set(message) == {"role", "content"}


def test_a_hundred_completions_wait_at_the_same_time_and_keep_their_order(tmp_path: Path) -> None:
    """A hundred times 30 milliseconds, in much less than the three seconds that one after the other would take."""

    async def complete_all(client: SamplingClient) -> list[TokensWithLogprobs]:
        completer = SamplingTokenCompleter(client, max_tokens=1, temperature=0.0)
        return await map_together(lambda byte: completer(ModelInput.from_ints([byte]), []), range(100))

    with recording.open_service(tmp_path, latency_s=0.03) as service:
        client = service.create_sampling_client(base_model="some/model").result()
        one_by_one = [asyncio.run(complete_all(client))[byte] for byte in (0, 50, 99)]
        start = time.perf_counter()
        together = asyncio.run(complete_all(client))
        assert time.perf_counter() - start < 50 * 0.03
    assert [together[byte] for byte in (0, 50, 99)] == one_by_one
