"""Stages of learning from a teacher. On-policy the student writes and the teacher scores each of its tokens; off-policy
the teacher writes, or says which tokens are likeliest in texts that there are, and the student learns it.

Shape suffixes: `B` chats of a batch, `D` datums.
"""

from dataclasses import replace
from typing import NamedTuple

from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.completers import SamplingMessageCompleter
from stovetop.datasets import Batches, Split, log_epoch
from stovetop.distillation import on_policy
from stovetop.distillation.datasets import (
    CompositeDataset,
    DistillationDatasetConfig,
    PromptOnlyDataset,
    PromptOnlyDatasetBuilder,
    SourcedGroupBuilder,
    prompt_of_row,
    truncated_prompt,
)
from stovetop.distillation.evaluation import TeacherKLEvaluator
from stovetop.distillation.off_policy import (
    compute_teacher_topk,
    mean_topk_kl,
    sample_teacher_chats,
    topk_cross_entropy_datum,
)
from stovetop.distillation.on_policy import SourcedDatum, assemble_sourced_data
from stovetop.distillation.teachers import TeacherConfig, create_teachers
from stovetop.errors import InvalidRequest
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.policies import Policy
from stovetop.kitchen.stages.rl import add_episodes, emit_batch
from stovetop.kitchen.stages.supervised import forward_backward
from stovetop.model_families import recommended_renderer_name
from stovetop.named_data import load_data
from stovetop.renderers.base import Renderer, TrainOnWhat
from stovetop.renderers.messages import Message
from stovetop.rl.advantages import compute_advantages
from stovetop.rl.metrics import compute_kl_sample_train
from stovetop.rl.rollout_record import RolloutRecord
from stovetop.rl.rollouts import Rollouts
from stovetop.rl.types import EnvGroupBuilder, RLDataset
from stovetop.runs import Run
from stovetop.supervised.data import conversations_to_data
from stovetop.supervised.nll import mean_nll
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse, TensorData

# ---- prompts and teachers --------------------------------------------------------------------------------------------


@stage(writes="prompts")
def load_prompts(dataset: str, run: Run, test_size: int = 0, seed: int = 0) -> Split[list[Message]]:
    """Questions, or chats up to the last user message. Rows that have none are left out and counted."""
    loaded = load_data(dataset, prompt_of_row, test_size=test_size, seed=seed, revisions=run.revisions)
    run.record_data(dataset, loaded)
    return Split(loaded.train, loaded.test)


@stage(writes="teacher_config")
def choose_teacher(teacher_model_name: str, teacher_checkpoint_path: str | None = None) -> TeacherConfig:
    """A base model as it is, or a saved checkpoint of it."""
    return TeacherConfig(base_model=teacher_model_name, load_checkpoint_path=teacher_checkpoint_path)


@stage(writes="teachers")
async def init_teachers(
    service: ServiceClient,
    training_client: TrainingClient,
    sources: list[DistillationDatasetConfig],
    renderer_name: str | None = None,
) -> list[SamplingClient]:
    """The teacher of each dataset, which must write as the student does."""
    configs = [source.teacher_config for source in sources]
    return await _create(service, training_client, configs, renderer_name)


@stage(writes="teacher")
async def init_teacher(
    service: ServiceClient,
    training_client: TrainingClient,
    teacher_config: TeacherConfig,
    renderer_name: str | None = None,
) -> SamplingClient:
    """The one teacher, which must write as the student does."""
    [teacher] = await _create(service, training_client, [teacher_config], renderer_name)
    return teacher


async def _create(
    service: ServiceClient, student: TrainingClient, configs: list[TeacherConfig], renderer_name: str | None
) -> list[SamplingClient]:
    tokenizer = student.get_tokenizer()
    name = renderer_name or recommended_renderer_name(tokenizer)
    return await create_teachers(service, configs, renderer_name=name, student_tokenizer=tokenizer)


# ---- on-policy -------------------------------------------------------------------------------------------------------


class PromptBatching(NamedTuple):
    """How prompts become batches of groups."""

    group_size: int
    num_epochs: int
    seed: int
    max_prompt_tokens: int | None


@stage(writes="prompt_batching")
def choose_prompt_batching(
    group_size: int = 4, num_epochs: int = 1, seed: int = 0, max_prompt_tokens: int | None = None
) -> PromptBatching:
    """What the config says of the batches of every dataset, as one value."""
    return PromptBatching(group_size, num_epochs, seed, max_prompt_tokens)


