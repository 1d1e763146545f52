"""The joint behind which all data of a run comes: names, sources, splits, mixtures, and the record of what was read."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop import named_data, row_sources
from stovetop.datasets import Row
from stovetop.errors import InvalidRequest, SeveralProblems, UnknownName
from stovetop.named_data import LeftOut, Loaded, Published, PublishedRows, load_data


def parse(row: Row) -> int | LeftOut:
    number = row.get("n")
    return number if isinstance(number, int) else LeftOut("it has no number")


def read(row: Row, place: str) -> int:
    number = row.get("n")
    if not isinstance(number, int):
        raise InvalidRequest(f"{place} needs 'n': {row}")
    return number


def table(**options: object) -> dict[str, Published[int]]:
    entry = {"train": (PublishedRows("owner/numbers"),), "parse": parse, "schema": "made up", **options}
    return {"numbers": Published(**entry)}  # pyright: ignore[reportArgumentType]  as each test says


def write(path: Path, numbers: Sequence[object]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps({'n': number})}\n" for number in numbers))
    return str(path)


def all_of(loaded: Loaded[int]) -> list[int]:
    return sorted(loaded.train + loaded.test)


# ---- sources


def test_a_source_of_ones_own_is_read_by_the_reader_and_its_errors_name_the_line(tmp_path: Path) -> None:
    loaded = load_data(write(tmp_path / "rows.jsonl", range(10)), read, test_size=3, seed=1)
    assert (len(loaded.train), len(loaded.test), all_of(loaded)) == (7, 3, list(range(10)))
    assert loaded.train_indices == loaded.train
    with pytest.raises(InvalidRequest, match=r"broken\.jsonl, line 2 needs 'n'"):
        load_data(write(tmp_path / "broken.jsonl", [1, "two"]), read)


def test_rows_of_a_named_set_may_lie_in_a_file_and_those_of_no_use_are_counted_by_reason(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [1, "two", 3, None, 5, 6])
    loaded = load_data(f"numbers:{file}", read, table(test_size=1000), test_size=1)
    assert (len(loaded.test), all_of(loaded)) == (1, [1, 3, 5, 6])
    assert (loaded.left_out, loaded.num_left_out) == ({"it has no number": 2}, 2)
    with pytest.raises(InvalidRequest, match=r"none of the 1 rows to train on can be used \(it has no number: 1\)"):
        load_data(f"numbers:{write(tmp_path / 'none.jsonl', ['x'])}", read, table())


def test_a_downloaded_folder_has_the_splits_of_the_set(tmp_path: Path) -> None:
    write(tmp_path / "numbers" / "train.jsonl", range(9))
    write(tmp_path / "numbers" / "test.jsonl", range(20, 26))
    named = table(test=(PublishedRows("owner/numbers", "test"),), test_size=4)
    loaded = load_data(f"numbers:{tmp_path / 'numbers'}", read, named)
    assert sorted(loaded.train) == list(range(9))
    assert len(loaded.test) == 4
    assert set(loaded.test) < set(range(20, 26))
    alone = load_data(f"numbers:{tmp_path / 'numbers'}", read, table(test_size=4))
    assert (len(alone.train), len(alone.test)) == (5, 4)  # without a test split the first of the shuffled rows
    assert alone.test == [row for row in alone.test if row not in alone.train]


def test_what_is_held_out_is_not_trained_on_where_a_set_says_what_is_the_same(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", range(6)), write(tmp_path / "test.jsonl", [4, 5, 9])
    loaded = load_data(f"numbers:{train}", read, table(identity=str), test_dataset=f"numbers:{test}")
    assert (sorted(loaded.train), loaded.test) == ([0, 1, 2, 3], [4, 5, 9])
    assert loaded.left_out == {"it is held out too": 2}


def test_the_first_rows_of_a_set_can_be_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", range(10))
    assert all_of(load_data(f"{file}[:3]", read)) == [0, 1, 2]
    with pytest.raises(InvalidRequest, match="at least 1"):
        load_data(f"{file}[:0]", read)
    with pytest.raises(InvalidRequest, match=r"numbers is too much; say how many rows, numbers\[:100000\]"):
        load_data("numbers", read, table(needs_limit="is too much"))


@pytest.mark.parametrize(
    ("dataset", "complaint"),
    [
        ("number", "did you mean 'numbers'"),
        ("sample:chat", "did you mean 'chats'"),
        ("numbers:nothing", "unknown dataset 'nothing'"),
        ("sample:chats+nope", "unknown dataset 'nope'"),
        ("numbers*0", "weight of a data set must be above 0"),
        ("", "unknown dataset ''"),
        ("+", "unknown dataset ''"),
        ("none.jsonl", "no such file"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(dataset: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint.replace("(", r"\(")):
        load_data(dataset, read, table())
    assert issubclass(UnknownName, InvalidRequest)


def test_a_path_that_exists_is_taken_as_it_is(tmp_path: Path) -> None:
    odd = write(tmp_path / "c++" / "a*2+b[:1].jsonl", range(4))
    assert all_of(load_data(odd, read)) == [0, 1, 2, 3]


# ---- mixtures


def test_sets_without_weights_give_all_of_their_rows(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", range(5)), write(tmp_path / "b.jsonl", range(10, 13))
    loaded = load_data(f"{a} + {b}", read, test_size=1)
    assert (len(loaded.train), len(loaded.test)) == (6, 2)
    assert all_of(loaded) == [0, 1, 2, 3, 4, 10, 11, 12]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_weights_are_shares_and_no_row_is_there_twice(
    num_a: int, num_b: int, weight_a: int, weight_b: int, seed: int
) -> None:
    rows = [[(0, f"a{n}") for n in range(num_a)], [(0, f"b{n}") for n in range(num_b)]]
    mixed = [item for _, item in named_data.by_weight(rows, [weight_a, weight_b], seed)]
    counts = Counter(item[0] for item in mixed)
    assert len(set(mixed)) == len(mixed)
    assert abs(counts["a"] * weight_b - counts["b"] * weight_a) <= max(weight_a, weight_b)
    assert counts["a"] >= num_a - 1 or counts["b"] >= num_b - 1  # one of them is used up


def test_a_mixture_is_written_with_its_weights(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", range(8)), write(tmp_path / "b.jsonl", range(100, 150))
    loaded = load_data(f"{a}*2+{b}", read)
    assert Counter(number >= 100 for number in loaded.train) == {False: 8, True: 4}


def test_weights_that_leave_nothing_of_a_set_are_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", range(8)), write(tmp_path / "b.jsonl", range(100, 150))
    with pytest.raises(InvalidRequest, match=r"no row of '.*b\.jsonl' is trained on, .* a larger weight, or leave it"):
        load_data(f"{a}*100+{b}", read)


def test_rows_are_named_once_so_that_none_is_trained_on_twice_or_held_out_too(tmp_path: Path) -> None:
    file, copy = write(tmp_path / "a.jsonl", range(8)), write(tmp_path / "copy.jsonl", range(8))
    for again in (file, copy, f"{file}[:3]"):
        with pytest.raises(InvalidRequest, match=r"trained on and would be held out too; .*: '.*\.jsonl'"):
            load_data(file, read, test_dataset=again)
        with pytest.raises(InvalidRequest, match=r"named twice, .*: '.*\.jsonl'"):
            load_data(f"{file}[:5]*2+{again}", read, test_size=1)


def test_all_that_is_wrong_with_the_sets_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SeveralProblems) as names:
        load_data("nope+sample:chat", read, test_dataset="neither")
    assert len(names.value.problems) == 3
    with pytest.raises(SeveralProblems) as rows:
        load_data(write(tmp_path / "broken.jsonl", ["two"]), read, test_dataset=f"{tmp_path}/none.jsonl")
    assert [each.split(": ")[0] for each in rows.value.problems] == [
        f"{tmp_path}/broken.jsonl, line 1 needs 'n'",
        "there is no such file; give the path of one, or sample:NAME",
    ]


# ---- the record


def test_the_record_says_which_bytes_were_read(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", range(3))
    other = write(tmp_path / "other.jsonl", range(3, 5))
    [train, test] = load_data(file, read, test_dataset=other).sources
    assert (train.role, train.num_rows, test.role, test.num_rows) == ("train", 3, "test", 2)
    assert (train.digest, test.digest) == (row_sources.digest_of(file), row_sources.digest_of(other))
    write(tmp_path / "rows.jsonl", [0, 1, 4])
    assert load_data(file, read).sources[0].digest != train.digest


def test_the_digest_of_a_folder_is_that_of_its_data(tmp_path: Path) -> None:
    write(tmp_path / "numbers" / "train.jsonl", range(3))
    before = row_sources.digest_of(str(tmp_path / "numbers"))
    (tmp_path / "numbers" / "README.md").write_text("a card")
    (tmp_path / "numbers" / ".cache").write_text("a cache")
    assert row_sources.digest_of(str(tmp_path / "numbers")) == before
    write(tmp_path / "numbers" / "train.jsonl", range(4))
    assert row_sources.digest_of(str(tmp_path / "numbers")) != before


# ---- a hub, as the library of it and its own client answer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What is asked of a hub that is there and has one commit, which changes when it is asked twice."""
    asked: list[dict[str, object]] = []

    def load_dataset(path: str, **options: object) -> Iterator[dict[str, object]]:
        asked.append({"path": path, **options})
        return iter([{"n": n} for n in range(20)])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("stovetop.hub.why_unreachable", lambda: None)
    commits = iter(("first", "second", "third"))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha=next(commits)))
    return asked


