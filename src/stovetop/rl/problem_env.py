"""Environments of one turn: a question is put, the answer is graded, the episode is over. In a `ProblemEnv`, what is
asked and what a right answer is, a `Problem` says; problems live in tasks and in files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol, assert_never, cast

from stovetop.completers import StopCondition
from stovetop.concurrency import in_thread
from stovetop.datasets import Batches
from stovetop.errors import GradeError, InvalidRequest
from stovetop.renderers.base import ParseTermination, Renderer
from stovetop.renderers.messages import Message, ensure_text, get_text_content, messages_from_json
from stovetop.rl.types import Action, Env, EnvGroupBuilder, Metrics, Observation, StepResult, StopReason
from stovetop.tracking.chats import ConversationFormatter
from stovetop.tracking.logtree import log_formatter
from stovetop.types import ModelInput

Truncated = Literal["graded", "bad_format", "wrong"]


class TurnResult(NamedTuple):
    """What the only answer of an episode is worth."""

    reward: float
    metrics: Metrics


class OneTurnEnv(Env, Protocol):
    """An Env of one turn: a chat is put to the policy, its answer is graded, the episode is over. Derive from it, and
    write `get_chat` and `grade`; the rest is the same for all."""

    renderer: Renderer  # of the policy

    def get_chat(self) -> Sequence[Message]:
        """What the policy answers to."""
        ...

    async def grade(self, action: Action) -> TurnResult:
        """What an answer is worth."""
        ...

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The chat as a generation prompt, and the renderer's stop sequences."""
        log_formatter(ConversationFormatter(self.get_chat()))
        return self.prompt(), self.renderer.get_stop_sequences()

    def prompt(self) -> ModelInput:
        """The chat, up to where the answer begins."""
        return self.renderer.build_generation_prompt(self.get_chat())

    async def step(self, action: Action) -> StepResult:
        """Grades the answer; the episode is over."""
        reward, metrics = await self.grade(action)
        return StepResult(
            reward=reward,
            episode_done=True,
            next_observation=ModelInput.empty(),
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics=metrics,
            stop_reason=end_of_one_turn(action),
        )


def end_of_one_turn(action: Action) -> StopReason:
    """Why an episode of one turn ended: the answer was cut off, or is there."""
    return StopReason.MAX_TOKENS if action.stop_reason == "length" else StopReason.COMPLETED


# ---- problems with checks --------------------------------------------------------------------------------------------


class Problem(Protocol):
    """A question, and what is asked of its answer. The checks see the text of an answer, without its thinking."""

    def get_question(self) -> str:
        """What the policy is asked: the content of a user's message."""
        ...

    def check_answer(self, text: str) -> bool:
        """Whether an answer is right. What it raises is a GradeError, never a wrong answer."""
        ...

    def check_format(self, text: str) -> bool:
        """Whether an answer is written as it should be, right or wrong."""
        ...

    def get_reference_answer(self) -> str:
        """A right answer, for people to read."""
        ...


class Grade(NamedTuple):
    """What became of an answer."""

    correct: bool
    well_formed: bool


@dataclass(frozen=True, slots=True)
class ProblemEnv(OneTurnEnv):
    """Puts a problem to the policy. Reward = format_coef·(format - 1) + correct, where both are 0 or 1: by default 1.0
    for a right and well-formed answer, 0.9 for a right one in bad format, 0.0 and -0.1 for wrong ones.

    Format is what `Problem.check_format` says of an answer that ended with the renderer's stop sequence. One that ended
    with the end-of-text token instead, as a base model does, fails it: so a policy is taught to end its turns. With
    `require_stop_sequence_for_format=False` either end will do.

    An answer is *truncated* when the policy did not end its turn itself. It fails the format check, unless `truncated`
    says "graded" (as if the stop sequence had followed) or "wrong" (no answer at all, whatever it says).
    """

    problem: Problem
    renderer: Renderer
    convo_prefix: Sequence[Message] = ()  # what stands before the question, such as a system message
    format_coef: float = 0.1
    require_stop_sequence_for_format: bool = True  # False: an answer that ended with the end-of-text token may pass
    truncated: Truncated = "bad_format"
    slow_checks: bool = False  # make the checks on a thread, so that other episodes go on meanwhile

    def get_chat(self) -> Sequence[Message]:
        """The prefix and the question."""
        return [*self.convo_prefix, Message(role="user", content=self.problem.get_question())]

    async def grade(self, action: Action) -> TurnResult:
        """Metrics are `format` and `correct`, each 0 or 1. A check that raises, or returns anything but True or False,
        is a GradeError."""
        message, termination = self.renderer.parse_response(action.tokens)
        checks = partial(self._grade, get_text_content(message), self._end(action, termination))
        correct, well_formed = await in_thread(checks) if self.slow_checks else checks()
        reward = self.format_coef * (well_formed - 1) + correct
        return TurnResult(reward, {"format": float(well_formed), "correct": float(correct)})

    def _end(self, action: Action, termination: ParseTermination) -> Literal["accepted", "in_bad_format", "truncated"]:
        if action.stop_reason != "stop" or not termination.is_clean:
            return "truncated"
        required = self.require_stop_sequence_for_format
        return "in_bad_format" if required and not termination.is_stop_sequence else "accepted"

    def _grade(self, text: str, end: Literal["accepted", "in_bad_format", "truncated"]) -> Grade:
        try:
            grade = Grade(_checked(self.problem.check_answer(text)), _checked(self.problem.check_format(text)))
        except Exception as error:
            raise GradeError(f"{type(self.problem).__name__} could not grade the answer {text!r}: {error!r}") from error
        judged = self.truncated if end == "truncated" else end
        match judged:
            case "graded" | "accepted":
                return grade
            case "bad_format" | "in_bad_format":
                return Grade(grade.correct, well_formed=False)
            case "wrong":
                return Grade(correct=False, well_formed=False)
            case _:
                assert_never(judged)


