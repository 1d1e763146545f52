"""Stages of prompt distillation: a model answers texts with a long prompt, and the answers are written without it.

Shape suffix: `D` datums.
"""

import json
import logging
from dataclasses import replace
from functools import partial

import numpy as np

from stovetop.client import ServiceClient
from stovetop.completers import SamplingMessageCompleter
from stovetop.distillation.prompted import answer_with_prompt
from stovetop.durable import write_file
from stovetop.errors import InvalidRequest
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.supervised import Chats
from stovetop.model_families import recommended_renderer_name
from stovetop.preference.reference import create_reference_client
from stovetop.renderers import get_renderer
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, ensure_text
from stovetop.rl.evaluation import RLTestSetEvaluator
from stovetop.rl.problem_env import ExactAnswer, ProblemEnv, ProblemGroupBuilder
from stovetop.runs import Run
from stovetop.supervised.nll import NLLEvaluator
from stovetop.types import Datum

log = logging.getLogger(__name__)

CHATS_FILE = "chats.jsonl"  # in the run: the texts with their answers


@stage(writes="teacher")
async def init_prompted_teacher(
    service: ServiceClient,
    model_name: str,
    max_tokens: int,
    temperature: float = 1.0,
    teacher_checkpoint_path: str | None = None,
    renderer_name: str | None = None,
) -> SamplingMessageCompleter:
    """What answers with the prompt: the model as it is, or a checkpoint of it."""
    client = await create_reference_client(service, model_name, teacher_checkpoint_path)
    tokenizer = client.get_tokenizer()
    renderer = get_renderer(renderer_name or recommended_renderer_name(tokenizer), tokenizer)
    return SamplingMessageCompleter(client, renderer, max_tokens, temperature=temperature)


@stage
async def write_answers(
    texts: list[str],
    instruction: list[Message],
    teacher: SamplingMessageCompleter,
    answer_pattern: str,
    run: Run,
    seed: int = 0,
) -> None:
    """A chat for each text, without the prompt; a text whose answer does not match is left out, and counted."""

    def teacher_of(index: int) -> SamplingMessageCompleter:
        return replace(teacher, seed=seed + index)  # with one seed for all, their draws would be alike

    answers = await answer_with_prompt(teacher_of, texts, instruction, answer_pattern)
    chats = [chat for chat in answers if chat is not None]
    numbers = {"num_texts": len(texts), "num_chats": len(chats), "num_unmatched": len(texts) - len(chats)}
    run.emit("answers.complete", **numbers)
    log.info("%(num_texts)d texts -> %(num_chats)d chats; %(num_unmatched)d answers do not match", numbers)
    if not chats:
        raise InvalidRequest(f"none of the {len(texts)} answers matches answer_pattern: {answer_pattern!r}")
    lines = [json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats]
    write_file(run.path / CHATS_FILE, "".join(lines).encode())


@stage(writes="evaluators")
def make_agreement_evaluators(chats: Chats, test_D: list[Datum], renderer: Renderer) -> Evaluators:
    """The loss of the answers to held-out texts, and the share of them that the model gives too, greedily and in as
    many tokens as the longest has, as `agreement/env/all/correct`."""
    roles = ["user", "assistant"]
    pairs = [chat for _, chat in chats.test if [each["role"] for each in chat] == roles]
    if not pairs or not test_D:
        return Evaluators()
    answers = [ExactAnswer(*(ensure_text(each["content"]) for each in chat)) for chat in pairs]
    thunks = [partial(ProblemEnv, answer, renderer, format_coef=0.0, truncated="graded") for answer in answers]
    max_tokens = max(np.count_nonzero(datum.loss_fn_inputs["weights"].array) for datum in test_D)
    agreement = RLTestSetEvaluator(
        [ProblemGroupBuilder(thunk, 1, "texts") for thunk in thunks], int(max_tokens), temperature=0.0, name="agreement"
    )
    return Evaluators(training=(NLLEvaluator(test_D),), sampling=(agreement,))