def test_a_hub_is_read_at_one_commit_which_is_recorded(calls: list[dict[str, object]]) -> None:
    named = table(test=(PublishedRows("owner/numbers", "test", "main"),))
    loaded = load_data("numbers", read, named)
    assert calls == [
        {"path": "owner/numbers", "split": "train", "revision": "first"},
        {"path": "owner/numbers", "split": "test", "name": "main", "revision": "first"},
    ]
    assert [(source.role, source.revision, source.num_rows, source.digest) for source in loaded.sources] == [
        ("train", "first", 20, None),
        ("test", "first", 20, None),
    ]


def test_a_run_that_goes_on_reads_the_commit_that_it_began_with(calls: list[dict[str, object]]) -> None:
    load_data("numbers", read, table(), revisions={"owner/numbers": "old"})
    assert [call["revision"] for call in calls] == ["old"]


def test_the_first_rows_of_a_hub_are_streamed(calls: list[dict[str, object]]) -> None:
    loaded = load_data("numbers[:3]", read, table())
    assert calls == [{"path": "owner/numbers", "split": "train", "revision": "first", "streaming": True}]
    assert (all_of(loaded), loaded.sources[0].num_rows) == ([0, 1, 2], 3)


def test_without_a_hub_a_name_is_refused_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("stovetop.hub.why_unreachable", lambda: "the hub cannot be reached")
    with pytest.raises(InvalidRequest, match=r"the hub cannot be reached; pass FILE.jsonl, FILE.parquet or a downl"):
        load_data("numbers", read, table())
