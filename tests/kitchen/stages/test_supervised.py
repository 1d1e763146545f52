"""Each stage of supervised learning alone, with nothing but what it reads, on the recording backend."""

import asyncio
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from kitchen.stages.configs import write_chats
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.recording import open_service
from stovetop.client import TrainingClient
from stovetop.kitchen import Positions, Row
from stovetop.kitchen.stages import supervised
from stovetop.kitchen.stages.session import init_renderer
from stovetop.kitchen.stages.supervised import SupervisedData
from stovetop.runs import Run, load
from stovetop.types import AdamParams, OptimStepResponse


@pytest.fixture
def service(tmp_path: Path) -> Iterator[InProcessServiceClient]:
    with open_service(tmp_path / "storage") as opened:
        yield opened


@pytest.fixture
def data(tmp_path: Path, run: Run, service: InProcessServiceClient, client: TrainingClient) -> SupervisedData:
    chats = supervised.load_dataset(write_chats(tmp_path / "chats.jsonl"), run, test_size=2)
    return supervised.build_supervised_dataset(chats, init_renderer(client, "role_colon"), service, client)


def test_load_dataset_holds_chats_out_or_takes_them_from_another_source(tmp_path: Path, run: Run) -> None:
    dataset, other = write_chats(tmp_path / "chats.jsonl"), write_chats(tmp_path / "other.jsonl", 3)
    chats = supervised.load_dataset(dataset=dataset, run=run, test_size=2, seed=1)
    assert (len(chats.train), len(chats.test)) == (8, 2)
    assert sorted(index for index, _ in chain(*chats)) == list(range(10))
    assert supervised.load_dataset(dataset, run, test_size=2, seed=2) != chats
    chats = supervised.load_dataset(dataset, run, test_dataset=other, test_size=2)
    assert (len(chats.train), len(chats.test)) == (10, 3)
    loads = [event for event in load(run.path).events if event.name == "dataset.load"]
    assert [event.values["num_test"] for event in loads] == [2, 2, 3]


def test_build_supervised_dataset_renders_every_chat_with_weights_that_sum_to_one(data: SupervisedData) -> None:
    assert (len(data.examples.data_of_chat), len(data.test_D)) == (8, 2)
    sums = [float(datum.loss_fn_inputs["weights"].array.sum()) for datum in chain(*data.examples.data_of_chat)]
    assert sums == pytest.approx([1.0] * 8)


def test_make_batches_shuffles_each_epoch_and_says_what_an_epoch_is(
    data: SupervisedData, caplog: pytest.LogCaptureFixture
) -> None:
    batches, num_per_epoch = supervised.make_batches(examples=data.examples, batch_size=3, num_epochs=2, seed=0)
    assert (len(batches), num_per_epoch) == (6, 3)
    assert [len(batch) for batch in batches] == [3, 3, 2] * 2
    batches, _ = supervised.make_batches(data.examples, 9)
    assert [len(batch) for batch in batches] == [8]
    assert caplog.messages == [
        "8 chats -> 8 datums -> 3 steps an epoch, the last with 2 chats",
        "8 chats -> 8 datums -> 1 step an epoch, a short one: there are fewer chats than the 9 of a batch",
    ]


def test_make_evaluators_measures_what_is_held_out(data: SupervisedData, client: TrainingClient) -> None:
    [evaluator] = supervised.make_evaluators(test_D=data.test_D).training
    assert asyncio.run(evaluator(client)).keys() == {"test/nll"}
    assert not any(supervised.make_evaluators(test_D=[]))


def test_get_batch_gives_the_data_of_the_step_and_counts_them(data: SupervisedData, run: Run) -> None:
    (batches, _), row = supervised.make_batches(data.examples, 3, 2), Row(4)
    data_D = supervised.get_batch(1, batches, Positions(3, 6), data.examples, row, run)
    assert data_D == list(chain.from_iterable(batches[4]))
    assert dict(row.values) == {
        "epoch": 1,
        "progress": 4 / 6,
        "num_sequences": 3,
        "num_untrainable": 0,
        "num_tokens": sum(datum.model_input.length for datum in data_D),
        "num_loss_tokens": sum(np.count_nonzero(datum.loss_fn_inputs["weights"].array) for datum in data_D),
    }
    [event] = [event for event in load(run.path).events if event.name == "dataset.batch"]
    assert (event.step, dict(event.values)) == (4, {"num_datums": 3, "num_tokens": row.values["num_tokens"]})


def test_forward_backward_submits_and_log_step_metrics_reads_what_came_of_it(
    data: SupervisedData, client: TrainingClient, run: Run
) -> None:
    data_D, row = data.test_D, Row(4)
    trained = supervised.forward_backward(training_client=client, data_D=data_D)
    row.add({"epoch": 1})
    supervised.log_step_metrics(
        data_D, trained.result(), OptimStepResponse({"grad_norm": 2.0}), AdamParams(learning_rate=0.25), row, run
    )
    loss = row.values["train_mean_nll"]
    assert loss == pytest.approx(trained.result().metrics["loss:sum"] / 2)
    assert dict(row.values) == {"epoch": 1, "learning_rate": 0.25, "train_mean_nll": loss, "grad_norm": 2.0}
    [event] = [event for event in load(run.path).events if event.name == "training.step"]
    assert (event.step, dict(event.values)) == (4, {"loss": loss, "learning_rate": 0.25, "epoch": 1})
