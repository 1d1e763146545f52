import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop import datasets
from stovetop.errors import InvalidRequest, MissingExtra, UnknownName
from stovetop.renderers.messages import FunctionCall, ToolCall

HELLO = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]}


def jsonl(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


# ---- sources


def test_rows_of_a_file_come_in_its_order_and_empty_lines_do_not_count(tmp_path: Path):
    assert datasets.load_rows(jsonl(tmp_path / "rows.jsonl", {"n": 1}, "", {"n": 2})) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{oops", "line 2 is not JSON"),
        ("[1]", "line 2 must be a JSON object"),
        ('{"a": "\\ud83d"}', "line 2 holds half of a surrogate pair"),
        ("[" * 100_000, "line 2 has too many brackets within brackets"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: str, complaint: str):
    with pytest.raises(InvalidRequest, match=f"rows.jsonl, {complaint}"):
        datasets.load_rows(jsonl(tmp_path / "rows.jsonl", {"n": 1}, line))


def test_bytes_that_are_no_text_are_named_by_file_and_line(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"n": 1}\n{"n": "\xff"}\n')
    with pytest.raises(InvalidRequest, match=r"rows\.jsonl, line 2 is not JSON"):
        datasets.load_rows(str(tmp_path / "rows.jsonl"))


def test_a_pair_of_surrogates_is_text(tmp_path: Path):
    assert datasets.load_rows(jsonl(tmp_path / "rows.jsonl", '{"a": "\\uD83D\\uDE00"}')) == [{"a": "😀"}]


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="no such file"):
        datasets.load_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(InvalidRequest, match="no row"):
        datasets.load_rows(jsonl(tmp_path / "empty.jsonl"))
    with pytest.raises(InvalidRequest, match="no row"):
        datasets.load_rows(parquet(tmp_path / "empty.parquet", []))


@pytest.mark.parametrize("source", ["x" * 300 + ".jsonl", "~no-such-user/rows.jsonl"])
def test_what_cannot_be_a_path_is_refused(source: str):
    with pytest.raises(InvalidRequest, match=r"cannot be the path of a file|no such file"):
        datasets.load_rows(source)


def test_the_sample_of_chats_is_shipped_and_every_chat_ends_with_an_answer():
    chats = datasets.load_chats("sample:chats")
    assert len(chats) == 24
    assert all(chat[-1]["role"] == "assistant" for chat in chats)
    assert datasets.sample_names() == sorted(datasets.sample_names()) != []


def test_an_unknown_sample_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match="did you mean 'chats'"):
        datasets.load_rows("sample:chat")


def test_chats_are_the_messages_of_rows(tmp_path: Path):
    assert datasets.load_chats(jsonl(tmp_path / "chats.jsonl", {**HELLO, "id": 7})) == [HELLO["messages"]]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "hi"}, "line 2: a chat needs 'messages'"),
        ({"messages": []}, "line 2: a chat needs 'messages'"),
        ({"messages": [HELLO["messages"][0], {"role": "robot", "content": "beep"}]}, "line 2, message 1.*'robot'"),
        ({"messages": [{"role": "user", "content": 3}]}, "line 2, message 0: content"),
        ({"messages": [{"role": "user", "text": "hi"}]}, "line 2, message 0.*'text'"),
    ],
)
def test_a_chat_that_is_none_is_named_by_file_line_message_and_field(tmp_path: Path, row: object, complaint: str):
    with pytest.raises(InvalidRequest, match=complaint):
        datasets.load_chats(jsonl(tmp_path / "chats.jsonl", HELLO, row))


