"""The paths of the OpenAI protocol, and what its errors look like. The key is the same as the SDK's, as `Authorization:
Bearer KEY`.

An answer is sent when the record of its tokens is committed (`kept`); its id is also in the header x-request-id.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from stovetop.concurrency import in_thread
from stovetop.errors import AuthenticationError, StovetopError
from stovetop.model_families import context_length_of
from stovetop.server.activity import Ended
from stovetop.server.openai import models
from stovetop.server.openai.answers import chat_answer, completion_answer, record
from stovetop.server.openai.bodies import BadParameter, ChatAsked, CompletionAsked, Sampled, read
from stovetop.server.openai.drawing import Choice, Drawn, Job, comes_in_pieces, draw, draw_in_pieces, num_tokens_of
from stovetop.server.openai.kept import keep, kept
from stovetop.server.openai.models import ModelNotFound, Models
from stovetop.server.openai.prompts import ChatPrompt, chat_prompt, completion_prompts, require_short
from stovetop.server.openai.streaming import ChatStream, CompletionStream, guarded
from stovetop.server.protocol import Answer, Asked, Dialect, Served, as_json, bearer_of
from stovetop.server.recovery import Parts
from stovetop.server.requests import category_of
from stovetop.types import ModelInput, SamplingParams

EVENTS = "text/event-stream"
MAX_STREAM_THREADS = 32  # that wait for pieces; more streams take turns. A bound, not a tuned number

_STATUS_NAMES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class OpenAI:
    """What serves the paths. It holds the checkpoints that are at hand, and the threads in which streams wait."""

    def __init__(self) -> None:
        self._models = Models()
        self._streams = ThreadPoolExecutor(MAX_STREAM_THREADS, thread_name_prefix="stream")

    async def list_models(self, parts: Parts, asked: Asked) -> Answer:
        return as_json({"object": "list", "data": models.listed(parts, asked.owner)})

    async def get_model(self, parts: Parts, asked: Asked) -> Answer:
        return as_json(models.described(parts, asked.path["model"], asked.owner))

    async def get_answer(self, parts: Parts, asked: Asked) -> Answer:
        """What was kept: see `kept`."""
        return Answer(await in_thread(partial(kept, parts.journal, asked.path["answer_id"], asked.owner, time.time())))

    async def chat(self, parts: Parts, asked: Asked) -> Answer:
        body, prompt, job = await in_thread(partial(self._chat_job, parts, asked))
        if not body.stream:
            drawn = await self._drawn(parts, job)
            answer = await in_thread(partial(chat_answer, job, drawn, prompt.renderer, body.stops))
            return as_json(answer, headers=_named(job))
        stream = ChatStream(job, prompt.renderer, body.stops, body.stream_options.include_usage)
        return await self._streamed(parts, job, stream)

    async def complete(self, parts: Parts, asked: Asked) -> Answer:
        body, job = await in_thread(partial(self._completion_job, parts, asked))
        if not body.stream:
            drawn = await self._drawn(parts, job)
            answer = await in_thread(partial(completion_answer, job, drawn, body.stops))
            return as_json(answer, headers=_named(job))
        return await self._streamed(parts, job, CompletionStream(job, body.stops, body.stream_options.include_usage))

    # ---- from a body to what is to be drawn, in a thread -------------------------------------------------------------

    def _chat_job(self, parts: Parts, asked: Asked) -> tuple[ChatAsked, ChatPrompt, Job]:
        body = read(ChatAsked, asked.body)
        target = self._models.find(parts, body.model, asked.owner)
        tokenizer = target.client.get_tokenizer()
        context_length = context_length_of(parts.service, target.base_model)
        require_short("messages", len(asked.body), context_length)
        prompt = chat_prompt(body, tokenizer, target.base_model)
        stops: list[str] | list[int] = prompt.renderer.get_stop_sequences()
        if body.stops:  # strings and token ids do not go together
            family = [item if isinstance(item, str) else tokenizer.decode([item]) for item in stops]
            stops = [*body.stops, *family]
        job = Job(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            created_s=time.time(),
            owner=asked.owner,
            target=target,
            tokenizer=tokenizer,
            prompts=_as_text([prompt.tokens], "messages"),
            params=_params(body, body.limit, stops),
            num_choices=body.n,
            with_logprobs=body.logprobs,
            num_alternatives=body.top_logprobs,
            context_length=context_length,
        )
        return body, prompt, job

    def _completion_job(self, parts: Parts, asked: Asked) -> tuple[CompletionAsked, Job]:
        body = read(CompletionAsked, asked.body)
        target = self._models.find(parts, body.model, asked.owner)
        tokenizer = target.client.get_tokenizer()
        context_length = context_length_of(parts.service, target.base_model)
        prompts = completion_prompts(body, tokenizer, context_length)
        job = Job(
            id=f"cmpl-{secrets.token_hex(12)}",
            created_s=time.time(),
            owner=asked.owner,
            target=target,
            tokenizer=tokenizer,
            prompts=[prompt.tokens for prompt in prompts],
            params=_params(body, max(1, body.max_tokens), body.stops or None),
            num_choices=body.n,
            with_logprobs=body.logprobs is not None,
            num_alternatives=body.logprobs or 0,
            scores_prompts=body.echo and body.logprobs is not None,
            draws_none=body.max_tokens == 0,
            prompt_texts=[prompt.text for prompt in prompts] if body.echo else [],
            context_length=context_length,
        )
        return body, job

    # ---- drawing -----------------------------------------------------------------------------------------------------

    async def _drawn(self, parts: Parts, job: Job) -> Drawn:
        """And kept."""
        with parts.limits.entered(job.owner, job.num_tokens):
            drawn = await self._draw(parts, job)
        await self._keep(parts, job, drawn.choices)
        return drawn

    async def _draw(self, parts: Parts, job: Job) -> Drawn:
        try:
            return await draw(job)
        except Exception as error:
            _failed(parts, job, error)
            parts.requests.end_if_failed()
            raise

    async def _keep(self, parts: Parts, job: Job, choices: Sequence[Choice]) -> None:
        committed = await in_thread(lambda: keep(parts.journal, job.id, job.owner, job.created_s, record(job, choices)))
        await asyncio.wrap_future(committed)
        parts.activity.ended(_as_ended(job, choices), lambda: _prompts_as_text(job))

    async def _streamed(self, parts: Parts, job: Job, stream: ChatStream | CompletionStream) -> Answer:
        """What is refused is refused before the first event."""
        keep_it = partial(self._keep, parts, job)
        with parts.limits.entered(job.owner, job.num_tokens):
            if comes_in_pieces(job):
                choice = Choice(0)
                tokens = await self._first_tokens(parts, job, choice)
                events = stream.in_pieces(choice, tokens, keep_it, self._following)
            else:
                events = stream.whole(await self._draw(parts, job), keep_it)
        return Answer(_ended(parts, job, guarded(events, partial(_failed, parts, job))), EVENTS, headers=_named(job))

    async def _first_tokens(self, parts: Parts, job: Job, choice: Choice) -> Iterator[Any]:
        try:
            return await self._in_stream_thread(partial(draw_in_pieces, job, choice))
        except Exception as error:
            _failed(parts, job, error)
            raise

    async def _following(self, iterator: Iterator[Any]) -> Any:
        return await self._in_stream_thread(partial(next, iterator, None))

    async def _in_stream_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._streams, work)


async def _ended(parts: Parts, job: Job, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    with parts.limits.entered(job.owner, job.num_tokens, may_be_refused=False):
        async for each in events:
            yield each
    parts.requests.end_if_failed()


def _failed(parts: Parts, job: Job, error: Exception) -> dict[str, Any]:
    """Notes it among the failures. What the client is told of it, where its answer was under way."""
    known = error if isinstance(error, StovetopError) else None
    message = "the server failed; its log says why" if known is None else str(known)
    outcome = "server" if category_of(error) == "server" else "user"
    parts.activity.ended(replace(_as_ended(job, ()), num_tokens=0, outcome=outcome, message=message))
    return _error_as_json(500, message, known)


def _as_ended(job: Job, choices: Sequence[Choice]) -> Ended:
    return Ended(
        id=job.id,
        owner=job.owner,
        verb="chat_completion" if job.id.startswith("chat") else "completion",
        seconds=time.time() - job.created_s,
        num_tokens=num_tokens_of(job, choices),
    )


def _prompts_as_text(job: Job) -> str:
    return "\n".join(job.tokenizer.decode(prompt.to_ints()) for prompt in job.prompts)


def _named(job: Job) -> dict[str, str]:
    return {"x-request-id": job.id}


def _params(body: Sampled, max_tokens: int | None, stop: Sequence[str] | Sequence[int] | None) -> SamplingParams:
    values: dict[str, Any] = {
        "max_tokens": max_tokens,
        "seed": body.seed,
        "stop": stop,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
    }
    try:
        return SamplingParams(**values)
    except StovetopError as error:
        param = next((name for name in values if f".{name}" in str(error) or f"{name} " in str(error)), None)
        raise BadParameter(param, str(error), "invalid_value") from error


def _as_text(prompts: list[ModelInput], param: str) -> list[ModelInput]:
    try:
        return [ModelInput.from_ints(prompt.to_ints()) for prompt in prompts]
    except StovetopError as error:
        raise BadParameter(param, f"images are not answered here: {error}") from error


# ---- errors --------------------------------------------------------------------------------------------------------


def _error_as_json(status: int, message: str, error: StovetopError | None) -> dict[str, Any]:
    param, code = (error.param, error.code) if isinstance(error, BadParameter) else (None, None)
    if isinstance(error, ModelNotFound):
        param, code = "model", "model_not_found"
    if isinstance(error, AuthenticationError):
        message, code = f"{message} (here as OPENAI_API_KEY, sent as a Bearer token)", "invalid_api_key"
    kind = _STATUS_NAMES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


OPENAI = Dialect(
    prefix="/v1/",
    key_of=bearer_of,
    refused=lambda status, message, error: as_json(_error_as_json(status, message, error), status),
)


def openai_table() -> list[Served]:
    """For one application."""
    serving = OpenAI()
    return [
        Served("GET", "models", serving.list_models, dialect=OPENAI),
        Served("GET", "models/{model:path}", serving.get_model, dialect=OPENAI),
        Served("POST", "chat/completions", serving.chat, dialect=OPENAI, ends_with_client=True, is_quiet=True),
        Served("POST", "completions", serving.complete, dialect=OPENAI, ends_with_client=True, is_quiet=True),
        Served("GET", "answers/{answer_id}", serving.get_answer, dialect=OPENAI),
    ]
