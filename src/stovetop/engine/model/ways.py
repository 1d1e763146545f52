# pyright: basic
"""The two ways in which a model computes logprobs, for checks when it is loaded: packed, as the trainer does, and from
a cache, as the sampler does.

Shapes: `T` tokens of a sequence, `V` vocabulary.
"""

import torch
from torch import Tensor

from stovetop.engine.kernels.attention_plans import PrefillAttention, PrefillChunk, pack_of_chunks
from stovetop.engine.kernels.block_attention import KEY_BLOCK
from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.kernels.packing import pack
from stovetop.engine.kernels.shared_prefix import SharedPrefixes
from stovetop.engine.lora.routing import AdapterRows
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.decoding import Step, decoded


def packed_logprobs(
    base: BaseModel, sequences: list[list[int]], parts: AdapterRows, share: bool = False
) -> list[Tensor]:
    packed = pack(sequences, share_prefixes=share)
    hidden_NE = base.hidden_states(packed, base.packed_attention(packed), parts)
    head = base.head(parts)
    return [head.logits(hidden_NE[packed.rows_of(index)]).log_softmax(-1) for index in range(len(sequences))]


def decoded_logprobs(
    base: BaseModel, sequences: list[list[int]], parts: AdapterRows, share: bool = False
) -> list[Tensor]:
    """The last rows of each sequence, one token at a time, all sequences in step, after the tokens before them in two
    chunks. With `share` whole blocks of these are outside of the slots."""
    num_steps = 3
    prompts, caches = [sequence[:-num_steps] for sequence in sequences], [KVCache(base.num_layers) for _ in sequences]
    halves = [len(prompt) // 2 for prompt in prompts]
    for starts, ends in ((([0] * len(prompts)), halves), (halves, list(map(len, prompts)))):
        _fill(base, caches, prompts, starts, ends, parts)
    cache, store = KVCache(base.num_layers), SharedPrefixes(base.num_layers)
    cache.reserve(len(prompts), max(map(len, sequences)))
    starts = [len(prompt) - len(prompt) % KEY_BLOCK if share else 0 for prompt in prompts]
    prefixes = [store.join(own, start) if start else None for own, start in zip(caches, starts, strict=True)]
    for slot, (own, prompt, start) in enumerate(zip(caches, prompts, starts, strict=True)):
        cache.copy_from(own, 0, [slot], len(prompt) - start, start=start)
    head, drawn = base.head(parts), []
    for index in range(num_steps):
        positions = [len(prompt) + index for prompt in prompts]
        step = Step(
            cache,
            [sequence[position] for sequence, position in zip(sequences, positions, strict=True)],
            positions,
            [position - start for position, start in zip(positions, starts, strict=True)],
            parts,
            store.of(prefixes, base.device),
        )
        drawn.append(head.logits(decoded(base, step)).log_softmax(-1))
    return list(torch.stack(drawn, 1))


def _fill(
    base: BaseModel,
    caches: list[KVCache],
    prompts: list[list[int]],
    starts: list[int],
    ends: list[int],
    parts: AdapterRows,
) -> None:
    """Computes tokens [start, end) of every prompt into its cache, in one pass."""
    chunks, first_row = [], 0
    for cache, prompt, start, end in zip(caches, prompts, starts, ends, strict=True):
        cache.reserve(1, len(prompt))
        chunks.append(PrefillChunk(cache, start, end - start, first_row))
        first_row += end - start
    packed = pack_of_chunks(chunks, [prompt[p.start : p.end] for prompt, p in zip(prompts, chunks, strict=True)])
    base.hidden_states(packed, PrefillAttention(chunks, base.arithmetic, base.device), parts)
