"""Each stage of distillation alone, with nothing but what it reads, on the recording backend."""

import asyncio
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from kitchen.stages.configs import write_chats, write_problems
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.recording import Raises, open_service
from stovetop.client import SamplingClient, TrainingClient
from stovetop.datasets import load_chats
from stovetop.distillation.datasets import DistillationDatasetConfig
from stovetop.distillation.teachers import TeacherConfig
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.kitchen import Positions, Row
from stovetop.kitchen.stages import distillation
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.policies import Policy
from stovetop.kitchen.stages.rl import make_policy_loss, train_step
from stovetop.kitchen.stages.sampling import choose_sampling, do_rollout
from stovetop.kitchen.stages.session import init_renderer
from stovetop.kitchen.stages.steps import optim_step
from stovetop.renderers.base import Renderer
from stovetop.rl.rollouts import Rollouts
from stovetop.runs import Run, load
from stovetop.supervised.data import conversations_to_data
from stovetop.types import AdamParams, Datum

STEPS = Positions(num_per_epoch=3, num_steps=6)
ADAM = AdamParams(learning_rate=0.25)
TEACHER = TeacherConfig(base_model="any/teacher")


@pytest.fixture
def renderer(client: TrainingClient) -> Renderer:
    return init_renderer(client)


@pytest.fixture
def teacher(service: InProcessServiceClient, client: TrainingClient) -> SamplingClient:
    return asyncio.run(distillation.init_teacher(service, client, TEACHER))


@pytest.fixture
def sources(tmp_path: Path, renderer: Renderer, run: Run) -> list[DistillationDatasetConfig]:
    loaded = distillation.load_prompts(write_problems(tmp_path / "rows"), run, test_size=2)
    batching = distillation.choose_prompt_batching(group_size=2, num_epochs=2)
    return distillation.choose_sources(loaded, TEACHER, renderer, batching, groups_per_batch=3)


@pytest.fixture
def prompts(sources: list[DistillationDatasetConfig]) -> distillation.Prompts:
    return asyncio.run(distillation.build_prompt_dataset(sources, num_epochs=2))


class Played(NamedTuple):
    policy: Policy
    rollouts: Rollouts


@pytest.fixture
def played(prompts: distillation.Prompts, client: TrainingClient, run: Run) -> Played:
    policy = Policy(client.save_weights_and_get_sampling_client().result(), 2, None)
    return Played(policy, asyncio.run(do_rollout(prompts.problems, 4, policy, choose_sampling(max_tokens=3), run)))


def emitted(run: Run, name: str) -> list[dict[str, float]]:
    return [dict(event.values) for event in load(run.path).events if event.name == name]


# ---- on-policy -------------------------------------------------------------------------------------------------------


def test_choose_teacher_is_a_model_or_a_checkpoint_of_it() -> None:
    assert distillation.choose_teacher("any/teacher") == TEACHER
    assert distillation.choose_teacher("any/teacher", "/saved").load_checkpoint_path == "/saved"


def test_init_teachers_makes_one_for_each_dataset(
    service: InProcessServiceClient, client: TrainingClient, sources: list[DistillationDatasetConfig]
) -> None:
    [teacher] = asyncio.run(distillation.init_teachers(service, client, sources))
    assert teacher.get_base_model() == "any/teacher"


def test_build_prompt_dataset_has_every_prompt_once_an_epoch_and_keeps_what_is_held_out(
    prompts: distillation.Prompts, run: Run
) -> None:
    assert prompts.num_per_epoch == 4
    assert [len(prompts.problems.get_batch(step)) for step in range(8)] == [3, 3, 3, 1] * 2
    assert len(prompts.test_builders) == 2
    assert emitted(run, "dataset.load") == [{"num_train": 10, "num_test": 2, "num_skipped": 0}]


def test_fewer_prompts_than_a_batch_has_are_one_batch(tmp_path: Path, renderer: Renderer, run: Run) -> None:
    loaded = distillation.load_prompts(write_problems(tmp_path / "rows"), run)
    batching = distillation.choose_prompt_batching(num_epochs=2)
    sources = distillation.choose_sources(loaded, TEACHER, renderer, batching, groups_per_batch=13)
    made = asyncio.run(distillation.build_prompt_dataset(sources, num_epochs=2))
    assert (made.num_per_epoch, len(made.problems.get_batch(1))) == (1, 12)


def test_make_teacher_evaluators_measures_on_what_is_held_out(
    prompts: distillation.Prompts, teacher: SamplingClient, client: TrainingClient
) -> None:
    [evaluator] = distillation.make_teacher_evaluators(prompts.test_builders, [teacher], max_tokens=3).sampling
    student = client.save_weights_and_get_sampling_client().result()
    metrics = asyncio.run(evaluator(student))
    assert metrics.keys() == {"test/teacher_kl", "test/teacher_kl/dataset_0"}
    assert distillation.make_teacher_evaluators([], [teacher], max_tokens=3) == Evaluators()


