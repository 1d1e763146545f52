"""Stages that measure: before an update, so that a row has the loss and the evaluation of the same weights; and at the
end."""

from typing import NamedTuple

from stovetop.checkpoints import is_due
from stovetop.client import TrainingClient
from stovetop.evaluators import Metrics, SamplingClientEvaluator, TrainingClientEvaluator, run_evaluators
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.runs import Run
from stovetop.tracking.evaluated import evaluating


class Evaluators(NamedTuple):
    """What a round of evaluation consists of."""

    training: tuple[TrainingClientEvaluator, ...] = ()
    sampling: tuple[SamplingClientEvaluator, ...] = ()


def evaluates(step: int, evaluators: Evaluators, eval_every: int = 0) -> bool:
    """Before the first step, and after every `eval_every` steps."""
    return any(evaluators) and is_due(step, eval_every)


_NONE = Evaluators()


def evaluates_at_end(evaluators: Evaluators, is_complete: bool, infrequent_evaluators: Evaluators = _NONE) -> bool:
    """Where there is something to measure with, and the run was not complete when it began."""
    return any((*evaluators, *infrequent_evaluators)) and not is_complete


@stage(writes="evaluated")
async def evaluate(training_client: TrainingClient, evaluators: Evaluators, run: Run, row: Row) -> Metrics:
    """Measures the weights as they are, and adds the numbers to the row."""
    with evaluating(row.step):
        metrics = await run_evaluators(training_client, **evaluators._asdict())
    row.add(metrics)
    run.emit("eval.complete", step=row.step, **metrics)
    return metrics


def evaluates_infrequently(step: int, infrequent_evaluators: Evaluators, infrequent_eval_every: int = 100) -> bool:
    """Likewise, for what takes long, after every `infrequent_eval_every` steps."""
    return any(infrequent_evaluators) and is_due(step, infrequent_eval_every)


evaluate_infrequently = evaluate.using(
    "evaluate_infrequently", evaluators="infrequent_evaluators", evaluated="evaluated_infrequently"
)
"""Where a stage writes `infrequent_evaluators`: insert `When(evaluates_infrequently, evaluate_infrequently)` beside the
other evaluation. Its metrics have names of their own. Those at the end run both."""


@stage(writes="evaluated_at_end")
async def evaluate_at_end(
    training_client: TrainingClient,
    evaluators: Evaluators,
    run: Run,
    positions: Positions,
    infrequent_evaluators: Evaluators = _NONE,
) -> Metrics:
    """Measures the final weights, also with what is measured less often, in a row of their own."""
    with evaluating(positions.num_steps):
        metrics = await run_evaluators(
            training_client,
            training=evaluators.training + infrequent_evaluators.training,
            sampling=evaluators.sampling + infrequent_evaluators.sampling,
        )
    run.log_metrics({"progress": 1.0, **metrics}, positions.num_steps)
    run.emit("eval.complete", step=positions.num_steps, **metrics)
    return metrics
