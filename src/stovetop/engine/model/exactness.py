# pyright: basic
"""Whether a model can run on the row-exact arithmetic (`arithmetic.py`), found out and not assumed.

What the mode rests on are facts about one build of a library on one processor. So when a model is loaded, the facts are
checked with the shapes of that model, and then the promise itself: the same logits, to the bit, for sequences alone,
packed, sharing a prefix, decoded from a cache in company, and with another number of threads.

Shapes: `I` inputs, `O` outputs, `R` rows, `T` tokens of a sequence, `V` vocabulary.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from stovetop.engine.kernels.arithmetic import ROW_MULTIPLE, Arithmetic, FrozenLinear, RotaryTable, RowExactSiLU
from stovetop.engine.kernels.block_attention import KEY_BLOCK, QUERY_MULTIPLE
from stovetop.engine.lora.routing import Rows
from stovetop.engine.lora.weights import initial_weights
from stovetop.engine.machine import set_threads_here
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.ways import decoded_logprobs, packed_logprobs
from stovetop.types import LoraConfig

ROWS = (8, 32, 128)  # counts of rows that a linear is tried with
HEAD_LOGITS_LIMIT = 2**24  # the head is tried with as many rows as keep its logits below this
# those whose angles depend on the position alone, within the context that a model has (`proving.context_length`)
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


def obstacle(model: nn.Module, config, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this model cannot run on the row-exact arithmetic, as far as its description tells."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return f"it needs float32 or bfloat16 on the CPU, not {str(dtype).removeprefix('torch.')} on {device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no products in bfloat16"
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation != "silu":
        return f"its activation {activation!r} has no row-exact form here"
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_local_experts"):
        if getattr(config, name, None):
            return f"its {name} has no row-exact form here"
    for rotary in rotaries(model):
        if rotary.rope_type not in ROPE_TYPES:
            return f"its rotary embedding {rotary.rope_type!r} depends on more than the position"
    return None


def prepare(model: nn.Module, num_positions: int) -> None:
    """Swaps the modules whose results depend on the place in a buffer for those that do not."""
    found = rotaries(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.SiLU) or type(child).__name__ == "SiLUActivation":
                setattr(parent, name, RowExactSiLU())
            elif child in found:
                setattr(parent, name, RotaryTable(child, num_positions, next(model.parameters()).dtype))


def rotaries(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]


def obstacle_found(base: BaseModel) -> str | None:
    """Why this model does not run row-exactly here, found by trying."""
    size = base.config
    head_size = getattr(size, "head_dim", None) or size.hidden_size // size.num_attention_heads
    return broken_fact(base.arithmetic, base.frozen_linears(), head_size) or broken_promise(base)


# ---- facts -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def broken_fact(arithmetic: Arithmetic, linears: list[FrozenLinear], head_size: int) -> str | None:
    """The first library fact that does not hold here, on one thread and on all."""
    generator = torch.Generator().manual_seed(0)
    for shape, linear in {tuple(linear.weight_OI.shape): linear for linear in linears}.items():
        rows = [count for count in ROWS if count * shape[0] <= HEAD_LOGITS_LIMIT]
        x_RI = torch.randn(max(rows), shape[1], generator=generator).to(linear.weight_OI.dtype)
        expected_RO = torch.cat([arithmetic.linear(part, linear) for part in x_RI.split(ROW_MULTIPLE)])
        for count in _on_threads(rows):
            if not torch.equal(arithmetic.linear(x_RI[-count:], linear), expected_RO[-count:]):
                return f"a linear of shape {shape} rounds otherwise with {count} rows"
    query = torch.randn(6, 256, head_size, generator=generator, dtype=torch.float32)
    block = torch.randn(6, KEY_BLOCK, head_size, generator=generator, dtype=torch.float32)
    expected = torch.cat([torch.bmm(part, block.transpose(1, 2)) for part in query.split(QUERY_MULTIPLE, 1)], 1)
    for count in _on_threads([QUERY_MULTIPLE, 24, 256]):
        for calls in (1, 3, 6):
            if not torch.equal(
                torch.bmm(query[:calls, -count:], block[:calls].transpose(1, 2)), expected[:calls, -count:]
            ):
                return f"a batched product rounds otherwise with {calls} calls of {count} rows"
    return None


def _on_threads(items: list[int]) -> Iterator[int]:
    """Each item with one thread, with as many as are set, and with a number between, for all of them may be used."""
    threads = torch.get_num_threads()
    try:
        for number in {1, (threads + 1) // 2, threads}:
            set_threads_here(number)
            yield from items
    finally:
        set_threads_here(threads)


# ---- the promise -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def broken_promise(base: BaseModel) -> str | None:
    """The first way of computing logits that gives other bits than a sequence alone; with an adapter on all targets,
    so that the low-rank products are tried too. The model is cut to its first layers: the others have their shapes."""
    generator = torch.Generator().manual_seed(0)
    weights = initial_weights(LoraConfig(rank=8, seed=0), base.targets, base.device)
    noise = {
        name: t if name.endswith(".A") else torch.randn(t.shape, generator=generator, dtype=torch.float32)
        for name, t in weights.tensors.items()
    }
    parts = [Rows(replace(weights, tensors=noise))]
    length = min(KEY_BLOCK + 6, base.limits.context_length - 4)
    first = torch.randint(0, base.limits.vocab_size, (length,), generator=generator).tolist()
    sequences = [first, [*first[: length // 2], *first[:5]], first[3:12]]
    with _first_layers(base) as base:
        expected = [packed_logprobs(base, [sequence], parts)[0] for sequence in sequences]
        for share in (False, True):
            for ours_TV, alone_TV in zip(packed_logprobs(base, sequences, parts, share), expected, strict=True):
                if not torch.equal(ours_TV, alone_TV):
                    return "packed sequences round otherwise than alone" + (", sharing a prefix" if share else "")
        for share in (False, base.attends_plainly):
            for ours_TV, alone_TV in zip(decoded_logprobs(base, sequences, parts, share), expected, strict=True):
                if not torch.equal(ours_TV, alone_TV[-len(ours_TV) :]):
                    return "decoding from a cache rounds otherwise than the whole sequence"
        for _ in _on_threads([0]):
            if not torch.equal(packed_logprobs(base, [sequences[1]], parts)[0], expected[1]):
                return "another number of threads rounds otherwise"
    return None


@contextlib.contextmanager
def _first_layers(base: BaseModel) -> Iterator[BaseModel]:
    """The model with only as many of its first layers as it takes to see every kind of them, and two at least. Kernels
    choose by shapes, and the shapes are all there."""
    name, layers = base.layers
    parent, own = base.trunk.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    types = getattr(base.config, "layer_types", None) or [""] * len(layers)
    kinds = [(kind, *(p.shape for p in layer.parameters())) for kind, layer in zip(types, layers, strict=True)]
    count = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    flat = None if base.flat is None else replace(base.flat, layers=base.flat.layers[:count])
    setattr(parent, own, layers[:count])
    try:
        yield replace(base, flat=flat, num_layers=min(count, len(layers)))
    finally:
        setattr(parent, own, layers)