def test_a_hub_dataset_is_loaded_by_the_library_that_knows_hubs(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(name: str, *, split: str) -> list[dict[str, str]]:
        return [{"name": name, "split": split}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert datasets.load_rows("owner/name") == [{"name": "owner/name", "split": "train"}]
    assert datasets.load_rows("owner/name", split="test")[0]["split"] == "test"


def test_without_that_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"stovetop\[data\]"):
        datasets.load_rows("owner/name")


def test_a_name_that_is_no_source_is_refused_with_what_could_be_one():
    for name in ("chats", "", "a/b/c"):
        with pytest.raises(UnknownName, match=r"sample:chats.*OWNER/NAME"):
            datasets.load_rows(name)


def test_a_split_of_what_has_none_is_refused():
    with pytest.raises(InvalidRequest, match="leave split out"):
        datasets.load_rows("sample:chats", split="test")


ROWS = [{"question": f"{n} + {n}", "answer": f"#### {2 * n}", "turns": [{"role": "user"}]} for n in range(3)]


def parquet(path: Path, rows: list[dict[str, object]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_rows_come_from_parquet_as_they_were_written(tmp_path: Path):
    """Seconds, for the library that reads it."""
    path = parquet(tmp_path / "rows.parquet", ROWS)
    assert datasets.load_rows(path) == ROWS
    assert list(datasets.stream_rows(path)) == ROWS
    with pytest.raises(InvalidRequest, match="leave split out"):
        datasets.load_rows(path, split="test")
    with pytest.raises(InvalidRequest, match="no such file"):
        datasets.load_rows(str(tmp_path / "none.parquet"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InvalidRequest, match=r"broken\.parquet is not a Parquet file"):
        datasets.load_rows(str(tmp_path / "broken.parquet"))


def test_a_files_name_is_taken_as_it_is(tmp_path: Path):
    """Neither as a pattern, nor by the case of its ending."""
    for name in ("UPPER.PARQUET", "rows[1].parquet", "rows*.parquet"):
        assert datasets.load_rows(parquet(tmp_path / name, ROWS)) == ROWS
    assert datasets.load_rows(jsonl(tmp_path / "rows[1].JSONL", {"n": 1})) == [{"n": 1}]


def test_chats_come_from_parquet_as_they_were_written(tmp_path: Path):
    """Its columns give every object the fields of all others, as null."""
    thinks = [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "A"}]
    calls = [
        {"function": {"name": "f", "arguments": {"x": 1}}, "id": "a"},
        {"function": {"name": "g", "arguments": {"y": "z"}}},
    ]
    chats = [
        [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {"role": "assistant", "content": thinks}],
        [{"role": "user", "content": []}, {"role": "assistant", "content": [], "tool_calls": calls}],
    ]
    path = parquet(tmp_path / "chats.parquet", [{"messages": chat} for chat in chats])
    first, second = datasets.load_chats(path)
    assert first == chats[0]
    assert second[1]["tool_calls"] == [
        ToolCall(FunctionCall("f", '{"x": 1}'), "a"),
        ToolCall(FunctionCall("g", '{"y": "z"}')),
    ]


def test_a_dataset_of_a_hub_may_lie_in_a_folder_of_parquet_or_jsonl(tmp_path: Path):
    parquet(tmp_path / "gsm" / "data" / "train-00000-of-00001.parquet", ROWS)
    parquet(tmp_path / "gsm" / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    assert datasets.load_rows(str(tmp_path / "gsm")) == ROWS
    assert datasets.load_rows(str(tmp_path / "gsm"), split="test") == ROWS[:1]
    (tmp_path / "chats").mkdir()
    jsonl(tmp_path / "chats" / "train.jsonl", HELLO, HELLO)
    assert datasets.load_chats(str(tmp_path / "chats")) == [HELLO["messages"]] * 2


def test_a_folder_without_the_split_or_without_data_is_refused_with_what_there_is(tmp_path: Path):
    parquet(tmp_path / "gsm" / "train.parquet", ROWS)
    with pytest.raises(InvalidRequest, match=r"gsm \(validation\) cannot be opened: .*Available splits: \['train'\]"):
        datasets.load_rows(str(tmp_path / "gsm"), split="validation")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="any data files"):
        datasets.load_rows(str(tmp_path / "empty"))


# ---- order


@given(num_rows=st.integers(0, 60), seed=st.integers(0, 2**40))
def test_the_order_is_that_of_numpy(num_rows: int, seed: int):
    assert datasets.shuffled(range(num_rows), seed) == np.random.default_rng(seed).permutation(num_rows).tolist()


def test_the_order_is_frozen():
    assert datasets.shuffled("abcdefgh", seed=0) == list("cedgfabh")


def test_a_split_leaves_no_row_in_both_parts_and_none_out():
    split = datasets.split_rows(range(10), test_size=3, seed=1)
    assert len(split.test) == 3
    assert sorted(split.train + split.test) == list(range(10))
    assert split == datasets.split_rows(range(10), test_size=3, seed=1)


def test_a_split_that_leaves_nothing_to_train_on_is_refused():
    with pytest.raises(InvalidRequest, match=r"0\.\.9.*: 10"):
        datasets.split_rows(range(10), test_size=10)


@given(
    num_rows=st.integers(1, 30), batch_size=st.integers(1, 30), num_epochs=st.integers(1, 3), seed=st.integers(0, 99)
)
def test_an_epoch_has_every_row_once_and_its_last_batch_alone_may_be_short(
    num_rows: int, batch_size: int, num_epochs: int, seed: int
):
    batch_size = min(batch_size, num_rows)
    batches = datasets.Batches(range(num_rows), batch_size, num_epochs=num_epochs, seed=seed)
    full = datasets.Batches(range(num_rows), batch_size, num_epochs=num_epochs, seed=seed, drop_last=True)
    assert len(full) == num_epochs * (num_rows // batch_size)
    for epoch in range(num_epochs):
        own, own_full = ([some[k] for k in range(len(some)) if some.epoch_of(k) == epoch] for some in (batches, full))
        assert sorted(row for batch in own for row in batch) == list(range(num_rows))
        assert [batch for batch in own if len(batch) == batch_size] == own_full
        assert all(len(batch) == batch_size for batch in own[:-1])


def test_a_batch_depends_on_seed_and_position_alone():
    batches = datasets.Batches(range(20), 4, num_epochs=3, seed=5)
    in_order = list(batches)
    assert len(in_order) == 15
    assert [batches[k] for k in (11, 2, 11)] == [in_order[11], in_order[2], in_order[11]]
    assert in_order == list(datasets.Batches(range(20), 4, num_epochs=3, seed=5))
    assert in_order[:5] != in_order[5:10]
    assert in_order != list(datasets.Batches(range(20), 4, num_epochs=3, seed=6))


def test_fewer_rows_than_a_batch_are_one_short_batch_unless_the_last_is_dropped():
    [batch] = datasets.Batches(range(4), 5)
    assert sorted(batch) == [0, 1, 2, 3]
    with pytest.raises(InvalidRequest, match=r"batch_size must be in 1\.\.4, the number of rows, for drop_last.*: 5"):
        datasets.Batches(range(4), 5, drop_last=True)


@pytest.mark.parametrize(("num_rows", "batch_size", "num_epochs"), [(4, 0, 1), (4, 2, 0), (0, 2, 1)])
def test_batches_of_nothing_are_refused(num_rows: int, batch_size: int, num_epochs: int):
    with pytest.raises(InvalidRequest, match="at least 1"):
        datasets.Batches(range(num_rows), batch_size, num_epochs=num_epochs)


def test_an_epoch_is_said_in_one_line(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="stovetop")
    datasets.log_epoch("chats", 10, 4, 10)
    datasets.log_epoch("problems", 12, 4)
    datasets.log_epoch("pairs", 4, 4, 8)
    assert caplog.messages == [
        "10 chats -> 10 datums -> 3 steps an epoch, the last with 2 chats",
        "12 problems -> 3 steps an epoch",
        "4 pairs -> 8 datums -> 1 step an epoch",
    ]


# ---- streams and mixtures


def test_a_stream_has_the_rows_of_its_source_one_at_a_time(tmp_path: Path):
    rows = datasets.stream_rows(jsonl(tmp_path / "rows.jsonl", {"n": 1}, {"n": 2}, "{oops"))
    assert [next(rows), next(rows)] == [{"n": 1}, {"n": 2}]
    with pytest.raises(InvalidRequest, match="line 3 is not JSON"):
        next(rows)


def test_a_hub_is_told_which_subset_and_revision_and_whether_to_stream(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(path: str, **options: object) -> list[dict[str, object]]:
        return [options]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    [options] = datasets.load_rows("owner/name", subset="main", revision="v2")
    assert options == {"split": "train", "name": "main", "revision": "v2"}
    [options] = datasets.stream_rows("owner/name", split="test")
    assert options == {"split": "test", "streaming": True}
    with pytest.raises(InvalidRequest, match="leave subset, revision out"):
        datasets.load_rows("sample:chats", subset="main", revision="v2")


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 99))
def test_a_shuffled_stream_has_every_row_once_and_none_long_before_its_time(num_rows: int, buffer_size: int, seed: int):
    rows = list(datasets.shuffled_stream(range(num_rows), buffer_size, seed))
    assert sorted(rows) == list(range(num_rows))
    assert all(row - place < buffer_size for place, row in enumerate(rows))
    assert rows == list(datasets.shuffled_stream(range(num_rows), buffer_size, seed))


def test_each_epoch_of_a_stream_has_an_order_of_its_own():
    epochs = [list(datasets.shuffled_stream(range(50), 10, seed=0, epoch=epoch)) for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_buffer_holds_at_least_one_row():
    with pytest.raises(InvalidRequest, match=r"buffer_size.*: 0"):
        list(datasets.shuffled_stream([1], 0, seed=0))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 60), st.integers(0, 99))
def test_every_source_of_a_mixture_has_its_share_from_the_beginning(weights: list[int], num_rows: int, seed: int):
    sources = [[(source, row) for row in range(3 + source)] for source in range(len(weights))]
    rows = datasets.interleave(sources, weights, num_rows, seed)
    assert rows == datasets.interleave(sources, weights, num_rows, seed)
    for source, weight in enumerate(weights):
        own = [place for place, row in enumerate(rows) if row[0] == source]
        for count in range(num_rows + 1):
            share = count * weight / sum(weights)
            assert abs(sum(place < count for place in own) - share) <= len(weights) / 2 + 1e-9
        drawn = [row for row in rows if row[0] == source]
        size = len(sources[source])
        for start in range(0, len(drawn) - size + 1, size):
            assert sorted(drawn[start : start + size]) == sources[source]


def test_the_order_within_a_mixture_depends_on_the_seed():
    assert datasets.interleave(["abcdef", "xyz"], [2, 1], 9, 0) != datasets.interleave(["abcdef", "xyz"], [2, 1], 9, 1)


@pytest.mark.parametrize(("sources", "weights"), [([[1], [2]], [1]), ([[1], []], [1, 1]), ([[1], [2]], [1, 0])])
def test_a_mixture_of_nothing_is_refused(sources: list[list[int]], weights: list[float]):
    with pytest.raises(InvalidRequest, match="rows and a weight"):
        datasets.interleave(sources, weights, 4)


def test_messages_that_are_no_list_are_shown(tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text('{"messages": "hello"}\n')
    with pytest.raises(InvalidRequest, match=r"line 1: a chat needs 'messages', a list .*; it is 'hello' \(str\)"):
        datasets.load_chats(str(tmp_path / "chats.jsonl"))
