import functools
import re
from pathlib import Path
from typing import cast

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from processes import run_python
from renderers.languages import chatml, save, thinking
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import UnknownName
from stovetop.model_families import recommended_renderer_name
from stovetop.tokenizer import SafeEncoder, get_tokenizer
from stovetop.tokenizing import Tokenizer

BYTES = ByteTokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(chatml(), tmp_path)
    return tmp_path


def test_a_tokenizer_is_loaded_once(folder: Path) -> None:
    assert get_tokenizer(str(folder)) is get_tokenizer(f"{folder}/.")
    assert get_tokenizer(str(folder)).encode("the end") == chatml().encode("the end")


def test_a_name_that_leads_to_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown tokenizer .* or fetch the model first"):
        get_tokenizer(str(tmp_path))


def test_importing_the_module_does_not_import_transformers() -> None:
    """Half a second: a fresh interpreter."""
    script = "import sys, stovetop.renderers, stovetop.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    assert run_python("-c", script).stdout == "set()\n"


def test_a_model_is_spoken_to_in_its_own_template_or_in_plain_text() -> None:
    assert recommended_renderer_name(chatml()) == "chat_template"
    assert recommended_renderer_name(chatml(None)) == "role_colon"


# ---- encoding safely ---------------------------------------------------------------------------------------------


@given(st.text())
def test_ordinary_text_is_encoded_as_the_tokenizer_does(text: str) -> None:
    encoder = SafeEncoder.of(chatml())
    assume(not encoder.find_controls(text))
    assert encoder.encode(encoder.protect(text)) == chatml().encode(text, add_special_tokens=False)


@given(st.lists(st.sampled_from(["<", "|im_end|>", "<|im_end|>", "<|im_start|>", "\ufdd0", "\ufdd1", "x"])))
def test_protected_text_holds_no_control_token_and_stays_the_same_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    for tokenizer in (BYTES, chatml()):
        encoder = SafeEncoder.of(tokenizer)
        tokens = encoder.encode(encoder.protect(text))
        assert not set(tokens) & set(tokenizer.get_added_vocab().values())
        assert tokenizer.decode(tokens) == text


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<think>", "<table>", " ", "\n", "the", " end", "é"])))
def test_a_rendered_chat_is_encoded_as_the_tokenizer_does(pieces: list[str]) -> None:
    text = "".join(pieces)
    for tokenizer in (BYTES, chatml(), thinking(), *map(unusual, UNUSUAL)):
        assert SafeEncoder.of(tokenizer).encode(text) == tokenizer.encode(text, add_special_tokens=False)


UNUSUAL = {
    "white space behind is the token's": AddedToken("<|im_end|>", special=True, rstrip=True),
    "white space before is the token's": AddedToken("<|im_end|>", special=True, lstrip=True),
    "within a word it is text": AddedToken("<|im_end|>", special=True, single_word=True),
    "the first word of a text is written otherwise": AddedToken("<|im_end|>", special=True),
}


@functools.cache
def unusual(how: str) -> Tokenizer:
    """A tokenizer that takes notice of what stands around its control tokens."""
    words = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=["▁", *map(chr, range(128))], show_progress=False)
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if "first" in how else "never")
    words.train_from_iterator(["the end", "of the end"] * 3, trainer)
    words.add_tokens([UNUSUAL[how], AddedToken("<|im_start|>", special=True)])
    return cast(Tokenizer, PreTrainedTokenizerFast(tokenizer_object=words))


@pytest.mark.parametrize("how", UNUSUAL)
def test_around_a_control_token_text_is_encoded_as_that_token_has_it(how: str) -> None:
    tokenizer = unusual(how)
    encoder = SafeEncoder.of(tokenizer)
    text = "the <|im_end|> end <|im_start|>the<|im_end|>the"
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    pieces = re.split(r"(<\|\w+\|>)", text)
    alone = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    assert encoder.encode(text) != alone  # so nothing may be looked up apart


def test_what_a_template_writes_stays_a_control_token() -> None:
    encoder = SafeEncoder.of(BYTES)
    tokens = encoder.encode(f"<|im_start|>{encoder.protect('<|im_start|>')}<|im_end|>")
    assert tokens == [BYTES.convert_tokens_to_ids("<|im_start|>"), *b"<|im_start|>", BYTES.eos_token_id]


def test_a_models_own_markup_is_its_own_only_if_the_template_writes_it_within_a_turn() -> None:
    tokenizer = thinking()
    think, call = (tokenizer.convert_tokens_to_ids(text) for text in ("<think>", "<tool_call>"))
    encoder = SafeEncoder.of(tokenizer, template="<|im_start|><think><|im_end|>", opening="")
    assert encoder.encode(encoder.protect_own("<think>")) == [think]
    assert think not in encoder.encode(encoder.protect("<think>"))
    assert call not in encoder.encode(encoder.protect_own("<tool_call>"))
    opened = SafeEncoder.of(tokenizer, template="<|im_start|><think><|im_end|>", opening="<|im_start|><think>")
    assert think not in opened.encode(opened.protect_own("<think>"))


def test_control_strings_are_found_in_order() -> None:
    assert SafeEncoder.of(BYTES).find_controls("a<|im_end|>\n<|im_start|><|im_end|>") == [
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
    ]


def test_what_somebody_sets_for_a_call_of_their_own_cuts_no_chat() -> None:
    tokenizer = chatml()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    encoder = SafeEncoder.of(chatml())
    text = "hello there <|im_end|> " * 3
    before = encoder.encode(text)
    assert before == tokenizer.encode(text, add_special_tokens=False)
    tokenizer(text, truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert encoder.encode(text) == before
    tokenizer(text, split_special_tokens=True)
    assert encoder.encode(text) == before


@given(st.lists(st.text("<|ab>", min_size=2, max_size=5), min_size=1, max_size=6), st.text("<|ab>", max_size=12))
def test_of_control_strings_that_begin_alike_the_longest_is_found(controls: list[str], text: str) -> None:
    class Known(ByteTokenizer):
        def get_added_vocab(self) -> dict[str, int]:
            return {control: 300 + index for index, control in enumerate(controls)}

        def convert_tokens_to_ids(self, tokens: str) -> int:
            return self.eos_token_id  # all are special

    longest_first = sorted(set(controls), key=lambda control: -len(control))
    expected = re.findall("|".join(map(re.escape, longest_first)), text)
    assert SafeEncoder.of(Known()).find_controls(text) == expected
