# pyright: basic
"""From hidden states to log-probabilities of given tokens, without a [tokens, vocabulary] tensor of the whole batch.

The output head is applied to a chunk of rows at a time. A row may be asked for any number of targets (a shared prompt,
soft targets), so what is asked is a list of pairs (row, token). Both backward passes are written by hand:

    _OnePairARow   z = h·Wᵀ, p = softmax(z): d logprob / d h = (onehot(target) - p)·W is computed on the way there,
                   while p is in the cache, so that the backward pass needs no logits
    _PairLogprobs  any pairs, a head that an adapter trains, soft-capped logits: computes the logits again, for the
                   rows with a gradient that is not zero

Shapes: `N` rows, `E` hidden size, `V` vocabulary, `P` pairs, `C` rows of one chunk, `R` rank of an adapter of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stovetop.engine.kernels.arithmetic import Arithmetic, Fast, FrozenLinear
from stovetop.engine.kernels.precision import precise, precise_dtype
from stovetop.engine.lora.low_rank import ALL, Factors, LowRank, Product

# Chosen with benchmarks/constants.py, on a CPU: half and double give so many times the speed.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}  # of the float32 logits that exist at one time: 1.00, 1.02
SOFTMAX_BYTES = 3 * 2**20  # of those that become probabilities at one time: 1.00, 1.00; all of a chunk take more memory
MIN_CHUNK_ROWS = 64  # fewer would read the weights more often than they compute with them


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output projection, with what adapters add to it. Some models bend its outputs z:
    logits = softcap·tanh(multiplier·z / softcap)."""

    linear: FrozenLinear
    low_ranks: Sequence[Product] = ()
    arithmetic: Arithmetic = field(default_factory=Fast)
    multiplier: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_CE: Tensor) -> Tensor:
        """Logits (C, V) in at least float32."""
        return self.logits_of(self.outputs(hidden_CE))

    def outputs(self, hidden_CE: Tensor) -> Tensor:
        """(C, V) of the projection alone, in the dtype of the model where no adapter adds to it."""
        outputs_CV = self.arithmetic.linear(hidden_CE, self.linear)
        if self.low_ranks:
            outputs_CV = precise(outputs_CV)
        for part in self.low_ranks:
            part.add_to(outputs_CV, hidden_CE, self.arithmetic)
        return outputs_CV

    def logits_of(self, outputs_CV: Tensor) -> Tensor:
        """From `outputs`, which it may overwrite. Any rows of them will do."""
        logits_CV = precise(outputs_CV)
        if self.multiplier != 1.0:
            logits_CV *= self.multiplier
        if self.softcap is not None:
            logits_CV = logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV

    @property
    def trained(self) -> tuple[Factors, float] | None:
        """The factors of the one adapter that is trained with the hidden states, and its scale."""
        if not self.low_ranks:
            return None
        (adapter,) = self.low_ranks
        assert isinstance(adapter, LowRank), "a pass scores each adapter's rows on their own"
        assert adapter.rows == ALL, "a pass scores each adapter's rows on their own"
        (factors,) = adapter.by_sibling
        assert factors is not None, "it trains the head"
        return factors, adapter.scale

    def d_outputs(self, d_logits_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """The gradient of the projection's outputs from that of the logits, which it takes over."""
        if self.softcap is not None:  # tanh' = 1 - tanh²
            d_logits_CV.mul_(1 - (logits_CV / self.softcap).square_())
        return d_logits_CV.mul_(self.multiplier) if self.multiplier != 1.0 else d_logits_CV


def pair_logprobs(
    head: Head,
    hidden_NE: Tensor,
    rows_P: Tensor,
    targets_P: Tensor,
    temperature: float = 1.0,
    trained_P: Tensor | None = None,
) -> Tensor:
    """log softmax(logits(row) / temperature)[target] for each pair, (P,) float32. Differentiable in the hidden states
    and in the factors of the head's adapter, of which there may be one, for all rows. `trained_P` says which pairs can
    have a gradient other than zero (None: all); it is no promise, and saves time where most have none."""
    single_P = _is_alone(head, hidden_NE, rows_P, trained_P)
    singles_S, others_S = single_P.nonzero()[:, 0], (~single_P).nonzero()[:, 0]
    if len(singles_S) == 0:
        return _of_any_pairs(head, hidden_NE, rows_P, targets_P, temperature)
    out_S = _OnePairARow.apply(hidden_NE, head, rows_P[singles_S], targets_P[singles_S], temperature)
    if len(others_S) == 0:
        return out_S
    others = _of_any_pairs(head, hidden_NE, rows_P[others_S], targets_P[others_S], temperature)
    return torch.cat([out_S, others])[torch.argsort(torch.cat([singles_S, others_S]))]


def _is_alone(head: Head, hidden_NE: Tensor, rows_P: Tensor, trained_P: Tensor | None) -> Tensor:
    """Which pairs are the only one of their row, and trained: no pair where the gradient of the head is not known
    on the way there, or is not asked for."""
    is_plain = head.softcap is None and not head.low_ranks
    if not (is_plain and hidden_NE.requires_grad and torch.is_grad_enabled()):
        return torch.zeros_like(rows_P, dtype=torch.bool)
    is_single_P = torch.bincount(rows_P, minlength=len(hidden_NE))[rows_P] == 1
    return is_single_P if trained_P is None else is_single_P & trained_P


def _of_any_pairs(head: Head, hidden_NE: Tensor, rows_P: Tensor, targets_P: Tensor, temperature: float) -> Tensor:
    a_RE, b_VR = (None, None) if head.trained is None else head.trained[0]
    order_P = torch.argsort(rows_P, stable=True)
    sorted_P = _PairLogprobs.apply(hidden_NE, a_RE, b_VR, head, rows_P[order_P], targets_P[order_P], temperature)
    return torch.empty_like(sorted_P).index_copy(0, order_P, sorted_P)


class _OnePairARow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, head: Head, rows_P: Tensor, targets_P: Tensor, temperature: float
    ) -> Tensor:
        out_P = torch.empty(len(rows_P), dtype=precise_dtype(hidden_NE.dtype), device=hidden_NE.device)
        slopes_PE = hidden_NE.new_empty(len(rows_P), hidden_NE.shape[1])  # of the logprob, by the outputs' own factor
        columns = (rows_P, targets_P, out_P, slopes_PE)
        for rows_C, targets_C, out_C, slopes_CE in zip(
            *(column.split(chunk_rows(head.linear.weight_OI)) for column in columns), strict=True
        ):
            outputs_CV = head.outputs(hidden_NE[rows_C])
            parts = zip(
                *(each.split(_softmax_rows(outputs_CV)) for each in (outputs_CV, targets_C, out_C)), strict=True
            )
            for outputs, targets, out in parts:
                logprobs = _tempered(head.logits_of(outputs), temperature).log_softmax(-1)
                out.copy_(logprobs.gather(1, targets[:, None])[:, 0])
                slopes = logprobs.exp_().neg_()
                outputs.copy_(slopes.scatter_add_(1, targets[:, None], torch.ones_like(out)[:, None]))
            torch.mm(outputs_CV, head.linear.weight_OI, out=slopes_CE)
        ctx.save_for_backward(rows_P, slopes_PE)
        ctx.shape, ctx.factor = hidden_NE.shape, head.multiplier / temperature
        return out_P

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows_P, slopes_PE = ctx.saved_tensors
        d_hidden_NE = slopes_PE.new_zeros(ctx.shape)
        d_hidden_NE[rows_P] = (slopes_PE * (gradients[0] * ctx.factor)[:, None]).to(slopes_PE.dtype)
        return d_hidden_NE, None, None, None, None


