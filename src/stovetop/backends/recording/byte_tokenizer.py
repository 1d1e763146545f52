"""A tokenizer that needs no files: a token is a byte of UTF-8, and some more are the control tokens of every family of
models that there is a renderer for.

`decode(encode(text, add_special_tokens=False)) == text` for every text. Chats are rendered as ChatML, and as in chat
models of that family the mark that ends a turn, `<|im_end|>`, is the end-of-text token.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stovetop.errors import InvalidRequest, UnknownName

_CHATML = "<|bos|> <|endoftext|> <|im_start|> <|im_end|>"
_FAMILIES = """
<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>
<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>
<|startoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|>
[BOS] [EOS] <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>
<|tool_calls_section_begin|> <|tool_calls_section_end|>
<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
<|media_begin|> <|media_content|> <|media_pad|> <|media_end|> <|vision_start|> <|vision_end|> <|image_pad|>
"""
_TAGS = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"  # within an answer

SPECIAL_TOKENS = {name: 256 + index for index, name in enumerate((_CHATML + _FAMILIES).split())}
TAGS = {name: 256 + len(SPECIAL_TOKENS) + index for index, name in enumerate(_TAGS.split())}
_ADDED = SPECIAL_TOKENS | TAGS
_NAMES = {token: name for name, token in _ADDED.items()}
_CONTROL = re.compile("(" + "|".join(re.escape(name) for name in _ADDED) + ")")

CHATML = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class ByteTokenizer:
    """The same ids on every machine, for tests and for the recording backend. As in the tokenizers of transformers,
    tags such as `<think>` are tokens too, and not special ones."""

    name_or_path = "stovetop/bytes"
    bos_token_id = SPECIAL_TOKENS["<|bos|>"]
    eos_token_id = SPECIAL_TOKENS["<|im_end|>"]
    chat_template = CHATML

    def __len__(self) -> int:
        return 256 + len(_ADDED)

    def get_added_vocab(self) -> dict[str, int]:
        """The control tokens by name."""
        return dict(_ADDED)

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """`add_special_tokens` puts `<|bos|>` first. `split_special_tokens` spells special tokens and tags as bytes, so
        that text from outside cannot smuggle one in."""
        tokens = [self.bos_token_id] if add_special_tokens else []
        for piece in [text] if split_special_tokens else _CONTROL.split(text):
            if piece in _ADDED and not split_special_tokens:
                tokens.append(_ADDED[piece])
            else:
                tokens.extend(piece.encode())
        return tokens

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Bytes that are not UTF-8 become U+FFFD, as a cut-off character does."""
        return b"".join(self._bytes(token_ids, skip_special_tokens)).decode(errors="replace")

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """The id of a special token, a tag, or a single byte's character."""
        if tokens in _ADDED:
            return _ADDED[tokens]
        if len(tokens.encode()) == 1:
            return tokens.encode()[0]
        raise UnknownName("token", tokens, _ADDED, hint="Any other token is a single byte")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
        **template: Any,
    ) -> str | list[int] | dict[str, list[int]]:
        """What `chat_template` says. As in transformers, tokens come as `{"input_ids": ...}` unless `return_dict` is
        false, and arguments that the template does not use (it uses none) change nothing."""
        text = "".join(
            f"<|im_start|>{message['role']}\n{_text_of(message['content'])}<|im_end|>\n" for message in conversation
        )
        text += "<|im_start|>assistant\n" if add_generation_prompt else ""
        if not tokenize:
            return text
        tokens = self.encode(text, add_special_tokens=False)
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens)} if return_dict else tokens

    def _bytes(self, token_ids: Sequence[int], skip_special_tokens: bool) -> Iterator[bytes]:
        for token in token_ids:
            if 0 <= token < 256:
                yield bytes([token])
            elif token not in _NAMES:
                raise InvalidRequest(f"token id {token} is outside the byte vocabulary, 0..{len(self) - 1}")
            elif not (skip_special_tokens and _NAMES[token] in SPECIAL_TOKENS):
                yield _NAMES[token].encode()


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
