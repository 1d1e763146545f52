"""The flat supervised loop on the recording backend: what it asks for, in which order, and that a run stopped anywhere
and started again is the run that would have been."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from costly import slow_but
from stovetop.backends import recording
from stovetop.backends.opened_base import Call
from stovetop.backends.recording import Raises
from stovetop.checkpoints import load_checkpoints_file
from stovetop.errors import CheckpointError, InvalidRequest, RequestFailedError
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes import sl_loop
from stovetop.runs import load
from stovetop.types import Datum, LoraConfig

NUM_STEPS = 8  # of two epochs


@pytest.fixture
def config(tmp_path: Path) -> sl_loop.Config:
    chats = [
        [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "abc" * (1 + i % 3)}] for i in range(10)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return sl_loop.Config(
        dataset=str(file),
        test_size=2,
        model_name="any/model",
        log_path=str(tmp_path / "run"),
        learning_rate=0.5,
        num_epochs=2,
        batch_size=2,
        lora_rank=4,
        eval_every=3,
        save_every=3,
    )


def train(config: sl_loop.Config, *faults: Raises) -> list[Call]:
    with recording.open_service(config.log_path, faults=faults) as service:
        asyncio.run(sl_loop.train(config, service))
        return service.calls


def rows(config: sl_loop.Config) -> list[dict[str, float]]:
    """The metrics of each step, without the clock."""
    metrics = load(config.log_path).metrics
    return [{name: value for name, value in row.items() if not name.startswith("time")} for row in metrics]


def of_trainer(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.client not in ("service", "sampling")]


def trained_batches(calls: list[Call]) -> list[list[Datum]]:
    return [call.arguments["data"] for call in calls if call.verb == "forward_backward"]


def test_the_loss_falls(config: sl_loop.Config) -> None:
    train(config)
    losses = load(config.log_path).series("test/nll").values
    assert losses[-1] < 0.7 * losses[0]


def test_calls_are_made_in_program_order(config: sl_loop.Config) -> None:
    verbs = [call.verb for call in of_trainer(train(config))]
    step = ["forward_backward", "optim_step"]
    first, second, third = (
        ["forward", *step, *step, *step, "save_state"],
        ["forward", *step, *step, *step, "save_state"],
        ["forward", *step, *step],
    )
    assert verbs == [*first, *second, *third, "forward", "save_state", "save_weights_for_sampler"]


def test_the_last_short_batch_of_an_epoch_is_trained(config: sl_loop.Config) -> None:
    """Eight chats in batches of three: every epoch has all of them, once."""
    batches = trained_batches(train(replace(config, batch_size=3)))
    assert [len(batch) for batch in batches] == [3, 3, 2] * 2
    for epoch in (batches[:3], batches[3:]):
        assert len({str(datum.model_input.to_ints()) for batch in epoch for datum in batch}) == 8


def test_a_batch_counts_chats_where_each_makes_several_datums(config: sl_loop.Config, tmp_path: Path) -> None:
    chats = [{"messages": [*turn("q", "a"), *turn("r", "b")]} for _ in range(6)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    config = replace(config, dataset=str(tmp_path / "chats.jsonl"), test_size=0, batch_size=4, num_epochs=1)
    batches = trained_batches(train(replace(config, renderer_name="qwen3")))
    assert [len(batch) for batch in batches] == [8, 4]


def turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_a_chat_with_nothing_to_train_on_is_left_out_and_counted(
    config: sl_loop.Config, caplog: pytest.LogCaptureFixture
) -> None:
    with Path(config.dataset).open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "hm"}]}) + "\n")
    train(replace(config, test_size=0))
    assert {row.get("num_untrainable", 1) for row in rows(config)} == {1}
    assert "1 of 11 rows have nothing to train on" in caplog.text


def test_the_adapter_is_made_as_the_config_says(config: sl_loop.Config) -> None:
    [created] = [call for call in train(config) if call.verb == "create_lora_training_client"]
    assert created.arguments["base_model"] == "any/model"
    assert created.arguments["config"] == LoraConfig(rank=4, seed=0, train_unembed=True)
    created, *_ = train(replace(config, log_path=f"{config.log_path}2", train_unembed=False, seed=3))
    assert created.arguments["config"] == LoraConfig(rank=4, seed=3, train_unembed=False)


def test_the_next_step_is_submitted_before_this_one_is_finished(config: sl_loop.Config) -> None:
    """The first step fails, and by then the second has been submitted; the third has not."""
    with recording.open_service(config.log_path, faults=[Raises("forward_backward", 1, ValueError("no"))]) as service:
        with pytest.raises(RequestFailedError, match="no"):
            asyncio.run(sl_loop.train(config, service))
        assert [call.verb for call in service.calls].count("forward_backward") == 2


def test_every_step_has_one_row_with_its_learning_rate(config: sl_loop.Config) -> None:
    calls = train(config)
    metrics = rows(config)
    assert [row["step"] for row in metrics] == list(range(NUM_STEPS + 1))
    rates = [row["learning_rate"] for row in metrics[:-1]]
    assert rates == pytest.approx([0.5 * (1 - step / NUM_STEPS) for step in range(NUM_STEPS)])
    adams = [call.arguments["optim_params"] for call in calls if call.verb == "optim_step"]
    assert [adam.learning_rate for adam in adams] == pytest.approx(rates)
    assert {(adam.beta1, adam.beta2, adam.eps) for adam in adams} == {(0.9, 0.95, 1e-8)}


def test_evaluation_sees_exactly_the_updates_before_it(config: sl_loop.Config) -> None:
    calls = of_trainer(train(config))
    updates_seen = [
        sum(earlier.verb == "optim_step" for earlier in calls[:index])
        for index, call in enumerate(calls)
        if call.verb == "forward"
    ]
    assert updates_seen == [row["step"] for row in rows(config) if "test/nll" in row] == [0, 3, 6, 8]


def test_a_checkpoint_row_names_the_next_batch(config: sl_loop.Config) -> None:
    calls = of_trainer(train(config))
    saves = [index for index, call in enumerate(calls) if call.verb == "save_state"]
    records = load_checkpoints_file(config.log_path)
    assert [record.batch for record in records] == [3, 6, 8]
    assert [len(trained_batches(calls[:index])) for index in saves] == [3, 6, 8]
    assert records[-1].name == "final"
    assert records[-1].sampler_path is not None


@pytest.mark.parametrize(
    "failing_step", [pytest.param(step, marks=[] if step == 4 else [pytest.mark.slow]) for step in (1, 3, 4, 5, 8)]
)
def test_a_run_stopped_at_any_step_and_started_again_is_the_run_that_would_have_been(
    config: sl_loop.Config, tmp_path: Path, failing_step: int
) -> None:
    whole = replace(config, log_path=str(tmp_path / "whole"))
    expected = train(whole)
    with pytest.raises(RequestFailedError):
        train(config, Raises("forward_backward", failing_step, RuntimeError("power cut")))
    resumed = train(config)
    done = (failing_step - 1) // 3 * 3
    assert trained_batches(resumed) == trained_batches(expected)[done:]
    assert rows(config) == rows(whole)


def test_a_finished_run_trains_nothing_and_says_so(config: sl_loop.Config, caplog: pytest.LogCaptureFixture) -> None:
    train(config)
    before = rows(config)
    with caplog.at_level("INFO"):
        calls = train(config)
    assert trained_batches(calls) == []
    assert "already complete" in caplog.text
    assert rows(config) == before
    assert len(load_checkpoints_file(config.log_path)) == 3


@pytest.mark.parametrize("schedule", slow_but(1, ["linear", "constant"]))
def test_a_finished_run_that_is_asked_for_less_is_complete_and_keeps_every_file(
    config: sl_loop.Config, schedule: LRSchedule, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, lr_schedule=schedule)
    train(config)
    kept = ("metrics.jsonl", "checkpoints.jsonl", "config.json", "loss.png")
    before = [(Path(config.log_path) / name).read_bytes() for name in kept]
    for num_epochs in (1, 2):
        with caplog.at_level("INFO"):
            assert trained_batches(train(replace(config, num_epochs=num_epochs))) == []
    assert "already complete: 8 of 4 batches are trained" in caplog.text
    assert [(Path(config.log_path) / name).read_bytes() for name in kept] == before


def test_a_finished_run_is_made_longer_where_the_rate_does_not_depend_on_its_length(
    config: sl_loop.Config, tmp_path: Path
) -> None:
    config = replace(config, lr_schedule="constant")
    train(config)
    train(replace(config, num_epochs=3))
    train(whole := replace(config, num_epochs=3, log_path=str(tmp_path / "whole")))
    losses = [[row["train_mean_nll"] for row in rows(each)[:-1]] for each in (config, whole)]
    assert len(losses[0]) == 12
    assert losses[0] == losses[1]
    train(linear := replace(config, lr_schedule="linear", log_path=str(tmp_path / "linear")))
    before = rows(linear)
    with pytest.raises(InvalidRequest, match=r"num_epochs: 2 -> 3 .*only\)\n.*load_checkpoint_path=.*/final "):
        train(replace(linear, num_epochs=3))
    assert rows(linear) == before


def test_a_run_that_lost_its_list_of_checkpoints_is_not_begun_again(config: sl_loop.Config) -> None:
    train(config)
    (Path(config.log_path) / "checkpoints.jsonl").unlink()
    before = rows(config)
    with pytest.raises(CheckpointError, match=r"To go on from 'final' \(batch 8"):
        train(config)
    assert rows(config) == before


def test_weights_to_start_from_come_with_a_fresh_optimizer(config: sl_loop.Config, tmp_path: Path) -> None:
    train(config)
    path = load_checkpoints_file(config.log_path)[-1].state_path
    again = replace(config, log_path=str(tmp_path / "again"), load_checkpoint_path=path)
    assert train(again)[0].verb == "create_training_client_from_state"
    assert rows(again)[0]["test/nll"] == pytest.approx(rows(config)[-1]["test/nll"])


def test_a_run_is_not_resumed_with_another_learning_rate(config: sl_loop.Config) -> None:
    train(config)
    with pytest.raises(InvalidRequest, match="learning_rate"):
        train(replace(config, learning_rate=0.1))


def test_the_loss_is_plotted(config: sl_loop.Config) -> None:
    train(config)
    assert (Path(config.log_path) / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_chat_that_is_left_out_is_named_by_its_row_in_the_file(
    config: sl_loop.Config, caplog: pytest.LogCaptureFixture
) -> None:
    lines = Path(config.dataset).read_text().splitlines()
    lines[6] = json.dumps({"messages": [{"role": "user", "content": "and?"}]})
    Path(config.dataset).write_text("\n".join(lines))
    train(config)
    assert "1 of" in caplog.text
    assert "(rows 6, counted from 0)" in caplog.text


def test_a_chat_beyond_the_models_context_is_named_before_the_first_step(config: sl_loop.Config) -> None:
    lines = Path(config.dataset).read_text().splitlines()
    long = [{"role": "user", "content": "x" * 10_000}, {"role": "assistant", "content": "no"}]
    lines[6] = json.dumps({"messages": long})
    Path(config.dataset).write_text("\n".join(lines))
    with pytest.raises(InvalidRequest, match=r"row 6: it has 10\d+ tokens, .* context is 8192; set max_length to 8192"):
        train(config)
    assert rows(config) == []
    train(replace(config, max_length=8192))
    assert len(rows(config)) > 0
