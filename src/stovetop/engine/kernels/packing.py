# pyright: basic
"""Sequences to one packed row and back, without a padding token. Tokens that several sequences start with are packed,
and computed, once.

The pack is a prefix tree: a *segment* is a run of tokens that belongs to the same sequences, and sees the segments
above it and itself. 8 samples of one prompt become 9 segments. A sequence is a path, and finds its own rows along it,
so a gradient on a shared row is the sum over its sequences by itself.

Shapes: `N` packed tokens, `T` tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MOST_SHARING = 8  # times the tokens of a run, that its sequences may have in all
RUN = 64  # tokens that are compared at a time
MIN_SHARED_TOKENS = 8  # a shorter common prefix is not worth a segment of its own


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows [start, start + length) of the pack; they see the rows of `above`, in order, and themselves causally."""

    start: int
    length: int
    above: tuple["Segment", ...] = field(default=(), repr=False)
    first_position: int = field(init=False)  # of its first row in the sequences that it is a part of

    def __post_init__(self) -> None:
        first = self.above[-1].first_position + self.above[-1].length if self.above else 0
        object.__setattr__(self, "first_position", first)

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

    def lay_out(group: _Group, start: int, above: tuple[Segment, ...]) -> tuple[int, tuple[Segment, ...]]:
        """Adds what the group shares beyond its first `start` tokens, which `above` holds, and the sequences that end
        there. Returns the same for its members."""
        first, common = sequences[group.first], group.common
        if common - start >= MIN_SHARED_TOKENS:
            above = (*above, add(first[start:common], above))
            start = common
        ended = [member for member in group.members if isinstance(member, int) and len(sequences[member]) == common]
        if ended:  # these are all equal
            leaf = above[-1] if start == common else add(first[start:common], above)
            leaves.update(dict.fromkeys(ended, leaf))
        return start, above

    waiting: list[tuple[_Group | int, int, tuple[Segment, ...]]] = []
    if share_prefixes:
        waiting.append((_grouped(sequences), 0, ()))
    else:
        leaves.update({index: add(sequence, ()) for index, sequence in enumerate(sequences)})
    while waiting:
        member, start, above = waiting.pop()
        if isinstance(member, _Group):
            start, above = lay_out(member, start, above)
            waiting += [(own, start, above) for own in reversed(member.members)]
        elif member not in leaves:
            leaves[member] = add(sequences[member][start:], above)
    positions_N = [segment.first_position + row for segment in segments for row in range(segment.length)]
    return Pack(tokens_N, positions_N, segments, [leaves[index] for index in range(len(sequences))])


@dataclass(slots=True, eq=False)
class _Group:
    """Sequences, by index, and groups of sequences, in sorted order, that agree on their first `common` tokens and on
    no more."""

    common: int
    first: int  # the index of one of its sequences
    members: "list[_Group | int]" = field(default_factory=list)


def _grouped(sequences: Sequence[Sequence[int]]) -> _Group:
    """The group of all: the tree of their prefixes, from what each has in common with its neighbour in sorted order
    (Kasai et al. 2001, "Linear-time longest-common-prefix computation in suffix arrays": the same tree)."""
    order = sorted(range(len(sequences)), key=lambda index: list(sequences[index]))
    with_next = [common_length(sequences[left], sequences[right]) for left, right in pairwise(order)]
    open_groups = [_Group(0, order[0])]  # each within the one before it; the next sequence may belong to all of them
    for index, common in zip(order, [*with_next, 0], strict=True):
        if common > open_groups[-1].common:
            open_groups.append(_Group(common, index))
        open_groups[-1].members.append(index)
        while open_groups[-1].common > common:
            complete = open_groups.pop()
            if open_groups[-1].common < common:
                open_groups.append(_Group(common, complete.first))
            open_groups[-1].members.append(complete)
    return open_groups[0]


def joined(packs: Sequence[Pack]) -> Pack:
    """Several packs one behind another; they share nothing."""
    tokens_N: list[int] = []
    positions_N: list[int] = []
    segments: list[Segment] = []
    leaves: list[Segment] = []
    for packed in packs:
        moved = _moved(packed.segments, len(tokens_N))
        tokens_N += packed.tokens_N
        positions_N += packed.positions_N
        segments += moved.values()
        leaves += [moved[leaf] for leaf in packed.leaves]
    return Pack(tokens_N, positions_N, segments, leaves)


def _moved(segments: Sequence[Segment], by: int) -> dict[Segment, Segment]:
    """Each once, after those above it."""
    if by == 0:
        return {segment: segment for segment in segments}
    moved: dict[Segment, Segment] = {}
    for segment in segments:
        above = tuple(moved[other] for other in segment.above)
        moved[segment] = Segment(segment.start + by, segment.length, above)
    return moved


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
    cuts, used, whole = [0], 0, 0
    for index, length in enumerate(lengths):
        new = length - (shared[index] if shared is not None and used else 0)
        if used and (used + new > max_tokens or whole + length > MOST_SHARING * max_tokens):
            cuts.append(index)
            used, whole, new = 0, 0, length
        used, whole = used + new, whole + length
    return [slice(start, end) for start, end in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
