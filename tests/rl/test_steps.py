import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.checkpoints import load_checkpoints_file
from stovetop.client import TrainingClient
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture, resolved
from stovetop.losses import PPO
from stovetop.rl.advantages import GAE, Advantage
from stovetop.rl.data_processing import trajectory_to_data
from stovetop.rl.steps import (
    KLPenalty,
    compute_full_batch_metrics_and_get_sampling_client,
    do_group_rollout_and_filter_constant_reward,
    ppo_update,
    prepare_minibatch,
    save_checkpoint_and_get_sampling_client,
    split_list,
    train_step,
)
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, ModelInput, OptimStepResponse

from .scripted import CountingEnv, Table, echo, group, trajectory


@contextmanager
def trainer_in(folder: Path) -> Iterator[tuple[InProcessServiceClient, TrainingClient]]:
    with recording.open_service(folder) as service:
        yield service, service.create_lora_training_client("any/name").result()


def data(*advantages: Advantage) -> list[Datum]:
    """One datum for each, of as many action tokens as its place in the row."""
    return [
        datum
        for length, advantage in enumerate(advantages, start=1)
        for datum in trajectory_to_data(trajectory(([97], [98] * length)), advantage)
    ]


def logprob_of(trainer: TrainingClient, text: bytes) -> float:
    client = trainer.save_weights_and_get_sampling_client().result()
    return float(np.sum(client.compute_logprobs(ModelInput.from_ints(text)).result()[1:]))


# ---- splitting ---------------------------------------------------------------------------------------------------


def test_a_list_is_split_in_order_and_as_evenly_as_possible():
    assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert split_list([1, 2, 3, 4, 5], 3) == [[1], [2, 3], [4, 5]]


@given(st.lists(st.integers(), min_size=1, max_size=30), st.data())
def test_a_split_loses_nothing_and_its_parts_differ_by_one_at_most(items: list[int], drawn: st.DataObject):
    parts = split_list(items, drawn.draw(st.integers(1, len(items))))
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("num_parts", [0, -1, 4])
def test_a_split_into_none_or_too_many_is_refused(num_parts: int):
    with pytest.raises(InvalidRequest, match=rf"1\.\.3.*: {num_parts}"):
        split_list([1, 2, 3], num_parts)


# ---- training ----------------------------------------------------------------------------------------------------


def test_each_substep_is_one_update_on_its_part_and_every_datum_gets_its_logprobs(tmp_path: Path):
    with trainer_in(tmp_path) as (service, trainer):
        step = asyncio.run(train_step(data(1, -1, 1, -1, 1), trainer, 0.1, num_substeps=3))
        calls = service.calls[1:]
    assert [call.verb for call in calls] == ["forward_backward", "optim_step"] * 3
    assert [len(call.arguments["data"]) for call in calls[::2]] == [1, 2, 2]
    assert not any("mask" in datum.loss_fn_inputs for call in calls[::2] for datum in call.arguments["data"])
    adam = calls[1].arguments["optim_params"]
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps) == (0.1, 0.9, 0.95, 1e-8)
    assert [logprobs.shape for logprobs in step.logprobs_D] == [[1], [2], [3], [4], [5]]
    assert step.metrics["skipped_nonfinite"] == 0


def test_there_are_no_more_substeps_than_datums(tmp_path: Path):
    with trainer_in(tmp_path) as (service, trainer):
        asyncio.run(train_step(data(1, -1), trainer, 0.1, num_substeps=8))
        assert [call.verb for call in service.calls].count("optim_step") == 2


def test_nothing_to_train_on_is_refused(tmp_path: Path):
    with trainer_in(tmp_path) as (_, trainer), pytest.raises(InvalidRequest, match="empty"):
        asyncio.run(train_step([], trainer, 0.1))


class NotedFuture(APIFuture[ForwardBackwardOutput]):
    """Notes that it is awaited."""

    def __init__(self, output: ForwardBackwardOutput, note: Callable[[], None]) -> None:
        super().__init__(resolved(output).future())
        self.note = note

    def __await__(self) -> Generator[object, None, ForwardBackwardOutput]:
        self.note()
        return super().__await__()


@dataclass
class Diary:
    """A training client that writes down when its losses are submitted and awaited."""

    notes: list[str] = field(default_factory=list)
    num_submitted: int = 0

    def forward_backward(self, data: Sequence[Datum], loss_fn: str, config: object) -> APIFuture[ForwardBackwardOutput]:
        self.num_submitted += 1
        number = self.num_submitted
        self.notes.append(f"submit {number}")
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        output = ForwardBackwardOutput("array", outputs, {"loss:sum": 1.0})
        return NotedFuture(output, lambda: self.notes.append(f"await {number}"))

    def optim_step(self, adam: AdamParams) -> APIFuture[OptimStepResponse]:
        self.notes.append(f"update {self.num_submitted}")
        return resolved(OptimStepResponse({"grad_norm": float(self.num_submitted)}))