@stage(writes="sources")
def choose_sources(
    prompts: Split[list[Message]],
    teacher_config: TeacherConfig,
    renderer: Renderer,
    prompt_batching: PromptBatching,
    groups_per_batch: int,
    prompts_name: str = "prompts",
) -> list[DistillationDatasetConfig]:
    """One dataset of prompts with its teacher. For several use it once for each, and put them together."""
    return [source_of(prompts, teacher_config, groups_per_batch, renderer, prompt_batching, dataset_name=prompts_name)]


def source_of(
    prompts: Split[list[Message]],
    teacher_config: TeacherConfig,
    groups_per_batch: int,
    renderer: Renderer,
    prompt_batching: PromptBatching,
    *,
    dataset_name: str = "prompts",
) -> DistillationDatasetConfig:
    """Prompts that are split already, `groups_per_batch` of them a step, with their teacher; `dataset_name` is the tag
    in metrics."""
    builder = PromptOnlyDatasetBuilder(
        source=prompts,
        renderer=renderer,
        groups_per_batch=groups_per_batch,
        dataset_name=dataset_name,
        **prompt_batching._asdict(),
    )
    return DistillationDatasetConfig(
        dataset_builder=builder, teacher_config=teacher_config, groups_per_batch=groups_per_batch
    )


class Prompts(NamedTuple):
    """The batches of all epochs, and what is held out; every group with the number of its dataset."""

    problems: RLDataset
    num_per_epoch: int
    test_builders: list[EnvGroupBuilder]


