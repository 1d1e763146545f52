# pyright: basic
"""Whether we run a model exactly, proven when it is loaded: our ways of computing logprobs against the library's own
eager path, each sequence alone.

    prove             the rules (masks, windows, rotary positions, soft caps, sinks, head): on a small copy of the
                      config (`cutting.py`) in float32, several lengths in one pass, packed and from a cache; with the
                      library's modules, and with ours in their place (`flat_decoder.py`). Forward passes alone, and
                      no samples that share a prefix
    check_full_model  the weights in their places: the model itself, in its own dtype, on two short sequences

A model that fails is refused by name: a silently wrong model is the worst outcome of all. Both make or run models of
the library, which is done within `machine.SHARED.changed()` (`adopting.adopt` does).

Shapes: `N` packed tokens, `T` tokens of a sequence, `V` vocabulary.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stovetop.engine.kernels.arithmetic import Arithmetic, Fast, RowExact
from stovetop.engine.kernels.attention_plans import AttentionPlan
from stovetop.engine.kernels.packing import pack
from stovetop.engine.kernels.sight import How
from stovetop.engine.model import exactness
from stovetop.engine.model.attention import NAME
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.cutting import LONGEST, NUM_SPECIAL, Uncuttable, cut_config
from stovetop.engine.model.decoder_layers import expert_counts, has_experts
from stovetop.engine.model.flat_decoder import flattened
from stovetop.engine.model.ways import decoded_logprobs, packed_logprobs
from stovetop.errors import InvalidRequest, listed

log = logging.getLogger(__name__)

SHORTEST, LEAST_CONTEXT = 5, 8  # tokens: of a sequence, of a model
GAIN = 1.5  # of random projections: scores then spread so much that a wrong mask changes every logit
SEEDS = (0, 1, 2)  # tried in turn: with some weights two experts are as good as tied, and rounding decides
TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 0.3}  # of the spread of the logits

# what the code of a model raises that is not made for what we give it
ERRORS_OF_MODELS = (TypeError, RuntimeError, KeyError, AttributeError, ValueError, IndexError)

Wrap = Callable[[PreTrainedModel, Arithmetic], BaseModel]


# ---- the rules, on a small copy --------------------------------------------------------------------------------------


class Proof(NamedTuple):
    """What a small copy has shown."""

    failure: str | None  # None: it gives what the library gives
    is_flat: bool = False  # with our decoder layers too
    is_exact: bool = False  # on the row-exact arithmetic


@torch.no_grad()
def prove(name: str, model: PreTrainedModel, wrap: Wrap, *, row_exact: bool) -> Proof:
    """Raises unless a small copy of `model` gives what the library gives: on the row-exact arithmetic, if that is asked
    for and possible, else on the fast one."""
    try:
        config = cut_config(model)
    except Uncuttable as error:
        raise InvalidRequest(
            f"base model {name!r} cannot be checked, so it is refused: no small copy of its config works ({error})"
        ) from error
    proof = Proof("not tried yet")
    for is_exact in [True, False] if row_exact else [False]:
        proof = _proof(type(model), config, wrap, row_exact=is_exact)
        if proof.failure is None:
            return proof
    raise InvalidRequest(f"base model {name!r}: {proof.failure}; so this model is refused")


def _proof(model_class: type[PreTrainedModel], config: Any, wrap: Wrap, *, row_exact: bool) -> Proof:
    """With the weights of the first seed that it succeeds with; the failure is that of the very first."""
    proofs = []
    for seed in SEEDS if expert_counts(config.get_text_config()) else SEEDS[:1]:
        proofs.append(_proof_with(seed, model_class, config, wrap, row_exact=row_exact))
        if proofs[-1].failure is None:
            return proofs[-1]
    return proofs[0]


def _proof_with(seed: int, model_class: type[PreTrainedModel], config: Any, wrap: Wrap, *, row_exact: bool) -> Proof:
    """With weights of this seed."""
    small = _random_model(model_class, config, seed)
    text = config.get_text_config()
    sequences = _sequences(text.vocab_size - NUM_SPECIAL, min(LONGEST, context_length(text)), seed)
    expected = [
        small(torch.tensor([sequence]), use_cache=False).logits[0].float().log_softmax(-1) for sequence in sequences
    ]
    if not all(torch.isfinite(logprobs_TV).all() for logprobs_TV in expected):
        return Proof("random weights give logits that are not finite")
    small.set_attn_implementation(NAME)
    try:
        if row_exact:
            exactness.prepare(small, context_length(text))
        base = wrap(small, RowExact() if row_exact else Fast())
        watched = _watched(base, sequences)
        failure = _not_once(watched.calls, base.num_layers) or _difference(base, watched, sequences, expected)
        if failure is not None:
            return Proof(failure)
    except ERRORS_OF_MODELS as error:
        return Proof(f"it does not run with packed attention ({type(error).__name__}: {error})")
    return Proof(None, _runs_flat(base, watched.calls, sequences, expected), row_exact)


def _runs_flat(base: BaseModel, calls: "Sequence[Call]", sequences: list[list[int]], expected: list[Tensor]) -> bool:
    """Whether our decoder layers compute what the library computes."""
    try:
        flat = flat_form(base, calls)
        return flat is not None and _difference(flat, _watched(flat, sequences), sequences, expected) is None
    except ERRORS_OF_MODELS as error:
        log.info("%s has the parts of our decoder layers, which cannot run with them: %r", type(base.trunk), error)
        return False


def flat_form(base: BaseModel, calls: "Sequence[Call]") -> BaseModel | None:
    """The model with our decoder layers in place of the library's; None where it is built of other parts."""
    flat = flattened(base.trunk, [call.how for call in sorted(calls, key=lambda call: call.layer)])
    return None if flat is None else replace(base, flat=flat)


