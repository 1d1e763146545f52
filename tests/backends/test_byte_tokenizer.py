"""A tokenizer of bytes: lossless, with special tokens and a chat template."""

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.backends.byte_tokenizer import CHATML, SPECIAL_TOKENS, ByteTokenizer
from stovetop.client import Tokenizer
from stovetop.errors import InvalidRequest, UnknownName

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi ☃"}]}]


@given(st.text())
def test_every_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < len(tokenizer) for token in tokens)
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *tokens]


def test_special_tokens_are_one_token_unless_split() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("a<|im_end|>b", add_special_tokens=False) == [97, 259, 98]
    split = tokenizer.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert split == list(b"<|im_end|>")
    assert tokenizer.decode([97, 259, 98]) == "a<|im_end|>b"
    assert tokenizer.decode([97, 259, 98], skip_special_tokens=True) == "ab"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == 259
    assert tokenizer.convert_tokens_to_ids("a") == 97
    assert tokenizer.get_added_vocab() == SPECIAL_TOKENS


def test_a_cut_off_character_decodes_to_a_replacement() -> None:
    assert ByteTokenizer().decode([97, 0xE2, 0x98]) == "a\ufffd"


def test_ids_and_tokens_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="260"):
        ByteTokenizer().decode([260])
    with pytest.raises(UnknownName, match=r"<\|im_end\|>"):
        ByteTokenizer().convert_tokens_to_ids("<|im_ends|>")


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_the_chat_template_is_what_its_jinja_source_says(add_generation_prompt: bool) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=add_generation_prompt)
    template = jinja2.Environment(trim_blocks=False, keep_trailing_newline=True).from_string(CHATML)
    assert text == template.render(messages=CHAT, add_generation_prompt=add_generation_prompt)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi ☃<|im_end|>\n")
    tokens = tokenizer.apply_chat_template(
        CHAT, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert tokenizer.decode(tokens) == text
    as_dict = tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=add_generation_prompt)
    assert as_dict["input_ids"] == tokens
