"""Public data sets of programming problems with tests, by name: `dataset=deepcoder`. What else a config can name is
said in `named_data.load_data`. `sample:deepcoder`, which the package ships, has rows of the same form: a few, for tests
and demonstrations. Nothing runs a program here.
"""

import json
from dataclasses import dataclass
from typing import Literal, cast, get_args

from stovetop.datasets import Row, Split, text_of
from stovetop.errors import InvalidRequest
from stovetop.kitchen.stage import stage
from stovetop.named_data import LeftOut, Published, PublishedRows, Table
from stovetop.runs import Run

TestKind = Literal["stdin_stdout", "functional"]

_KINDS: dict[object, TestKind] = {
    "stdin_stdout": "stdin_stdout",
    "stdin": "stdin_stdout",
    None: "stdin_stdout",
    "functional": "functional",
    "function_call": "functional",
}


@dataclass(frozen=True, slots=True)
class CodeTest:
    """What a program reads or a function is called with, and what it must write or return: text, or for functions JSON,
    an argument a line."""

    input: str
    output: str
    kind: TestKind = "stdin_stdout"
    function_name: str | None = None  # of a functional test
    or_output: str | None = None  # what is right too: some sets put the result of a function into a list of one

    def __post_init__(self) -> None:
        if self.kind not in get_args(TestKind) or (self.kind == "functional" and not self.function_name):
            raise InvalidRequest(f"a functional test names its function; other tests are stdin_stdout: {self}")


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A problem in words, and the tests that a program has to pass."""

    question: str
    tests: tuple[CodeTest, ...]
    starter_code: str | None = None  # that the program has to begin with


def _problem_of_row(row: Row, place: str) -> CodeProblem | LeftOut:
    parsed = parse_deepcoder(row)
    if isinstance(parsed, LeftOut):
        raise InvalidRequest(f"{place} is no programming problem: {parsed.reason}; the row has {sorted(row)}")
    return parsed


# ---- rows ------------------------------------------------------------------------------------------------------------


def parse_deepcoder(row: Row) -> CodeProblem | LeftOut:
    """`problem`, `starter_code`, and `tests` as JSON in a string: a list of objects of `input`, `output` and a kind
    (`type` or `testtype`), or, as TACO has them, one object of `inputs` and `outputs`, with `fn_name` for functions.
    `metadata`, likewise JSON, may have the name of the function as `func_name`."""
    question = text_of(row, "problem", "question", "prompt")
    if question is None:
        return LeftOut("it has no text of a problem")
    raw = row.get("tests") or row.get("ground_truth")
    found = _json(raw)
    if found is None:
        return LeftOut("its tests are no JSON" if raw else "it has no tests")
    metadata = _json(row.get("metadata"))
    name = cast("dict[str, object]", metadata).get("func_name") if isinstance(metadata, dict) else None
    tests = _tests(found, name)
    if not tests:
        return LeftOut("it has no tests")
    if any(test is None for test in tests):
        return LeftOut("a test has no input, no output, or no kind that is known")
    return CodeProblem(question, tuple(test for test in tests if test is not None), text_of(row, "starter_code"))


def _tests(found: object, function_name: object) -> list[CodeTest | None]:
    if isinstance(found, dict):
        table = cast("dict[str, object]", found)
        inputs, outputs, name = table.get("inputs"), table.get("outputs"), table.get("fn_name") or function_name
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            return [_test(table, function_name)]
        pairs = zip(cast("list[object]", inputs), cast("list[object]", outputs), strict=False)
        kind = "functional" if name else "stdin_stdout"
        tests = [_test({"input": given, "output": wanted, "type": kind}, name) for given, wanted in pairs]
        return tests if len(cast("list[object]", inputs)) == len(cast("list[object]", outputs)) else [None]
    return [_test(test, function_name) for test in cast("list[object]", found)] if isinstance(found, list) else [None]


def _test(test: object, function_name: object) -> CodeTest | None:
    if not isinstance(test, dict):
        return None
    fields = cast("dict[str, object]", test)
    kind = _KINDS.get(fields.get("testtype") or fields.get("type"))
    metadata = _json(fields.get("metadata"))
    own = cast("dict[str, object]", metadata).get("func_name") if isinstance(metadata, dict) else None
    name = fields.get("fn_name") or own or function_name
    if kind is None or "input" not in fields or "output" not in fields or (kind == "functional" and not name):
        return None
    given, wanted = fields["input"], fields["output"]
    if kind == "stdin_stdout":
        return CodeTest(_as_text(given), _as_text(wanted))
    if isinstance(given, str):
        return CodeTest(given, _as_text(wanted), kind, str(name))
    if not isinstance(given, list):
        return None
    arguments = "\n".join(json.dumps(argument) for argument in cast("list[object]", given))
    alone = cast("list[object]", wanted) if isinstance(wanted, list) else []
    or_output = json.dumps(alone[0]) if len(alone) == 1 else None
    return CodeTest(arguments, json.dumps(wanted), kind, str(name), or_output)


def _json(value: object) -> object:
    """What a string of JSON holds; other values as they are, and None for a string that is none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _as_text(value: object) -> str:
    """As a program reads or writes it: lines of text; or JSON."""
    if isinstance(value, list) and all(isinstance(line, str) for line in cast("list[object]", value)):
        return "\n".join(cast("list[str]", value))
    return value if isinstance(value, str) else json.dumps(value)


# ---- the data sets ---------------------------------------------------------------------------------------------------

_DEEPCODER = "agentica-org/DeepCoder-Preview-Dataset"

CODE: dict[str, Published[CodeProblem]] = {
    # Problems of programming contests, filtered by whether their tests can be trusted (Luo et al. 2025).
    "deepcoder": Published(
        train=tuple(PublishedRows(_DEEPCODER, "train", subset) for subset in ("primeintellect", "taco", "lcbv5")),
        test=tuple(PublishedRows(_DEEPCODER, "test", subset) for subset in ("codeforces", "lcbv5")),
        parse=parse_deepcoder,
        schema="its files on the hub, cards of copies, programs that read it: problem, tests, starter_code, metadata",
    ),
}

# The problems that a config names, to train on and held out. Rows of your own have the form of DeepCoder's.
load = Table(_problem_of_row, CODE).load

CodeProblems = Split[CodeProblem]


@stage(writes="code_problems")
def load_code_problems(
    dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0, seed: int = 0
) -> CodeProblems:
    """The problems to train on, of a named data set or of a file, and those held out."""
    loaded = load(dataset, test_dataset, test_size, seed, run.revisions)
    run.record_data(dataset, loaded)
    return Split(loaded.train, loaded.test)