def _difference(base: BaseModel, watched: "_Watched", sequences: list[list[int]], expected: list[Tensor]) -> str | None:
    """Where this way of computing logprobs is not that of the library."""
    found = {
        "packed": packed_logprobs(base, sequences, []),
        "packed with a shared prefix": [logits_TV.log_softmax(-1) for logits_TV in watched.logits],
        "decoded from a cache": decoded_logprobs(base, sequences, []),
    }
    allowed = TOLERANCE[torch.float32] * max(logprobs_TV.std().item() for logprobs_TV in expected)
    for way, results in found.items():
        errors = [
            (ours_TV - theirs_TV[-len(ours_TV) :]).abs().max().item()
            for ours_TV, theirs_TV in zip(results, expected, strict=True)
        ]
        if not max(errors) <= allowed:
            lengths = ", ".join(str(len(logprobs_TV)) for logprobs_TV in expected)
            return (
                f"on a small copy of its config, logprobs of sequences of {lengths} tokens, {way}, differ from the "
                f"library's by {max(errors):.3g} (allowed {allowed:.3g}): {_suspicion(watched.calls, base.config)}"
            )
    return None


def _suspicion(calls: "Sequence[Call]", config: Any) -> str:
    windows = [key for key, value in vars(config).items() if "window" in key and isinstance(value, int) and value > 1]
    if windows and not any(call.how.window for call in calls):
        return (
            f"its attention layers do not pass on {listed(windows)}, which the library puts into a mask that we do not "
            "use; choose a version of the model without a window"
        )
    return "it asks for something that our attention or head does not honour"


def _random_model(model_class: type[PreTrainedModel], config: Any, seed: int) -> PreTrainedModel:
    """With weights that let every rule show: the library's own are so small that each token sees all others alike."""
    model = model_class(copy.deepcopy(config)).eval().requires_grad_(False)  # it keeps its config, and changes it
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(model.get_input_embeddings().weight)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.dim() < 2:
            parameter.add_(noise * 0.2)  # around what the library puts there: 0 or 1
        else:
            fan_in = max(parameter.shape[-2:]) if parameter.dim() > 2 else parameter.shape[-1]
            parameter.copy_(noise * (0.5 if id(parameter) in embeddings else GAIN / fan_in**0.5))
    return model


def _sequences(vocabulary: int, longest: int, seed: int) -> list[list[int]]:
    """A long one, one that goes on from its first half, and a short one."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(0, vocabulary, (2 * longest,), generator=generator).tolist()
    long, other = drawn[:longest], drawn[longest:]
    return [long, [*long[: longest // 2], *other[: longest // 4]], other[:SHORTEST]]


def context_length(config: Any) -> int:
    """The longest sequence whose tokens all are where the library would have them, whatever else is in the pass. What a
    text model was trained on, but for rotary embeddings that change all positions of a sequence once it is longer than
    some number of tokens: up to that number nothing depends on a sequence's length."""
    longest = config.max_position_embeddings
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(own for own in given.values() if isinstance(own, dict))):
        if rope.get("rope_type") == "longrope":
            first = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
            longest = min(longest, first)
    return longest


