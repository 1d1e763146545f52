from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest, NothingToTrain, UnknownName
from stovetop.supervised.data import SupervisedDataset
from stovetop.supervised.streaming import StreamingSupervisedDataset
from stovetop.types import Datum, ModelInput


def to_datum(row: int) -> Datum:
    return Datum(ModelInput.from_ints([row]), {"target_tokens": [row], "weights": [1.0]})


def dataset(num_rows: int = 23, batch_size: int = 4, buffer_size: int = 6, there_are: int = 100) -> SupervisedDataset:
    return StreamingSupervisedDataset(
        lambda: iter(range(there_are)),
        num_rows=num_rows,
        batch_size=batch_size,
        buffer_size=buffer_size,
        map_fn=to_datum,
    )


def rows_of(batch: list[Datum]) -> list[int]:
    return [datum.model_input.to_ints()[0] for datum in batch]


def epoch_of(data: SupervisedDataset) -> list[list[int]]:
    return [rows_of(data.get_batch(index)) for index in range(len(data))]


def test_an_epoch_has_the_promised_rows_once_each():
    batches = epoch_of(dataset())
    assert [len(batch) for batch in batches] == [4] * 5 + [3]
    rows = [row for batch in batches for row in batch]
    assert sorted(rows) == list(range(23)) != rows


def test_rows_that_do_not_fill_a_last_batch_may_be_left_out():
    data = StreamingSupervisedDataset(lambda: range(23), num_rows=23, batch_size=4, map_fn=to_datum, drop_last=True)
    assert [len(batch) for batch in epoch_of(data)] == [4] * 5


def test_a_row_with_nothing_to_train_on_is_left_out_of_its_batch_and_reported(caplog):
    def but_multiples_of_three(row: int) -> Datum:
        if row % 3 == 0:
            raise NothingToTrain("a third")
        return to_datum(row)

    data = StreamingSupervisedDataset(lambda: range(8), num_rows=8, batch_size=4, map_fn=but_multiples_of_three)
    assert sorted(row for batch in epoch_of(data) for row in batch) == [1, 2, 4, 5, 7]
    assert sorted(data.untrainable) == [0, 3, 6]
    assert "3 of 8 rows have nothing to train on" in caplog.messages[-1]
    for first_row, batch_size, options in ((2, 5, {}), (3, 1, {}), (2, 5, {"on_untrainable": "refuse"})):
        rows = range(first_row, first_row + 5)
        one = partial(StreamingSupervisedDataset, num_rows=5, batch_size=batch_size, buffer_size=1)
        data = one(lambda rows=rows: rows, map_fn=but_multiples_of_three, **options)
        if batch_size == 5 and not options:
            assert rows_of(data.get_batch(0)) == [2, 4, 5]
        else:
            with pytest.raises(NothingToTrain, match=r"row \d: a third"):
                data.get_batch(0)


def test_epochs_differ_and_each_is_the_same_again():
    data = dataset()
    first = epoch_of(data)
    data.set_epoch(1)
    second = epoch_of(data)
    data.set_epoch(0)
    assert epoch_of(data) == first != second
    assert epoch_of(dataset()) == first


@given(st.integers(0, 4), st.integers(1, 30))
def test_a_resumed_run_gets_the_batches_of_one_that_was_not_cut_off(start: int, buffer_size: int):
    whole = epoch_of(dataset(buffer_size=buffer_size))
    resumed = dataset(buffer_size=buffer_size)
    assert [rows_of(resumed.get_batch(index)) for index in range(start, 6)] == whole[start:]


@pytest.mark.parametrize("index", [1, 0, 3])
def test_batches_out_of_order_are_refused_with_the_one_that_is_next(index: int):
    data = dataset()
    data.get_batch(0)
    data.get_batch(1)
    with pytest.raises(InvalidRequest, match=rf"batch 2 is next.*: {index}"):
        data.get_batch(index)


def test_no_row_is_made_into_data_before_its_batch_is_asked_for():
    made: list[int] = []

    def noting(row: int) -> Datum:
        made.append(row)
        return to_datum(row)

    data = StreamingSupervisedDataset(lambda: range(40), num_rows=40, batch_size=4, buffer_size=8, map_fn=noting)
    data.get_batch(3)
    assert len(made) == 4


def test_no_more_rows_are_read_than_the_buffer_needs():
    read: list[int] = []

    def rows() -> Iterator[int]:
        for row in range(1_000):
            read.append(row)
            yield row

    data = StreamingSupervisedDataset(rows, num_rows=1_000, batch_size=4, buffer_size=10, map_fn=to_datum)
    data.get_batch(0)
    assert len(read) <= 15


def test_ten_thousand_rows_are_shuffled_together_unless_another_buffer_is_asked_for():
    num_read = 0

    def rows() -> Iterator[int]:
        nonlocal num_read
        for row in range(20_000):
            num_read += 1
            yield row

    data = StreamingSupervisedDataset(rows, num_rows=20_000, batch_size=1, map_fn=to_datum)
    data.get_batch(0)
    assert num_read == 10_001


@pytest.mark.parametrize("buffer_size", [0, -1])
def test_a_buffer_without_room_is_refused_when_the_dataset_is_made(buffer_size: int):
    with pytest.raises(InvalidRequest, match=f"buffer_size must be at least 1.*: {buffer_size}"):
        dataset(buffer_size=buffer_size)


def test_a_misspelt_choice_for_untrainable_rows_is_refused_when_the_dataset_is_made():
    with pytest.raises(UnknownName, match="did you mean 'skip'"):
        StreamingSupervisedDataset(
            lambda: range(4),
            num_rows=4,
            batch_size=2,
            map_fn=to_datum,
            on_untrainable="skipp",  # pyright: ignore[reportArgumentType]  wrong on purpose
        )


def test_a_buffer_of_one_keeps_the_order():
    assert epoch_of(dataset(buffer_size=1))[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_comes_of_one_row_stays_together():
    data = StreamingSupervisedDataset(
        lambda: range(8), num_rows=8, batch_size=2, flatmap_fn=lambda row: [to_datum(row), to_datum(100 + row)]
    )
    first, second, third, fourth = rows_of(data.get_batch(0))
    assert (second, fourth) == (first + 100, third + 100)


def test_a_stream_that_ends_early_is_an_error():
    data = dataset(there_are=10)
    data.get_batch(0)
    data.get_batch(1)
    with pytest.raises(InvalidRequest, match=r"ended before.*: 23"):
        data.get_batch(2)


def test_a_row_that_cannot_be_data_is_named_by_its_place_in_the_stream():
    def refuse_seven(row: int) -> Datum:
        if row == 7:
            raise InvalidRequest("no")
        return to_datum(row)

    data = StreamingSupervisedDataset(lambda: range(8), num_rows=8, batch_size=8, map_fn=refuse_seven)
    with pytest.raises(InvalidRequest, match="row 7: no"):
        data.get_batch(0)


@pytest.mark.parametrize("batch_size", [1, 23])
def test_a_batch_may_be_a_single_row_or_all_there_are(batch_size: int):
    batches = epoch_of(dataset(batch_size=batch_size))
    assert [len(batch) for batch in batches] == [batch_size] * (23 // batch_size)


@pytest.mark.parametrize("batch_size", [0, 24])
def test_batches_that_cannot_be_filled_are_refused(batch_size: int):
    with pytest.raises(InvalidRequest, match=rf"1\.\.23.*: {batch_size}"):
        dataset(batch_size=batch_size)
    with pytest.raises(IndexError):
        dataset().get_batch(6)
