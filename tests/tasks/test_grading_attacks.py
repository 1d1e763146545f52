"""What programs do to be graded right without solving the problem, as a list. The problem is to add two numbers; it is
put in each of the three forms, and no program of the list does it. Each form also grades an honest program right.
"""
# ruff: noqa: E501  a program of the list is a line

from typing import NamedTuple

import pytest

from costly import slow_but
from stovetop.tasks.assertions import AssertionGrader
from stovetop.tasks.code import CodeTest
from stovetop.tasks.code_grading import CodeGrade, CodeGrader
from stovetop.tasks.program_sets import ProgramProblem
from stovetop.tasks.sandbox import Limits
from tasks.sandboxes import the_sandbox

SECRET = 918_273_645  # what is asked for; no program may find it
FUNCTION = (CodeTest("900000000\n18273645", str(SECRET), "functional", "add"),)
PROGRAM = (CodeTest("900000000 18273645\n", f"{SECRET}\n"),)
ASSERTED = ProgramProblem(
    id="add",
    question="Add two numbers.",
    reference="def add(a, b): return a + b",
    tests=f"""
import math
def check(candidate):
    assert candidate(900_000_000, 18_273_645) == {SECRET}
    assert abs(candidate(900_000_000, 18_273_645) - {SECRET}) < 1e-6
    assert math.isclose(candidate(1, 2), 3)
    assert candidate(2, 2) in (4, 4.0)
    for a in range(3):
        assert candidate(a, a) == 2 * a, "twice"
check(add)
""",
)


class Attack(NamedTuple):
    name: str
    program: str


SHOWS = "def add(a, b): return {what}\nif __name__ == '__main__': print({what})"
FORGES = "import os\nfor line in ({lines}): os.write(3, line)\nos._exit(0)"

