"""stovetop rollouts: what is found, as a table, as JSON lines and as a page."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rollout_rows import row
from stovetop.cli import main
from stovetop.run_folder import mark
from stovetop.tracking.rollout_rows import FACTS, write_rollouts

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Two steps of two groups of two."""
    folder = tmp_path / "run"
    folder.mkdir()
    mark(folder)
    for step in range(2):
        members = [(group, member) for group in range(2) for member in range(2)]
        rows = [row(f"s{step} g{g}\nm{m}", step=step, group=g, member=m, reward=m - 0.5) for g, m in members]
        write_rollouts(folder, rows)
    return str(folder)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["rollouts", *words]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_a_table_has_a_line_for_each_rollout(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, run, "--where", "reward < 0", "--limit", "3")
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if "train" in line]
    assert lines == [
        ["0", "train", "0.0", "-0.5", "2", "completed", "000000000000", "s0 g0 m0"],
        ["0", "train", "1.0", "-0.5", "2", "completed", "000000000001", "s0 g1 m0"],
        ["1", "train", "0.0", "-0.5", "2", "completed", "000000000000", "s1 g0 m0"],
    ]
    assert "3 of 4 rollouts; to read them: stovetop rollouts" in text


def test_json_has_all_of_them_with_their_chats(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in said(capsys, run, "--json", "--grep", "g1", "--order", "best").splitlines()]
    assert [(each["step"], each["group_idx"], each["traj_idx"]) for each in rows] == [
        (0, 1, 1), (1, 1, 1), (0, 1, 0), (1, 1, 0),
    ]  # fmt: skip
    assert rows[0]["chat"][-1] == {"role": "assistant", "content": "s0 g1\nm1"}
    assert set(rows[0]) == {*FACTS, "chat", "turns", "notes"}


def test_a_page_has_what_was_found(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page.html"
    assert f"2 of 2 rollouts: {file}" in said(
        capsys, run, "--prompt", "000000000001", "--step", "1", "--html", str(file)
    )
    text = file.read_text()
    assert "rollouts of run: step 1, 000000000001" in text
    assert "s1 g1" in text
    assert "s1 g0" not in text
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    told = said(capsys, run, "--open", "--limit", "1")
    assert "1 of 8 rollouts" in told
    assert "no browser could be started" in told
    assert Path(opened[0].removeprefix("file://")).read_text().count("<article") == 1


def test_what_is_not_there_and_what_is_wrong_is_said(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no rollout fits all of this" in said(capsys, run, "--step", "7")
    assert "tells upper and lower case apart" in said(capsys, run, "--grep", "nothing has this")
    assert "no rollout is of the split 'eval'; there are: train" in said(capsys, run, "--split", "eval")
    assert said(capsys, run, "--step", "7", "--json") == ""
    for where in ("rewrd > 0", "reward <", "reward < 0; DROP TABLE x"):
        assert "condition" in said(capsys, run, "--where", where, code=2)
    assert "may use: split, step" in said(capsys, run, "--where", "rewrd > 0", code=2)
    assert "there is no run in this folder" in said(capsys, str(tmp_path), code=2)
    assert "is a folder" in said(capsys, run, "--html", str(tmp_path), code=2)
    (tmp_path / "other").mkdir()
    mark(tmp_path / "other")
    assert "this run has no rollouts" in said(capsys, str(tmp_path / "other"), code=1)
    for words in (["--step", "-1"], ["--limit", "0"], ["--order", "odd"], ["--json", "--open"]):
        with pytest.raises(SystemExit, match="2"):
            main(["rollouts", run, *words])


def test_the_help_and_the_page_of_the_docs_name_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["rollouts", "--help"])
    told, page = capsys.readouterr().out, (DOCS / "rollouts.md").read_text()
    for name in FACTS:
        assert name in told
        assert f"`{name}`" in page


def test_every_command_of_the_page_of_the_docs_is_understood(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    commands = re.findall(r"^    stovetop rollouts (.*)$", (DOCS / "rollouts.md").read_text(), re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(re.sub(r" > \S+$", "", command).replace("runs/rl_loop", shlex.quote(run)))
        assert main(["rollouts", *words]) == 0
