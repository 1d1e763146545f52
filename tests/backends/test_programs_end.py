"""How programs end that have a service open: by an exception, by Ctrl-C, whatever runs at that moment. Soon, without an
abort, as they would without a service; and all who wait are answered."""

import ast
import signal
from pathlib import Path

import pytest

from engine import tiny
from processes import Ended, signal_after

SOON_S = 5.0  # by which a program has ended that need not finish what it queued
SOON_WITH_TORCH_S = 20.0  # the same, where an interpreter with torch ends on a machine that is busy with other tests
SRC = Path(__file__).parents[2] / "src" / "stovetop"

HEAD = """
import asyncio, sys, threading, time
import stovetop as st

def datum(first=1, length=2):
    inputs = {'target_tokens': [2] * length, 'weights': [1.0] * length}
    return st.Datum(st.ModelInput.from_ints([first] * length), inputs)

def queue_many(client):
    return [client.forward_backward([datum()], 'cross_entropy') for _ in range(400)]

def under_way():
    print('under way', flush=True)

def in_a_thread(wait):
    def answered():
        try:
            wait()
        except st.StovetopError as error:
            print('answered:', error, flush=True)
    threading.Thread(target=answered).start()  # no daemon: Python waits for it

SLOW = {'latency_s': 0.05}  # so that 400 calls take twenty seconds
"""


def run(program: str, seconds: float = 0.2, by: signal.Signals = signal.SIGINT, *arguments: str) -> Ended:
    """Sends the signal so many seconds after the program said that it is under way."""
    return signal_after(["-c", HEAD + program, *arguments], seconds, by)


# ---- exceptions ------------------------------------------------------------------------------------------------------

AMID_WORK = """
def work(service):
    queue_many(service.create_lora_training_client('m').result())[0].result()
    under_way()
    exec(sys.argv[1])

if sys.argv[2] == 'with':
    with st.ServiceClient('recording', **SLOW) as service:
        work(service)
else:
    work(st.ServiceClient('recording', **SLOW))
"""


