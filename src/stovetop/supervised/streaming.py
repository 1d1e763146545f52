"""Supervised datasets that memory does not hold: rows come one after the other, and are shuffled in a buffer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic

from stovetop.datasets import shuffled_stream
from stovetop.errors import InvalidRequest, NothingToTrain
from stovetop.supervised.data import data_maker
from stovetop.supervised.untrainable import OnUntrainable, Row, check_on_untrainable, naming_row, report_untrainable
from stovetop.types import Datum


class StreamingSupervisedDataset(Generic[Row]):
    """A SupervisedDataset that is read from front to back. The first batch asked for in an epoch may be any, so that a
    run can be resumed: the rows before it are read and dropped. From then on batches come in order, each once.

        StreamingSupervisedDataset(lambda: stream_rows("rows.jsonl"), num_rows=10_000, batch_size=8, map_fn=to_datum)

    `open_rows` opens the stream anew each epoch; its first `num_rows` rows are used, with `drop_last` less those that
    do not fill a last batch. The order depends on the epoch's seed, and batch k of a resumed run is batch k of one that
    was not cut off.

    A row with nothing to train on is left out when its batch comes, which then has fewer; `untrainable` has the reasons
    so far, by the row's number. A batch of such rows alone is an error, as more than half of all is.
    """

    def __init__(
        self,
        open_rows: Callable[[], Iterable[Row]],
        *,
        num_rows: int,  # a stream does not know how many it has
        batch_size: int,
        buffer_size: int = 10_000,  # rows in memory; 1: no shuffling
        map_fn: Callable[[Row], Datum] | None = None,
        flatmap_fn: Callable[[Row], Sequence[Datum]] | None = None,
        drop_last: bool = False,
        on_untrainable: OnUntrainable = "skip",
    ) -> None:
        if not 1 <= batch_size <= num_rows:
            raise InvalidRequest(f"batch_size must be in 1..{num_rows}, the number of rows: {batch_size}")
        if buffer_size < 1:
            raise InvalidRequest(f"buffer_size must be at least 1, which keeps the order: {buffer_size}")
        check_on_untrainable(on_untrainable)
        self._open_rows = open_rows
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._buffer_size = buffer_size
        self._make = data_maker(map_fn, flatmap_fn)
        self._num_batches = num_rows // batch_size if drop_last else -(-num_rows // batch_size)
        self._on_untrainable = on_untrainable
        self.set_epoch(0)

    def set_epoch(self, seed: int) -> None:
        self._seed = seed
        self._rows: Iterator[tuple[int, Row]] | None = None  # opened when the first batch is asked for
        self._next = 0
        self.untrainable: dict[int, str] = {}

    def __len__(self) -> int:
        return self._num_batches

    def get_batch(self, index: int) -> list[Datum]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        if self._rows is None:
            self._rows = self._open_at(index)
        elif index != self._next:
            raise InvalidRequest(
                f"a stream has its batches in order, and batch {self._next} is next; call set_epoch to begin again: "
                f"{index}"
            )
        self._next = index + 1
        rows = list(islice(self._rows, self._batch_size))
        if len(rows) < min(self._batch_size, self._num_rows - index * self._batch_size):
            raise InvalidRequest(f"the stream ended before it had as many rows as num_rows says: {self._num_rows}")
        data: list[Datum] = []
        for number, row in rows:
            try:
                with naming_row(number):
                    data += self._make(row)
            except NothingToTrain as error:
                if self._on_untrainable == "refuse" or (not data and number == rows[-1][0]):
                    raise
                self.untrainable[number] = str(error)
                report_untrainable(self.untrainable, self._num_rows)
        return data

    def _open_at(self, index: int) -> Iterator[tuple[int, Row]]:
        numbered = enumerate(islice(self._open_rows(), self._num_rows))
        rows = shuffled_stream(numbered, self._buffer_size, self._seed)
        for _ in islice(rows, index * self._batch_size):
            pass
        return rows
