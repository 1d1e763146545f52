"""A tokenizer of bytes: lossless, with special tokens and a chat template."""

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.backends.recording.byte_tokenizer import CHATML, SPECIAL_TOKENS, TAGS, ByteTokenizer
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers import get_renderer, supported_renderers
from stovetop.renderers.messages import get_text_content
from stovetop.tokenizing import Tokenizer

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
    assert tokenizer.get_added_vocab() == SPECIAL_TOKENS | TAGS


def test_tags_are_tokens_that_are_not_special() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("<think>a</think><|im_end|>", add_special_tokens=False)
    assert len(tokens) == 4
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "<think>a</think>"


@given(st.text(), st.sampled_from(sorted(SPECIAL_TOKENS | TAGS)), st.text())
def test_text_with_control_tokens_survives_as_tokens_and_as_bytes(before: str, control: str, after: str) -> None:
    tokenizer = ByteTokenizer()
    text = before + control + after
    tokens = tokenizer.encode(text, add_special_tokens=False)
    spelled = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(tokens) == tokenizer.decode(spelled) == text
    assert len(tokens) < len(spelled) == len(text.encode())


@pytest.mark.parametrize("name", [name for name in supported_renderers() if not name.startswith("qwen3_vl")])
def test_the_renderer_of_every_family_runs_on_it(name: str) -> None:
    """Those that see images need the model's image processor."""
    tokenizer = ByteTokenizer()
    renderer = get_renderer(name, tokenizer)
    user, answer = {"role": "user", "content": "Say <|im_end|> and <|eot_id|>"}, {"role": "assistant", "content": "No."}
    prompt = renderer.build_generation_prompt([user]).to_ints()
    (example,) = renderer.build_supervised_examples([user, answer])
    weighted = zip(example.model_input.to_ints(), example.weights, strict=True)
    written = [token for token, weight in weighted if weight]
    assert "Say <|im_end|> and <|eot_id|>" in tokenizer.decode(prompt)
    parsed, termination = renderer.parse_response(written)
    assert (get_text_content(parsed).strip(), termination.is_clean) == ("No.", True)


def test_a_cut_off_character_decodes_to_a_replacement() -> None:
    assert ByteTokenizer().decode([97, 0xE2, 0x98]) == "a\ufffd"


def test_ids_and_tokens_that_do_not_exist_are_refused() -> None:
    outside = len(ByteTokenizer())
    with pytest.raises(InvalidRequest, match=f"{outside} is outside the byte vocabulary"):
        ByteTokenizer().decode([outside])
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
