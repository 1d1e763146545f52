"""Stages of preference learning: comparisons to pairs, the reference that they are measured against, the loss on pairs.

Shape suffix: `D` datums, a chosen answer at every even index and the rejected one behind it.
"""

from dataclasses import asdict
from typing import NamedTuple

from stovetop.checkpoints import Start
from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.datasets import log_epoch
from stovetop.futures import APIFuture
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.session import Adapter
from stovetop.kitchen.stages.steps import await_future
from stovetop.named_data import load_data
from stovetop.preference import reference as references
from stovetop.preference.datasets import DPODataset, LabeledComparisons
from stovetop.preference.loss_values import DPO, PreferenceLoss
from stovetop.preference.types import labeled_comparison_from_json
from stovetop.renderers.base import Renderer
from stovetop.runs import Run
from stovetop.supervised import logprobs
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse

REFERENCE = "reference"  # the name of the weights that are saved when a run begins


@stage(writes="comparisons")
def load_comparisons(dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0) -> LabeledComparisons:
    """Rows of `prompt`, `chosen` and `rejected`, to train on and held out."""
    loaded = load_data(
        dataset,
        labeled_comparison_from_json,
        test_dataset=test_dataset,
        test_size=test_size,
        half_at_most=True,
        revisions=run.revisions,
    )
    run.record_data(dataset, loaded)
    return LabeledComparisons(loaded.train, loaded.test, loaded.num_left_out)


class Reference(NamedTuple):
    """Frozen weights, and where they lie if a resumed run could not make them of its config alone."""

    reference: SamplingClient
    reference_path: str | None


@stage(writes=("reference", "reference_path"))
async def init_reference(
    service: ServiceClient,
    training_client: TrainingClient,
    start: Start,
    adapter: Adapter,
    reference_model_name: str | None = None,
) -> Reference:
    """Another model as it is, or else the weights that the run began with. A resumed run has the one it always had."""
    if reference_model_name is not None:
        reference = await references.create_reference_client(service, reference_model_name)
        tokenizer, other = training_client.get_tokenizer(), reference.get_tokenizer()
        references.check_same_tokenizer(tokenizer, other, reference_model_name)
        return Reference(reference, None)
    if start.record is not None:
        path = start.record.reference_path or adapter.load_checkpoint_path
        return Reference(await references.create_reference_client(service, adapter.model_name, path), path)
    frozen, saved = (
        training_client.save_weights_and_get_sampling_client(),
        training_client.save_weights_for_sampler(REFERENCE),
    )
    return Reference(await frozen, (await saved).path)


class PreferenceData(NamedTuple):
    """What comparisons came to."""

    preference_dataset: DPODataset
    num_per_epoch: int


@stage(writes=("preference_dataset", "num_per_epoch"))
def build_preference_dataset(
    comparisons: LabeledComparisons, renderer: Renderer, run: Run, batch_size: int, max_length: int | None = None
) -> PreferenceData:
    """The pairs to train on. Ties, and pairs of which nothing is left to train on, are left out and counted."""
    pairs = DPODataset(comparisons.train, batch_size, renderer, max_length=max_length)
    num_pairs = len(comparisons.train) - pairs.num_ties - len(pairs.untrainable)
    left_out = {"num_ties": pairs.num_ties, "num_untrainable": len(pairs.untrainable)}
    log_epoch("pairs", num_pairs, batch_size, 2 * num_pairs)
    run.emit("dpo.dataset_built", num_pairs=num_pairs, num_batches=len(pairs), **left_out)
    return PreferenceData(pairs, len(pairs))


@stage(writes="preference_loss")
def make_preference_loss(dpo_beta: float = 0.1) -> PreferenceLoss:
    """Direct preference optimization; replace this stage for another loss of `preference.loss_values`."""
    return DPO(beta=dpo_beta)


@stage(writes="data_D")
def get_preference_batch(
    preference_dataset: DPODataset, epoch: int, batch: int, positions: Positions, row: Row, run: Run
) -> list[Datum]:
    """The pairs of this step."""
    data_D = preference_dataset.get_batch(batch)
    num_tokens = sum(datum.model_input.length for datum in data_D)
    row.add({"epoch": epoch, "progress": row.step / positions.num_steps, "num_tokens": num_tokens})
    run.emit("dataset.batch", step=row.step, num_datums=len(data_D), num_tokens=num_tokens)
    return data_D


@stage(writes="reference_logprobs_D")
async def compute_reference_logprobs(data_D: list[Datum], reference: SamplingClient) -> list[logprobs.Logprobs]:
    """What the reference makes of the answers. A loss without a reference needs no such stage."""
    return await logprobs.compute_reference_logprobs(reference, data_D)


@stage(writes="trained")
def dpo_forward_backward(
    training_client: TrainingClient,
    data_D: list[Datum],
    preference_loss: PreferenceLoss,
    reference_logprobs_D: list[logprobs.Logprobs] | None = None,
) -> APIFuture[ForwardBackwardOutput]:
    """Submits the loss on pairs and its gradient."""
    from stovetop.preference.losses import preference_loss_fn  # torch

    return training_client.forward_backward_custom(data_D, preference_loss_fn(preference_loss, reference_logprobs_D))


await_dpo = await_future.using("await_dpo", future="trained", result="trained_output")


@stage
def log_dpo_metrics(
    trained_output: ForwardBackwardOutput,
    stepped_response: OptimStepResponse,
    preference_loss: PreferenceLoss,
    adam: AdamParams,
    row: Row,
    run: Run,
) -> None:
    """The loss and the rewards of the weights that the step began with, and what the optimizer says."""
    metrics = trained_output.metrics
    row.add({"learning_rate": adam.learning_rate, **metrics, **stepped_response.metrics})
    shown = {name: metrics[name] for name in ("accuracy", "chosen_reward", "rejected_reward", "margin", "num_pairs")}
    loss = metrics[f"{preference_loss.name}_loss"]
    run.emit("dpo.step", step=row.step, loss=loss, **shown, **asdict(preference_loss))