def test_the_gap_to_the_teacher_becomes_the_advantage_that_a_step_trains_on(
    played: Played, teacher: SamplingClient, client: TrainingClient, run: Run
) -> None:
    row = Row(4)
    sourced_D = distillation.assemble_distillation_batch(played.rollouts, STEPS, row, run)
    assert [event["num_datums"] for event in emitted(run, "rl.batch_assembled")] == [6]
    assert [index for _, index in sourced_D] == [0] * 6
    assert not any(datum.loss_fn_inputs["advantages"].array.any() for datum, _ in sourced_D)
    data_D = asyncio.run(distillation.incorporate_teacher_kl(sourced_D, [teacher], row, kl_penalty_coef=2.0))
    total = sum(float(datum.loss_fn_inputs["advantages"].array.sum()) for datum in data_D)
    num_tokens = row.values["env/all/total_ac_tokens"]
    assert total == pytest.approx(-2 * row.values["teacher_kl"] * num_tokens, rel=1e-5)
    logprobs_D = asyncio.run(train_step(client, data_D, ADAM, make_policy_loss(), row))
    distillation.log_on_policy_metrics(data_D, logprobs_D, played.policy, row, run)
    assert row.values["lag"] == 2
    [event] = emitted(run, "distillation.step")
    assert event == {
        "loss": row.values["loss:sum"], "teacher_kl": row.values["teacher_kl"],
        "teacher_kl_dataset_0": row.values["teacher_kl"],
    }  # fmt: skip


# ---- off-policy ------------------------------------------------------------------------------------------------------


def test_load_prompts_leaves_out_rows_that_have_none_and_says_how_many(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [{"question": "a"}, {"prompt": "b"}, {"prompt": " "}, {"messages": [{"role": "user", "content": "c"}]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    train, test = distillation.load_prompts(str(file), run, test_size=1)
    assert sorted(chat[0]["content"] for chat in [*train, *test]) == ["a", "b", "c"]  # pyright: ignore[reportArgumentType]  texts
    assert emitted(run, "dataset.load") == [{"num_train": 2, "num_test": 1, "num_skipped": 1}]
    file.write_text('{"text": "a"}\n')
    with pytest.raises(InvalidRequest, match=r"none of the 1 rows to train on can be used \(it has no prompt: 1\)"):
        distillation.load_prompts(str(file), run)


def test_the_teacher_answers_the_prompts_of_a_step_and_the_student_trains_on_the_answers(
    tmp_path: Path, run: Run, teacher: SamplingClient, renderer: Renderer, client: TrainingClient
) -> None:
    loaded = distillation.load_prompts(write_problems(tmp_path / "rows"), run, test_size=3)
    batches, num_per_epoch = distillation.build_distillation_dataset(loaded, renderer, batch_size=3, num_epochs=2)
    assert num_per_epoch == 3
    row = Row(4)
    prompts_B = distillation.get_distillation_batch(batches, 1, STEPS, row, run)
    assert emitted(run, "dataset.batch") == [{"num_prompts": 3}]
    assert prompts_B == batches[4]
    ask = distillation.make_teacher_completer(teacher, renderer, max_tokens=3, teacher_temperature=0.5)
    data_D = asyncio.run(distillation.teacher_inference(prompts_B, ask, row, seed=1))
    assert data_D == asyncio.run(distillation.teacher_inference(prompts_B, ask, Row(4), seed=1))
    assert data_D != asyncio.run(distillation.teacher_inference(prompts_B, ask, Row(5), seed=1))
    trained = distillation.distillation_forward_backward(client, data_D).result()
    stepped = optim_step(client, ADAM).result()
    distillation.log_distillation_metrics(data_D, trained, stepped, ADAM, row, run)
    assert (row.values["num_prompts"], row.values["learning_rate"]) == (3, 0.25)
    assert "topk_kl" not in row.values
    assert emitted(run, "distillation.step") == [{"loss": row.values["train_mean_nll"], "learning_rate": 0.25}]


def test_a_teacher_that_fails_fails_the_step_and_gives_no_empty_example(tmp_path: Path, renderer: Renderer) -> None:
    with open_service(tmp_path, faults=[Raises("sample", nth=1, error=ValueError("gone"))]) as service:
        teacher = service.create_sampling_client(base_model="any/teacher").result()
        ask = distillation.make_teacher_completer(teacher, renderer, max_tokens=3)
        with pytest.raises(RequestFailedError):
            asyncio.run(distillation.teacher_inference([[{"role": "user", "content": "q"}]], ask, Row(0)))


def test_teacher_topk_gives_soft_targets_whose_distance_the_log_says(
    tmp_path: Path, teacher: SamplingClient, renderer: Renderer, client: TrainingClient, run: Run
) -> None:
    data_D: list[Datum] = conversations_to_data(load_chats(write_chats(tmp_path / "chats"))[:2], renderer, None)
    soft_D = asyncio.run(distillation.teacher_topk(data_D, teacher, num_teacher_targets=5))
    shapes = [datum.loss_fn_inputs["target_tokens"].array.shape for datum in soft_D]
    assert shapes == [(datum.model_input.length, 5) for datum in data_D]
    row = Row(0)
    trained = distillation.distillation_forward_backward(client, soft_D).result()
    distillation.log_distillation_metrics(soft_D, trained, optim_step(client, ADAM).result(), ADAM, row, run)
    assert row.values["topk_kl"] > 0