def _softmax_rows(outputs_CV: Tensor) -> int:
    if outputs_CV.device.type != "cpu":
        return len(outputs_CV)
    return max(1, SOFTMAX_BYTES // (4 * outputs_CV.shape[1]))


class _Chunk(NamedTuple):
    rows_C: Tensor  # distinct rows, ascending
    place_P: Tensor  # for each pair of the chunk, its row's place in rows_C
    pairs: slice


def chunk_rows(weight_VE: Tensor) -> int:
    """For how many rows logits are computed at a time."""
    allowed = CHUNK_BYTES.get(weight_VE.device.type, CHUNK_BYTES["cpu"])
    return max(MIN_CHUNK_ROWS, allowed // (4 * len(weight_VE)))


def _chunks(rows_P: Tensor, weight_VE: Tensor) -> list[_Chunk]:
    """Cuts pairs, sorted by row, into runs that cover at most `chunk_rows`."""
    rows_U, place_P = torch.unique_consecutive(rows_P, return_inverse=True)
    size = chunk_rows(weight_VE)
    starts = list(range(0, len(rows_U), size))
    borders = torch.searchsorted(place_P, torch.tensor([*starts, len(rows_U)], device=place_P.device)).tolist()
    return [
        _Chunk(rows_U[start : start + size], place_P[left:right] - start, slice(left, right))
        for start, left, right in zip(starts, borders[:-1], borders[1:], strict=True)
    ]


class _PairLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        a_RE: Tensor | None,
        b_VR: Tensor | None,
        head: Head,
        rows_P: Tensor,
        targets_P: Tensor,
        temperature: float,
    ) -> Tensor:
        out_P = torch.empty(len(rows_P), dtype=precise_dtype(hidden_NE.dtype), device=hidden_NE.device)
        for rows_C, place_P, pairs in _chunks(rows_P, head.linear.weight_OI):
            logprobs_CV = _tempered(head.logits(hidden_NE[rows_C]), temperature).log_softmax(-1)
            out_P[pairs] = logprobs_CV[place_P, targets_P[pairs]]
        ctx.save_for_backward(hidden_NE, a_RE, b_VR, rows_P, targets_P)
        ctx.head, ctx.temperature = head, temperature
        return out_P

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NE, a_RE, b_VR, rows_P, targets_P = ctx.saved_tensors
        head, grad_P = ctx.head, gradients[0]
        d_hidden_NE = torch.zeros_like(hidden_NE) if ctx.needs_input_grad[0] else None
        d_a_RE = torch.zeros_like(a_RE) if ctx.needs_input_grad[1] else None
        d_b_VR = torch.zeros_like(b_VR) if ctx.needs_input_grad[2] else None
        if a_RE is not None:  # a model in float64 has logits in float64
            a_RE, b_VR = a_RE.to(grad_P.dtype), b_VR.to(grad_P.dtype)
        live_P = torch.isin(rows_P, rows_P[grad_P != 0])
        rows_P, targets_P, grad_P = rows_P[live_P], targets_P[live_P], grad_P[live_P]
        for rows_C, place_P, pairs in _chunks(rows_P, head.linear.weight_OI) if len(rows_P) else []:
            hidden_CE, grad_p = hidden_NE[rows_C], grad_P[pairs]
            logits_CV = head.logits(hidden_CE)
            d_logits_CV = _d_logits(logits_CV, place_P, targets_P[pairs], grad_p, ctx.temperature)
            d_logits_CV = head.d_outputs(d_logits_CV, logits_CV)
            if d_hidden_NE is not None:
                d_hidden_CE = d_logits_CV.to(head.linear.weight_OI.dtype) @ head.linear.weight_OI
            if a_RE is not None:
                _, scale = head.trained
                thin_CR = (d_logits_CV @ b_VR) * scale
                if d_hidden_NE is not None:
                    d_hidden_CE = d_hidden_CE + (thin_CR @ a_RE).to(d_hidden_CE.dtype)
                if d_a_RE is not None:
                    d_a_RE += thin_CR.t() @ hidden_CE.to(a_RE.dtype)
                if d_b_VR is not None:
                    d_b_VR += d_logits_CV.t() @ ((hidden_CE.to(a_RE.dtype) @ a_RE.t()) * scale)
            if d_hidden_NE is not None:
                d_hidden_NE[rows_C] = d_hidden_CE
        return d_hidden_NE, d_a_RE, d_b_VR, None, None, None, None


def _d_logits(logits_CV: Tensor, place_P: Tensor, targets_P: Tensor, grad_P: Tensor, temperature: float) -> Tensor:
    """d Σ grad·logprob / d logits: each pair adds its gradient at its target and takes it back along the softmax."""
    grad_P = grad_P / temperature
    total_C = torch.zeros(len(logits_CV), dtype=grad_P.dtype, device=logits_CV.device).index_add_(0, place_P, grad_P)
    d_logits_CV = _tempered(logits_CV, temperature).softmax(-1).mul_(-total_C[:, None])
    return d_logits_CV.index_put_((place_P, targets_P), grad_P, accumulate=True)


def _tempered(logits_CV: Tensor, temperature: float) -> Tensor:
    return logits_CV if temperature == 1.0 else logits_CV / temperature


@torch.no_grad()
def top_logprobs(head: Head, hidden_NE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row and their logprobs at temperature 1, most probable first: (N, k) each."""
    chunks = hidden_NE.split(chunk_rows(head.linear.weight_OI))
    tops = [head.logits(rows).log_softmax(-1).topk(k, dim=-1) for rows in chunks]
    return torch.cat([top.indices for top in tops]), torch.cat([top.values for top in tops])
