"""Packs give every sequence back, and hold shared tokens once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stovetop.engine.kernels.packing import MIN_SHARED_TOKENS, common_length, joined, micro_batches, pack

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(st.lists(few_tokens, min_size=1, max_size=12), st.booleans())
def test_every_sequence_finds_its_tokens_and_positions(sequences: list[list[int]], share: bool) -> None:
    packed = pack(sequences, share_prefixes=share)
    for index, sequence in enumerate(sequences):
        rows = packed.rows_of(index)
        assert [packed.tokens_N[row] for row in rows] == sequence
        assert [packed.positions_N[row] for row in rows] == list(range(len(sequence)))
    assert packed.num_tokens <= sum(map(len, sequences))
    assert [row for segment in packed.segments for row in segment.rows] == list(range(packed.num_tokens))


@given(st.lists(few_tokens, min_size=2, max_size=8))
def test_two_sequences_share_rows_only_where_their_prefixes_agree(sequences: list[list[int]]) -> None:
    packed = pack(sequences)
    for left in range(len(sequences)):
        for right in range(left):
            shared = set(packed.rows_of(left)) & set(packed.rows_of(right))
            assert len(shared) <= common_length(sequences[left], sequences[right])


def test_the_samples_of_a_prompt_share_its_rows() -> None:
    prompt = list(range(100, 120))
    packed = pack([[*prompt, sample, 7] for sample in range(8)])
    assert packed.num_tokens == 20 + 8 * 2
    assert len(packed.segments) == 9


def test_prompts_share_what_is_common_to_them_too() -> None:
    system, first, second = list(range(100, 110)), list(range(200, 210)), list(range(300, 310))
    packed = pack([[*system, *first, 1], [*system, *first, 2], [*system, *second, 1], [*system, *second, 2]])
    assert packed.num_tokens == 10 + 10 + 10 + 4


def test_equal_sequences_share_every_row() -> None:
    packed = pack([list(range(10))] * 3)
    assert packed.num_tokens == 10
    assert packed.rows_of(0) == packed.rows_of(2)


def test_a_short_common_prefix_is_not_split_off() -> None:
    prefix = list(range(MIN_SHARED_TOKENS - 1))
    assert len(pack([[*prefix, 50], [*prefix, 60]]).segments) == 2


def test_without_sharing_every_sequence_stands_alone() -> None:
    assert pack([list(range(10))] * 3, share_prefixes=False).num_tokens == 30


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_micro_batches_keep_the_order_and_the_bound(lengths: list[int], bound: int) -> None:
    cuts = micro_batches(lengths, bound)
    assert [length for cut in cuts for length in lengths[cut]] == lengths
    for cut in cuts:
        assert len(lengths[cut]) == 1 or sum(lengths[cut]) <= bound


@given(st.lists(st.integers(0, 1), max_size=200), st.lists(st.integers(0, 1), max_size=9), st.integers(0, 200))
def test_the_common_length_is_where_the_first_difference_is(tokens: list[int], ending: list[int], at: int) -> None:
    other = [*tokens[:at], *ending]
    same = [a == b for a, b in zip(tokens, other, strict=False)]
    assert common_length(tokens, other) == (same.index(False) if False in same else len(same))


def test_what_sequences_begin_with_alike_counts_once_in_a_run() -> None:
    prompt = list(range(200))
    sequences = [[*prompt, *[seed] * 60] for seed in range(16)]
    shared = [0] + [common_length(a, b) for a, b in pairwise(sequences)]
    lengths = [len(sequence) for sequence in sequences]
    cuts = micro_batches(lengths, 700, shared)
    assert [cut.stop - cut.start for cut in cuts] == [8, 8]
    assert all(pack(sequences[cut]).num_tokens <= 700 for cut in cuts)
    assert len(micro_batches(lengths, 700)) == 8


def test_a_run_of_long_prompts_with_short_endings_is_cut_for_the_keys_that_attention_has() -> None:
    sequences = [[*range(1000), seed] for seed in range(100)]
    shared = [0] + [common_length(a, b) for a, b in pairwise(sequences)]
    cuts = micro_batches([len(sequence) for sequence in sequences], 2000, shared)
    assert [cut.stop - cut.start for cut in cuts] == [15] * 6 + [10]


def test_thousands_of_nested_prefixes_are_packed_and_joined() -> None:
    """As the turns of long chats are, one datum a turn: deeper than functions may call themselves."""
    longest = list(range(1500))
    packed = joined([pack([longest[: 1 + length] for length in range(1500)])] * 2)
    assert packed.num_tokens < 2 * 1500 * 5
    for index in (0, 7, 1234, 1499):
        for rows in (packed.rows_of(index), packed.rows_of(1500 + index)):
            assert [packed.tokens_N[row] for row in rows] == longest[: 1 + index]


def test_every_turn_of_a_chat_shares_the_turns_before_it() -> None:
    """Each prefix is one segment, once, however deep; before and after it moves behind another pack."""
    turns = [list(range(10 * depth)) for depth in range(1, 41)]
    packed = joined([pack([[7] * 9]), pack(turns)])
    assert packed.num_tokens == 9 + 400
    assert len(packed.segments) == 1 + 40
    assert [packed.positions_N[row] for row in packed.rows_of(40)] == list(range(400))
