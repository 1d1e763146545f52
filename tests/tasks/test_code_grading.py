"""How programs run, what counts as equal, and what becomes of a grader whose sandbox fails. What
programs do to be right without earning it is in `test_grading_attacks.py`.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.errors import EnvError, GradeError, InvalidRequest, SandboxError
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from stovetop.rl.rollouts import ErrorPolicy, MinViableGroup, RetryOnFailure, Rollouts, do_rollouts
from stovetop.tasks.code import CodeProblem, CodeTest
from stovetop.tasks.code_grading import CodeGrader, CodingProblem, same_tokens, same_value
from stovetop.tasks.inside.plain_data import decoded, encoded
from stovetop.tasks.sandbox import DEFAULT_LIMITS, Completed, Limits, Sandbox
from stovetop.types import ModelInput
from tasks.sandboxes import the_sandbox

TOKENIZER = ByteTokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```"


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1\n2", "1 2", True),
        ("  1\t2  \n\n", "1 2\n", True),
        ("1 2 3", "1 2", False),
        ("1", "1 2", False),
        ("", "", True),
        ("", "0", False),
        ("yes", "YES", False),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("1e-7", "0.0", True),
        ("100000000.5", "100000000.0", True),
        ("7.0", "7", False),
        ("+7", "7", True),
        ("007", "7", True),
        ("1000000000000000001", "1000000000000000000", False),
        ("5", "5.0", True),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("inf", "1e400", False),
        ("1e999", "1.0", False),
        ("7", "７", False),
        ("9" * 5000, "8" * 5000, False),
        ("1\x002", "12", False),
    ],
)
def test_output_is_compared_word_by_word_and_numbers_with_a_tolerance(given: str, wanted: str, same: bool):
    assert same_tokens(given, wanted) is same


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ((1, 2), [1, 2], True),
        ([(1, "a")], [[1, "a"]], True),
        ([1, 2], [1, 2, 3], False),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (1.0000001, 1, False),
        (True, 1, True),
        ("1", 1, False),
        (None, None, True),
        (None, False, False),
        ({1: "a"}, {"1": "a"}, True),
        ({"a": 1.0}, {"a": 1.00000001}, True),
        ({"a": 1}, {"b": 1}, False),
        ({1, 2}, [1, 2], False),
        ("ab", ["a", "b"], False),
        (float("nan"), 1.0, False),
        (float("inf"), 1e308, False),
        (10**400, 1.5, False),
        ([-(10**400)], [0.0], False),
    ],
)
def test_what_a_function_returns_is_compared_as_json(given: object, wanted: object, same: bool):
    assert same_value(given, wanted) is same


@pytest.mark.parametrize(
    "value", [None, True, 3, -1.5, "é", b"\x00\xff", [1, (2, [])], {"a": {1: (2,)}}, {1, 2}, frozenset("a"), 2 + 3j]
)
def test_plain_values_go_over_as_they_are(value: object):
    back = decoded(encoded(value))
    assert back == value
    assert type(back) is type(value)


# ---- programs --------------------------------------------------------------------------------------------------------

SUM = CodeProblem("Print the sum of two numbers.", (CodeTest("3 4\n", "7\n"), CodeTest("-2 9\n", "7\n")))


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (fenced("print(sum(map(int, input().split())))"), 1.0),
        (fenced("print(8)"), 0.0),
        (fenced("1 / 0"), 0.0),
        (fenced("while True: pass"), 0.0),
        ("The sum.", -0.1),
    ],
)
def test_the_reward_is_for_passing_every_test_and_for_a_block_of_code(answer: str, reward: float):
    grader = CodeGrader(the_sandbox(), Limits(time_s=0.3 if "while" in answer else 6.0))
    env = ProblemEnv(CodingProblem(SUM, grader), RENDERER, slow_checks=True)
    action = asyncio.run(answers(answer)(ModelInput.empty(), []))
    assert asyncio.run(env.step(action)).reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("code", "test", "why"),
    [
        ("print(input()[::-1])", CodeTest("ab\n", "ba"), ""),
        ("print('ab')", CodeTest("", "ba"), "it wrote 'ab"),
        ("print(2)\n1/0", CodeTest("", "2"), "ZeroDivisionError"),
        ("print(2)\nraise SystemExit(1)", CodeTest("", "2"), "exit code 1"),
        ("print(2, end='', flush=True)\nwhile True: pass", CodeTest("", "2"), "it was ended: time"),
        ("def f(a, b): return a * b", CodeTest('"ab"\n2', '"abab"', "functional", "f"), ""),
        ("class Solution:\n def f(self, a: List[int]): return max(a)", CodeTest("[1, 3]", "3", "functional", "f"), ""),
        ("def f(a): return (a, deque([a])[0])", CodeTest("1", "[1, 1]", "functional", "f"), ""),
        ("def f(a): return a", CodeTest("1", "[1]", "functional", "f", or_output="1"), ""),
        ("def f(a): return [a]", CodeTest("1", "[1]", "functional", "f", or_output="1"), ""),
        ("def f(a): return a", CodeTest("True", "True", "functional", "f"), ""),
        ("def f(a): return 1 / a", CodeTest("0", "0", "functional", "f"), "ZeroDivisionError"),
        ("def g(a): return a", CodeTest("0", "0", "functional", "f"), "AttributeError"),
        ("def f(a: return a", CodeTest("0", "0", "functional", "f"), "SyntaxError, as it was loaded"),
        ("def f(a): return object()", CodeTest("0", "0", "functional", "f"), "no plain value"),
        ("def f(a):\n    print('noise')\n    return a", CodeTest("0", "0", "functional", "f"), ""),
        ("def f(a): return a\nif __name__ == '__main__': 1 / 0", CodeTest("0", "0", "functional", "f"), ""),
    ],
)  # fmt: skip
def test_programs_and_functions_are_run_and_what_is_wrong_is_said(code: str, test: CodeTest, why: str):
    graded = CodeGrader(the_sandbox(), Limits(time_s=1.0)).grade(code, [test])
    assert graded.is_correct is (why == "")
    assert why in graded.why


def test_a_problem_without_tests_is_refused():
    with pytest.raises(InvalidRequest, match="at least one test"):
        CodeGrader(the_sandbox()).grade("print(1)", [])


def test_the_question_says_what_form_is_wanted():
    asked = CodingProblem(SUM, CodeGrader(the_sandbox())).get_question()
    assert asked.startswith("Print the sum")
    assert "reads standard input" in asked
    completes = CodeProblem("Double it.", SUM.tests, starter_code="def double(n):")
    assert "```python\ndef double(n):\n```" in CodingProblem(completes, CodeGrader(the_sandbox())).get_question()


# ---- a sandbox that fails --------------------------------------------------------------------------------------------


@dataclass
class Writes:
    """A sandbox in which every program writes this as its answer."""

    answer: bytes

    def run(
        self, files: Mapping[str, bytes], command: Sequence[str], limits: Limits = DEFAULT_LIMITS, stdin: bytes = b""
    ) -> Completed:
        return Completed(0, b"", b"", self.answer, None, 0.1)


@pytest.mark.parametrize(
    "value", [b"[" * 600 + b"]" * 600, b'{"set": [[]]}', b'{"truth": 2}', b'{"is": 1}', b'{"dict": [[[1], 2]]}']
)
def test_what_no_runner_would_have_written_counts_as_raised(value: bytes):
    """Values that are nested until nothing can write them down for the judge stopped a run."""
    answers, _ = CodeGrader(Writes(b'{"is": ' + value + b"}\n")).call("", [["f", [], {}]])
    assert answers == [{"raised": "no plain value"}]


class FailingSandbox:
    """The first so many programs cannot be run; of the others, each writes 7."""

    def __init__(self, num_failures: int = 1_000_000, takes_s: float = 0.0) -> None:
        self.num_failures, self.takes_s = num_failures, takes_s
        self.running, self.most = 0, 0
        self._lock = threading.Lock()

    def run(
        self, files: Mapping[str, bytes], command: Sequence[str], limits: Limits = DEFAULT_LIMITS, stdin: bytes = b""
    ) -> Completed:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.num_failures -= 1
        time.sleep(self.takes_s)
        with self._lock:
            self.running -= 1
        if self.num_failures >= 0:
            raise SandboxError("the sandbox did not start")
        return Completed(0, b"7\n", b"", b"", None, self.takes_s)


def answers(text: str):
    async def answer(
        model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        tokens = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "stop")

    return answer


def played(sandbox: Sandbox, on_error: ErrorPolicy) -> Rollouts:
    problem = CodingProblem(SUM, CodeGrader(sandbox))
    builder = ProblemGroupBuilder(partial(ProblemEnv, problem, RENDERER, slow_checks=True), 2)
    return asyncio.run(do_rollouts([builder], answers(fenced("print(7)")), on_error))


def test_a_sandbox_that_fails_is_no_wrong_answer_the_run_stops():
    with pytest.raises(EnvError) as stopped:
        played(FailingSandbox(), RetryOnFailure(max_retries=1))
    assert isinstance(stopped.value.__cause__, GradeError)


def test_or_the_group_is_dropped_and_counted():
    rollouts = played(FailingSandbox(), MinViableGroup(max_retries=1))
    assert rollouts.owned_groups_P == []
    assert rollouts.num_groups_skipped == 1
    assert rollouts.error_metrics()["rollout_errors/total"] == 4


def test_a_sandbox_that_fails_once_is_tried_again():
    rollouts = played(FailingSandbox(1), RetryOnFailure(max_retries=1))
    ((_, group),) = rollouts.owned_groups_P
    assert group.get_total_rewards() == [1.0, 1.0]


def test_fifty_gradings_at_once_keep_to_the_number_of_sandboxes():
    sandbox = FailingSandbox(0, takes_s=0.004)
    grader = CodeGrader(sandbox, max_at_once=4)
    with ThreadPoolExecutor(50) as threads:
        graded = list(threads.map(lambda _: grader.grade("", SUM.tests), range(50)))
    assert all(each.is_correct for each in graded)
    assert sandbox.most == 4