# ---- the model itself ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Two short sequences of different length, so that a mistake in packing would show, and what the library computes
    for them."""

    sequences: list[list[int]]
    logits: list[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel) -> "Probe":
        """By a model of the library, as it is."""
        config = model.config.get_text_config()
        generator, longest = torch.Generator().manual_seed(0), context_length(config)
        sequences: list[list[int]] = [
            torch.randint(0, config.vocab_size, (min(length, longest),), generator=generator).tolist()
            for length in (24, 15)
        ]
        logits = [model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0] for tokens in sequences]
        return cls(sequences, logits)


class Call(NamedTuple):
    """A call of attention in a pass."""

    layer: int
    how: How
    kv_bytes: int  # of the key and the value of one token


@dataclass(frozen=True, slots=True, eq=False)
class _Watching:
    """A plan that notes the calls of attention through it."""

    plan: AttentionPlan
    calls: list[Call] = field(default_factory=list)

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        self.calls.append(Call(layer, how, key_GND[:, :1].nbytes + value_GND[:, :1].nbytes))
        return self.plan.attend(layer, query_HND, key_GND, value_GND, how)


class _Watched(NamedTuple):
    """What a pass over packed sequences gave: logits of each sequence, and the calls of attention."""

    logits: list[Tensor]
    calls: list[Call]


def _watched(base: BaseModel, sequences: list[list[int]]) -> _Watched:
    packed = pack(sequences)
    plan = _Watching(base.packed_attention(packed))
    hidden_NE, head = base.hidden_states(packed, plan, []), base.head([])
    return _Watched([head.logits(hidden_NE[packed.rows_of(index)]) for index in range(len(sequences))], plan.calls)


def _not_once(calls: list[Call], num_layers: int) -> str | None:
    """Why these calls of attention are not one for each layer."""
    layers = [call.layer for call in calls]
    if len(set(layers)) < len(layers):
        return f"attention runs {len(layers)} times in its {num_layers} layers; we can honour one run a layer"
    if sorted(layers) != list(range(num_layers)):
        return (
            f"of its {num_layers} layers {len(layers)} attend through our function; the others have an attention of "
            "their own, which knows nothing of packs and caches"
        )
    return None


@torch.no_grad()
def attention_calls(base: BaseModel) -> list[Call]:
    """One a layer, in the order of the layers, in a pass of one token; raises where there are others."""
    calls = _watched_or_refused(base, [[0]]).calls
    obstacle = _not_once(calls, base.num_layers)
    if obstacle is not None:
        raise InvalidRequest(f"base model {base.limits.name!r}: {obstacle}; so this model is refused")
    return sorted(calls, key=lambda call: call.layer)


@torch.no_grad()
def check_full_model(base: BaseModel, probe: Probe) -> None:
    """Raises if the model does not compute what the library computes."""
    name, rough = base.limits.name, has_experts(base.layers, base.config)
    for ours_TV, logits_TV in zip(_watched_or_refused(base, probe.sequences).logits, probe.logits, strict=True):
        error, allowed = _error(ours_TV, logits_TV, rough), _tolerance(logits_TV)
        if not error <= allowed:
            raise InvalidRequest(
                f"base model {name!r}: our logits differ from the library's by {error:.3g} (allowed {allowed:.3g}); it "
                "has something our attention or head does not honour, so this model is refused"
            )


def _watched_or_refused(base: BaseModel, sequences: list[list[int]]) -> _Watched:
    try:
        return _watched(base, sequences)
    except ERRORS_OF_MODELS as error:
        raise InvalidRequest(f"base model {base.limits.name!r} does not run with packed attention: {error}") from error


def _error(ours_TV: Tensor, theirs_TV: Tensor, has_experts: bool) -> float:
    """The largest difference. With experts the median over tokens of the root mean square: where two experts are as
    good as tied, rounding decides which of them a token goes to, and its logits are others but not wrong. A wrong rule
    changes most tokens."""
    difference_TV = ours_TV - theirs_TV.float()
    if has_experts:
        return difference_TV.square().mean(-1).sqrt().median().item()
    return difference_TV.abs().max().item()


def _tolerance(logits_TV: Tensor) -> float:
    """Rounding that many layers may gather: relative to the spread of the logits, by the precision of the dtype."""
    return (logits_TV.float().std().item() + 1e-6) * TOLERANCE[logits_TV.dtype]