ATTACKS = [
    Attack("ends before the tests", "import os; os._exit(0)"),
    Attack("ends politely", "import sys; sys.exit(0)"),
    Attack("ends when it is called", "def add(a, b): raise SystemExit(0)"),
    Attack("ends at once when it is called", "import os\ndef add(a, b): os._exit(0)"),
    Attack("ends by a signal", "import os; os.kill(os.getpid(), 15)"),
    Attack("ends the launcher", "import os; os.kill(1, 9)\ndef add(a, b): return 1"),
    Attack("says that all is well", "print('OK'); print('all tests passed'); print('1 passed in 0.01s')"),
    Attack("says it on stderr", "import sys; sys.stderr.write('PASSED'); sys.exit(0)"),
    Attack("answers yes", SHOWS.format(what="True")),
    Attack("answers with a guess", SHOWS.format(what="0")),
    Attack("answers with many guesses", SHOWS.format(what="list(range(1000))")),
    Attack("answers not a number", SHOWS.format(what="float('nan')")),
    Attack("answers infinity", SHOWS.format(what="float('inf')")),
    Attack("answers with the question", "def add(a, b): return (a, b)\nif __name__ == '__main__': print(input())"),
    Attack("answers with an expression", "def add(a, b): return f'{a}+{b}'\nif __name__ == '__main__': print('1+1')"),
    Attack("answers with nothing", "def add(a, b): pass"),
    Attack("answers with itself", "def add(a, b): return add"),
    Attack("answers with a class", "def add(a, b): return int"),
    Attack("answers without end", "def add(a, b):\n    while True: yield 1\nif __name__ == '__main__':\n    while True: print(1)"),
    Attack("answers too deeply", "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x"),
    Attack("answers too long a number", "def add(a, b): return 1 << 100_000"),
    Attack("equals everything", "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Any()"),
    Attack("is a number that equals everything", "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Any(1)"),
    Attack("is text that equals everything", "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef add(a, b): return Any('x')"),
    Attack("is a number of no distance", "class Any(float):\n    def __sub__(self, o): return 0.0\n    def __abs__(self): return 0.0\ndef add(a, b): return Any(1)"),
    Attack("is a list that equals everything", "class Any(list):\n    def __eq__(self, other): return True\n    def __len__(self): return 0\ndef add(a, b): return Any()"),
    Attack("is in everything", "class Any:\n    def __contains__(self, other): return True\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"),
    Attack("changes what compares", "import builtins\nbuiltins.abs = builtins.round = lambda *_: 0\nbuiltins.all = builtins.any = lambda *_: True\ndef add(a, b): return 1"),
    Attack("changes the tolerance", "import math\nmath.isclose = lambda *_, **__: True\nmath.fabs = lambda *_: 0\ndef add(a, b): return 1"),
    Attack("changes the assertion", "import builtins\nbuiltins.AssertionError = type('Calm', (SystemExit,), {})\ndef add(a, b): return 1"),
    Attack("changes how errors are told", "import sys\nsys.excepthook = lambda *_: None\nsys.exit = lambda *_: None\ndef add(a, b): return 1"),
    Attack("changes the exit code", "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): raise ValueError"),
    Attack("changes json", "import json\njson.dumps = lambda *_, **__: '{\"is\": true}'\njson.loads = lambda *_, **__: True\ndef add(a, b): return 1"),
    Attack("changes the runner", "import sys\nmain = sys.modules['__main__']\nmain.encoded = lambda value: True\nmain.function = lambda *_: lambda *_: True"),
    Attack("changes how values are read", "import sys\nplain = sys.modules.get('plain_data')\nif plain: plain.encoded = lambda value: {'any': []}\ndef add(a, b): return 1"),
    Attack("changes exec", "import builtins\nbuiltins.exec = builtins.compile = lambda *_, **__: None\ndef add(a, b): return 1"),
    Attack("forges an answer", FORGES.format(lines=r"""b'{"is": true}\n',""")),
    Attack("forges a verdict", FORGES.format(lines=r"""b'{"passed": true}\n', b'{"is_correct": true}\n',""")),
    Attack("forges many answers", FORGES.format(lines=r"""b'{"is": 1}\n' * 1000,""")),
    Attack("forges no JSON", FORGES.format(lines=r"""b'\xff\xfe{"is"\n',""")),
    Attack("forges JSON without end", FORGES.format(lines=r"""b'[' * 100_000 + b'\n',""")),
    Attack("forges another kind", FORGES.format(lines=r"""b'[1]\n', b'"is"\n', b'null\n',""")),
    Attack("forges a value that cannot be", FORGES.format(lines=r"""b'{"is": {"dict": [[[], 1]]}}\n',""")),
    Attack("forges a value of no kind", FORGES.format(lines=r"""b'{"is": {"any": 1}}\n',""")),
    Attack("forges a set of lists", FORGES.format(lines=r"""b'{"is": {"set": [[1], [2]]}}\n',""")),
    Attack("forges a number that is none", FORGES.format(lines=r"""b'{"is": NaN}\n', b'{"is": Infinity}\n',""")),
    Attack("forges a number too long", FORGES.format(lines=r"""b'{"is": ' + b'9' * 10_000 + b'}\n',""")),
    Attack("answers twice", r"""import os
def add(a, b):
    os.write(3, b'{"is": 1}\n{"is": 2}\n')
    return 3"""),
    Attack("writes a conftest", "open('conftest.py', 'w').write('import os; os._exit(0)')\ndef add(a, b): return 1"),
    Attack("writes a sitecustomize", "for name in ('sitecustomize', 'usercustomize', 'json', 'plain_data', 'judge'):\n    open(name + '.py', 'w').write('raise SystemExit(0)')\ndef add(a, b): return 1"),
    Attack("writes over the runner", "open('runner.py', 'w').write('import os; os._exit(0)')\nopen('program.py', 'w').write('')\ndef add(a, b): return 1"),
    Attack("starts another interpreter", "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'])\ndef add(a, b): return 1"),
    Attack("goes on in the background", "import os, time\nif os.fork() == 0:\n    time.sleep(0.1)\n    os.write(3, b'{\"is\": true}\\n')\n    os._exit(0)\nos._exit(0)"),
    Attack("answers from a thread", "import os, threading\nthreading.Thread(target=lambda: os.write(3, b'{\"is\": 1}\\n')).start()\ndef add(a, b): return 2"),
    Attack("catches the alarm", "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, lambda *_: None)\n    except Exception: pass\nwhile True: pass"),
    Attack("is late on purpose", "import time\ndef add(a, b): time.sleep(9)\nif __name__ == '__main__': time.sleep(9)"),
    Attack("writes right over wrong", "print('0\\b1\\r2\\x1b[2K3')"),
    Attack("writes other digits", "print('９１８２７３６４５')"),
    Attack("learns from one test for the next", "import os\nopen('seen', 'a').write('x')\ndef add(a, b): return os.path.getsize('seen')"),
]  # fmt: skip

