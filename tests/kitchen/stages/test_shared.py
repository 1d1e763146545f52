"""Each shared stage alone, with nothing but what it reads, on the recording backend."""

import asyncio

import pytest

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.checkpoints import Start, get_last_checkpoint, submit_checkpoint
from stovetop.client import TrainingClient
from stovetop.durable import read_rows
from stovetop.errors import CheckpointError, UnknownName
from stovetop.evaluators import Metrics
from stovetop.futures import resolved
from stovetop.kitchen import Positions, Row
from stovetop.kitchen.stages import evaluation, policies, session, steps
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.policies import Policy
from stovetop.runs import Run, load
from stovetop.types import AdamParams, Datum, ModelInput, SaveWeightsForSamplerResponse

MODEL = "any/model"
DATUM = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
STEPS = Positions(num_per_epoch=3, num_steps=6)


def emitted(run: Run, name: str) -> list[tuple[int | None, dict[str, float | str]]]:
    events = load(run.path).events
    return [(event.step, {**event.values, **event.labels}) for event in events if event.name == name]


def train(client: TrainingClient) -> None:
    client.forward_backward([DATUM], "cross_entropy")
    client.optim_step(AdamParams(learning_rate=0.5)).result()


# ---- session ---------------------------------------------------------------------------------------------------------


ADAPTER = session.choose_adapter(model_name=MODEL, lora_rank=4, seed=3, train_unembed=False)


def test_init_session_makes_the_adapter_that_was_chosen(service: InProcessServiceClient, run: Run) -> None:
    start, client = asyncio.run(session.init_session(service, run, ADAPTER))
    assert (start.batch, start.training_client) == (0, client)
    arguments = service.calls[0].arguments
    assert arguments["base_model"] == MODEL
    assert (arguments["config"].rank, arguments["config"].seed, arguments["config"].train_unembed) == (4, 3, False)


def test_init_session_goes_on_from_the_last_checkpoint(
    service: InProcessServiceClient, client: TrainingClient, run: Run
) -> None:
    asyncio.run(submit_checkpoint(client, "000002", {"batch": 2}).record(run.path))
    start, _ = asyncio.run(session.init_session(service, run, ADAPTER))
    assert start.batch == 2


def test_init_renderer_takes_the_recommended_one_or_the_one_that_is_named(client: TrainingClient) -> None:
    recommended = session.init_renderer(training_client=client)
    named = session.init_renderer(training_client=client, renderer_name="role_colon")
    assert {type(recommended).__name__, type(named).__name__} == {"RoleColonRenderer"} or recommended != named
    with pytest.raises(UnknownName, match="role_colom"):
        session.init_renderer(client, "role_colom")


@pytest.mark.parametrize(("max_steps", "num_steps"), [(None, 6), (4, 4), (9, 6)])
def test_plan_steps_ends_with_the_epochs_or_at_max_steps(
    client: TrainingClient, run: Run, max_steps: int | None, num_steps: int
) -> None:
    plan = session.plan_steps(3, Start(client), run, num_epochs=2, max_steps=max_steps)
    assert plan == (Positions(3, num_steps, 0), False)


def test_plan_steps_drops_rows_that_run_again_and_none_of_a_run_that_is_complete(
    client: TrainingClient, run: Run
) -> None:
    for step in range(3):
        run.log_metrics({"loss": 1.0}, step)
    asyncio.run(submit_checkpoint(client, "final", {"batch": 2, "final": True}).record(run.path))
    start = Start(client, 2, get_last_checkpoint(run.path))
    assert session.plan_steps(1, start, run, num_epochs=2) == (Positions(1, 2, 2), True)
    assert len(load(run.path).metrics) == 3
    assert session.plan_steps(1, start, run, num_epochs=4) == (Positions(1, 4, 2), False)
    assert [row["step"] for row in load(run.path).metrics] == [0, 1]


def test_is_unfinished_where_the_run_was_not_complete() -> None:
    assert session.is_unfinished(is_complete=False)
    assert not session.is_unfinished(is_complete=True)


def test_save_final_weights_writes_the_final_row_and_register_model_the_model(client: TrainingClient, run: Run) -> None:
    saved = asyncio.run(session.save_final_weights(client, run, STEPS, reference_path="/reference"))
    last = get_last_checkpoint(run.path)
    assert last == saved
    assert last is not None
    assert (last.name, last.batch, last.final, last.reference_path) == ("final", 6, True, "/reference")
    assert emitted(run, "training.checkpoint") == [(6, {"name": "final"})]
    session.register_model(run, ADAPTER, Start(client))
    assert emitted(run, "model.registered") == []
    session.register_model(run, ADAPTER, Start(client), saved)
    expected = [(6, {"base_model": MODEL, "path": last.sampler_path})]
    assert read_rows(run.path / "models.jsonl") == [{"name": "run", "base_model": MODEL, "path": last.sampler_path}]
    assert emitted(run, "model.registered") == expected
    complete = Start(client, 6, saved)
    session.register_model(run, ADAPTER, complete)
    assert emitted(run, "model.registered") == expected
    (run.path / "models.jsonl").unlink()  # as if the run had been killed before
    session.register_model(run, ADAPTER, complete)
    assert len(read_rows(run.path / "models.jsonl")) == 1
    assert emitted(run, "model.registered") == expected


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_conditions_of_a_step() -> None:
    assert [step for step in range(6) if steps.saves(step, STEPS, save_every=2)] == [1, 3]
    assert not steps.saves(1, STEPS)
    assert steps.enters_epoch(enters_epoch=True)
    assert not steps.ends_epoch(ends_epoch=False)


