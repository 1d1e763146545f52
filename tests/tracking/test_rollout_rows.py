"""Rollouts as rows: in Parquet and in JSON lines alike, each once, and found by what they say and came to."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_rows import row, turn
from stovetop import extras
from stovetop.durable import write_file
from stovetop.errors import InvalidRequest, StovetopError, UnknownName
from stovetop.tracking.rollout_rows import (
    RolloutRow,
    as_json_lines,
    drop_rollouts,
    eval_split,
    find_rollouts,
    last_rollouts,
    read_rollouts,
    rollout_files,
    write_rollouts,
)

STRANGE = row(
    "it's “quoted” \N{COOKING}\\ \"x\"\n'; DROP",
    tags=[],
    policy_step=None,
    advantage=None,
    metrics={},
    chat=[{"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}]}],
    turns=[turn(logs={"judge": "fine", "score": 0.5})],
    notes=[{"tag": "p", "children": ["noted"]}, "text"],
    logprobs=[None, -1.5, -2.5, -0.25],
    trained_logprobs=[],
    advantages=[],
    member=1,
)


@pytest.fixture(params=["parquet", "jsonl"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose rollouts are written with pyarrow, or without."""
    if request.param == "jsonl":
        monkeypatch.setattr("stovetop.tracking.rollout_rows.is_installed", lambda module: False)
    else:
        assert extras.is_installed("pyarrow")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def all_of(run: Path, **conditions: Any) -> list[RolloutRow]:
    return read_rollouts(find_rollouts(run, **conditions).rollouts)


def test_rows_come_back_as_they_were_written_whatever_is_in_them(run: Path) -> None:
    rows = [row("four"), STRANGE]
    file = write_rollouts(run, rows)
    assert file.parent == run / "rollouts"
    assert file.stem == "000000_train"
    read = all_of(run)
    assert [replace(each, trained_logprobs=[], logprobs=[]) for each in read] == [
        replace(each, trained_logprobs=[], logprobs=[]) for each in rows
    ]
    assert read[0].trained_logprobs == pytest.approx([-0.51])
    assert read[1].logprobs == [None, -1.5, -2.5, -0.25]


def test_what_is_found_fits_every_condition_in_the_order_that_was_asked_for(run: Path) -> None:
    for step in range(3):
        rows = [row(f"answer {step} {member}", step=step, member=member, reward=member - 1.0) for member in range(3)]
        write_rollouts(run, rows)
    write_rollouts(run, [row("a very long answer", step=1, split=eval_split("test"), metrics={"correct": 0.0})])

    def answers(**conditions: Any) -> list[str]:
        return [each.answer.strip() for each in all_of(run, **conditions)]

    assert answers(where="reward < 0") == ["answer 0 0", "answer 1 0", "answer 2 0"]
    assert answers(where="reward < 0 OR reward > 0 -- and so on", step=2) == ["answer 2 0", "answer 2 2"]
    assert answers(grep="answer 1", split="train") == ["answer 1 0", "answer 1 1", "answer 1 2"]
    assert answers(grep="2+2?", limit=1, order="longest") == ["a very long answer"]
    assert answers(grep="ANSWER") == []
    assert answers(split="eval_test") == ["a very long answer"]
    assert answers(where="metrics['correct'] < 1") == ["a very long answer"]
    assert answers(where="list_contains(tags, 'sums')", order="worst", limit=2) == ["answer 0 0", "answer 1 0"]
    assert answers(order="best", limit=1, step=1, split="train") == ["answer 1 2"]
    assert answers(step=7) == []
    assert find_rollouts(run, where="reward < 0", limit=1).num_found == 3


def test_one_prompt_can_be_followed_over_the_steps(run: Path) -> None:
    for step in range(3):
        prompts = ["ab3f" * 3, "b3f" * 4]
        write_rollouts(run, [row(f"{step}.{n}", step=step, group=n, prompt=prompt) for n, prompt in enumerate(prompts)])
    found = find_rollouts(run, prompt="b3fb").rollouts
    assert [(each.values["step"], each.values["answer"]) for each in found] == [(0, " 0.1"), (1, " 1.1"), (2, " 2.1")]


def test_a_step_that_runs_again_replaces_its_rollouts_and_those_after_it_are_dropped(run: Path) -> None:
    for step in range(4):
        write_rollouts(run, [row(f"first {step}", step=step)])
        write_rollouts(run, [row(f"held out {step}", step=step, split="eval_test")])
        pages = run / f"iteration_{step:06d}"
        pages.mkdir()
        (pages / "train.html").touch()
        (pages / "eval_test.jsonl").touch()
        (pages / "mine.txt").touch()
    (run / "rollouts" / ".000002_train.parquet.writing-1a2b3c4d").touch()  # of a process that was killed
    drop_rollouts(run, 2)
    assert sorted(each.answer for each in all_of(run)) == [" first 0", " first 1", " held out 0", " held out 1"]
    assert {file.name[:6] for file in (run / "rollouts").iterdir()} == {"000000", "000001"}
    left = {step: sorted(file.name for file in (run / f"iteration_{step:06d}").iterdir()) for step in (1, 3)}
    assert left == {1: ["eval_test.jsonl", "mine.txt", "train.html"], 3: ["mine.txt"]}
    write_rollouts(run, [row("again", step=1)])
    assert [each.answer for each in all_of(run, step=1, split="train")] == [" again"]


