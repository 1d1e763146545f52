"""Stop strings are found wherever they lie in what was drawn, whatever the tokenizer does with spaces and bytes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine import tiny
from stovetop.engine.sampling.stops import stops_of
from stovetop.types import SamplingParams

WORDS = ["▁END", "END", "▁the", "▁", "E", "N", "D", "x", "▁x", "é", ".", "<|end|>"]


def sentencepiece() -> PreTrainedTokenizerFast:
    """Like Llama 2's: a space at the start of a text is dropped when it is decoded; unknown characters as bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    core = Tokenizer(
        models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


PIECES, BYTES = sentencepiece(), tiny.tokenizer()


def ends_at(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], *stop: str) -> int | None:
    """After how many tokens a sample ends, if it does."""
    stops = stops_of(SamplingParams(stop=list(stop)), frozenset(), tokenizer)
    return next((count for count in range(1, len(tokens) + 1) if stops.hit(tokens[:count])), None)


def pieces(*names: str) -> list[int]:
    return [PIECES.convert_tokens_to_ids(name) for name in names]


def test_a_stop_string_that_begins_with_a_space_is_found_at_the_start_of_an_answer() -> None:
    assert PIECES.decode(pieces("▁END")) == "END"  # which is what hides it
    assert ends_at(PIECES, pieces("▁END"), " END") == 1
    assert ends_at(PIECES, pieces("▁", "E", "N", "D"), " END") == 4
    assert ends_at(PIECES, pieces("▁the", "▁END"), " END") == 2


def test_without_the_space_it_is_not_there() -> None:
    assert ends_at(PIECES, pieces("END", "▁the"), " END") is None
    assert ends_at(PIECES, pieces("END"), "END") == 1


def test_characters_in_pieces_are_found_with_their_last_byte() -> None:
    euro = pieces("<0xE2>", "<0x82>", "<0xAC>")
    assert ends_at(PIECES, [*euro, *euro], "€") == 3
    in_bytes = BYTES.encode("a€", add_special_tokens=False)
    assert len(in_bytes) == 4
    assert ends_at(BYTES, in_bytes, "€") == 4


def test_a_character_in_pieces_is_found_after_many_others() -> None:
    """Where what is looked at begins within one of them."""
    letters = [f"<0x{byte:02X}>" for byte in "あ".encode()]
    for count in range(1, 9):
        tokens = pieces(*letters * count, "<0xE2>", "<0x82>", "<0xAC>")
        assert ends_at(PIECES, tokens, "€") == len(tokens)


def test_the_text_of_control_tokens_counts_and_so_does_a_part_of_it() -> None:
    end = BYTES.convert_tokens_to_ids("<|im_end|>")
    assert ends_at(BYTES, [65, end], "<|im_end|>") == 2
    assert ends_at(BYTES, [65, end], "end|>") == 2
    assert ends_at(PIECES, pieces("▁the", "<|end|>"), "<|end|>") == 2


def test_tokens_without_any_text_may_lie_between() -> None:
    """Numbers that the model has and the tokenizer has not."""
    nothing = [500] * 40
    assert BYTES.decode(nothing) == ""
    tokens = BYTES.encode("ab", add_special_tokens=False)
    assert ends_at(BYTES, [tokens[0], *nothing, tokens[1]], "ab") == 42


text = st.text(alphabet="aé€😀 \nxEND.", min_size=1, max_size=12)


@given(text, st.data(), st.sampled_from([PIECES, BYTES]))
def test_a_sample_ends_with_the_token_that_completes_the_string(
    answer: str, data: st.DataObject, tokenizer: PreTrainedTokenizerFast
) -> None:
    start = data.draw(st.integers(0, len(answer) - 1))
    stop = answer[start : data.draw(st.integers(start + 1, len(answer)))]
    lead = tokenizer.encode("x", add_special_tokens=False)
    tokens = tokenizer.encode("x" + answer, add_special_tokens=False)[len(lead) :]
    found = ends_at(tokenizer, tokens, stop)
    texts = [tokenizer.decode([*lead, *tokens[:count]])[1:] for count in range(len(tokens) + 1)]
    assert found == next(count for count, text in enumerate(texts) if stop in text)
    assert ends_at(tokenizer, tokens, "y") is None


def test_the_prompt_ends_nothing() -> None:
    """Neither by what is in it nor by what begins in it: a sample sees its own tokens only."""
    assert ends_at(PIECES, pieces("D", "▁the"), "END") is None
    with pytest.raises(ValueError, match="need a tokenizer"):
        stops_of(SamplingParams(stop="END"), frozenset(), None)