def _checked(answer: bool) -> bool:
    """What a check returned, which must be True or False, not the None of one that forgot to return."""
    if answer not in (True, False):
        raise TypeError(f"a check must return True or False: {answer!r}")
    return bool(answer)


@dataclass(frozen=True, slots=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """The same problem several times. `env_thunk` may be `partial(ProblemEnv, problem, renderer)`."""

    env_thunk: Callable[[], Env]  # pickles if what it calls, and with what, does
    num_envs: int
    dataset_name: str = "problems"  # the tag

    async def make_envs(self) -> Sequence[Env]:
        return [self.env_thunk() for _ in range(self.num_envs)]

    def logging_tags(self) -> Sequence[str]:
        return [self.dataset_name]


class ProblemDataset:
    """An RLDataset of problems: shuffled in every epoch, `groups_per_batch` at a time, as `datasets.Batches` has it."""

    def __init__(
        self,
        builders_P: Sequence[EnvGroupBuilder],
        groups_per_batch: int,
        *,
        seed: int = 0,
        num_epochs: int = 1,
        drop_last: bool = False,
    ) -> None:
        self._batches = Batches(builders_P, groups_per_batch, num_epochs=num_epochs, seed=seed, drop_last=drop_last)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`, counted over all epochs."""
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)


# ---- problems from rows: one right answer, word for word ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """A problem with one right answer, which is compared character for character: space before, after or within it
    counts. What may vary belongs into a Problem of its own."""

    question: str
    answer: str

    def get_question(self) -> str:
        """The question as it was given."""
        return self.question

    def check_answer(self, text: str) -> bool:
        """Whether it is the answer, character for character."""
        return text == self.answer

    def check_format(self, text: str) -> bool:
        """Always True: what is not the answer is wrong."""
        return True

    def get_reference_answer(self) -> str:
        return self.answer


class PosedProblem(NamedTuple):
    """A problem, and the chat that its question ends."""

    problem: ExactAnswer
    convo_prefix: Sequence[Message]


def problems_from_rows(rows: Sequence[Mapping[str, object]]) -> list[PosedProblem]:
    """The problem of each row. A row has `answer`, a text, and either `question`, a text, or `messages`, a chat that
    ends with the question. Errors name the row by its index: call it before rows are shuffled."""
    return [problem_of_row(row, f"row {index}") for index, row in enumerate(rows)]


def answer_builders(
    rows: Sequence[Mapping[str, object]], renderer: Renderer, group_size: int, *, dataset_name: str = "problems"
) -> list[ProblemGroupBuilder]:
    """`problem_builders` of the problems of rows.

    answer_builders([{"question": "What is 2 + 2?", "answer": "4"}], renderer, group_size=8)
    """
    return problem_builders(problems_from_rows(rows), renderer, group_size, dataset_name=dataset_name)


def problem_builders(
    problems: Sequence[PosedProblem],
    renderer: Renderer,
    group_size: int,
    *,
    dataset_name: str = "problems",
    max_prompt_tokens: int | None = None,
) -> list[ProblemGroupBuilder]:
    """A group builder for each problem. The reward is 1 for exactly the answer, if the policy ended its turn itself,
    else 0. A prompt of more than `max_prompt_tokens`, what the model's context leaves beside an answer, is refused."""
    thunks = [
        partial(ProblemEnv, problem, renderer, convo_prefix, format_coef=0.0, truncated="wrong")
        for problem, convo_prefix in problems
    ]
    refuse_long_prompts((thunk() for thunk in thunks), max_prompt_tokens)
    return [ProblemGroupBuilder(thunk, group_size, dataset_name) for thunk in thunks]


def refuse_long_prompts(envs: Iterable[OneTurnEnv], max_prompt_tokens: int | None) -> None:
    """Refuses problems of which one leaves no room for an answer; None is no limit."""
    if max_prompt_tokens is not None:
        for env in envs:
            refuse_long_prompt(env, max_prompt_tokens)


def refuse_long_prompt(env: OneTurnEnv, max_prompt_tokens: int, what: str = "a problem") -> None:
    """`what` is what the error says that it is the prompt of."""
    num_tokens = env.prompt().length
    if num_tokens > max_prompt_tokens:
        question = get_text_content(env.get_chat()[-1])
        raise InvalidRequest(
            f"the prompt of {what} has {num_tokens} tokens, and the model's context leaves {max_prompt_tokens} beside "
            f"max_tokens; leave it out, or lower max_tokens: {question[:60]!r}"
        )


def problem_of_row(row: Mapping[str, object], where: str) -> PosedProblem:
    """See `problems_from_rows`. `where` names the row in errors."""
    answer, question, messages = row.get("answer"), row.get("question"), row.get("messages")
    if not isinstance(answer, str) or not answer:
        raise InvalidRequest(f"{where} needs 'answer', a text that is not empty: {answer!r}")
    if isinstance(question, str) and messages is None:
        return PosedProblem(ExactAnswer(question, answer), ())
    if not isinstance(messages, list) or question is not None:
        raise InvalidRequest(f"{where} needs 'question', a text, or 'messages', a list, not both; it has {sorted(row)}")
    chat = messages_from_json(cast(list[object], messages), where)
    if not chat or chat[-1]["role"] != "user":
        raise InvalidRequest(f"{where}: messages must end with the user's question; roles: {[m['role'] for m in chat]}")
    return PosedProblem(ExactAnswer(ensure_text(chat[-1]["content"]), answer), chat[:-1])
