"""Stages of supervised learning: chats to data, data to batches, the loss.

Shape suffix: `D` datums.
"""

from itertools import chain
from typing import NamedTuple

import numpy as np

from stovetop.client import ServiceClient, TrainingClient
from stovetop.datasets import Batches, Split, chat_of_row, log_epoch
from stovetop.futures import APIFuture
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.model_families import context_length
from stovetop.named_data import load_data
from stovetop.renderers.base import Renderer, TrainOnWhat
from stovetop.renderers.messages import Message
from stovetop.runs import Run
from stovetop.supervised.data import ChatData, data_of_chats
from stovetop.supervised.nll import NLLEvaluator, mean_nll
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse

Chats = Split[tuple[int, list[Message]]]  # each with its index in its source


@stage(writes="chats")
def load_dataset(dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0, seed: int = 0) -> Chats:
    """The chats to train on, in a first order of their own, and those held out."""
    loaded = load_data(
        dataset,
        chat_of_row,
        test_dataset=test_dataset,
        test_size=test_size,
        seed=seed,
        revisions=run.revisions,
    )
    run.record_data(dataset, loaded)
    return loaded.placed()


class SupervisedData(NamedTuple):
    """What chats came to."""

    examples: ChatData
    test_D: list[Datum]


@stage(writes=("examples", "test_D"))
def build_supervised_dataset(
    chats: Chats,
    renderer: Renderer,
    service: ServiceClient,
    training_client: TrainingClient,
    max_length: int | None = None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
) -> SupervisedData:
    """Renders every chat once: tokens, shifted by one, and a weight for each."""
    context = context_length(service, training_client)
    train, test = (
        data_of_chats(
            [chat for _, chat in part],
            renderer,
            max_length,
            train_on_what,
            context_length=context,
            indices=[index for index, _ in part],
        )
        for part in chats
    )
    return SupervisedData(train, list(chain.from_iterable(test.data_of_chat)))


class ChatBatches(NamedTuple):
    """Batches of chats, each chat as its data."""

    batches: Batches[list[Datum]]
    num_per_epoch: int


@stage(writes=("batches", "num_per_epoch"))
def make_batches(examples: ChatData, batch_size: int, num_epochs: int = 1, seed: int = 0) -> ChatBatches:
    """The batches of all epochs, each epoch in an order of its own. A batch counts chats; the last of an epoch may have
    fewer."""
    num_chats, num_datums = len(examples.data_of_chat), sum(map(len, examples.data_of_chat))
    log_epoch(examples.what, num_chats, batch_size, num_datums)
    batches = Batches(examples.data_of_chat, batch_size, num_epochs=num_epochs, seed=seed)
    return ChatBatches(batches, batches.num_per_epoch)


@stage(writes="evaluators")
def make_evaluators(test_D: list[Datum]) -> Evaluators:
    """The loss of the chats that are held out, if there are any."""
    return Evaluators(training=(NLLEvaluator(test_D),) if test_D else ())


@stage(writes="data_D")
def get_batch(
    epoch: int, batches: Batches[list[Datum]], positions: Positions, examples: ChatData, row: Row, run: Run
) -> list[Datum]:
    """The data of this step."""
    data_D = list(chain.from_iterable(batches[row.step]))
    row.add(
        {
            "epoch": epoch,
            "progress": row.step / positions.num_steps,
            "num_sequences": len(data_D),
            "num_untrainable": len(examples.untrainable),  # chats left out: nothing in them to train on
            "num_tokens": sum(datum.model_input.length for datum in data_D),
            "num_loss_tokens": sum(np.count_nonzero(datum.loss_fn_inputs["weights"].array) for datum in data_D),
        }
    )
    run.emit("dataset.batch", step=row.step, num_datums=len(data_D), num_tokens=row.values["num_tokens"])
    return data_D


@stage(writes="trained")
def forward_backward(
    training_client: TrainingClient, data_D: list[Datum], loss_fn: str = "cross_entropy"
) -> APIFuture[ForwardBackwardOutput]:
    """Submits the loss and its gradient."""
    return training_client.forward_backward(data_D, loss_fn)


@stage
def log_step_metrics(
    data_D: list[Datum],
    trained_output: ForwardBackwardOutput,
    stepped_response: OptimStepResponse,
    adam: AdamParams,
    row: Row,
    run: Run,
) -> None:
    """The loss of the weights that the step began with, and what the optimizer says."""
    loss = mean_nll(trained_output, data_D)
    row.add({"learning_rate": adam.learning_rate, "train_mean_nll": loss, **stepped_response.metrics})
    epoch = row.values["epoch"]
    run.emit("training.step", step=row.step, loss=loss, learning_rate=adam.learning_rate, epoch=epoch)
