"""The published tinker-cookbook runs as it is, on this package and, with the official SDK, on a server; is killed, and
goes on. Each run is in a process of its own, since `as_tinker` acts on the whole process. They take minutes, so only
.ci/run runs them.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import tiny
from missing import COOKBOOK
from processes import run_python
from serving import Served, served

PROGRAM = Path(__file__).parent / "cookbook_runs.py"
NUM_STEPS = 12
NUM_STEPS_OVER_THE_WIRE = 5
NAME = "kitchen/boxing"  # of the model, for clients of the server
LIMIT_S = 300.0  # of one run to its end, and of the import of every module
LOCAL, RECORDING = "", "recording"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and data for every run."""
    if importlib.util.find_spec(COOKBOOK) is None:
        raise ModuleNotFoundError(f"{COOKBOOK} is not installed; run: make .venv/installed-test", name=COOKBOOK)
    folder = tmp_path_factory.mktemp("kitchen")
    tiny.save_model(folder / "model", boxing_model())
    say = [[message("user", f"Say {i}"), message("assistant", f"It is {i}.")] for i in range(26)]
    no = message("assistant", "no")
    pairs = [{"prompt_conversation": [user], "completion_A": [good], "completion_B": [no]} for user, good in say]
    write_rows(folder / "chats.jsonl", [{"messages": chat} for chat in say])
    write_rows(folder / "comparisons.jsonl", [{"comparison": pair, "label": "A"} for pair in pairs])
    write_rows(folder / "questions.jsonl", [{"question": f"{i}?", "answer": f"#### {i % 2 + 1}"} for i in range(26)])
    return folder


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def boxing_model() -> torch.nn.Module:
    r"""A Llama whose next token depends on the last one alone. It answers \boxed{1} or \boxed{2}, and ends there or
    goes on, so that rewards differ within a group."""
    tokenizer = tiny.tokenizer()
    model = tiny.llama(
        hidden_size=tiny.VOCAB_SIZE, intermediate_size=32, num_hidden_layers=1, max_position_embeddings=2048
    )
    logits_VV = torch.full((tiny.VOCAB_SIZE, tiny.VOCAB_SIZE), -4.0)  # of the next token, by the last one
    follows = {":": "\\", "\\": "b", "b": "o", "o": "x", "x": "e", "e": "dr", "d": "{", "{": "12", "1": "}", "2": "}"}
    follows |= {"}": "\n", "\n": "\nU", "U": "s", "s": "e", "r": ":"}
    for last, successors in follows.items():
        for successor in successors:
            logits_VV[token_of(tokenizer, successor), token_of(tokenizer, last)] = 8.0
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(tiny.VOCAB_SIZE))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(logits_VV / tiny.VOCAB_SIZE**0.5)
    return model


def token_of(tokenizer: tiny.PreTrainedTokenizerFast, character: str) -> int:
    (token,) = tokenizer.encode(character, add_special_tokens=False)
    return token