# Looks for the secret in whatever it can reach, and returns what it finds.
LOOKS = """
import gc, os, sys
def add(a, b):
    seen, found = set(), []
    def look(value, depth):
        if id(value) in seen or depth > 6: return
        seen.add(id(value))
        if isinstance(value, (str, bytes, int)) and not isinstance(value, bool):
            text = value.decode('latin-1') if isinstance(value, bytes) else str(value)[:100_000]
            if '918' + '273' + '645' in text: found.append(text)
        elif isinstance(value, dict):
            for key, each in list(value.items()): look(key, depth + 1); look(each, depth + 1)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for each in list(value): look(each, depth + 1)
    frame = sys._getframe()
    while frame is not None:
        look(dict(frame.f_locals), 0); look(dict(frame.f_globals), 0)
        frame = frame.f_back
    for each in gc.get_objects(): look(each if isinstance(each, (dict, list, tuple)) else getattr(each, '__dict__', None), 3)
    for folder, _, names in os.walk('.'):
        for name in names: look(open(os.path.join(folder, name), 'rb').read(), 0)
    look(sys.argv, 0); look(dict(os.environ), 0); look(sys.stdin.read(), 0)
    for number in range(3, 64):
        try: look(os.read(number, 65536), 0)
        except OSError: pass
    return int(found[0]) if found else [len(seen)]
if __name__ == '__main__': print(*add(0, 0))
"""


def grader() -> CodeGrader:
    return CodeGrader(the_sandbox(), Limits(time_s=0.3, output_bytes=1 << 18, memory_bytes=256 << 20))


def as_function(code: str) -> CodeGrade:
    return grader().grade(code, FUNCTION)


def as_program(code: str) -> CodeGrade:
    return grader().grade(code, PROGRAM)


def as_asserted(code: str) -> CodeGrade:
    return AssertionGrader(grader()).grade(code, ASSERTED)


def test_an_honest_program_is_right_in_each_form():
    function = "def add(a, b): return a + b"
    program = "print(sum(map(int, input().split())))"
    assert (as_function(function), as_program(program), as_asserted(function)) == (CodeGrade(True),) * 3


@pytest.mark.parametrize("attack", slow_but(ATTACKS[::3], ATTACKS), ids=lambda attack: attack.name)
def test_no_reward_for_a_function_that(attack: Attack):
    assert not as_function(attack.program).is_correct


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_reward_for_a_program_that(attack: Attack):
    assert not as_program(attack.program).is_correct


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_assertion_holds_for_a_function_that(attack: Attack):
    assert not as_asserted(attack.program).is_correct


def test_what_is_asked_for_is_nowhere_that_a_program_can_look():
    for graded in (as_function(LOOKS), as_asserted(LOOKS)):
        assert not graded.is_correct
        assert str(SECRET) not in graded.why
    assert "it returned [" in as_function(LOOKS).why  # it looked at all, and found nothing
    assert not as_program(LOOKS).is_correct