@stage(writes=("problems", "num_per_epoch", "test_builders"))
async def build_prompt_dataset(sources: list[DistillationDatasetConfig], num_epochs: int = 1) -> Prompts:
    """What the student is asked: of each dataset its share in every batch."""
    made = [await source.dataset_builder() for source in sources]
    problems = CompositeDataset([train for train, _ in made], [source.groups_per_batch for source in sources])
    held_out: list[EnvGroupBuilder] = [
        SourcedGroupBuilder(builder, index)
        for index, (_, test) in enumerate(made)
        if test is not None
        for batch in range(len(test))
        for builder in test.get_batch(batch)
    ]
    return Prompts(problems, len(problems) // num_epochs, held_out)


@stage(writes="evaluators")
def make_teacher_evaluators(
    test_builders: list[EnvGroupBuilder],
    teachers: list[SamplingClient],
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    rollout_record: RolloutRecord | None = None,
) -> Evaluators:
    """How far from the teachers the student's answers to the prompts that are held out are, if there are any."""
    evaluator = TeacherKLEvaluator(test_builders, teachers, max_tokens, temperature, seed, rollout_record)
    return Evaluators(sampling=(evaluator,) if test_builders else ())


@stage(writes="sourced_D")
def assemble_distillation_batch(rollouts: Rollouts, positions: Positions, row: Row, run: Run) -> list[SourcedDatum]:
    """The data, still with their mask, and each with the number of its dataset; how the episodes went, into the row.
    Where environments give rewards, they count too."""
    add_episodes(row, rollouts, positions)
    owned_P = rollouts.owned_groups_P
    sourced_D = assemble_sourced_data(owned_P, compute_advantages([group for _, group in owned_P]))
    emit_batch(run, row.step, [sourced.datum for sourced in sourced_D])
    return sourced_D


@stage(writes="data_D")
async def incorporate_teacher_kl(
    sourced_D: list[SourcedDatum],
    teachers: list[SamplingClient],
    row: Row,
    kl_penalty_coef: float = 1.0,
    kl_discount_factor: float = 0.0,
    centres_teacher_kl: bool = False,
) -> list[Datum]:
    """Adds to the advantage of each token how much likelier its teacher finds it than the student."""
    data_D, metrics = await on_policy.incorporate_teacher_kl(
        sourced_D,
        teachers,
        kl_penalty_coef=kl_penalty_coef,
        kl_discount_factor=kl_discount_factor,
        centred=centres_teacher_kl,
    )
    row.add(metrics)
    return data_D


@stage
def log_on_policy_metrics(
    data_D: list[Datum], logprobs_D: list[TensorData], policy: Policy, row: Row, run: Run
) -> None:
    """How far student and teacher are apart, and sampler and trainer; and by how many steps."""
    row.add({"lag": row.step - policy.num_updates, **compute_kl_sample_train(data_D, logprobs_D)})
    apart = {name.replace("/", "_"): value for name, value in row.values.items() if name.startswith("teacher_kl")}
    run.emit("distillation.step", step=row.step, loss=row.values["loss:sum"], **apart)


# ---- off-policy ------------------------------------------------------------------------------------------------------


class DistillationBatches(NamedTuple):
    """Batches of prompts."""

    batches: Batches[list[Message]]
    num_per_epoch: int


@stage(writes=("batches", "num_per_epoch"))
def build_distillation_dataset(
    prompts: Split[list[Message]],
    renderer: Renderer,
    batch_size: int,
    num_epochs: int = 1,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
) -> DistillationBatches:
    """The prompts of all epochs, each epoch in an order of its own. The text of a long one loses its end."""
    train = prompts.train
    if max_prompt_tokens is not None:
        train = [truncated_prompt(prompt, renderer.tokenizer, max_prompt_tokens) for prompt in train]
    log_epoch("prompts", len(train), batch_size)
    batches = Batches(train, min(batch_size, len(train)), num_epochs=num_epochs, seed=seed)
    return DistillationBatches(batches, batches.num_per_epoch)


@stage(writes="test_builders")
def hold_out_prompts(
    prompts: Split[list[Message]], renderer: Renderer, max_prompt_tokens: int | None = None
) -> list[EnvGroupBuilder]:
    """The prompts that are held out, for the student to answer."""
    if not prompts.test:
        return []
    num = len(prompts.test)
    held_out = PromptOnlyDataset(prompts.test, num, renderer, group_size=1, max_prompt_tokens=max_prompt_tokens)
    return [SourcedGroupBuilder(builder, 0) for builder in held_out.get_batch(0)]


@stage(writes="evaluators")
def make_teacher_evaluator(
    test_builders: list[EnvGroupBuilder],
    teacher: SamplingClient,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> Evaluators:
    """How far from the one teacher the student's own answers to the prompts that are held out are, if there are any."""
    return make_teacher_evaluators(test_builders, [teacher], max_tokens, temperature, seed)


@stage(writes="prompts_B")
def get_distillation_batch(
    batches: Batches[list[Message]], epoch: int, positions: Positions, row: Row, run: Run
) -> list[list[Message]]:
    """The prompts of this step."""
    prompts_B = batches[row.step]
    row.add({"epoch": epoch, "progress": row.step / positions.num_steps, "num_prompts": len(prompts_B)})
    run.emit("dataset.batch", step=row.step, num_prompts=len(prompts_B))
    return prompts_B


@stage(writes="ask_teacher")
def make_teacher_completer(
    teacher: SamplingClient, renderer: Renderer, max_tokens: int, teacher_temperature: float = 1.0
) -> SamplingMessageCompleter:
    """How the teacher is asked."""
    return SamplingMessageCompleter(teacher, renderer, max_tokens, temperature=teacher_temperature)


@stage(writes="data_D")
async def teacher_inference(
    prompts_B: list[list[Message]],
    ask_teacher: SamplingMessageCompleter,
    row: Row,
    max_length: int | None = None,
    seed: int = 0,
) -> list[Datum]:
    """The teacher's answers, as data to train on. An answer that fails fails the step."""
    chats_B = await sample_teacher_chats(replace(ask_teacher, seed=seed + row.step), prompts_B)
    last = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    data_D = conversations_to_data(chats_B, ask_teacher.renderer, max_length, last)
    if not data_D:
        raise InvalidRequest(f"none of the teacher's {len(chats_B)} answers has anything to train on")
    row.add({"num_untrainable": len(chats_B) - len(data_D), "num_tokens": sum(d.model_input.length for d in data_D)})
    return data_D


@stage(writes="data_D")
async def teacher_topk(data_D: list[Datum], teacher: SamplingClient, num_teacher_targets: int = 20) -> list[Datum]:
    """The likeliest tokens of the teacher at every position of given data, as what the student is to say."""
    topk_D = await compute_teacher_topk(teacher, data_D, num_teacher_targets)
    return [topk_cross_entropy_datum(datum, topk) for datum, topk in zip(data_D, topk_D, strict=True)]


distillation_forward_backward = forward_backward.using("distillation_forward_backward")


@stage
def log_distillation_metrics(
    data_D: list[Datum],
    trained_output: ForwardBackwardOutput,
    stepped_response: OptimStepResponse,
    adam: AdamParams,
    row: Row,
    run: Run,
) -> None:
    """The loss of the weights that the step began with, where the teacher's distribution is known also how far the
    student's is from it, and what the optimizer says."""
    metrics = {"train_mean_nll": mean_nll(trained_output, data_D)}
    if all(datum.loss_fn_inputs["target_tokens"].array.ndim == 2 for datum in data_D):
        metrics["topk_kl"] = mean_topk_kl(trained_output, data_D)
    row.add({"learning_rate": adam.learning_rate, **metrics, **stepped_response.metrics})
    run.emit("distillation.step", step=row.step, loss=metrics["train_mean_nll"], learning_rate=adam.learning_rate)
