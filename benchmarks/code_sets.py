"""What the tests of a set of programming problems are worth: are its own solutions right by them, and how many wrong
programs would they accept?

    python benchmarks/code_sets.py HumanEval.jsonl.gz                   its solutions
    python benchmarks/code_sets.py mbpp.jsonl --mutants 5               and five changes to each
    python benchmarks/code_sets.py sample:deepcoder --mutants 5

A mutant is a solution with one small change. One that is accepted may do the same as the solution; it is surely wrong
if it returns something else for arguments near those of the tests. So of mutants that are accepted two numbers are
given: all, and those surely wrong. The set's tests accept at least the second number of wrong programs.
"""

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mutants import mutants_of, nearby

from stovetop.datasets import Row, load_rows
from stovetop.errors import GradeError
from stovetop.tasks.assertions import AssertionGrader
from stovetop.tasks.code import CodeProblem, parse_deepcoder
from stovetop.tasks.code_grading import CodeGrade, CodeGrader
from stovetop.tasks.program_sets import ProgramProblem, parse_humaneval, parse_mbpp
from stovetop.tasks.sandbox import find_sandbox


@dataclass
class Counts:
    """Of a set."""

    problems: int = 0
    right: int = 0  # solutions that pass
    wrong: list[str] = field(default_factory=list[str])  # what became of the others
    mutants: int = 0
    accepted: int = 0
    surely_wrong: int = 0  # among those accepted
    with_accepted: int = 0  # problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a file of rows, JSON, JSONL or either gzipped; or sample:NAME")
    parser.add_argument("--mutants", type=int, default=0, help="of each solution")
    parser.add_argument("--first", type=int, help="only so many problems")
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    rows = list(_rows(arguments.source))[: arguments.first]
    grader = CodeGrader(find_sandbox(), max_at_once=arguments.at_once)
    asserting = AssertionGrader(grader)
    counts = Counts()
    with ThreadPoolExecutor(arguments.at_once) as threads:
        for one in threads.map(
            lambda numbered: _of_row(grader, asserting, *numbered, arguments.mutants), enumerate(rows)
        ):
            _add(counts, one)
    _report(arguments.source, counts)


def _rows(source: str) -> Iterator[Row]:
    if source.startswith("sample:"):
        yield from load_rows(source)
        return
    content = Path(source).read_bytes()
    text = (gzip.decompress(content) if source.endswith(".gz") else content).decode()
    yield from json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())


def _of_row(grader: CodeGrader, asserting: AssertionGrader, index: int, row: Row, num_mutants: int) -> Counts:
    parse = parse_humaneval if "entry_point" in row else parse_mbpp if "test_list" in row else parse_deepcoder
    problem = parse(row)
    assert isinstance(problem, ProgramProblem | CodeProblem), problem
    solution = problem.reference if isinstance(problem, ProgramProblem) else _solution(row)
    if solution is None:
        return Counts()

    def grade(code: str) -> CodeGrade:
        if isinstance(problem, ProgramProblem):
            return asserting.grade(code, problem)
        return grader.grade(code, problem.tests)

    name = str(row.get("task_id", index))
    try:
        graded = grade(solution)
    except GradeError as error:
        return Counts(1, 0, [f"{name}: {error}"])
    if not graded.is_correct:
        return Counts(1, 0, [f"{name}: {graded.why}"])
    counts = Counts(1, 1)
    for mutant in mutants_of(solution, num_mutants, seed=index):
        counts.mutants += 1
        if grade(mutant).is_correct:
            counts.accepted += 1
            counts.surely_wrong += _differs(grader, asserting, problem, solution, mutant, index)
    counts.with_accepted = int(counts.accepted > 0)
    return counts


def _solution(row: Row) -> str | None:
    solutions = row.get("solutions")
    return str(solutions[0]) if isinstance(solutions, list) and solutions else None


def _differs(
    grader: CodeGrader,
    asserting: AssertionGrader,
    problem: ProgramProblem | CodeProblem,
    solution: str,
    mutant: str,
    seed: int,
) -> bool:
    """Whether it returns something else for arguments near those of the tests, where the solution returns something."""
    if not isinstance(problem, ProgramProblem):
        return False
    chooses = random.Random(seed)
    calls = [nearby(call, chooses) for call in asserting.calls_of(problem) for _ in range(8)][:64]
    said, said_too = (grader.call(code, calls)[0] for code in (solution, mutant))
    return any("is" in one and one != other for one, other in zip(said, said_too, strict=False))


def _add(counts: Counts, one: Counts) -> None:
    for name, value in vars(one).items():
        setattr(counts, name, getattr(counts, name) + value)


def _report(source: str, counts: Counts) -> None:
    print(f"{Path(source).name}: {counts.right} of {counts.problems} solutions are right by the set's own tests")
    for line in counts.wrong:
        print(f"    {line}")
    if counts.mutants:
        print(
            f"    {counts.mutants} mutants: {counts.accepted} accepted ({counts.accepted / counts.mutants:.1%}), "
            f"{counts.surely_wrong} of them surely wrong ({counts.surely_wrong / counts.mutants:.1%}); "
            f"{counts.with_accepted} problems accept at least one"
        )


if __name__ == "__main__":
    main()