def test_a_substep_is_submitted_before_the_one_before_it_is_awaited():
    diary = Diary()
    step = asyncio.run(train_step(data(1, -1, 1), diary, 0.1, num_substeps=3))
    assert diary.notes == [
        *("submit 1", "update 1", "submit 2", "update 2"),
        *("await 1", "submit 3", "update 3", "await 2", "await 3"),
    ]
    assert step.metrics == {"loss:sum": 3, "grad_norm": 2}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_mean_over_tokens_is_that_of_the_whole_update_however_it_is_split(tmp_path: Path, size: int):
    advantages = [1, -1, 1, 1, -1, 1, -1, 1]
    with trainer_in(tmp_path) as (service, trainer):
        asyncio.run(train_step(data(*advantages), trainer, 0.1, normalize="token"))
        [sent] = [call.arguments["data"] for call in service.calls if call.verb == "forward_backward"]
        in_parts = service.create_lora_training_client("any/name").result()
        for part in split_list(sent, len(sent) // size):
            in_parts.forward_backward(part, "importance_sampling")
        in_parts.optim_step(service.calls[2].arguments["optim_params"]).result()
        assert logprob_of(in_parts, b"abbb") == pytest.approx(logprob_of(trainer, b"abbb"), abs=1e-6)
    advantages_sent = [abs(value) for datum in sent for value in datum.loss_fn_inputs["advantages"].tolist()]
    assert advantages_sent == pytest.approx([1 / sum(range(1, 9))] * len(advantages_sent))


def test_ppo_is_several_passes_over_the_same_data_with_the_ratios_clipped(tmp_path: Path):
    [datum] = data([1.0])
    sampled = {**datum.loss_fn_inputs, "logprobs": [-4.0]}  # less likely than it is now
    with trainer_in(tmp_path) as (service, trainer):
        loss = PPO(clip_high_threshold=1.3)
        steps = asyncio.run(ppo_update([Datum(datum.model_input, sampled)], trainer, 0.1, ppo_epochs=3, loss=loss))
        calls = service.calls[1:]
    assert [call.verb for call in calls] == ["forward_backward", "optim_step"] * 3
    assert {call.arguments["loss_fn"] for call in calls[::2]} == {"ppo"}
    assert calls[0].arguments["loss_fn_config"]["clip_high_threshold"] == 1.3
    first, second, third = (step.logprobs_D[0].tolist()[0] for step in steps)
    assert first < second < third


# ---- preparing ---------------------------------------------------------------------------------------------------


def owned(tag: str, *rewards_G: float):
    return Table(lambda seat: CountingEnv(seat), len(rewards_G), tags=[tag]), group(*rewards_G)


def test_metrics_are_of_all_groups_under_their_own_tags_and_data_of_those_that_teach():
    groups = [owned("easy", 1, 1), owned("hard", 1, 0), owned("mid", 0, 1)]
    batch = asyncio.run(prepare_minibatch(groups, removes_constant_reward_groups=True))
    assert batch.metrics["env/easy/reward/total"] == 1
    assert batch.metrics["env/hard/by_group/frac_mixed"] == batch.metrics["env/mid/by_group/frac_mixed"] == 1
    assert batch.metrics["env/all/total_episodes"] == 6
    assert [datum.loss_fn_inputs["advantages"].tolist() for datum in batch.data_D] == [
        [0, 0.5],
        [0, -0.5],
        [0, -0.5],
        [0, 0.5],
    ]
    assert [metadata.group_idx for metadata in batch.metadata_D] == [0, 0, 1, 1]
    assert (batch.metrics["filter/groups_removed"], batch.metrics["filter/all_constant"]) == (1, 0)


def test_a_batch_without_a_gradient_is_still_a_step_and_metrics_say_so():
    groups = [owned("easy", 1, 1), owned("hard", 0, 0, 0)]
    batch = asyncio.run(prepare_minibatch(groups, removes_constant_reward_groups=True))
    assert (batch.metrics["filter/groups_removed"], batch.metrics["filter/all_constant"]) == (1, 1)
    assert len(batch.data_D) == 2
    assert not any(datum.loss_fn_inputs["advantages"].array.any() for datum in batch.data_D)
    unfiltered = asyncio.run(prepare_minibatch(groups))
    assert len(unfiltered.data_D) == 5
    assert not any(name.startswith("filter/") for name in unfiltered.metrics)


def test_the_chosen_estimator_is_what_reaches_the_data():
    groups = [owned("one", 0, 1)]
    normalized = asyncio.run(prepare_minibatch(groups, normalizes_advantages=True))
    assert [max(datum.loss_fn_inputs["advantages"].tolist(), key=abs) for datum in normalized.data_D] == [-1, 1]
    of_turns = asyncio.run(prepare_minibatch(groups, estimator=GAE(baseline="zero")))
    assert [datum.loss_fn_inputs["advantages"].tolist() for datum in of_turns.data_D] == [[0, 0], [0, 1]]


def test_a_penalty_joins_the_advantages_and_is_reported(tmp_path: Path):
    groups = [owned("one", 0, 1)]
    with trainer_in(tmp_path) as (service, _):
        base = service.create_sampling_client(base_model="any/name").result()
        batch = asyncio.run(prepare_minibatch(groups, kl_penalty=KLPenalty(base, 0.5)))
    assert "kl_policy_base" in batch.metrics
    # Both answers are the same token, so that the penalty, centred, is nothing.
    assert [datum.loss_fn_inputs["advantages"].tolist()[1] for datum in batch.data_D] == pytest.approx([-0.5, 0.5])


def test_penalties_are_not_discounted_and_updates_not_divided_unless_told_so(tmp_path: Path):
    with trainer_in(tmp_path) as (service, trainer):
        base = service.create_sampling_client(base_model="any/name").result()
        assert KLPenalty(base, 0.5) == KLPenalty(base, 0.5, discount=0.0)
        asyncio.run(ppo_update(data(1, -1), trainer, 0.1))
        assert [call.verb for call in service.calls].count("optim_step") == 4


def test_a_group_that_teaches_nothing_is_none_unless_it_is_asked_for():
    constant = Table(lambda seat: CountingEnv(seat, rewards=[1.0]), 3)
    mixed = Table(lambda seat: CountingEnv(seat), 3)
    play = do_group_rollout_and_filter_constant_reward
    assert asyncio.run(play(constant, echo)) is None
    assert asyncio.run(play(constant, echo, do_remove_constant_reward_groups=False)).get_total_rewards() == [1.0] * 3
    assert asyncio.run(play(mixed, echo)).get_total_rewards() == [0, 1, 2]


# ---- saving ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_saved_where_one_is_due_and_names_the_next_batch(tmp_path: Path):
    async def run() -> None:
        for i_batch in range(5):
            frozen = await save_checkpoint_and_get_sampling_client(trainer, i_batch, save_every=2)
            if frozen.saved is not None:
                await frozen.saved.record(tmp_path / "run")

    with trainer_in(tmp_path) as (_, trainer):
        asyncio.run(run())
    records = load_checkpoints_file(tmp_path / "run")
    assert [(record.name, record.batch, record.has("sampler_path")) for record in records] == [
        ("000002", 2, True),
        ("000004", 4, True),
    ]


def test_a_checkpoint_is_recorded_by_the_caller_who_logs_the_step_first(tmp_path: Path):
    """So that a process that is killed in between runs the step again, and has its row of metrics."""
    log_path = tmp_path / "run"

    async def run() -> None:
        data_D = data(1, 1)
        step = await train_step(data_D, trainer, 0.1)
        for frozen in (
            await save_checkpoint_and_get_sampling_client(trainer, 1, save_every=1),
            await compute_full_batch_metrics_and_get_sampling_client(trainer, 2, data_D, step.logprobs_D, save_every=1),
        ):
            assert frozen.saved is not None
            recorded_before = load_checkpoints_file(log_path)
            record = await frozen.saved.record(log_path)
            assert load_checkpoints_file(log_path) == [*recorded_before, record]
        assert [record.batch for record in load_checkpoints_file(log_path)] == [1, 2]

    with trainer_in(tmp_path) as (_, trainer):
        asyncio.run(run())


def test_the_first_batch_has_nothing_to_save_and_the_next_one_has(tmp_path: Path):
    async def saved(i_batch: int) -> bool:
        return (await save_checkpoint_and_get_sampling_client(trainer, i_batch, save_every=1)).saved is not None

    with trainer_in(tmp_path) as (_, trainer):
        assert [asyncio.run(saved(i_batch)) for i_batch in range(2)] == [False, True]


def test_a_resumed_loop_does_not_save_what_it_was_resumed_from(tmp_path: Path):
    with trainer_in(tmp_path) as (_, trainer):
        frozen = asyncio.run(save_checkpoint_and_get_sampling_client(trainer, 4, save_every=2, start_batch=4))
    assert frozen.saved is None


def test_after_a_step_come_its_metrics_and_the_client_that_sees_it(tmp_path: Path):
    async def run() -> None:
        data_D = data(1, 1)
        step = await train_step(data_D, trainer, 0.3)
        after = await compute_full_batch_metrics_and_get_sampling_client(
            trainer, 1, data_D, step.logprobs_D, save_every=0, do_compute_post_kl=True
        )
        assert after.saved is None
        assert {"optim/kl_sample_train_v1", "kl_pre_post_v2", "time/save_checkpoint"} <= after.metrics.keys()
        now = await after.sampling_client.compute_logprobs(ModelInput.from_ints(b"ab"))
        assert now[1] > step.logprobs_D[0].tolist()[0]

    with trainer_in(tmp_path) as (_, trainer):
        asyncio.run(run())