@pytest.mark.parametrize(
    ("end", "code", "form"),
    [
        ("raise ZeroDivisionError('mine')", 1, "plain"),
        ("raise SystemExit(7)", 7, "with"),
        pytest.param("raise ZeroDivisionError('mine')", 1, "with", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(7)", 7, "plain", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_ends_amid_work_ends_soon_and_as_it_wants_to(end: str, code: int, form: str) -> None:
    ended = run(AMID_WORK, 0.0, signal.SIGCONT, end, form)
    assert (ended.code, "ZeroDivisionError: mine" in ended.errors) == (code, code == 1)
    assert ("accepted calls that were not done: 39" in ended.errors) == (form == "plain")
    assert ended.seconds < SOON_S


def test_a_thread_of_the_user_that_waits_for_a_result_is_answered_when_the_main_thread_raises() -> None:
    ended = run(
        """
service = st.ServiceClient('recording', **SLOW)
futures = queue_many(service.create_lora_training_client('m').result())
in_a_thread(futures[-1].result)
under_way()
raise ZeroDivisionError('mine')
""",
        0.0,
        signal.SIGCONT,
    )
    assert (ended.code, "ZeroDivisionError: mine" in ended.errors) == (1, True)
    assert "answered: forward_backward (call 400 of" in ended.printed
    assert "main thread of the program has ended by ZeroDivisionError('mine')" in ended.printed
    assert ended.seconds < SOON_S


def test_a_thread_of_the_user_goes_on_when_the_main_thread_ends_without_an_exception() -> None:
    program = """
service = st.ServiceClient('recording', latency_s=0.02)
client = service.create_lora_training_client('m').result()
def go_on():
    for _ in range(30):
        client.forward_backward([datum()], 'cross_entropy').result()
    print('all done')
in_a_thread(go_on)
under_way()
"""
    ended = run(program, 0.0, signal.SIGCONT)
    assert (ended.code, ended.printed, ended.errors) == (0, "under way\nall done\n", "")


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

INTERRUPTED = {
    "the main thread waits": """
service = st.ServiceClient('recording', **SLOW)
futures = queue_many(service.create_lora_training_client('m').result())
in_a_thread(futures[-2].result)
under_way()
futures[-1].result()
""",
    "an event loop runs": """
async def main():
    service = st.ServiceClient('recording', **SLOW)
    futures = queue_many(await service.create_lora_training_client('m'))
    under_way()
    await futures[-1]
asyncio.run(main())
""",
    "an event loop runs, in a block": """
async def main():
    async with st.ServiceClient('recording', **SLOW) as service:
        futures = queue_many(await service.create_lora_training_client('m'))
        under_way()
        await asyncio.to_thread(futures[-1].result)
asyncio.run(main())
""",
    "a custom loss computes": """
service = st.ServiceClient('recording')
client = service.create_lora_training_client('m').result()
def loss(data, logprobs):
    under_way()
    while True: sum(range(1000))
in_a_thread(lambda: client.forward_backward_custom([datum()], loss).result())
time.sleep(60)
""",
    "a custom loss sleeps": """
service = st.ServiceClient('recording')
client = service.create_lora_training_client('m').result()
def loss(data, logprobs):
    under_way()
    time.sleep(60)
client.forward_backward_custom([datum()], loss).result()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_ends_a_program_soon_and_answers_all_who_wait(when: str) -> None:
    program = INTERRUPTED[when]
    ended = run(program)
    assert ended.code == -signal.SIGINT, ended.errors
    assert ended.errors.rstrip().endswith("KeyboardInterrupt") or "accepted calls that were not done" in ended.errors
    assert ("answered: forward_backward" in ended.printed) == ("in_a_thread" in program)
    assert ended.seconds < SOON_S


LONG_CALL = """
service = st.ServiceClient(threads=1)
client = service.create_lora_training_client(sys.argv[1]).result()
data = [datum(first, 200) for first in range(40)] * 100
for _ in range(4): client.forward_backward(data, 'cross_entropy')
under_way()
time.sleep(60)
"""


@pytest.mark.slow
def test_ctrl_c_within_a_long_call_ends_a_script_soon_and_without_an_abort(tmp_path: Path) -> None:
    """A call of 4,000 sequences takes ten seconds, and is the one that runs. It is its first one: while it runs, torch
    imports and executes strings, which makes Python forget that the program was ended by Ctrl-C."""
    ended = run(LONG_CALL, 0.2, signal.SIGINT, str(tiny.save_model(tmp_path / "tiny")))
    assert ended.code == -signal.SIGINT, ended.errors
    assert "KeyboardInterrupt" in ended.errors
    assert ended.seconds < SOON_WITH_TORCH_S


WITH_A_REAL_MODEL = {
    "it loads": """
service = st.ServiceClient()
made = service.create_lora_training_client(sys.argv[1])
under_way()
made.result()
""",
    "it trains": """
service = st.ServiceClient()
client = service.create_lora_training_client(sys.argv[1]).result()
under_way()
client.forward_backward([datum(k, 200) for k in range(1, 25)], 'cross_entropy').result()
""",
    "it saves": """
service = st.ServiceClient()
client = service.create_lora_training_client(sys.argv[1]).result()
under_way()
for index in range(100): client.save_state(f's{index}').result()
""",
}


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("when", WITH_A_REAL_MODEL)
def test_ctrl_c_ends_a_program_with_a_real_model_soon_and_without_an_abort(
    when: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = WITH_A_REAL_MODEL[when].replace("ServiceClient()", f"ServiceClient(storage={str(tmp_path)!r})")
    ended = run(program, 0.7, signal.SIGINT, str(smollm2))
    assert ended.code == -signal.SIGINT, ended.errors
    assert ended.seconds < SOON_WITH_TORCH_S


# ---- signals ---------------------------------------------------------------------------------------------------------

SETS_SIGNALS = {  # the command line's own process, and processes of ours
    "cli/interrupts.py",
    "cli/serve.py",
    "rl/worker_process.py",
    "tasks/sandbox/launcher.py",
}


def test_the_library_installs_no_signal_handler_and_no_exit_hook_of_its_own() -> None:
    sets_signals, has_hooks = set[str](), set[str]()
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        if "signal" not in text and "atexit" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Attribute(value=ast.Name("signal"), attr="signal" | "set_wakeup_fd" | "setitimer"):
                    sets_signals.add(str(path.relative_to(SRC)))
                case ast.Import(names=[ast.alias("atexit")]) | ast.ImportFrom(module="atexit"):
                    has_hooks.add(str(path.relative_to(SRC)))
                case _:
                    pass
    assert (sets_signals, has_hooks) == (SETS_SIGNALS, set())
