"""What dpo:small and rlhf:small have learnt, on comparisons that they have not trained on: `sample:courtesy`, of whose
answers a rule says which is better."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

import stovetop
from recipe_proofs.measuring import SEED, final_weights, own_renderer
from stovetop.checkpoints import get_last_checkpoint
from stovetop.client import SamplingClient
from stovetop.completers import SamplingMessageCompleter
from stovetop.concurrency import map_together
from stovetop.preference.datasets import comparison_to_pair
from stovetop.preference.evaluator import ComparisonPolicyEvaluator
from stovetop.preference.types import Comparison, LabeledComparison
from stovetop.recipes import dpo, rlhf
from stovetop.runs import load
from stovetop.supervised.logprobs import compute_reference_logprobs
from stovetop.tasks import comparisons
from stovetop.tasks.courtesy import CourtesyRule
from stovetop.types import Datum

# ---- dpo -------------------------------------------------------------------------------------------------------------


async def dpo_small(folder: Path, seed: int) -> dict[str, float]:
    """Preference accuracy on held-out pairs: the share whose chosen answer has gained more, against the reference, than
    the rejected one; a pair in which neither has counts one half, as all do before the first step."""
    config = replace(dpo.PRESETS["small"], log_path=str(folder), seed=seed)
    await dpo.main(config)
    last = get_last_checkpoint(folder)
    assert last is not None
    with stovetop.ServiceClient(storage=folder) as service:
        base = await service.create_sampling_client(base_model=config.model_name)
        reference = await service.create_sampling_client(model_path=last.reference_path)
        policy = await service.create_sampling_client(model_path=last.sampler_path)
        held_out = comparisons.load(config.dataset, config.test_dataset, config.test_size).test
        test_D = list(chain.from_iterable(comparison_to_pair(each, own_renderer(base)) for each in held_out))
        summed = [await _summed(client, test_D) for client in (base, reference, policy)]
        of_base, of_reference, of_policy = summed
    return {
        "before": _accuracy(of_base - of_reference),
        "after": _accuracy(of_policy - of_reference),
        "logprob_accuracy_before": _accuracy(of_base),  # without a reference: which answer is likelier
        "logprob_accuracy_after": _accuracy(of_policy),
        "reference_unchanged": float(np.array_equal(of_base, of_reference)),
        "num_held_out": len(held_out),
    }


async def _summed(client: SamplingClient, data_D: Sequence[Datum]) -> np.ndarray:
    """The logprob of each answer."""
    logprobs_D = await compute_reference_logprobs(client, data_D)
    weights_D = [datum.loss_fn_inputs["weights"].array for datum in data_D]
    return np.array([float(np.dot(one, weights)) for one, weights in zip(logprobs_D, weights_D, strict=True)])


def _accuracy(worth_D: np.ndarray) -> float:
    margins_P = worth_D[0::2] - worth_D[1::2]
    return float(np.mean((margins_P > 0) + 0.5 * (margins_P == 0)))


# ---- rlhf ------------------------------------------------------------------------------------------------------------


async def rlhf_small(folder: Path, seed: int) -> dict[str, float]:
    """`before` and `after` are the win rate against the supervised model, of itself and of the final policy: how often
    the answer to a held-out prompt is the more courteous one by the rule that the comparisons were made with, a tie
    counting half. `reward_accuracy_...`: how often the reward model is right about held-out comparisons, in both
    orders."""
    config = replace(rlhf.PRESETS["small"], log_path=str(folder), seed=seed)
    await rlhf.main(config)
    judged = load(folder / "2_reward").series("test/accuracy").values
    held_out = comparisons.load(config.dataset, config.test_dataset, config.rl_test_size).test
    with stovetop.ServiceClient(storage=folder) as service:
        supervised, policy = [
            await service.create_sampling_client(model_path=final_weights(folder / name))
            for name in ("1_supervised", "3_reinforcement")
        ]
        renderer = own_renderer(supervised)
        answers = SamplingMessageCompleter(supervised, renderer, config.max_tokens, temperature=1.0, seed=SEED)
        against = await map_together(lambda one: _answered(one, answers), held_out, name="prompt")
        evaluator = ComparisonPolicyEvaluator(against, CourtesyRule(), renderer, config.max_tokens, seed=SEED + 1)
        before, after = [await evaluator(client) for client in (supervised, policy)]
    return {
        "before": before["win_rate"],
        "after": after["win_rate"],
        "stderr_after": after["stderr"],
        "reward_accuracy_before": judged[0],
        "reward_accuracy_after": judged[-1],
        "num_held_out": len(held_out),
    }


async def _answered(labeled: LabeledComparison, completer: SamplingMessageCompleter) -> Comparison:
    """The prompt with an answer of this model, to compare another with."""
    prompt = labeled.comparison.prompt_conversation
    answer = [await completer(prompt)]
    return Comparison(prompt, answer, answer)
