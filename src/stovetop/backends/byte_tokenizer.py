"""A tokenizer that needs no files: a token is a byte of UTF-8, and four more are special.

`decode(encode(text, add_special_tokens=False)) == text` for every text. Chats are rendered as ChatML, and as in chat
models of that family the mark that ends a turn, `<|im_end|>`, is the end-of-text token.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stovetop.errors import InvalidRequest, UnknownName

SPECIAL_TOKENS = {"<|bos|>": 256, "<|endoftext|>": 257, "<|im_start|>": 258, "<|im_end|>": 259}
_NAMES = {token: name for name, token in SPECIAL_TOKENS.items()}
_SPECIAL = re.compile("(" + "|".join(re.escape(name) for name in SPECIAL_TOKENS) + ")")

CHATML = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class ByteTokenizer:
    """The same ids on every machine, for tests and for the recording backend."""

    bos_token_id = SPECIAL_TOKENS["<|bos|>"]
    eos_token_id = SPECIAL_TOKENS["<|im_end|>"]
    chat_template = CHATML

    def __len__(self) -> int:
        return 256 + len(SPECIAL_TOKENS)

    def get_added_vocab(self) -> dict[str, int]:
        """The control tokens by name."""
        return dict(SPECIAL_TOKENS)

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """`add_special_tokens` puts `<|bos|>` first. `split_special_tokens` spells special tokens out as bytes, so that
        text from outside cannot smuggle one in."""
        tokens = [self.bos_token_id] if add_special_tokens else []
        for piece in [text] if split_special_tokens else _SPECIAL.split(text):
            if piece in SPECIAL_TOKENS and not split_special_tokens:
                tokens.append(SPECIAL_TOKENS[piece])
            else:
                tokens.extend(piece.encode())
        return tokens

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Bytes that are not UTF-8 become U+FFFD, as a cut-off character does."""
        return b"".join(self._bytes(token_ids, skip_special_tokens)).decode(errors="replace")

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """The id of a special token, or of a single byte's character."""
        if tokens in SPECIAL_TOKENS:
            return SPECIAL_TOKENS[tokens]
        if len(tokens.encode()) == 1:
            return tokens.encode()[0]
        raise UnknownName("token", tokens, SPECIAL_TOKENS, hint="Any other token is a single byte")

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
            elif not skip_special_tokens:
                yield _NAMES[token].encode()


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