def test_a_run_that_goes_on_in_the_other_format_has_no_rollout_twice(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [row("once")])
    lines = tmp_path / "rollouts" / "000000_train.jsonl"
    write_file(lines, as_json_lines([row("once")]))  # as a kill leaves it, between the new file and the old
    assert [each.answer for each in all_of(tmp_path)] == [" once"]
    write_rollouts(tmp_path, [row("anew")])
    assert [file.suffix for file in rollout_files(tmp_path)] == [".parquet"]
    assert not lines.exists()
    write_file(tmp_path / "rollouts" / "000001_train.jsonl", as_json_lines([row("later", step=1)]))
    assert [each.answer for each in all_of(tmp_path)] == [" anew", " later"]


def test_the_phases_of_a_run_are_read_with_it(tmp_path: Path) -> None:
    for number, name in enumerate(("1_first", "2_second")):
        phase = tmp_path / name
        phase.mkdir()
        write_rollouts(phase, [row(f"of {name}", step=number), row("no", step=number, member=1)])
    (tmp_path / "mine" / "rollouts").mkdir(parents=True)
    (tmp_path / "mine" / "rollouts" / "notes.jsonl").touch()
    assert [each.answer for each in all_of(tmp_path, where="traj_idx = 0")] == [" of 1_first", " of 2_second"]


def test_the_last_rollouts_are_those_of_the_last_step_that_trained(run: Path) -> None:
    assert last_rollouts(run) == []
    for step in (0, 11):
        write_rollouts(run, [row(f"{step}.{group}", step=step, group=group) for group in range(3)])
    write_rollouts(run, [row("held out", step=12, split="eval_test")])
    assert [each.answer for each in last_rollouts(run, limit=2)] == [" 11.0", " 11.1"]


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    run = tmp_path / "it's [a] {run}*"
    run.mkdir()
    write_rollouts(run, [row("four")])
    write_rollouts(run, [row("four", split=eval_split("held/out 'x'"))])
    assert [each.split for each in all_of(run)] == ["eval_held%2Fout%20%27x%27", "train"]


@pytest.mark.parametrize(
    "where",
    [
        "answer = (SELECT content FROM read_text('/etc/passwd'))",
        "rewards > 0",
        "reward >",
        "reward = 'much'",
        "true); DROP TABLE x; SELECT (1",
        "reward > 0; SELECT 1",
        ")",
    ],
)
def test_a_condition_that_is_none_is_refused_with_what_it_may_use(tmp_path: Path, where: str) -> None:
    write_rollouts(tmp_path, [row()])
    with pytest.raises(InvalidRequest, match="condition") as refused:
        find_rollouts(tmp_path, where=where)
    assert "semicolon" in str(refused.value) or "num_tokens" in str(refused.value)


@pytest.mark.parametrize("name", ["000001_train.parquet", "000001_train.jsonl"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_rollouts(tmp_path, [row()])
    (tmp_path / "rollouts" / name).write_bytes(b'{"step": ')
    with pytest.raises(StovetopError, match=name):
        find_rollouts(tmp_path)


def test_an_unknown_order_is_refused(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [row()])
    with pytest.raises(UnknownName, match="order"):
        find_rollouts(tmp_path, order="shortest")  # pyright: ignore[reportArgumentType]  what is refused


def test_json_lines_are_what_any_program_reads() -> None:
    [line] = as_json_lines([row("four", metrics={"odd": float("nan")})]).splitlines()
    read = json.loads(line)
    assert (read["answer"], read["metrics"], read["chat"][1]) == (
        " four",
        {"odd": "NaN"},
        {"role": "assistant", "content": "four"},
    )


@pytest.mark.slow
def test_a_hundred_thousand_rollouts_are_searched_in_under_a_second(tmp_path: Path) -> None:
    """On a machine that does nothing else; here the limit is three."""
    rows = [row("one two three four five six seven eight", group=n // 8, member=n % 8) for n in range(500)]
    for step in range(200):
        rewards = [(each.group_idx * 8 + step) / 1000 - 0.2 for each in rows]
        of_step = zip(rows, rewards, strict=True)
        write_rollouts(tmp_path, [replace(each, step=step, reward=reward) for each, reward in of_step])
    find_rollouts(tmp_path, where="step = 0")  # what a process pays once
    began_s = time.monotonic()
    found = find_rollouts(tmp_path, where="reward < 0", grep="eight", limit=20)
    assert time.monotonic() - began_s < 3
    assert len(found.rollouts) == 20
    assert found.num_found > 1000
