"""What the README shows, works as written."""

import re
import shlex
from pathlib import Path

import pytest

from processes import run_python
from stovetop.cli import main, understand
from stovetop.run_folder import mark

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_loop_of_the_readme_runs_and_learns(tmp_path: Path) -> None:
    (loop,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    on_the_fake_model = loop.replace("st.ServiceClient()", 'st.ServiceClient("recording")')
    assert on_the_fake_model != loop
    done = run_python("-c", on_the_fake_model, cwd=tmp_path, check=True)
    losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats", done.stdout)]
    assert len(losses) == 8
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_the_commands_of_the_readme_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "sl_loop", "base_url=recording", "renderer_name=role_colon", "epochs=1"]) == 0  # to go on with
    Path("runs/rl_loop").mkdir(parents=True)
    mark(Path("runs/rl_loop"))  # to be read
    commands = re.findall(r"(?:^    |`)stovetop (.*?)(?:#.*)?(?:`|$)", README, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)
        understand([*words, "base_url=recording", "log_path=runs/of_its_own"] if words[0] == "run" else words)


def test_the_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^    make (\w+)", README, re.MULTILINE))
    assert targets == {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
