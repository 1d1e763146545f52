"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): pairs of a better and a worse answer in, a
model that prefers as they do out. The workflow PREFERENCE with its own data, and with held-out pairs measured.

    stovetop run dpo                                                    helpful and harmless, and a model from the hub
    stovetop run dpo:small                                              without a network: the more courteous answer

`tests/kitchen/test_preference.py` has the same as one flat loop. `dataset=sample:helpsteer3` and `sample:ultrafeedback`
have the other two forms of rows. A resumed run keeps the reference that it began with.
"""

import asyncio
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated

from stovetop.checks import check_all
from stovetop.client import SamplingClient, ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.kitchen import When, stage
from stovetop.kitchen.stages.evaluation import Evaluators, evaluate, evaluate_at_end, evaluates, evaluates_at_end
from stovetop.kitchen.workflows import PREFERENCE
from stovetop.lr_schedules import LRSchedule
from stovetop.preference.datasets import LabeledComparisons, comparison_to_pair
from stovetop.preference.evaluator import PairsEvaluator
from stovetop.preference.loss_values import PreferenceLoss
from stovetop.recipes.configs import TrainingConfig, check_training
from stovetop.recipes.settings import Count, LearningRate, Positive, check_num_steps, check_weights
from stovetop.renderers.base import Renderer
from stovetop.rules import Whole, number
from stovetop.runs import open_run
from stovetop.supervised.logprobs import compute_reference_logprobs
from stovetop.tasks import comparisons as data
from stovetop.tasks.comparisons import load_named_comparisons
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    dataset: str = "hhh"  # hhh, helpsteer3, ultrafeedback; FILE.jsonl with prompt, chosen and rejected; sample:NAME
    test_dataset: str | None = None  # held-out rows of the same form; None: a test split, or test_size of the dataset
    test_size: Count = 1024  # comparisons held out of a dataset that has no test split, half of them at most; 0: none
    model_name: str = "meta-llama/Llama-3.2-1B"
    log_path: str = field(default="runs/dpo", metadata=MAY_CHANGE)
    reference_model_name: str | None = None  # what the policy is measured against; None: the weights it starts from
    max_length: Annotated[int, Whole(2)] | None = 8192  # tokens of a prompt with an answer; what is over is cut off
    dpo_beta: Annotated[float, number(above=0)] = 0.1  # how strongly the policy is held to the reference
    learning_rate: LearningRate = 1e-5
    lr_schedule: LRSchedule = "linear"
    batch_size: Positive = 256  # comparisons a step; the last step of an epoch may have fewer
    eval_every: Count = field(default=10, metadata=MAY_CHANGE)


@stage(writes="evaluators")
async def make_pairs_evaluator(
    comparisons: LabeledComparisons,
    renderer: Renderer,
    reference: SamplingClient,
    preference_loss: PreferenceLoss,
    max_length: int | None = None,
) -> Evaluators:
    """The loss of the pairs that are held out, if there are any, against the same reference."""
    pairs = [comparison_to_pair(each, renderer, max_length) for each in comparisons.test]
    test_D = list(chain.from_iterable(pairs))
    if not test_D:
        return Evaluators()
    return Evaluators(
        training=(PairsEvaluator(test_D, preference_loss, await compute_reference_logprobs(reference, test_D)),)
    )


WORKFLOW = (
    PREFERENCE.replace("load_comparisons", load_named_comparisons)
    .insert_after("make_preference_loss", make_pairs_evaluator)
    .insert_before("schedule", When(evaluates, evaluate))
    .insert_before("save_final_weights", When(evaluates_at_end, evaluate_at_end))
)
COLUMNS = ("learning_rate", "dpo_loss", "accuracy", "margin", "test/accuracy", "grad_norm", "time/step")


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    reference = config.reference_model_name or config.model_name
    check_training(config, lambda: check_pairs(config), lambda: check_weights(config.base_url, reference))


def check_pairs(config: Config) -> None:
    """Refuses comparisons that cannot be had or have changed, and a warm-up that is longer than the run on them."""
    loaded = data.load(config.dataset, config.test_dataset, config.test_size, revisions=revisions_in(config.log_path))
    num = sum(labeled.answers() is not None for labeled in loaded.train)
    check_all(
        lambda: check_data(config.log_path, config.dataset, loaded.sources, config.behavior_if_exists),
        lambda: check_num_steps(num, config.batch_size, config.num_epochs, config.max_steps, config.warmup_steps),
    )


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    with open_run(config.log_path, config, columns=COLUMNS, **config.run_options()) as run:
        state = await WORKFLOW.run(config, service=service, run=run)
        held_out = {"held out": "test/accuracy"} if state["evaluators"] != Evaluators() else {}
        lines = {"training batch": "accuracy"} | held_out
        run.plot("accuracy", lines, title="DPO", y_label="share of pairs", running_mean=5)


PRESETS = {
    "small": Config(
        model_name="smollm2",
        log_path="runs/dpo_small",
        dataset="sample:courtesy",
        test_size=48,
        max_length=None,
        learning_rate=2e-4,
        batch_size=16,
        lora_rank=16,
    )
}  # of two right answers the more courteous one is better


if __name__ == "__main__":
    asyncio.run(main(Config()))
