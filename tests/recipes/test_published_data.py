"""The public data sets of the recipes, read by the library of the hub as it would read them there: each lies in a
folder of its name, with the splits and subsets that it has."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stovetop import datasets
from stovetop.recipes import rl_basic, sl_basic
from stovetop.tasks import chats, comparisons, problems
from stovetop.tasks.comparisons import COMPARISONS

pytestmark = pytest.mark.slow  # the library of the hub takes its time for each of them
Rows = Sequence[Mapping[str, object]]


@pytest.fixture(autouse=True)
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # OWNER/NAME is a folder here


def publish(name: str, subset: str | None = None, **splits: Rows) -> None:
    """As its owner would upload it: a file a split, and a card that says which subset they belong to."""
    folder = Path(name) / (subset or "data")
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(list(rows)), folder / f"{split}-00000-of-00001.parquet")
    files = "".join(f"  - split: {split}\n    path: {folder.name}/{split}-*\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {subset or 'default'}\n  data_files:\n{files}---\n"
    (Path(name) / "README.md").write_text(card)


def chat(number: int) -> dict[str, object]:
    question, answer = {"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}
    return {"prompt": f"q{number}", "messages": [question, answer], "category": "Chat"}


def test_no_robots_has_a_test_split_which_is_held_out() -> None:
    publish("HuggingFaceH4/no_robots", train=[chat(n) for n in range(6)], test=[chat(9)])
    loaded = chats.load("no_robots", None, test_size=4, seed=0)
    assert sorted(loaded.train_indices) == list(range(6))
    assert [messages[0]["content"] for messages in loaded.test] == ["q9"]
    Path("own.jsonl").write_text(json.dumps(chat(7)) + "\n")
    assert [messages[0]["content"] for messages in chats.load("no_robots", "own.jsonl", 4, 0).test] == ["q7"]
    sl_basic.check(sl_basic.Config(batch_size=6, base_url="recording"))


def test_gsm8k_has_a_test_split_too_and_is_a_subset_of_its_data_set() -> None:
    rows = [{"question": f"{n} + 1 = ?", "answer": f"It is.\n#### {n + 1}"} for n in range(5)]
    publish("openai/gsm8k", "main", train=rows[:4], test=rows[4:])
    split = problems.load("gsm8k", None, test_size=2, seed=0)
    assert sorted(str(row["question"]) for row in split.train) == [f"{n} + 1 = ?" for n in range(4)]
    assert split.test == [{"question": "4 + 1 = ?", "answer": "5"}]
    assert len(problems.load("gsm8k", "sample:gsm8k", 2, 0).test) == len(datasets.load_rows("sample:gsm8k"))
    rl_basic.check(rl_basic.Config(groups_per_batch=4, base_url="recording"))


@pytest.mark.parametrize(
    ("name", "source", "test_split"),
    [
        ("hhh", "Anthropic/hh-rlhf", "test"),
        ("helpsteer3", "nvidia/HelpSteer3", "validation"),
        ("ultrafeedback", "argilla/ultrafeedback-binarized-preferences", None),
    ],
)
def test_comparisons_are_read_by_their_name(name: str, source: str, test_split: str | None) -> None:
    rows = datasets.load_rows(f"sample:{name}")
    subset = COMPARISONS[name].train[0].subset
    publish(source, subset, train=rows[:-2], **({test_split: rows[-2:]} if test_split else {}))
    loaded = comparisons.load(name, None, test_size=3)
    assert len(loaded.test) == (2 if test_split else len(rows[:-2]) // 2)
    assert len(loaded.train) + len(loaded.test) + loaded.num_left_out == len(rows) - (0 if test_split else 2)


def test_prompts_to_distill_are_read_from_a_hub_too() -> None:
    publish("somebody/questions", train=[{"prompt": f"q{n}"} for n in range(3)])
    assert [row["prompt"] for row in datasets.stream_rows("somebody/questions")] == ["q0", "q1", "q2"]
