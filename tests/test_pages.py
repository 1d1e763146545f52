"""What the README and the pages of docs/ show, works as it is printed. Those about a server are in
server/test_pages_about_serving.py.

A page is one test, since its examples go on from one another; so Sybil is called here, and not by its plugin, which
makes a test of each example (and pytest-xdist spreads those)."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pages import PAGES, ROOT, Reader, name_of, work_in
from stovetop.cli import main

AT_A_SERVER = {"openai", "serving"}
SLOW = {  # several runs each, to their end: half a second and more
    "evaluation", "first_hour", "resume", "seeing_runs", "sweeps", "workflows", "workflows/insert_a_kl_stage",
    "workflows/new_method", "workflows/two_phases",
}  # fmt: skip
RUN = "run sl_loop base_url=recording renderer_name=role_colon epochs=1"
RL_RUN = (
    "run rl_loop base_url=recording renderer_name=role_colon dataset=sample:gsm8k test_size=2 groups_per_batch=2 "
    "group_size=2 max_tokens=4 max_steps=1"
)
SWEEP = "sweep sl_basic:small base_url=recording learning_rate=1e-4,1e-3 max_steps=1"
BEFORE = {  # commands that a page takes for done, on the fake model
    "README": [RUN, RL_RUN],
    "rollouts": [RL_RUN],
    "first_hour": [f"{RUN} log_path=runs/sl_basic_small", f"{RL_RUN} log_path=runs/rl_basic_small"],
    "trackers": [f"{RUN} log_path=runs/sl_basic"],
    "seeing_runs": [SWEEP, *(f"{RUN} log_path=runs/{name}" for name in ("sl_basic", "low_rate", "high_rate"))],
    "sweeps": [SWEEP],
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_in(tmp_path, monkeypatch)


@pytest.fixture
def make_reader(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reader]:
    return lambda **replaced: Reader(capsys, monkeypatch, **replaced)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if name_of(page) in SLOW else [])
        for page in PAGES
        if name_of(page) not in AT_A_SERVER | {"README"}
    ],
)
def test_a_page_does_what_it_says(page: Path, make_reader: Callable[..., Reader]) -> None:
    """A second or less: on a fake model."""
    for command in BEFORE.get(name_of(page), ()):
        assert main(command.split()) == 0
    make_reader().read(page)


def test_the_readme_does_what_it_says_and_its_loop_learns(make_reader: Callable[..., Reader]) -> None:
    for command in BEFORE["README"]:
        assert main(command.split()) == 0
    reader = make_reader(replaced={"st.ServiceClient()": 'st.ServiceClient("recording")'})
    reader.read(ROOT / "README.md")
    (printed,) = reader.all_printed
    losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats", printed)]
    assert len(losses) == 8
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("    stovetop rum sl_loop\n", "unknown command 'rum'"),
        ("    stovetop run sl_loop lerning_rate=1\n", "did you mean"),
        ("Try `stovetop run sl_lop` now.\n", "unknown recipe 'sl_lop'"),
        ("Try `stovetop\nrum RUN` now.\n", "unknown command 'rum'"),
        ("    stovetop report runs/never\n", "runs/never"),
        ("    make dinner\n", "dinner"),
        ("    pip install 'stovetop[lamb]'\n", "unknown extra 'lamb'"),
        ("    python benchmarks/none.py\n", "benchmarks/none.py"),
        ("    print(1)\n", "an indented block has commands"),
        ("```python\nprint(1)\n```\n", "does not say that its program prints: 1"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "printed: 1\n\nshown: 2\n"),
        ("```python\nprint(x)\n```\n", "name 'x' is not defined"),
        ("```ruby\nputs 1\n```\n", "ruby"),
    ],
)
def test_a_page_that_says_what_is_not_so_is_refused(
    page: str, error: str, tmp_path: Path, make_reader: Callable[..., Reader], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# A page\n\n{page}")
    with pytest.raises(Exception) as refused:  # noqa: PT011  of whatever kind
        make_reader().read(file)
    assert error in f"{refused.value}{capsys.readouterr().err}"
