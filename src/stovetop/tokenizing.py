"""What the package asks of a tokenizer. Which one a model has is `tokenizer.get_tokenizer`'s question."""

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the package asks of a tokenizer: the part of the transformers interface that it uses."""

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text token: a sampled sequence may end with it whatever `stop` says. None if there is none."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The token that a text begins with, where the family has one."""
        ...

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The Jinja template of a chat; several by name; None if the model has none."""
        ...

    def __len__(self) -> int: ...
    def get_added_vocab(self) -> dict[str, int]:
        """The tokens that are matched as whole strings, before any others: control tokens are among them."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Names of control tokens in it become these tokens: text that is not trusted goes through
        `tokenizer.SafeEncoder`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Tokens of an unfinished character become U+FFFD."""
        ...

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """The id of one token by its own name, such as <|im_end|>."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[Any], *, tokenize: bool, add_generation_prompt: bool = False, **template: Any
    ) -> Any:
        """A chat as the template writes it: text, or token ids with `tokenize`. Further arguments go to the
        template."""
        ...