def test_set_epoch_gives_each_epoch_a_seed_of_its_own() -> None:
    class Dataset:
        seeds: list[int] = []  # noqa: RUF012  one object

        def set_epoch(self, seed: int) -> None:
            self.seeds.append(seed)

    dataset = Dataset()
    for epoch in range(2):
        steps.set_epoch(dataset, epoch, seed=7)
    assert dataset.seeds == [7, 8]


def test_the_rate_of_a_step_is_that_of_the_schedule() -> None:
    optimizer = steps.make_optimizer(learning_rate=1.0, adam_beta1=0.5, weight_decay=0.1)
    assert optimizer == AdamParams(1.0, 0.5, 0.95, 1e-8, 0.1)
    rates = [steps.schedule(step, STEPS, optimizer, "linear", warmup_steps=2).learning_rate for step in range(6)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])
    assert steps.schedule(step=5, positions=STEPS, optimizer=optimizer) == optimizer


def test_optim_step_submits_and_await_future_waits(client: TrainingClient, service: InProcessServiceClient) -> None:
    client.forward_backward([DATUM], "cross_entropy")
    stepped = steps.optim_step(training_client=client, adam=AdamParams(learning_rate=0.25))
    assert asyncio.run(steps.await_future(stepped)) == stepped.result()  # pyright: ignore[reportArgumentType]  of any type
    assert service.calls[-1].arguments["optim_params"].learning_rate == 0.25
    assert (dict(steps.await_optim_step.reads), dict(steps.await_optim_step.writes)) == (
        {"future": "stepped"},
        {"result": "stepped_response"},
    )
    assert dict(steps.await_forward_backward.reads) == {"future": "trained"}


def test_log_step_writes_the_row(run: Run) -> None:
    row = Row(3)
    row.add({"loss": 0.5})
    steps.log_step(row=row, run=run)
    assert load(run.path).metrics == [{"step": 3, "loss": 0.5}]


def test_log_epoch_metrics_takes_the_means_of_the_rows_of_the_epoch(run: Run) -> None:
    for step in range(6):
        run.log_metrics({"loss": float(step), "time/step": 9.0, **({"test/nll": 1.0} if step == 4 else {})}, step)
    steps.log_epoch_metrics(run=run, step=5, epoch=1, positions=STEPS)
    means = {"loss": 4.0, "test/nll": 1.0}  # also of what is not in the last row
    assert emitted(run, "training.epoch") == [(5, {"epoch": 1, "num_steps": 3, **means})]


def test_a_checkpoint_is_saved_after_a_step_and_recorded_with_the_policies_that_are_needed(
    client: TrainingClient, run: Run
) -> None:
    saved = steps.save_checkpoint(training_client=client, step=2)
    assert get_last_checkpoint(run.path) is None
    train(client)
    asyncio.run(
        steps.record_checkpoint(
            saved=saved, run=run, step=2, policies=[policy(client, 2, "/a"), policy(client, 3, "/b")]
        )
    )
    last = get_last_checkpoint(run.path)
    assert last is not None
    assert (last.name, last.batch, last.policy_paths) == ("000003", 3, ("/a", "/b"))
    assert emitted(run, "training.checkpoint") == [(2, {"name": "000003"})]


# ---- policies --------------------------------------------------------------------------------------------------------


def policy(client: TrainingClient, num_updates: int, path: str | None) -> Policy:
    saved = None if path is None else resolved(SaveWeightsForSamplerResponse(path))
    return Policy(client.save_weights_and_get_sampling_client().result(), num_updates, saved)


def test_a_policy_keeps_the_weights_that_it_was_frozen_at(client: TrainingClient) -> None:
    text = ModelInput.from_ints([1, 2])
    frozen = asyncio.run(policies.freeze_policy(training_client=client, step=0, positions=STEPS))
    before = frozen.client.compute_logprobs(text).result()
    for _ in range(3):
        train(client)
    after = asyncio.run(policies.freeze_policy(client, 1, STEPS))
    assert (frozen.num_updates, after.num_updates, frozen.saved) == (1, 2, None)
    assert frozen.client.compute_logprobs(text).result() == before
    assert after.client.compute_logprobs(text).result() != before


@pytest.mark.parametrize(
    ("depth", "save_every", "expected"),
    [(0, 3, []), (1, 3, [2, 3, 5, 6]), (2, 0, [4, 5, 6]), (1, 0, [5, 6]), (6, 0, [1, 2, 3, 4, 5, 6])],
)
def test_a_policy_is_saved_where_a_checkpoint_within_the_next_updates_needs_it(
    client: TrainingClient, depth: int, save_every: int, expected: list[int]
) -> None:
    frozen = [asyncio.run(policies.freeze_policy(client, step, STEPS, save_every, depth)) for step in range(6)]
    assert [each.num_updates for each in frozen if each.saved is not None] == expected


