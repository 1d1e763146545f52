"""Logprobs of tokens as both endpoints write them. A token is told by its text; where that is only part of a character
it has no bytes of its own that could be told.
"""

from collections.abc import Sequence
from typing import Any

from stovetop.renderers.streaming import Utf8TokenDecoder
from stovetop.server.openai.drawing import Alternatives, Choice, ScoredPrompt
from stovetop.tokenizing import Tokenizer

_PART = "�"


def of_chat(choice: Choice, tokenizer: Tokenizer, first: int = 0) -> dict[str, Any]:
    """Of the tokens from `first` on."""
    told: list[dict[str, Any]] = []
    for index in range(first, len(choice.tokens)):
        others: Alternatives = () if choice.alternatives_TK is None else choice.alternatives_TK[index]
        said = _told(tokenizer, choice.tokens[index], choice.logprobs_T[index])
        top = [_told(tokenizer, token, logprob) for token, logprob in others]
        told.append({**said, "top_logprobs": top})
    return {"content": told, "refusal": None}


def _told(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "logprob": logprob, "bytes": None if _PART in text else list(text.encode())}


def of_completion(choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of all tokens of an answer."""
    rows_TK = [None] * len(choice.tokens) if choice.alternatives_TK is None else choice.alternatives_TK
    return _listed(tokenizer, choice.tokens, choice.logprobs_T, rows_TK)


def of_prompt_and_completion(
    choice: Choice, tokenizer: Tokenizer, prompt: Sequence[int], prompt_text: str, scored: ScoredPrompt
) -> dict[str, Any]:
    """The prompt's before those. What the tokenizer has put before its text takes up no place in the text."""
    answer = of_completion(choice, tokenizer)
    rows_TK = scored.alternatives_TK or [None] * len(prompt)
    num_added = len(tokenizer.decode(prompt)) - len(prompt_text)
    of_prompt = _listed(tokenizer, prompt, scored.logprobs_T, rows_TK)
    of_prompt["text_offset"] = [max(0, offset - num_added) for offset in of_prompt["text_offset"]]
    answer["text_offset"] = [offset + len(prompt_text) for offset in answer["text_offset"]]
    return {name: of_prompt[name] + answer[name] for name in answer}


def _listed(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs_T: Sequence[float | None],
    rows_TK: Sequence[Alternatives | None],
) -> dict[str, Any]:
    return {
        "tokens": [tokenizer.decode([token]) for token in tokens],
        "token_logprobs": list(logprobs_T),
        "top_logprobs": [_by_text(tokenizer, row) for row in rows_TK],
        "text_offset": _offsets(tokenizer, tokens),
    }


def _by_text(tokenizer: Tokenizer, row_K: Alternatives | None) -> dict[str, float] | None:
    """Of two tokens of one text, the more probable one."""
    if row_K is None:
        return None
    return {tokenizer.decode([token]): logprob for token, logprob in reversed(row_K)}


def _offsets(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Where in the text each token begins; where the character does that it is part of."""
    decoder, offsets, offset = Utf8TokenDecoder(tokenizer), list[int](), 0
    for token in tokens:
        offsets.append(offset)
        offset += len(decoder.feed(token))
    return offsets
