"""The demo: a small model learns to put three digits in ascending order, first from 32 examples, then from reward.

    stovetop fetch smollm2 && stovetop run sort_digits_demo

It is the two flat loops in a row, `sl_loop` and then `rl_loop` from its weights, with the accuracy on 64 unseen
problems before, between and after: at temperature 1, four answers each, and greedily. The digits of the test occur in
neither stage, and the reward is the right answer and nothing else. Interrupt it and start it again: it goes on where it
was.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import stovetop
from stovetop import SamplingParams
from stovetop.checkpoints import get_last_checkpoint
from stovetop.checks import check as check_fields
from stovetop.client import SamplingClient, ServiceClient
from stovetop.durable import append_row, parse_rows, write_file
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.model_families import recommended_renderer_name
from stovetop.recipes import rl_loop, sl_loop
from stovetop.recipes.settings import Positive, Rate, check_weights
from stovetop.renderers import get_renderer
from stovetop.renderers.messages import ensure_text, message_from_json
from stovetop.rl.evaluation import RLTestSetEvaluator
from stovetop.rl.problem_env import answer_builders
from stovetop.rules import Whole
from stovetop.run_folder import claimed, mark, run_path, settled
from stovetop.runs import load
from stovetop.tasks import sort_digits
from stovetop.tracking.console import open_console
from stovetop.types import Seed

if TYPE_CHECKING:
    from rich.console import Console

Stage = Literal["base model", "after examples", "after reward"]
RESULTS = "results.jsonl"  # a row per stage that was measured

NumTestProblems = Annotated[int, Whole(1, sort_digits.NUM_TEST_PROBLEMS)]


@dataclass(frozen=True, kw_only=True)
class Config:
    model_name: str = "smollm2"  # a folder, a fetched model, or a name on the hub
    log_path: str = "runs/sort_digits"  # the run directory; again: it goes on
    base_url: str | None = None  # None: in this process; recording: a fake; a URL
    seed: Seed = 0  # of the adapter, the split, the order and the answers
    sl_learning_rate: Rate = 5e-4  # decays to zero
    sl_epochs: Positive = 4  # of two steps of 16 chats
    rl_learning_rate: Rate = 2e-4  # of the second stage
    rl_steps: Positive = 24  # of 8 problems, 8 answers each
    num_test_problems: NumTestProblems = sort_digits.NUM_TEST_PROBLEMS  # that it is measured on

    def __post_init__(self) -> None:
        check_fields(self)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    folder = run_path(config.log_path)
    if not _was_begun(folder):
        settled(folder, "resume")
    check_weights(config.base_url, config.model_name)


async def main(config: Config) -> None:
    folder = run_path(config.log_path)
    if _was_begun(folder):
        mark(folder)
    console = open_console(shown=True)
    options: dict[str, Any] = {"threads": "probe"} if config.base_url is None else {}
    with (
        claimed(folder, "resume"),
        stovetop.ServiceClient(config.base_url, storage=folder, **options) as service,
    ):
        await run(config, service, folder, console)


def _was_begun(folder: Path) -> bool:
    """Whether a demo was begun there, be it before runs had a mark."""
    return all((folder / f"{name}.jsonl").is_file() for name in ("chats", "problems", "test_chats"))


async def run(config: Config, service: ServiceClient, folder: Path, console: "Console") -> None:
    data = {
        "chats": sort_digits.chats(),
        "problems": sort_digits.problems(),
        "test_chats": sort_digits.test_chats()[: config.num_test_problems],
    }
    paths = {name: str(folder / f"{name}.jsonl") for name in data}
    for name, rows in data.items():
        write_file(Path(paths[name]), "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    supervised = sl_loop.Config(
        dataset=paths["chats"],
        test_dataset=paths["test_chats"],
        model_name=config.model_name,
        log_path=str(folder / "supervised"),
        learning_rate=config.sl_learning_rate,
        num_epochs=config.sl_epochs,
        batch_size=16,
        lora_rank=16,
        train_unembed=False,
        seed=config.seed,
        eval_every=2,
        save_every=2,
    )

    console.rule("1  The model as it is")
    base = await service.create_sampling_client(base_model=config.model_name)
    await measure("base model", base, config, folder, console)

    console.rule("2  Learning from 32 examples")
    await sl_loop.train(supervised, service)
    learnt = await service.create_sampling_client(model_path=final_weights(folder / "supervised", "sampler_path"))
    await measure("after examples", learnt, config, folder, console)

    console.rule("3  Learning from reward")
    reinforced = rl_loop.Config(
        dataset=paths["problems"],
        test_size=0,
        model_name=config.model_name,
        log_path=str(folder / "rl"),
        load_checkpoint_path=final_weights(folder / "supervised", "state_path"),
        max_tokens=sort_digits.MAX_TOKENS,
        learning_rate=config.rl_learning_rate,
        max_steps=config.rl_steps,
        lora_rank=16,
        train_unembed=False,
        seed=config.seed,
        eval_every=0,
        save_every=2,
    )
    await rl_loop.train(reinforced, service)
    rewarded = await service.create_sampling_client(model_path=final_weights(folder / "rl", "sampler_path"))
    await measure("after reward", rewarded, config, folder, console)

    console.rule("What was learnt")
    show_results(folder, console)
    await show_answers({"base model": base, "after examples": learnt, "after reward": rewarded}, console)
    console.print(f"plots: {folder / 'supervised' / 'loss.png'}\n       {folder / 'rl' / 'reward.png'}")


def final_weights(run_path: Path, key: Literal["state_path", "sampler_path"]) -> str:
    """Where a finished stage left its weights."""
    record = get_last_checkpoint(run_path, key)
    path = None if record is None else record.get(key)
    if record is None or not record.final or not isinstance(path, str):
        raise StovetopError(f"this stage has no final checkpoint; remove it and start again: {run_path}")
    return path


@dataclass(frozen=True, slots=True)
class Result:
    """A row of results.jsonl: how often a stage was right."""

    stage: str
    sampled: float  # at temperature 1
    greedy: float
    seconds: float  # that measuring took

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Self:
        stage, *numbers = (row.get(key) for key in ("stage", "at temperature 1", "greedy", "seconds"))
        if stage not in get_args(Stage) or not all(type(number) in (int, float) for number in numbers):
            raise InvalidRequest(f"a result needs a stage, 'at temperature 1', 'greedy' and 'seconds', numbers: {row}")
        return cls(str(stage), *(float(number) for number in numbers))  # pyright: ignore[reportArgumentType]  as checked


async def measure(stage: Stage, client: SamplingClient, config: Config, folder: Path, console: "Console") -> None:
    """Accuracy on unseen problems, noted once: a stage that was measured is not measured again."""
    if any(result.stage == stage for result in parse_rows(folder / RESULTS, Result.from_row)):
        return
    tokenizer = client.get_tokenizer()
    renderer = get_renderer(recommended_renderer_name(tokenizer), tokenizer)
    problems = sort_digits.test_problems()[: config.num_test_problems]
    accuracy: dict[str, float] = {}
    began_s = time.monotonic()
    with console.status(f"{stage}: answering {len(problems)} unseen problems"):
        for name, temperature, group_size in (("at temperature 1", 1.0, 4), ("greedy", 0.0, 1)):
            builders = answer_builders(problems, renderer, group_size)
            evaluate = RLTestSetEvaluator(builders, sort_digits.MAX_TOKENS, temperature, seed=config.seed)
            accuracy[name] = (await evaluate(client))["test/env/all/correct"]
    append_row(folder / RESULTS, {"stage": stage, **accuracy, "seconds": time.monotonic() - began_s})
    numbers = ", ".join(f"{value:.3f} {name}" for name, value in accuracy.items())
    console.print(f"{stage}: of {len(problems)} unseen problems right: {numbers}")


def show_results(folder: Path, console: "Console") -> None:
    from rich.table import Table

    results = parse_rows(folder / RESULTS, Result.from_row)
    losses = load(folder / "supervised").series("test/nll").values
    held_out = {"base model": losses[0], "after examples": losses[-1]}
    table = Table("", "held-out loss", "right at temperature 1", "right, greedy", title="Unseen problems")
    for result in results:
        loss = f"{held_out[result.stage]:.3f}" if result.stage in held_out else ""
        table.add_row(result.stage, loss, f"{result.sampled:.3f}", f"{result.greedy:.3f}")
    console.print(table)
    stops = [event for run in ("supervised", "rl") for event in load(folder / run).events if event.name == "run.stop"]
    seconds = sum(event.values["seconds"] for event in stops) + sum(result.seconds for result in results)
    console.print(f"time spent on training and measuring: {seconds:.0f} s")


async def show_answers(clients: dict[Stage, SamplingClient], console: "Console") -> None:
    """The greedy answers of each stage to the first unseen problems."""
    from rich.table import Table

    table = Table("asked", "right", *clients, title="Completions")
    for row in sort_digits.test_chats()[:5]:
        assert isinstance(row["messages"], list)
        *question, answer = (message_from_json(message, "test chat") for message in row["messages"])
        replies: list[str] = []
        for client in clients.values():
            tokenizer = client.get_tokenizer()
            renderer = get_renderer(recommended_renderer_name(tokenizer), tokenizer)
            params = SamplingParams(24, seed=0, stop=renderer.get_stop_sequences(), temperature=0.0)
            response = await client.sample(renderer.build_generation_prompt(question), 1, params)
            message, _ = renderer.parse_response(response.sequences[0].tokens)
            replies.append(ensure_text(message["content"]))
        table.add_row(ensure_text(question[-1]["content"]), ensure_text(answer["content"]), *replies)
    console.print(table)