def test_the_policies_of_a_fresh_run_are_its_first_weights_and_those_of_a_resumed_one_its_checkpoints(
    service: InProcessServiceClient, client: TrainingClient, run: Run
) -> None:
    [first] = asyncio.run(policies.initial_policies(service, client, Start(client), STEPS))
    assert (first.num_updates, first.saved) == (0, None)
    [first] = asyncio.run(policies.initial_policies(service, client, Start(client), STEPS, 2, 2))
    assert first.saved is not None
    train(client)
    second = asyncio.run(policies.freeze_policy(client, 0, STEPS, 1, 2))
    paths = asyncio.run(policies.saved_paths([first, first, second]))
    record = asyncio.run(submit_checkpoint(client, "000001", {"batch": 1}).record(run.path, policy_paths=paths))
    resumed = asyncio.run(policies.initial_policies(service, client, Start(client, 1, record), STEPS))
    assert [each.num_updates for each in resumed] == [0, 0, 1]
    assert asyncio.run(policies.saved_paths(resumed)) == paths
    text = ModelInput.from_ints([1, 2])
    assert [each.client.compute_logprobs(text).result() for each in resumed] == [
        each.client.compute_logprobs(text).result() for each in (first, first, second)
    ]


def test_policies_of_which_one_is_not_saved_cannot_be_recorded(client: TrainingClient) -> None:
    assert asyncio.run(policies.saved_paths([policy(client, 1, None)])) == []
    with pytest.raises(CheckpointError, match="needs the policy after 2 updates, and it was not saved"):
        asyncio.run(policies.saved_paths([policy(client, 1, "/a"), policy(client, 2, None)]))


# ---- evaluation ------------------------------------------------------------------------------------------------------


async def measure(client: TrainingClient) -> Metrics:
    return {"test/nll": 0.5}


async def measure_more(client: TrainingClient) -> Metrics:
    return {"more/nll": 0.25}


def test_evaluation_is_due_where_there_is_something_to_measure_with() -> None:
    some, none = Evaluators(training=(measure,)), Evaluators()
    assert [step for step in range(6) if evaluation.evaluates(step, some, eval_every=3)] == [0, 3]
    assert not evaluation.evaluates(0, some)
    assert not evaluation.evaluates(0, none, eval_every=1)
    assert evaluation.evaluates_at_end(some, is_complete=False)
    assert not evaluation.evaluates_at_end(some, is_complete=True)
    assert not evaluation.evaluates_at_end(none, is_complete=False)


def test_what_takes_long_is_measured_beside_the_rest_and_less_often(client: TrainingClient, run: Run) -> None:
    some, none = Evaluators(training=(measure,)), Evaluators()
    due = [step for step in range(0, 301, 50) if evaluation.evaluates_infrequently(step, infrequent_evaluators=some)]
    assert due == [0, 100, 200, 300]
    assert not evaluation.evaluates_infrequently(0, none)
    assert not evaluation.evaluates_infrequently(0, some, infrequent_eval_every=0)
    stage = evaluation.evaluate_infrequently
    assert stage.reads["evaluators"] == "infrequent_evaluators"
    assert list(stage.writes.values()) == ["evaluated_infrequently"]
    assert evaluation.evaluates_at_end(none, is_complete=False, infrequent_evaluators=some)
    asyncio.run(evaluation.evaluate_at_end(client, some, run, STEPS, Evaluators(training=(measure_more,))))
    assert load(run.path).metrics == [{"step": 6, "progress": 1.0, "test/nll": 0.5, "more/nll": 0.25}]


def test_evaluate_adds_to_the_row_and_at_the_end_there_is_a_row_of_its_own(client: TrainingClient, run: Run) -> None:
    row, evaluators = Row(3), Evaluators(training=(measure,))
    assert asyncio.run(evaluation.evaluate(client, evaluators, run, row)) == {"test/nll": 0.5}
    assert dict(row.values) == {"test/nll": 0.5}
    asyncio.run(evaluation.evaluate_at_end(client, evaluators, run, STEPS))
    assert load(run.path).metrics == [{"step": 6, "progress": 1.0, "test/nll": 0.5}]
    assert emitted(run, "eval.complete") == [(3, {"test/nll": 0.5}), (6, {"test/nll": 0.5})]


def test_an_evaluation_knows_its_step_though_a_loop_that_looks_ahead_logs_earlier_ones_later(
    client: TrainingClient, run: Run
) -> None:
    async def which(_: TrainingClient) -> Metrics:
        return {"step_of_it": run.evaluated_step}

    evaluators = Evaluators(training=(which,))
    assert run.evaluated_step == 0
    assert asyncio.run(evaluation.evaluate(client, evaluators, run, Row(3))) == {"step_of_it": 3}
    assert asyncio.run(evaluation.evaluate_at_end(client, evaluators, run, STEPS)) == {"step_of_it": 6}
