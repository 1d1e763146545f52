# pyright: basic
"""Sequences to one packed row and back, without a padding token. Tokens that several sequences start with are packed,
and computed, once.

The pack is a prefix tree: a *segment* is a run of tokens that belongs to the same sequences, and sees the segments
above it and itself. 8 samples of one prompt become 9 segments. A sequence is a path, and finds its own rows along it,
so a gradient on a shared row is the sum over its sequences by itself.

Shapes: `N` packed tokens, `T` tokens of one sequence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

MOST_SHARING = 8  # times the tokens of a run, that its sequences may have in all
RUN = 64  # tokens that are compared at a time
MIN_SHARED_TOKENS = 8  # a shorter common prefix is not worth a segment of its own


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, start + length) of the pack; they see the rows of `above`, in order, and themselves causally."""

    start: int
    length: int
    above: tuple["Segment", ...] = ()

    @property
    def first_position(self) -> int:
        return sum(segment.length for segment in self.above)

    @property
    def rows(self) -> range:
        return range(self.start, self.start + self.length)

    @property
    def key_rows(self) -> list[int]:
        """Rows of the sequence up to the end of this segment: what its last row sees."""
        return [row for segment in (*self.above, self) for row in segment.rows]


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences laid out in one row."""

    tokens_N: list[int]
    positions_N: list[int]  # of each token in its sequence
    segments: list[Segment]  # in the order of their rows
    leaves: list[Segment]  # for each sequence, the segment that it ends with

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)

    def rows_of(self, index: int) -> list[int]:
        """Where the tokens of sequence `index` lie, in its order."""
        return self.leaves[index].key_rows


def pack(sequences: Sequence[Sequence[int]], *, share_prefixes: bool = True) -> Pack:
    """Lays out `sequences`, none of them empty. Without `share_prefixes` each is a segment of its own."""
    tokens_N: list[int] = []
    segments: list[Segment] = []
    leaves: dict[int, Segment] = {}

    def add(tokens_T: Sequence[int], above: tuple[Segment, ...]) -> Segment:
        segments.append(Segment(len(tokens_N), len(tokens_T), above))
        tokens_N.extend(tokens_T)
        return segments[-1]

    def lay_out(indices: list[int], start: int, above: tuple[Segment, ...]) -> None:
        """Sequences `indices`, sorted, agree on their first `start` tokens, which `above` holds."""
        if len(indices) == 1:
            leaves[indices[0]] = add(sequences[indices[0]][start:], above)
            return
        common = common_length(sequences[indices[0]], sequences[indices[-1]])
        if common - start >= MIN_SHARED_TOKENS:
            above = (*above, add(sequences[indices[0]][start:common], above))
            start = common
        for _, group in groupby(indices, key=lambda index: tuple(sequences[index][common : common + 1])):
            members = list(group)
            if len(sequences[members[0]]) == common:  # these end here, and are all equal
                leaf = above[-1] if start == common else add(sequences[members[0]][start:], above)
                leaves.update(dict.fromkeys(members, leaf))
            else:
                lay_out(members, start, above)

    if share_prefixes:
        lay_out(sorted(range(len(sequences)), key=lambda index: list(sequences[index])), 0, ())
    else:
        leaves.update({index: add(sequence, ()) for index, sequence in enumerate(sequences)})
    positions_N = [position for segment in segments for position in _positions(segment)]
    return Pack(tokens_N, positions_N, segments, [leaves[index] for index in range(len(sequences))])


def joined(packs: Sequence[Pack]) -> Pack:
    """Several packs one behind another; they share nothing."""
    tokens_N: list[int] = []
    positions_N: list[int] = []
    segments: list[Segment] = []
    leaves: list[Segment] = []
    for packed in packs:
        by = len(tokens_N)
        tokens_N += packed.tokens_N
        positions_N += packed.positions_N
        segments += [_moved(segment, by) for segment in packed.segments]
        leaves += [_moved(leaf, by) for leaf in packed.leaves]
    return Pack(tokens_N, positions_N, segments, leaves)


def _moved(segment: Segment, by: int) -> Segment:
    return Segment(segment.start + by, segment.length, tuple(_moved(above, by) for above in segment.above))


def _positions(segment: Segment) -> Iterable[int]:
    return range(segment.first_position, segment.first_position + segment.length)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    start = 0
    while left[start : start + RUN] == right[start : start + RUN] and start < min(len(left), len(right)):
        start += RUN
    for index in range(start, min(len(left), len(right))):
        if left[index] != right[index]:
            return index
    return min(len(left), len(right))


def micro_batches(lengths: Sequence[int], max_tokens: int, shared: Sequence[int] | None = None) -> list[slice]:
    """Cuts sequences, in their order, into runs of at most `max_tokens` tokens; a longer one stands alone. The first
    `shared[i]` tokens of sequence i are those of the one before it, so a run that has both counts them once; but all
    tokens, for each of which attention has a key, are at most `MOST_SHARING` times as many."""
    cuts, filled, whole = [0], 0, 0
    for index, length in enumerate(lengths):
        new = length - (shared[index] if shared is not None and filled else 0)
        if filled and (filled + new > max_tokens or whole + length > MOST_SHARING * max_tokens):
            cuts.append(index)
            filled, whole, new = 0, 0, length
        filled, whole = filled + new, whole + length
    return [slice(start, end) for start, end in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
