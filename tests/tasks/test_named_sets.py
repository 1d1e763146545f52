"""Public data sets of chats, problems, prompts and code: what a row comes to, which rows are held out, and the samples.
The rows are frozen: of the form that their cards and the programs that read them show."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stovetop.datasets import Row, load_rows
from stovetop.errors import InvalidRequest
from stovetop.named_data import LeftOut, Published
from stovetop.renderers.messages import Message
from stovetop.tasks import chats, code, comparisons, problems, prompts
from stovetop.tasks.code import CodeProblem, CodeTest

TABLES: Mapping[str, Mapping[str, Published[Any]]] = {
    "chats": chats.CHATS,
    "comparisons": comparisons.COMPARISONS,
    "problems": problems.PROBLEMS,
    "prompts": prompts.PROMPTS,
    "code": code.CODE,
}
LOAD: Mapping[str, Callable[..., Any]] = {
    "chats": chats.load,
    "comparisons": comparisons.load,
    "problems": problems.load,
    "prompts": prompts.load,
    "code": code.load,
}
NAMES = [(kind, name) for kind, table in TABLES.items() for name in table]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


# ---- rows

NO_ROBOTS: Row = {
    "prompt": "Name a colour.",
    "prompt_id": "ea90b63ee80487c17282a1f2708ae0a04b14b6d98516438f9f6f71b072b267b7",
    "messages": [{"content": "Be brief.", "role": "system"}, {"content": "Name a colour.", "role": "user"},
                 {"content": "Red.", "role": "assistant"}],
    "category": "Brainstorm",
}  # fmt: skip
TULU3: Row = {
    "id": "oasst1_1", "source": "ai2-adapt-dev/oasst1_converted",
    "messages": [{"content": "Hi", "role": "user"}, {"content": "Hello", "role": "assistant"},
                 {"content": "Bye", "role": "user"}, {"content": "Good-bye", "role": "assistant"}],
}  # fmt: skip
OPENTHOUGHTS3: Row = {
    "difficulty": 8, "source": "ai2-adapt-dev/openmath-2-math", "domain": "math",
    "conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "<think>\nEasy.\n</think>\n\n2"}],
}  # fmt: skip
GSM8K: Row = {
    "question": "Nora has 3 bags of 4 rolls. How many rolls?",
    "answer": "She has 3*4 = <<3*4=12>>12 rolls.\n#### 1,012",
}
MATH: Row = {
    "problem": "What is $1/2 + 1/4$?", "level": "Level 1", "type": "Prealgebra",
    "solution": r"It is $\frac{2}{4} + \frac14 = \boxed{\frac{3}{4}}$.",
}  # fmt: skip
MATH_500: Row = {**MATH, "answer": r"\frac{3}{4}", "subject": "Prealgebra", "unique_id": "test/prealgebra/1.json"}
POLARIS: Row = {"problem": "How many primes are below 10?", "answer": "4", "difficulty": "7/8"}
DEEPMATH: Row = {
    "question": "Evaluate the limit.", "final_answer": r"\dfrac{1}{2}", "difficulty": 5.0, "topic": "Mathematics",
    "r1_solution_1": "...", "r1_solution_2": "...", "r1_solution_3": "...",
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "row", "expected"),
    [
        (chats.parse_messages, NO_ROBOTS,
         [Message(role="system", content="Be brief."), user("Name a colour."), assistant("Red.")]),
        (chats.parse_messages, TULU3, [user("Hi"), assistant("Hello"), user("Bye"), assistant("Good-bye")]),
        (chats.parse_openthoughts3, OPENTHOUGHTS3, [user("1 + 1?"), assistant("<think>\nEasy.\n</think>\n\n2")]),
        (problems.parse_gsm8k, GSM8K, {"question": GSM8K["question"], "answer": "1,012"}),
        (problems.parse_math, MATH, {"question": MATH["problem"], "answer": r"\frac{3}{4}"}),
        (problems.parse_math, MATH_500, {"question": MATH["problem"], "answer": r"\frac{3}{4}"}),
        (problems.parse_polaris, POLARIS, {"question": POLARIS["problem"], "answer": "4"}),
        (problems.parse_deepmath, DEEPMATH, {"question": DEEPMATH["question"], "answer": r"\dfrac{1}{2}"}),
        (prompts.parse_tulu3, TULU3, [user("Hi")]),
        (prompts.parse_deepmath, DEEPMATH, [user("Evaluate the limit.")]),
    ],
)  # fmt: skip
def test_a_published_row_becomes_ours(parse: Callable[[Row], object], row: Row, expected: object) -> None:
    assert parse(row) == expected


@pytest.mark.parametrize(
    ("parse", "row", "reason"),
    [
        (chats.parse_messages, {}, "no messages"),
        (chats.parse_messages, {"messages": []}, "no messages"),
        (chats.parse_messages, {"messages": "Hi"}, "no messages"),
        (chats.parse_messages, {"messages": ["Hi"]}, "no role that is known, or no content"),
        (chats.parse_messages, {"messages": [{"role": "robot", "content": "Hi"}]}, "no role that is known"),
        (chats.parse_messages, {"messages": [{"role": "user"}]}, "no content"),
        (chats.parse_messages, {"messages": [{"role": "user", "content": "Hi"}]}, "no answer"),
        (chats.parse_messages, {"messages": [{"role": "assistant", "content": ""}]}, "answer is empty"),
        (chats.parse_openthoughts3, {"messages": TULU3["messages"]}, "no conversations"),
        (chats.parse_openthoughts3, {"conversations": ["1 + 1?"]}, "no sender that is known"),
        (chats.parse_openthoughts3, {"conversations": [{"from": "tool", "value": "x"}]}, "no sender that is known"),
        (chats.parse_openthoughts3, {"conversations": [{"from": "human", "value": None}]}, "no text"),
        (chats.parse_openthoughts3, {"conversations": [{"from": "human", "value": "1 + 1?"}]}, "no answer"),
        (problems.parse_gsm8k, {}, "no text as its question"),
        (problems.parse_gsm8k, GSM8K | {"answer": None}, "no text as its answer"),
        (problems.parse_gsm8k, GSM8K | {"answer": "12"}, "no result"),
        (problems.parse_gsm8k, GSM8K | {"answer": "12\n####"}, "no result"),
        (problems.parse_math, MATH | {"solution": "It is 3/4."}, "no result"),
        (problems.parse_math, MATH | {"solution": r"It is \boxed{3"}, "no result"),
        (problems.parse_math, MATH | {"problem": " "}, "no text as its problem"),
        (problems.parse_polaris, POLARIS | {"answer": ""}, "no text as its answer"),
        (problems.parse_polaris, POLARIS | {"answer": 4}, "no text as its answer"),
        (problems.parse_deepmath, {"question": "Evaluate the limit."}, "no text as its final_answer"),
        (prompts.parse_tulu3, {"messages": [{"role": "assistant", "content": "Hi"}]}, "no message of a user"),
        (prompts.parse_tulu3, {"messages": [{"role": "user", "content": " "}, "?"]}, "no message of a user"),
        (prompts.parse_deepmath, {"problem": "Evaluate the limit."}, "no question"),
    ],
)
def test_a_row_of_no_use_is_left_out_with_the_reason(parse: Callable[[Row], object], row: Row, reason: str) -> None:
    parsed = parse(row)
    assert isinstance(parsed, LeftOut)
    assert reason in parsed.reason


# ---- code


def deepcoder(tests: object, **more: object) -> Row:
    return {"problem": "Add them.", "tests": tests if isinstance(tests, str) else json.dumps(tests), **more}  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        (deepcoder([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]), [CodeTest("1 2\n", "3\n")]),
        (deepcoder([{"testtype": "stdin", "input": "1 2", "output": "3"}]), [CodeTest("1 2", "3")]),
        (deepcoder({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]}),
         [CodeTest("1 2\n", "3\n"), CodeTest("3\n4", "7")]),
        (deepcoder({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}),
         [CodeTest("1\n2", "3", "functional", "add")]),
        (deepcoder({"inputs": [[[1, 2]], ["ab"]], "outputs": [[3], ["ba"]], "fn_name": "f"}),
         [CodeTest("[1, 2]", "[3]", "functional", "f", "3"),
          CodeTest('"ab"', '["ba"]', "functional", "f", '"ba"')]),
        (deepcoder([{"type": "function_call", "fn_name": "f", "input": ["a", 2], "output": "aa"}]),
         [CodeTest('"a"\n2', '"aa"', "functional", "f")]),
        (deepcoder([{"testtype": "functional", "input": "1", "output": "2", "metadata": {"func_name": "f"}}]),
         [CodeTest("1", "2", "functional", "f")]),
        (deepcoder([{"testtype": "functional", "input": "1", "output": "2"}], metadata='{"func_name": "g"}'),
         [CodeTest("1", "2", "functional", "g")]),
    ],
)  # fmt: skip
def test_tests_come_in_the_forms_of_all_parts_of_the_set(row: Row, tests: list[CodeTest]) -> None:
    assert code.parse_deepcoder(row) == CodeProblem("Add them.", tuple(tests))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no text of a problem"),
        ({"problem": "Add them."}, "no tests"),
        (deepcoder("[{"), "no JSON"),
        (deepcoder([]), "no tests"),
        (deepcoder("3"), "no kind that is known"),
        (deepcoder(["1"]), "no kind that is known"),
        (deepcoder([{"input": "1"}]), "no output"),
        (deepcoder([{"input": "1", "output": "2", "type": "image"}]), "no kind that is known"),
        (deepcoder([{"input": "1", "output": "2", "type": "functional"}]), "no kind that is known"),
        (deepcoder({"inputs": ["1", "2"], "outputs": ["1"]}), "no input, no output"),
    ],
)
def test_a_problem_without_tests_that_can_be_run_is_left_out(row: Row, reason: str) -> None:
    parsed = code.parse_deepcoder(row)
    assert isinstance(parsed, LeftOut)
    assert reason in parsed.reason


def test_a_functional_test_names_its_function() -> None:
    with pytest.raises(InvalidRequest, match="names its function"):
        CodeTest("1", "2", "functional")


# ---- where they lie, and what is held out


def test_the_sets_of_the_hub_are_split_as_others_split_them() -> None:
    def part(entry: Published[Any]) -> tuple[list[str], list[str], int | None]:
        train, test = (
            sorted({f"{rows.source}/{rows.subset or ''}:{rows.split or 'train'}" for rows in part})
            for part in (entry.train, entry.test)
        )
        return train, test, entry.test_size

    assert part(chats.CHATS["no_robots"]) == (
        ["HuggingFaceH4/no_robots/:train"], ["HuggingFaceH4/no_robots/:test"], None,
    )  # fmt: skip
    assert part(chats.CHATS["tulu3"]) == (["allenai/tulu-3-sft-mixture/:train"], [], 1024)
    assert part(problems.PROBLEMS["gsm8k"]) == (["openai/gsm8k/main:train"], ["openai/gsm8k/main:test"], None)
    train, test, _ = part(problems.PROBLEMS["math"])
    assert (len(train), test) == (14, ["HuggingFaceH4/MATH-500/:test"])
    source = "agentica-org/DeepCoder-Preview-Dataset"
    assert part(code.CODE["deepcoder"]) == (
        [f"{source}/{subset}:train" for subset in ("lcbv5", "primeintellect", "taco")],
        [f"{source}/{subset}:test" for subset in ("codeforces", "lcbv5")],
        None,
    )


def test_no_problem_of_math_500_is_trained_on() -> None:
    identity = problems.PROBLEMS["math"].identity
    assert identity is not None
    assert identity({"question": "q", "answer": "1"}) == identity({"question": "q", "answer": "2"})


def test_all_of_a_set_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"some 60 GB; say how many rows, openthoughts3\[:100000\]"):
        chats.load("openthoughts3")


# ---- samples


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_every_set_has_a_sample_of_its_form(kind: str, name: str) -> None:
    rows = load_rows(f"sample:{name}")
    loaded = LOAD[kind](f"sample:{name}", test_size=2)
    assert len(loaded.train) + len(loaded.test) + loaded.num_left_out == len(rows) >= 8
    assert len(loaded.test) == 2
    assert loaded.num_left_out <= 1
    assert TABLES[kind][name].schema


def test_a_row_of_ones_own_that_is_no_problem_is_named_by_its_line(tmp_path: Any) -> None:
    (tmp_path / "own.jsonl").write_text('{"problem": "Add.", "tests": "[]"}\n')
    with pytest.raises(InvalidRequest, match=r"own\.jsonl, line 1 is no programming problem: it has no tests"):
        code.load(str(tmp_path / "own.jsonl"))
    (tmp_path / "own.jsonl").write_text('{"messages": [{"role": "robot", "content": "x"}]}\n')
    with pytest.raises(InvalidRequest, match=r"own\.jsonl, line 1: unknown role of message 0"):
        prompts.load(str(tmp_path / "own.jsonl"))
