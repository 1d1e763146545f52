"""Reinforcement learning with a verifiable reward as one flat loop: problems in, a model that solves more of them out.

    stovetop run rl_loop                           sums, and the small model: it needs no preset and no network
    stovetop run rl_loop dataset=problems.jsonl    problems of your own

A step: freeze the weights, draw a group of answers to each problem, grade them, give every answer the reward minus the
mean of its group as advantage, take one policy-gradient step. On-policy throughout: every answer is trained on by the
weights that drew it, which the two kl_sample_train metrics show. The look-ahead here is small: the weights for the next
step are frozen before the results of this one are awaited. What is left out: several steps per batch, environments of
several turns, KL penalties, sampling ahead of training.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated

import stovetop
from stovetop import AdamParams
from stovetop.checkpoints import is_due, resume_or_create, save_final_checkpoint, submit_checkpoint
from stovetop.checks import check as check_fields
from stovetop.checks import check_all
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.datasets import log_epoch
from stovetop.hyperparams import settled_rate
from stovetop.lr_schedules import LRSchedule, compute_schedule_lr_multiplier
from stovetop.model_families import context_length, recommended_renderer_name
from stovetop.named_data import Loaded, load_data
from stovetop.recipes.settings import (
    Beta,
    Count,
    Epsilon,
    LearningRate,
    Positive,
    Temperature,
    check_at_most,
    check_policy_loss,
    check_rate,
    check_renderer_name,
    check_start,
    check_weights,
)
from stovetop.renderers import get_renderer
from stovetop.retention import KeepCheckpoints
from stovetop.rl.data_processing import assemble_training_data, without_mask
from stovetop.rl.evaluation import RLTestSetEvaluator
from stovetop.rl.metrics import compute_rollout_metrics, compute_update_metrics, rl_step_fields
from stovetop.rl.problem_env import PosedProblem, ProblemDataset, problem_builders, problem_of_row
from stovetop.rl.rollout_record import RolloutRecord, TrainedOn
from stovetop.rl.rollouts import RetryOnFailure, do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.steps import judge_groups
from stovetop.rules import Whole
from stovetop.runs import BehaviorIfExists, check_opening, open_run
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE
from stovetop.tracking.step_times import listening
from stovetop.tracking.trackers import check_trackers, parse_trackers
from stovetop.types import Rank, Seed


@dataclass(frozen=True, kw_only=True)
class Config:
    dataset: str = "sample:arithmetic"  # FILE.jsonl with "question" or "messages", and "answer"; sample:NAME; a hub id
    test_dataset: str | None = None  # held-out problems, likewise; None: test_size problems of the dataset
    test_size: Count = 32  # problems held out of the dataset when there is no test_dataset; 0: none
    model_name: str = "smollm2"  # a folder, a fetched model, or a name on the hub
    log_path: str = field(default="runs/rl_loop", metadata=MAY_CHANGE)  # the run directory; again: it goes on
    behavior_if_exists: BehaviorIfExists = field(default="resume", metadata=MAY_CHANGE)  # of a run that is there
    keep_checkpoints: KeepCheckpoints = field(default="2", metadata=MAY_CHANGE)  # 2, "2 lowest:METRIC", all
    trackers: str = field(default="", metadata=MAY_CHANGE)  # wandb, trackio, mlflow, tensorboard; NAME:PROJECT, several
    enable_trace: bool = field(default=False, metadata=MAY_CHANGE)  # trace.json, for Perfetto: what ran when
    base_url: str | None = field(default=None, metadata=MAY_CHANGE)  # None: in this process; recording: a fake; a URL
    load_checkpoint_path: str | None = None  # weights to start from, with a fresh optimizer
    renderer_name: str | None = None  # None: the one recommended for the model
    groups_per_batch: Positive = 8  # prompts a step; the last step of an epoch may have fewer
    group_size: Annotated[int, Whole(2)] = 8  # answers to each prompt; one alone has no others to be better than
    max_tokens: Positive = 16  # of an answer
    temperature: Temperature = 1.0  # of the answers
    learning_rate: LearningRate = 4e-5  # at its highest; auto: derived from the model
    lr_schedule: LRSchedule = "constant"  # how the rate falls
    warmup_steps: Count = 0  # in which the rate rises
    num_epochs: Positive = field(default=1, metadata=HOW_LONG)  # passes over the data
    max_steps: Positive | None = field(default=None, metadata=HOW_LONG)  # at most; None: as many as the epochs have
    loss_fn: str = "importance_sampling"  # or "ppo", "cispo"
    loss_fn_config: dict[str, float] = field(default_factory=dict[str, float])  # loss_fn_config.KEY=1.5 sets one
    remove_constant_reward_groups: bool = True  # they have no gradient
    num_groups_to_log: Count = field(default=4, metadata=MAY_CHANGE)  # of each step, as a page to read; 0: no pages
    lora_rank: Rank = 32  # of the adapter's matrices
    train_unembed: bool = True  # the output head too
    seed: Seed = 0  # of the adapter, the split, the order and the answers
    adam_beta1: Beta = 0.9  # of the mean of gradients
    adam_beta2: Beta = 0.95  # of the mean of their squares
    adam_eps: Epsilon = 1e-8  # added to the root of that
    eval_every: Count = field(default=20, metadata=MAY_CHANGE)  # steps; 0: only at the end
    save_every: Count = field(default=20, metadata=MAY_CHANGE)  # steps; 0: only at the end

    def __post_init__(self) -> None:
        check_all(
            lambda: check_fields(self),
            lambda: check_renderer_name(self.renderer_name),
            lambda: parse_trackers(self.trackers),
            lambda: check_policy_loss(self.loss_fn, self.loss_fn_config, self.temperature),
        )


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    path = config.load_checkpoint_path
    check_all(
        lambda: check_opening(config.log_path, config, config.behavior_if_exists),
        lambda: load(config),
        lambda: check_weights(config.base_url, config.model_name, path),
        lambda: check_start("load_checkpoint_path", path, config.lora_rank, config.train_unembed),
        lambda: check_rate(config.learning_rate, config.model_name),
        lambda: check_trackers(config.trackers),
    )


def load(config: Config) -> Loaded[PosedProblem]:
    """The problems to train on, in a first order of their own, and those held out."""
    problems = load_data(
        config.dataset,
        problem_of_row,
        test_dataset=config.test_dataset,
        test_size=config.test_size,
        seed=config.seed,
        revisions=revisions_in(config.log_path),
    )
    num_steps = -(-len(problems.train) // config.groups_per_batch) * config.num_epochs
    num_steps = min(num_steps, config.max_steps or num_steps)
    check_all(
        lambda: check_at_most("warmup_steps", config.warmup_steps, num_steps, "steps"),
        lambda: check_data(config.log_path, config.dataset, problems.sources, config.behavior_if_exists),
    )
    return problems


async def main(config: Config) -> None:
    with stovetop.ServiceClient(config.base_url, storage=config.log_path) as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    problems = load(config)  # before anything is written
    columns = ("env/all/reward/total", "env/all/by_group/frac_mixed", "optim/entropy", "optim/kl_sample_train_v2",
               "time/total", "test/env/all/reward/total")  # fmt: skip
    with open_run(
        config.log_path,
        config,
        behavior_if_exists=config.behavior_if_exists,
        columns=columns,
        keep_checkpoints=config.keep_checkpoints,
        trackers=config.trackers,
        enable_trace=config.enable_trace,
    ) as run:
        run.record_data(config.dataset, problems)
        start = await resume_or_create(
            service,
            run.path,
            model_name=config.model_name,
            lora_rank=config.lora_rank,
            seed=config.seed,
            train_unembed=config.train_unembed,
            load_checkpoint_path=config.load_checkpoint_path,
            user_metadata=await run.user_metadata(),
        )
        trainer = start.training_client
        peak_rate = settled_rate(config.learning_rate, config.model_name)

        # Problems become builders of environment groups: a prompt, a reference answer, `group_size` tries.
        tokenizer = trainer.get_tokenizer()
        renderer = get_renderer(config.renderer_name or recommended_renderer_name(tokenizer), tokenizer)
        context = context_length(service, trainer)
        room = None if context is None else context - config.max_tokens
        builders = problem_builders(problems.train, renderer, config.group_size, max_prompt_tokens=room)
        batches = ProblemDataset(builders, config.groups_per_batch, seed=config.seed, num_epochs=config.num_epochs)
        num_steps = min(len(batches), config.max_steps or len(batches))
        log_epoch("problems", len(problems.train), config.groups_per_batch)
        if start.is_complete(num_steps):
            return
        run.start_at(start.batch, num_steps)
        test_builders = problem_builders(problems.test, renderer, group_size=1, max_prompt_tokens=room)
        record = RolloutRecord(run, renderer, config.num_groups_to_log)
        evaluate = RLTestSetEvaluator(
            test_builders, config.max_tokens, config.temperature, seed=config.seed, record=record
        )
        loss_fn_config = {**config.loss_fn_config, "temperature": config.temperature}

        frozen = trainer.save_weights_and_get_sampling_client()
        progress = run.progress("training", total=num_steps, completed=start.batch)
        with progress as bar, listening(service) as times:
            for step in range(start.batch, num_steps):
                began_s = time.perf_counter()
                sampler = await frozen
                evaluates = bool(problems.test) and is_due(step, config.eval_every)
                metrics: dict[str, float] = await evaluate(sampler) if evaluates else {}

                # Answers to every problem of the batch, graded.
                policy = SamplingPolicy(sampler, config.max_tokens, config.temperature, seed=config.seed + step)
                rollouts = await do_rollouts(batches.get_batch(step), policy, RetryOnFailure())
                metrics |= compute_rollout_metrics(rollouts)

                # Advantages, and the data to train on.
                judged = judge_groups(
                    rollouts.owned_groups_P, removes_constant_reward_groups=config.remove_constant_reward_groups
                )
                data_D, _ = assemble_training_data(judged.groups_P, judged.advantages_P_G)

                # One step, its checkpoint, and the weights for the next step: submitted in order, then awaited.
                multiplier = compute_schedule_lr_multiplier(config.lr_schedule, step, num_steps, config.warmup_steps)
                rate = peak_rate * multiplier
                trained = trainer.forward_backward(without_mask(data_D), config.loss_fn, loss_fn_config)
                stepped = trainer.optim_step(AdamParams(rate, config.adam_beta1, config.adam_beta2, config.adam_eps))
                saves = is_due(step + 1, config.save_every) and step + 1 < num_steps
                saved = submit_checkpoint(trainer, f"{step + 1:06d}", {"batch": step + 1}) if saves else None
                frozen = trainer.save_weights_and_get_sampling_client()

                logprobs_D = [outputs["logprobs"] for outputs in (await trained).loss_fn_outputs]
                metrics |= compute_update_metrics(data_D, logprobs_D) | (await stepped).metrics
                metrics |= judged.metrics | {
                    "loss:sum": (await trained).metrics["loss:sum"],
                    "progress/batch": step,
                    "progress/done_frac": (step + 1) / num_steps,
                    "optim/lr": rate,
                    **times.since_last_row(),
                    "time/total": time.perf_counter() - began_s,
                }
                await record.keep_step(step, rollouts, TrainedOn(judged.groups_P, data_D, logprobs_D), policy_step=step)
                run.log_metrics(metrics, step)
                run.emit("rl.step", step=step, **rl_step_fields(metrics))
                if saved is not None:
                    await saved.record(run.path)
                    await run.retain(service)
                bar.advance()

        if problems.test:
            run.log_metrics(await evaluate(await frozen), num_steps)
        await save_final_checkpoint(trainer, run.path, start=start, num_batches=num_steps)
        await run.retain(service)
        reward = {"reward of a batch": "env/all/reward/total"}
        run.plot("reward", reward, title="Reinforcement learning", y_label="mean reward", running_mean=5)


if __name__ == "__main__":
    asyncio.run(main(Config()))