def write_rows(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("run", "base_url"),
    [
        ("supervised", LOCAL),
        ("reinforcement", LOCAL),
        ("reinforcement_streaming", LOCAL),
        ("reinforcement_async", RECORDING),
        ("preference", LOCAL),
        ("distillation", RECORDING),
        ("flat_supervised", RECORDING),
        ("flat_reinforcement", LOCAL),
    ],
)
def test_a_published_loop_is_killed_and_goes_on(
    run: str, base_url: str, kitchen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_home(tmp_path, kitchen, monkeypatch)
    command = [str(PROGRAM), run, str(tmp_path), str(tmp_path / "model"), base_url, str(NUM_STEPS)]
    kill_and_resume(command, tmp_path, NUM_STEPS)


@pytest.fixture(scope="module")
def server(kitchen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served([f"{NAME}={kitchen / 'model'}"], tmp_path_factory.mktemp("server") / "storage") as server:
        server.wait_until_it_serves()
        yield server


@pytest.mark.parametrize(
    "run",
    [
        "supervised",
        "reinforcement",
        "reinforcement_substeps",
        "reinforcement_cispo",
        "reinforcement_streaming",
        "reinforcement_async",
        "preference",
        "distillation",
        "flat_supervised",
        "flat_reinforcement",
    ],
)
def test_over_the_wire_a_published_loop_is_killed_and_goes_on(
    run: str, server: Served, kitchen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is found where the server says, and without a network."""
    over_the_wire(server, tmp_path, kitchen, monkeypatch)
    command = [str(PROGRAM), run, str(tmp_path), NAME, server.url, str(NUM_STEPS_OVER_THE_WIRE)]
    kill_and_resume(command, tmp_path, NUM_STEPS_OVER_THE_WIRE)


def test_over_the_wire_a_published_loop_does_not_notice_that_its_server_is_killed(
    server: Served, kitchen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_the_wire(server, tmp_path, kitchen, monkeypatch)
    num_steps = str(NUM_STEPS_OVER_THE_WIRE)
    with (tmp_path / "said.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "reinforcement", str(tmp_path), NAME, server.url, num_steps],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for_checkpoints(process, tmp_path)
            server.child.send_signal(signal.SIGKILL)
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait(30)
    assert code == 0, (tmp_path / "said.txt").read_text()[-4000:]
    steps = {row["step"] for row in read_rows(tmp_path / "log" / "metrics.jsonl")}
    assert set(range(NUM_STEPS_OVER_THE_WIRE)) <= steps  # and the last evaluation


@pytest.mark.parametrize("run", ["reinforcement_stable", "flat_reinforcement_stable"])
def test_over_the_wire_the_cookbooks_default_loss_is_refused_with_what_to_pass_before_anything_is_drawn(
    run: str, server: Served, kitchen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_the_wire(server, tmp_path, kitchen, monkeypatch)
    done = run_python(str(PROGRAM), run, str(tmp_path), NAME, server.url, "3", limit_s=LIMIT_S)
    assert done.returncode != 0
    said = "pass loss_fn='importance_sampling', 'ppo' or 'cispo'"
    assert said in done.stdout + done.stderr, (done.stdout + done.stderr)[-4000:]
    assert not [row for row in read_rows(tmp_path / "log" / "metrics.jsonl") if "optim/lr" in row]


def at_home(folder: Path, kitchen: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """The data are in the run's folder, which is its home: checkpoints of the local backend are there, those of the
    recording one in the temporary folder."""
    for file in kitchen.iterdir():
        (folder / file.name).symlink_to(file)
    for name, value in {"HOME": str(folder), "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1", **variables}.items():
        monkeypatch.setenv(name, value)


def over_the_wire(server: Served, folder: Path, kitchen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.wait_until_it_serves()
    at_home(folder, kitchen, monkeypatch, **server.exports, TINKER_TELEMETRY="0")
    assert NAME.replace("/", "--") in "".join(os.listdir(server.exports["HF_HUB_CACHE"]))


def kill_and_resume(command: list[str], folder: Path, num_steps: int) -> None:
    kill_after_two_checkpoints(command, folder)
    saved = checkpoints(folder)
    assert not any(row.get("batch") == num_steps or row["name"] == "final" for row in saved)
    done = run_python(*command, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    resumed = checkpoints(folder)[len(saved) :]
    assert [position(row) for row in resumed[:1]] >= [position(saved[-1])], "it did not go on from its checkpoint"
    assert resumed[-1]["name"] == "final"
    rows = read_rows(folder / "log" / "metrics.jsonl")
    missing = set(range(num_steps)) - {row["step"] for row in rows}
    assert len(missing) <= 1, missing  # the cookbook saves a step before it logs it, so a kill between loses one row
    assert any(row.get("reward/total", 1.0) or row.get("env/all/reward/total", 1.0) for row in rows)


def kill_after_two_checkpoints(command: list[str], folder: Path) -> None:
    with (folder / "killed.txt").open("w") as output:
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for_checkpoints(process, folder)
            assert process.poll() is None, f"it ended by itself: {(folder / 'killed.txt').read_text()[-4000:]}"
        finally:
            process.kill()
            process.wait(timeout=30)


def wait_for_checkpoints(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """For two, or until the process has ended."""
    give_up_s = time.monotonic() + 240
    while len(checkpoints(folder)) < 2 and process.poll() is None and time.monotonic() < give_up_s:
        time.sleep(0.01)


def position(row: dict[str, object]) -> tuple[object, object]:
    return row.get("epoch", 0), row["batch"]


def checkpoints(folder: Path) -> list[dict[str, object]]:
    return read_rows(folder / "log" / "checkpoints.jsonl")


def read_rows(file: Path) -> list[dict[str, object]]:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last may be half written
    return [json.loads(line) for line in lines]


IMPORTS = """
import importlib, pkgutil, tinker_cookbook
for module in pkgutil.walk_packages(tinker_cookbook.__path__, "tinker_cookbook.", onerror=lambda name: None):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except BaseException:
            continue
        print("imported", module.name)
"""


def test_every_module_that_imports_with_the_sdk_imports_with_this_package(
    kitchen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_sdk, with_ours = imported(IMPORTS), imported("import stovetop.as_tinker" + IMPORTS)
    with capsys.disabled():
        print(f"\n{len(with_sdk)} modules of tinker-cookbook import with the SDK, {len(with_ours)} with stovetop")  # noqa: T201
    assert with_sdk - with_ours == set()
    assert len(with_sdk) > 100


def imported(program: str) -> set[str]:
    done = run_python("-c", program, limit_s=LIMIT_S, check=True)
    return {line.split()[1] for line in done.stdout.splitlines() if line.startswith("imported ")}
