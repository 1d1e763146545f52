"""The data of a run, by name: public data sets, files, folders, samples, data sets of a hub, several mixed.

A recipe gets it with one call, and the run keeps what was read, so that data that has changed is noticed:

    loaded = chats.load(config.dataset, config.test_dataset, config.test_size, config.seed)   # tasks/chats.py
    run.record_data(config.dataset, loaded)                                                   # runs.py
    loaded.train, loaded.test

`tasks/` has a table for each kind (`chats`, `comparisons`, `problems`, `prompts`, `code`), with a `load` like this one
and a stage that does both. No data set is named here: a table says where its rows lie, and what a row comes to.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from stovetop.checks import collecting
from stovetop.datasets import Row, Split, interleave, row_of, shuffled, split_rows
from stovetop.errors import InvalidRequest
from stovetop.hub import asking
from stovetop.row_sources import (
    HubPart,
    Term,
    digest_of,
    hub_revision,
    is_folder,
    is_on_hub,
    open_rows,
    parse_terms,
)

T = TypeVar("T")


class LeftOut(NamedTuple):
    """What a parser returns for a row that is of no use. Rows are counted by the reason."""

    reason: str  # "its answers are the same"


class PublishedRows(NamedTuple):
    """All rows of a split of a data set of a hub."""

    source: str  # "owner/name"
    split: str | None = None  # None: "train"
    subset: str | None = None


@dataclass(frozen=True, kw_only=True)
class Published(Generic[T]):
    """A public data set: where its rows lie, which of them are held out, and what a row comes to."""

    train: tuple[PublishedRows, ...]
    parse: Callable[[Row], T | LeftOut]  # a published row to ours
    schema: str  # where the form of its rows is known from
    test: tuple[PublishedRows, ...] = ()  # what is held out, if it is a part of its own
    test_size: int | None = None  # rows held out, the first of those shuffled with seed 0; None: all of `test`
    identity: Callable[[T], Hashable] | None = None  # nothing to train on has the identity of something held out
    needs_limit: str | None = None  # why all of it is too much; "NAME[:100000]" says how many rows


@dataclass(frozen=True, slots=True)
class Source:
    """What was read, for the record of a run: two runs with equal sources had the same data."""

    role: str  # "train" or "test"; "prompt" of a file that answers are made with
    source: str  # a file, a sample, a folder, "owner/name"
    num_rows: int
    split: str | None = None
    subset: str | None = None
    digest: str | None = None  # SHA-256 of what lies on this machine
    revision: str | None = None  # the commit of a data set of a hub; None: the hub could not be asked


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """The data of a run: to train on, in a first order of its own, and held out. Nothing is in both."""

    train: list[T]
    test: list[T]
    train_indices: list[int]  # of the rows, in their source
    test_indices: list[int]
    left_out: Mapping[str, int]  # number of rows that are of no use, by reason
    sources: tuple[Source, ...]

    @property
    def num_left_out(self) -> int:
        """Rows of no use, whatever the reason."""
        return sum(self.left_out.values())

    def placed(self) -> "Split[tuple[int, T]]":
        """Each with the index of its row in its source, for errors that name it."""
        return Split(
            list(zip(self.train_indices, self.train, strict=True)), list(zip(self.test_indices, self.test, strict=True))
        )


def load_data(
    dataset: str,
    read: Callable[[Row, str], T | LeftOut],
    named: Mapping[str, Published[T]] | None = None,
    *,
    test_dataset: str | None = None,
    test_size: int = 0,
    seed: int = 0,
    half_at_most: bool = False,
    revisions: Mapping[str, str] | None = None,
) -> Loaded[T]:
    """The data that a config names.

        NAME            a public data set of the table `named`, from its hub
        NAME:SOURCE     rows of the same form from elsewhere: FILE.jsonl, FILE.parquet, the folder of a download
        sample:NAME     a few rows of the same form, which the package ships
        SOURCE          rows that `read` understands; it gets a row and its place, for errors
        A[:1000]        its first 1000 rows; those of a hub are streamed, and no more is downloaded
        A+B             all rows of both
        A*2+B           two rows of A for each of B, until the rows of one of them are used up: none is there twice

    Held out are the rows of `test_dataset`, named likewise; or the test set of a public data set; or `test_size` rows,
    chosen by `seed`, with `half_at_most` no more than half. `revisions` are commits of a hub that are to be read
    instead of the newest: those that a run began with (`Run.revisions`)."""
    table = named or {}
    terms, test_terms = list[Term](), list[Term]()
    with collecting() as problem:
        with problem:
            terms += parse_terms(dataset, table)
        with problem:
            test_terms += [] if test_dataset is None else parse_terms(test_dataset, table)
    with ExitStack() as stack:
        asks = any(term.source is None or is_on_hub(term.source) for term in (*terms, *test_terms))
        reader = _Reader(read, table, stack.enter_context(asking()) if asks else None, revisions or {})
        parts: list[Split[_Read[T]]] = []
        problem = stack.enter_context(collecting())
        for term in terms:
            with problem:
                if test_dataset is None:
                    parts.append(reader.split(term, test_size, seed, half_at_most=half_at_most))
                else:
                    parts.append(Split(shuffled(reader.rows(term, "train"), seed), []))
        for term in test_terms:
            with problem:
                parts.append(Split([], reader.rows(term, "test")))
    _check_apart(reader.sources)
    test = [made for _, rows in parts for made in reader.of_use(rows)]
    trained = [reader.of_use(part.train, term, test) for part, term in zip(parts, terms, strict=False)]
    weights = [term.weight for term in terms if term.weight is not None]
    train = by_weight(trained, weights, seed) if weights else [made for rows in trained for made in rows]
    drawn = set(map(id, train))
    for term, rows in zip(terms, trained, strict=False):
        if drawn.isdisjoint(map(id, rows)):
            raise InvalidRequest(
                f"with these weights no row of {term.text!r} is trained on, for the rows of another data set are used "
                f"up before; give it a larger weight, or leave it out: {dataset!r}"
            )
    return Loaded(
        train=[item for _, item in train],
        test=[item for _, item in test],
        train_indices=[index for index, _ in train],
        test_indices=[index for index, _ in test],
        left_out=dict(reader.left_out),
        sources=tuple(reader.sources),
    )


@dataclass(frozen=True)
class Table(Generic[T]):
    """The data sets of one kind: `load` is what `tasks/` has for each."""

    read: Callable[[Row, str], T | LeftOut]  # a row of a user's own, and its place
    named: Mapping[str, Published[T]]
    half_at_most: bool = False  # of the rows are held out

    def load(
        self,
        dataset: str,
        test_dataset: str | None = None,
        test_size: int = 0,
        seed: int = 0,
        revisions: Mapping[str, str] | None = None,
    ) -> Loaded[T]:
        """What a config names, to train on and held out: see `load_data`."""
        return load_data(
            dataset,
            self.read,
            self.named,
            test_dataset=test_dataset,
            test_size=test_size,
            seed=seed,
            half_at_most=self.half_at_most,
            revisions=revisions,
        )


_Read = tuple[int, T | LeftOut]  # what a row came to, and its index in its source


@dataclass(frozen=True)
class _Reader(Generic[T]):
    """Reads the rows of terms, and notes what it read and what was of no use."""

    read: Callable[[Row, str], T | LeftOut]
    table: Mapping[str, Published[T]]
    problem: str | None  # why the hub cannot be reached
    revisions: Mapping[str, str]
    sources: list[Source] = field(default_factory=list[Source])
    left_out: Counter[str] = field(default_factory=Counter[str])

    def split(self, term: Term, test_size: int, seed: int, *, half_at_most: bool) -> Split[_Read[T]]:
        """By the rule of a public data set where it comes whole, else by `test_size`."""
        rows, entry = self.rows(term, "train"), self._entry(term)
        if entry is not None and (term.source is None or is_folder(term.source)):
            if test_rows := self._rows_of(term, entry.test):
                test = self._read(test_rows, entry, "test")
                test = test if entry.test_size is None else shuffled(test, 0)[: entry.test_size]
                return Split(shuffled(rows, seed), test)
            if entry.test_size is not None:
                return split_rows(rows, min(entry.test_size, len(rows) // 2), 0)
        useless = [row for row in rows if isinstance(row[1], LeftOut)]
        useful = [row for row in rows if not isinstance(row[1], LeftOut)]
        if not useful:
            return Split(useless, [])  # which is refused with the reasons
        num_test = min(test_size, len(useful) // 2) if half_at_most else test_size
        if num_test >= len(useful):
            raise InvalidRequest(
                f"test_size must leave a row to train on, 0..{len(useful) - 1} of {term.text!r}: {test_size}"
            )
        train, test = split_rows(useful, num_test, seed)
        return Split(train + useless, test)

    def rows(self, term: Term, role: str) -> list[_Read[T]]:
        """All rows of a term, in their order."""
        entry = self._entry(term)
        if entry is None or (term.source is not None and not is_folder(term.source)):
            assert term.source is not None
            return self._read([PublishedRows(term.source)], entry, role, term.limit)
        if entry.needs_limit is not None and term.source is None and term.limit is None:
            raise InvalidRequest(
                f"{term.name} {entry.needs_limit}; say how many rows, {term.name}[:100000]: {term.text!r}"
            )
        return self._read(self._rows_of(term, entry.train), entry, role, term.limit)

    def of_use(
        self, rows: Sequence[_Read[T]], term: Term | None = None, held_out: Sequence[tuple[int, T]] = ()
    ) -> list[tuple[int, T]]:
        """Without those that are left out, and without what is held out, if the term's data set says what is the
        same."""
        entry = None if term is None else self._entry(term)
        identity = None if entry is None else entry.identity
        known = {identity(item) for _, item in held_out} if identity else set[Hashable]()
        found: list[tuple[int, T]] = []
        reasons = Counter[str]()
        for index, item in rows:
            if isinstance(item, LeftOut):
                reasons[item.reason] += 1
            elif identity is not None and identity(item) in known:
                reasons["it is held out too"] += 1
            else:
                found.append((index, item))
        self.left_out.update(reasons)
        if term is not None and not found:
            said = "; ".join(f"{reason}: {number}" for reason, number in reasons.most_common())
            raise InvalidRequest(f"none of the {len(rows)} rows to train on can be used ({said}): {term.text!r}")
        return found

    def _entry(self, term: Term) -> Published[T] | None:
        return None if term.name is None else self.table[term.name]

    def _rows_of(self, term: Term, published_rows: Sequence[PublishedRows]) -> list[PublishedRows]:
        """Where they lie: on their hub, or in the folder that the data set to train on was downloaded to."""
        entry = self._entry(term)
        if term.source is None or entry is None:
            return list(published_rows)
        whole = entry.train[0].source
        return [rows._replace(source=term.source) for rows in published_rows if rows.source == whole]

    def _read(
        self, parts: Sequence[PublishedRows], entry: Published[T] | None, role: str, limit: int | None = None
    ) -> list[_Read[T]]:
        read: list[_Read[T]] = []
        for part in parts:
            left = None if limit is None else limit - len(read)
            if left == 0:
                break
            before = len(read)
            revision = self._revision(part.source)
            hub_part = HubPart(part.split, part.subset, revision, streaming=left is not None)
            for placed in islice(open_rows(part.source, hub_part, self.problem), left):
                row = row_of(placed)
                read.append((len(read), self.read(row, placed.place) if entry is None else entry.parse(row)))
            split = part.split or ("train" if is_on_hub(part.source) or is_folder(part.source) else None)
            digest = digest_of(part.source)
            self.sources.append(Source(role, part.source, len(read) - before, split, part.subset, digest, revision))
        return read

    def _revision(self, source: str) -> str | None:
        """The commit to read a data set of a hub from; None where there is no asking."""
        if not is_on_hub(source) or self.problem is not None:
            return None
        known = [read.revision for read in self.sources if read.source == source and read.revision]
        return known[0] if known else self.revisions.get(source) or hub_revision(source)


def _check_apart(sources: Sequence[Source]) -> None:
    """Refuses the same rows twice: every epoch has each once, and what is held out is not trained on."""
    known: dict[tuple[str | None, ...], Source] = {}
    for source in sources:
        first = known.setdefault((source.digest or source.source, source.split, source.subset), source)
        if first is source:
            continue
        if first.role != source.role:
            raise InvalidRequest(
                f"these rows are trained on and would be held out too; name others as test_dataset, or none, and "
                f"test_size rows are held out: {source.source!r}"
            )
        raise InvalidRequest(
            f"these rows are named twice, and an epoch has each once; name them once: {source.source!r}"
        )


def by_weight(trained: Sequence[Sequence[tuple[int, T]]], weights: Sequence[float], seed: int) -> list[tuple[int, T]]:
    """Rows of all in proportion to the weights, until the first of them is used up."""
    num_rows = int(min(len(rows) * sum(weights) / weight for rows, weight in zip(trained, weights, strict=True)))
    numbered = [[(number, index) for index in range(len(rows))] for number, rows in enumerate(trained)]
    drawn: dict[tuple[int, int], None] = {}
    for row in interleave(numbered, weights, max(num_rows, 1), seed):
        if row in drawn:
            break
        drawn[row] = None
    return [trained[number][index] for number, index in drawn]
