"""DISTILLATION as a whole, on the recording backend: on-policy it is the flat loop of this file, with one teacher or
several; off-policy the student learns what the teacher answers, or finds likeliest."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from costly import slow_but
from kitchen.stages.configs import DistillationConfig, OffPolicyConfig, TopKConfig, write_chats, write_problems
from kitchen.test_supervised import checkpoints, rows, weights
from stovetop.backends import recording
from stovetop.backends.opened_base import Call
from stovetop.checkpoints import is_due, resume_or_create, save_final_checkpoint, submit_checkpoint
from stovetop.client import ServiceClient, TrainingClient
from stovetop.datasets import Split
from stovetop.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDatasetBuilder,
    SourcedGroupBuilder,
    create_composite_dataset,
)
from stovetop.distillation.evaluation import TeacherKLEvaluator
from stovetop.distillation.on_policy import SourcedDatum, assemble_sourced_data, incorporate_teacher_kl
from stovetop.distillation.teachers import TeacherConfig, create_teachers
from stovetop.errors import StageFailed
from stovetop.kitchen import stage
from stovetop.kitchen.run_config import RunConfig
from stovetop.kitchen.stages.distillation import PromptBatching, source_of
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import DISTILLATION, OFF_POLICY_DISTILLATION, TOPK_DISTILLATION
from stovetop.model_families import recommended_renderer_name
from stovetop.renderers import get_renderer
from stovetop.renderers.base import Renderer, TrainOnWhat
from stovetop.renderers.messages import Message
from stovetop.rl.advantages import compute_advantages
from stovetop.rl.metrics import compute_kl_sample_train, compute_trajectory_metrics
from stovetop.rl.rollouts import RetryOnFailure, do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.steps import train_step
from stovetop.runs import load, open_run
from stovetop.supervised.data import conversations_to_data
from stovetop.types import AdamParams, Datum
from tiny_service import open_tiny

NUM_STEPS = 6  # of two epochs: nine prompts to train on, three a step


@pytest.fixture
def config(tmp_path: Path) -> DistillationConfig:
    return DistillationConfig(dataset=write_problems(tmp_path / "prompts.jsonl"), log_path=str(tmp_path / "run"))


async def train(config: RunConfig, workflow: Workflow = DISTILLATION) -> Sequence[Call]:
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False) as run,
    ):
        await workflow.run(config, service=service, run=run)
        return service.calls


# ---- on-policy -------------------------------------------------------------------------------------------------------


async def flat_loop(config: DistillationConfig, service: ServiceClient) -> None:
    """The same without a workflow, for one teacher."""
    with open_run(config.log_path, config, console=False) as run:
        start = await resume_or_create(service, run.path, model_name=config.model_name, lora_rank=4, seed=config.seed)
        client = start.training_client
        tokenizer = client.get_tokenizer()
        renderer_name = recommended_renderer_name(tokenizer)
        builder = PromptOnlyDatasetBuilder(
            source=config.dataset, renderer=get_renderer(renderer_name, tokenizer),
            groups_per_batch=config.groups_per_batch, group_size=config.group_size, test_size=config.test_size,
            num_epochs=config.num_epochs, seed=config.seed,
        )  # fmt: skip
        teacher_config = TeacherConfig(base_model=config.teacher_model_name)
        teachers = await create_teachers(
            service, [teacher_config], renderer_name=renderer_name, student_tokenizer=tokenizer
        )
        source = DistillationDatasetConfig(dataset_builder=builder, teacher_config=teacher_config, groups_per_batch=3)
        dataset, [test] = await create_composite_dataset([source])
        held_out = [SourcedGroupBuilder(builder, 0) for builder in test.get_batch(0)]
        evaluator = TeacherKLEvaluator(held_out, teachers, config.max_tokens, config.temperature, config.seed)
        adam = AdamParams(config.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
        for step in range(len(dataset)):
            policy = await client.save_weights_and_get_sampling_client()
            row: dict[str, float] = {"progress/batch": step, "progress/done_frac": (step + 1) / len(dataset), "lag": 0}
            if is_due(step, config.eval_every):
                row |= await evaluator(policy)
            sampling = SamplingPolicy(policy, config.max_tokens, config.temperature, seed=config.seed + step)
            rollouts = await do_rollouts(dataset.get_batch(step), sampling, RetryOnFailure())
            owned_P = rollouts.owned_groups_P
            groups_P = [group for _, group in owned_P]
            row |= rollouts.error_metrics()
            row |= compute_trajectory_metrics(groups_P, [builder.logging_tags() for builder, _ in owned_P])
            sourced_D = assemble_sourced_data(owned_P, compute_advantages(groups_P))
            data_D, metrics = await incorporate_teacher_kl(sourced_D, teachers, kl_penalty_coef=config.kl_penalty_coef)
            trained = await train_step(
                data_D, client, adam.learning_rate, adam=adam, loss_fn_config={"temperature": config.temperature}
            )
            saved = (
                submit_checkpoint(client, f"{step + 1:06d}", {"batch": step + 1})
                if is_due(step + 1, config.save_every) and step + 1 < len(dataset)
                else None
            )
            row |= {"optim/lr": adam.learning_rate, "optim/num_updates": 1, **metrics, **trained.metrics}
            run.log_metrics(row | compute_kl_sample_train(data_D, trained.logprobs_D), step)
            if saved is not None:
                await saved.record(run.path)
        final = await evaluator(await client.save_weights_and_get_sampling_client())
        run.log_metrics({"progress": 1.0, **final}, len(dataset))
        await save_final_checkpoint(client, run.path, start=start, num_batches=len(dataset))


def test_on_policy_it_is_the_flat_loop_in_every_metric_and_to_the_bit(config: DistillationConfig) -> None:
    asyncio.run(train(config))
    flat = replace(config, log_path=f"{config.log_path}-flat")
    with recording.open_service(flat.log_path) as service:
        asyncio.run(flat_loop(flat, service))
    assert rows(config.log_path) == rows(flat.log_path)
    assert weights(config.log_path) == weights(flat.log_path)
    assert checkpoints(config.log_path) == checkpoints(flat.log_path) == [("000002", 2), ("000004", 4), ("final", 6)]


def taught_letters(client: TrainingClient) -> str:
    """Weights that answer in small letters, whichever."""
    renderer = get_renderer("chat_template", client.get_tokenizer())
    drawn = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), (64, 3))
    chats = [
        [Message(role="user", content=f"q{index % 9}"), Message(role="assistant", content="".join(letters))]
        for index, letters in enumerate(drawn)
    ]
    data_D = conversations_to_data(chats, renderer, None, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    for _ in range(15):
        client.forward_backward(data_D, "cross_entropy")
        client.optim_step(AdamParams(0.03))
    path = client.save_weights_for_sampler("teacher").result().path
    assert path is not None
    return path


@stage(writes="data_D")
def without_penalty(sourced_D: list[SourcedDatum]) -> list[Datum]:
    return [sourced.datum for sourced in sourced_D]


@pytest.mark.slow
def test_a_transformer_comes_twice_as_near_to_its_teacher_and_by_the_penalty_alone(
    config: DistillationConfig, tmp_path: Path
) -> None:
    def distances(config: DistillationConfig, workflow: Workflow) -> list[float]:
        with open_run(config.log_path, config, console=False) as run:
            asyncio.run(workflow.run(config, service=tiny.service, run=run))
        return [row["test/teacher_kl"] for row in rows(config.log_path) if "test/teacher_kl" in row]

    with open_tiny(tmp_path / "tiny") as tiny:
        teacher = taught_letters(tiny.service.create_lora_training_client(tiny.model, rank=8, seed=0).result())
        config = replace(
            config, model_name=tiny.model, teacher_model_name=tiny.model, teacher_checkpoint_path=teacher,
            num_epochs=8, group_size=8, max_tokens=2, learning_rate=0.01, centres_teacher_kl=True, eval_every=99,
            save_every=0,
        )  # fmt: skip
        first, last = distances(config, DISTILLATION)
        idle = replace(config, log_path=f"{config.log_path}-without", max_steps=2, centres_teacher_kl=False)
        unmoved = distances(idle, DISTILLATION.replace("incorporate_teacher_kl", without_penalty))
    assert last < first / 2
    assert unmoved == [first, first]


def test_each_step_trains_on_fresh_answers_of_the_student(config: DistillationConfig) -> None:
    calls = asyncio.run(train(replace(config, eval_every=0, save_every=0)))
    verbs = [call.verb for call in calls if call.client != "service"]
    in_order = [verb for verb, before in zip(verbs, ["", *verbs], strict=False) if verb != before]
    step = ["sample", "compute_logprobs", "forward_backward", "optim_step", "save_weights_and_get_sampling_client"]
    end = ["sample", "compute_logprobs", "save_state", "save_weights_for_sampler"]  # evaluated at the end alone
    assert in_order == ["save_weights_and_get_sampling_client", *step * NUM_STEPS, *end]
    losses = {call.arguments["loss_fn"] for call in calls if call.verb == "forward_backward"}
    assert losses == {"importance_sampling"}


@pytest.mark.parametrize("depth", slow_but(1, [2, 0]))
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_would_have_been(
    config: DistillationConfig, depth: int
) -> None:
    whole = replace(config, max_steps_off_policy=depth, num_substeps=2, log_path=f"{config.log_path}-whole")
    asyncio.run(train(whole))
    assert [row["lag"] for row in rows(whole.log_path)[:-1]] == [min(step, depth) for step in range(NUM_STEPS)]

    @stage
    def stops(step: int) -> None:
        if step == 3:
            raise ValueError("stopped")

    stopped = replace(whole, log_path=config.log_path)
    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(stopped, DISTILLATION.insert_after("log_step", stops)))
    asyncio.run(train(stopped))
    assert rows(stopped.log_path) == rows(whole.log_path)
    assert weights(stopped.log_path) == weights(whole.log_path)


def test_several_datasets_have_each_their_own_teacher(config: DistillationConfig) -> None:
    @stage(writes="sources")
    def choose_two(
        prompts: Split[list[Message]], renderer: Renderer, prompt_batching: PromptBatching
    ) -> list[DistillationDatasetConfig]:
        teachers = [TeacherConfig(base_model=f"any/teacher-{number}") for number in (1, 2)]
        return [source_of(prompts, each, number, renderer, prompt_batching) for number, each in enumerate(teachers, 1)]

    workflow = DISTILLATION.replace("choose_sources", choose_two).remove("choose_teacher")

    @dataclass(frozen=True, kw_only=True)
    class TwoConfig(RunConfig):
        dataset: str
        test_size: int = 3
        model_name: str = "any/model"
        num_epochs: int = 1
        max_tokens: int = 3
        max_steps: int = 2
        max_steps_off_policy: int = 0
        learning_rate: float = 0.5
        eval_every: int = 1

    two = TwoConfig(dataset=config.dataset, log_path=config.log_path)
    asyncio.run(train(two, workflow))
    found = rows(two.log_path)
    per_teacher = {f"{where}teacher_kl/dataset_{index}" for where in ("", "test/") for index in (0, 1)}
    assert all(per_teacher <= set(row) for row in found[:-1])
    weighted = (found[0]["teacher_kl/dataset_0"] + 2 * found[0]["teacher_kl/dataset_1"]) / 3
    assert found[0]["teacher_kl"] == pytest.approx(weighted, rel=0.5)


# ---- off-policy ------------------------------------------------------------------------------------------------------


def off_policy(folder: Path) -> OffPolicyConfig:
    return OffPolicyConfig(dataset=write_problems(folder / "prompts.jsonl"), log_path=str(folder / "run"))


def topk(folder: Path) -> TopKConfig:
    return TopKConfig(dataset=write_chats(folder / "chats.jsonl"), log_path=str(folder / "run"))


def test_off_policy_the_student_learns_what_the_teacher_answers(tmp_path: Path) -> None:
    config = replace(off_policy(tmp_path), num_epochs=4, teacher_temperature=0.0)
    asyncio.run(train(config, OFF_POLICY_DISTILLATION))
    *found, last = rows(config.log_path)
    assert len(found) == 20
    assert found[-1]["train_mean_nll"] < found[0]["train_mean_nll"]
    assert all(row["num_prompts"] == 2 for row in found)
    assert last["test/teacher_kl"] < found[0]["test/teacher_kl"]


def test_off_policy_the_student_learns_what_the_teacher_finds_likeliest(tmp_path: Path) -> None:
    config = topk(tmp_path)
    asyncio.run(train(config, TOPK_DISTILLATION))
    *found, last = rows(config.log_path)
    assert last["test/nll"] > 0
    assert found[-1]["topk_kl"] < found[0]["topk_kl"]
    steps = [event for event in load(config.log_path).events if event.name == "distillation.step"]
    assert [event.values["loss"] for event in steps] == [row["train_mean_nll"] for row in found]


@pytest.mark.parametrize(
    ("workflow", "make"),
    slow_but(1, [(TOPK_DISTILLATION, topk), (OFF_POLICY_DISTILLATION, off_policy)]),
    ids=["top k", "answers"],
)
def test_off_policy_a_run_that_is_stopped_and_resumed_is_the_run_that_would_have_been(
    tmp_path: Path, workflow: Workflow, make: Callable[[Path], OffPolicyConfig | TopKConfig]
) -> None:
    config = make(tmp_path)
    whole = replace(config, log_path=f"{config.log_path}-whole")
    asyncio.run(train(whole, workflow))

    @stage
    def stops(step: int) -> None:
        if step == 4:
            raise ValueError("stopped")

    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, workflow.insert_after("optim_step", stops)))
    asyncio.run(train(config, workflow))
    assert rows(config.log_path) == rows(whole.log_path)
    assert weights(config.log_path) == weights(whole.log_path)
