"""The kinds of evaluation sets, and how rows of each become an ExampleSet: problems that a grader scores, chats
that are read, labels, answers that a judge compares. The sets by name are in evaluation_sets.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Generic, Literal, TypeVar

from stovetop.checks import check
from stovetop.datasets import Row, chat_of_row
from stovetop.errors import InvalidRequest
from stovetop.evaluation.chats import HeldOutChats
from stovetop.evaluation.example_set import ExampleSet, Ratio, Reported
from stovetop.evaluation.labels import LabelEnv, LabelSet
from stovetop.evaluation.pairwise import PairwiseSet
from stovetop.evaluation.problems import CUT_OFF, ProblemSet
from stovetop.evaluation.rows import Settings
from stovetop.named_data import LeftOut, Published, Source, load_data
from stovetop.preference.reward_model import PreferenceModel
from stovetop.preference.types import Comparison, labeled_comparison_from_json
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message
from stovetop.rl.problem_env import OneTurnEnv, ProblemEnv, ProblemGroupBuilder, problem_of_row, refuse_long_prompt
from stovetop.rules import ListOf, Whole, number
from stovetop.supervised.data import conversation_to_datum
from stovetop.tasks import math
from stovetop.tasks.instruction_following import InstructedPrompt, InstructionEnv
from stovetop.tasks.math_grading import Grade
from stovetop.tasks.program_sets import ProgramAnswer, ProgramGrader, ProgramProblem

T = TypeVar("T")
Need = Literal["mathematics", "programs", "judge"]


# ---- what a set is made of -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How answers are asked for."""

    num_samples: Annotated[int, Whole(1)] = 1  # answers to each example
    temperature: Annotated[float, number(at_least=0)] = 0.0
    max_tokens: Annotated[int, Whole(1)] | None = None  # of an answer; None: as the set says
    context_tokens: int | None = None  # of the model, prompt and answer together; None: not known
    ks: Annotated[Sequence[int], ListOf(Whole(1), at_least=1)] = (1,)  # of pass@k

    def __post_init__(self) -> None:
        check(self)
        if max(self.ks) > self.num_samples:
            raise InvalidRequest(
                f"pass@k needs k in 1..{self.num_samples}, the number of samples of an example: {max(self.ks)}"
            )
        if self.num_samples > 1 and self.temperature == 0:
            raise InvalidRequest(
                f"at temperature 0 all {self.num_samples} samples of an example are the same answer; pass a "
                "temperature above 0, or one sample"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What sets are scored with, those that need it."""

    grade: Grade | None = None  # of mathematics
    grade_program: ProgramGrader | None = None
    judge: PreferenceModel | None = None


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """Examples that were read and checked."""

    name: str
    ids: tuple[str, ...]
    sources: tuple[Source, ...]
    left_out: Mapping[str, int]  # rows that are of no use, by reason
    needs: Need | None
    is_sampled: bool  # False: it is only read, and how answers are asked for makes no difference
    max_tokens: int  # of an answer, unless `Asking` says otherwise
    maker: Callable[[Renderer, Asking, int, Tools], ExampleSet]

    def make(self, renderer: Renderer, asking: Asking, tools: Tools) -> ExampleSet:
        """The examples, as a policy with this renderer sees them. `tools` has what `needs` names."""
        return self.maker(renderer, asking, self.answer_tokens(asking), tools)

    def answer_tokens(self, asking: Asking) -> int:
        """The longest answer."""
        return asking.max_tokens or self.max_tokens

    def settings(self, asking: Asking, renderer_name: str | None) -> Settings:
        """What its rows depend on besides the weights and a judge. The renderer may not be known yet."""
        settings: dict[str, str | int | float | list[str] | None] = {
            "rows": [
                " ".join(filter(None, (each.source, each.split, each.subset, each.digest or each.revision)))
                for each in self.sources
            ],
        }
        if renderer_name is not None:
            settings["renderer"] = renderer_name
        if self.is_sampled:
            settings |= {
                "num_samples": asking.num_samples,
                "temperature": asking.temperature,
                "max_tokens": self.answer_tokens(asking),
            }
        return settings


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """What rows of one form come to."""

    summary: str  # one line
    read: Callable[[Row, str], T | LeftOut]  # a row, and its place for errors
    make: Callable[["Examples[T]", Renderer, Asking, int, Tools], ExampleSet]
    max_tokens: int = 0
    id_of: Callable[[T], str] | None = None  # None: its place in its source
    published: Published[T] | None = None
    published_as: str = ""  # its name
    needs: Need | None = None
    is_sampled: bool = True

    def load(self, name: str, rows: str, revisions: Mapping[str, str] | None = None) -> LoadedSet:
        """The examples that `rows` names, in the order of their source. What `named_data.load_data` knows is known
        here, with the public set under its name."""
        named = {} if self.published is None else {self.published_as: self.published}
        loaded = load_data(rows, self.read, named, revisions=revisions)
        placed = sorted(zip(loaded.train_indices, loaded.train, strict=True), key=lambda each: each[0])
        ids = [(self.id_of and self.id_of(item)) or str(index) for index, item in placed]
        if len(set(ids)) < len(ids):
            [(twice, _)] = Counter(ids).most_common(1)
            raise InvalidRequest(f"two examples have the same id, {twice!r}; give each its own: {rows!r}")
        examples = Examples(name, dict(zip(ids, (item for _, item in placed), strict=True)))
        return LoadedSet(
            name,
            tuple(ids),
            loaded.sources,
            loaded.left_out,
            self.needs,
            self.is_sampled,
            self.max_tokens,
            partial(self.make, examples),
        )


@dataclass(frozen=True, slots=True)
class Examples(Generic[T]):
    """Of one set, by id."""

    name: str
    items: Mapping[str, T] = field(default_factory=dict[str, T])


# ---- problems --------------------------------------------------------------------------------------------------------


def mathematics(
    examples: Examples[Row], renderer: Renderer, asking: Asking, max_tokens: int, tools: Tools
) -> ExampleSet:
    """An answer in \\boxed{} that is equal to the reference."""
    assert tools.grade is not None, "open_tools was told of this set"
    asked = [math.problem_of_row(row, tools.grade, f"example {id}") for id, row in examples.items.items()]
    envs = [partial(ProblemEnv, problem, renderer, slow_checks=True) for problem in asked]
    return _problem_set(examples, envs, renderer, asking, max_tokens, ("format",))


def programs(
    examples: Examples[ProgramProblem], renderer: Renderer, asking: Asking, max_tokens: int, tools: Tools
) -> ExampleSet:
    """A program that passes its tests."""
    assert tools.grade_program is not None, "open_tools was told of this set"
    answers = [ProgramAnswer(problem, tools.grade_program) for problem in examples.items.values()]
    envs = [partial(ProblemEnv, answer, renderer, slow_checks=True) for answer in answers]
    return _problem_set(examples, envs, renderer, asking, max_tokens, ("format",))


def instructions(
    examples: Examples[InstructedPrompt], renderer: Renderer, asking: Asking, max_tokens: int, _: Tools
) -> ExampleSet:
    """Instructions that are followed: all of a prompt, and of all prompts together."""
    envs = [partial(InstructionEnv, prompt, renderer) for prompt in examples.items.values()]
    made = _problem_set(examples, envs, renderer, asking, max_tokens, ("correct_loose",))
    of_instructions = {
        "instructions": Ratio("followed", "instructions"),
        "instructions_loose": Ratio("followed_loose", "instructions"),
    }
    return replace(made, reported=replace(made.reported, ratios=of_instructions))


def _problem_set(
    examples: Examples[T],
    envs: Sequence[Callable[[], OneTurnEnv]],
    renderer: Renderer,
    asking: Asking,
    max_tokens: int,
    means: Sequence[str],
) -> ProblemSet:
    by_id = dict(zip(examples.items, envs, strict=True))
    if asking.context_tokens is not None:
        for id, env in by_id.items():
            refuse_long_prompt(env(), asking.context_tokens - max_tokens, f"example {id} of {examples.name}")
    return ProblemSet(
        examples.name,
        {id: ProblemGroupBuilder(env, asking.num_samples, examples.name) for id, env in by_id.items()},
        renderer.tokenizer,
        max_tokens,
        Reported(means=(*means, CUT_OFF), correct="correct", ks=asking.ks),
        asking.temperature,
    )


# ---- examples of your own --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabelledChat:
    """A chat that ends with a question, and the label that answers it."""

    chat: Sequence[Message]
    label: str


def labelled(row: Row, place: str) -> LabelledChat:
    problem, before = problem_of_row(row, place)
    return LabelledChat([*before, Message(role="user", content=problem.question)], problem.answer)


def labels(
    examples: Examples[LabelledChat], renderer: Renderer, asking: Asking, max_tokens: int, _: Tools
) -> ExampleSet:
    labels = sorted({each.label for each in examples.items.values()})
    envs = [partial(LabelEnv, each.chat, labels, each.label, renderer) for each in examples.items.values()]
    made = _problem_set(examples, envs, renderer, asking, max_tokens, ())
    return LabelSet(made, labels, {id: each.label for id, each in examples.items.items()})


def answered_chat(row: Row, place: str) -> list[Message] | LeftOut:
    """The `messages` of a row, one of them the assistant's."""
    chat = chat_of_row(row, place)
    has_answer = any(message["role"] == "assistant" and message["content"] for message in chat)
    return chat if has_answer else LeftOut("it has no answer")


def chats(
    examples: Examples[list[Message]], renderer: Renderer, _asking: Asking, _max: int, _tools: Tools
) -> ExampleSet:
    data = {id: conversation_to_datum(chat, renderer, None, reduction="none") for id, chat in examples.items.items()}
    return HeldOutChats(examples.name, data, renderer.tokenizer)


def reference(row: Row, place: str) -> Comparison:
    """The better answer of a labelled comparison, or the last message of a chat, is the reference, completion A."""
    if "messages" not in row:
        answers = labeled_comparison_from_json(row, place)
        better = answers.answers()
        chosen = answers.comparison.completion_A if better is None else better.chosen
        return Comparison(answers.comparison.prompt_conversation, chosen, chosen)
    *prompt, answer = chat_of_row(row, place)
    if answer["role"] != "assistant" or not prompt:
        raise InvalidRequest(f"{place}: the last of messages must be the assistant's, the reference, behind a prompt")
    return Comparison(prompt, [answer], [answer])


def pairwise(
    examples: Examples[Comparison], renderer: Renderer, asking: Asking, max_tokens: int, tools: Tools
) -> ExampleSet:
    assert tools.judge is not None, "open_tools was told of this set"
    return PairwiseSet(
        examples.name,
        examples.items,
        tools.judge,
        renderer,
        max_tokens,
        asking.temperature,
        asking.num_samples,
    )
