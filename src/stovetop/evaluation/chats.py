"""Held-out chats: the negative log-likelihood (NLL) of their answers. Nothing is sampled, so one seed is enough."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stovetop.client import SamplingClient
from stovetop.evaluation.estimates import Estimate
from stovetop.evaluation.example_set import Ratio, Reported
from stovetop.evaluation.rows import ExampleRow, Sample
from stovetop.supervised.logprobs import compute_reference_logprobs
from stovetop.supervised.nll import compute_mean_nll, text_cost
from stovetop.tokenizing import Tokenizer
from stovetop.types import Datum, TensorData

REPORTED = Reported(ratios={"nll": Ratio("nats", "tokens"), "bpb": Ratio("bits", "bytes")})
WITHOUT_TEXT = Reported(ratios={"nll": Ratio("nats", "tokens")})


@dataclass(frozen=True, slots=True)
class HeldOutChats:
    """An ExampleSet: the mean NLL of chats per token with a weight, as `nll`, and per byte of text, as `bpb`; see
    `supervised.nll`. The weights of a datum are 0 or 1: each token counts alike."""

    name: str
    data: Mapping[str, Datum]  # by id of the chat
    tokenizer: Tokenizer

    @property
    def ids(self) -> Sequence[str]:
        return list(self.data)

    async def measure(self, id: str, client: SamplingClient, seed: int) -> Sequence[Sample]:
        datum = self.data[id]
        [logprobs_N] = await compute_reference_logprobs(client, [datum])
        logprobs, weights, targets = (
            TensorData.from_numpy(logprobs_N), datum.loss_fn_inputs["weights"], datum.loss_fn_inputs["target_tokens"]
        )  # fmt: skip
        tokens = float(weights.array.sum())
        bits, num_bytes = text_cost(logprobs, weights, targets, self.tokenizer)
        nats = compute_mean_nll([logprobs], [weights]) * tokens
        return [Sample({"nats": nats, "tokens": tokens, "bits": bits, "bytes": float(num_bytes)})]

    def metrics(self, rows: Sequence[ExampleRow]) -> dict[str, Estimate]:
        has_text = any(sample.scores["bytes"] for row in rows for sample in row.samples)
        return (REPORTED if has_text else WITHOUT_TEXT).metrics(rows)
