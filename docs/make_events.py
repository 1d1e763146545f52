"""Writes docs/events.md: the events of a run, when each is emitted, what it holds, and where in the code that is.

    python docs/make_events.py

Where an event is emitted is read from the code. `tests/test_docs.py` compares the page, and finds events that are not
in the table; `tests/recipes/test_conformance.py` compares what whole runs emitted.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import stovetop

PAGE = Path(__file__).parent / "events.md"
SOURCE = Path(stovetop.__file__).parent
ANY = "*"  # among the fields of an event: others too

INTRODUCTION = """\
# Events

This page is written by `python docs/make_events.py`, from the code and a table.

A run is one stream of events. `events.jsonl` has all of them but the rows of metrics, which are in `metrics.jsonl`; the
terminal, trackers and plots read the same stream. A row:

```json
{"time": 1767225600.0, "name": "training.step", "step": 3, "values": {"loss": 0.5, "learning_rate": 0.0002, "epoch": 0}}
```

`values` are numbers (NaN and the infinities are the strings "NaN", "Infinity", "-Infinity"), `labels` are words,
`step` is there where the event belongs to one. What is empty is left out. After a resume, events of steps that run
again stay in the file; `stovetop.runs.load` leaves them out.

A stage or a loop of yours emits events with `run.emit("my.event", step=3, loss=0.5)`; a reader of the stream is a class with
a method `receive(event)` ([Replace a logger](workflows/replace_a_logger.md)).
"""


class Meaning(NamedTuple):
    """Of an event."""

    when: str
    values: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


EVENTS: Mapping[str, Mapping[str, Meaning]] = {
    "Of the run": {
        "run.start": Meaning("a run was opened, for the first time or again", labels=("path",)),
        "run.config": Meaning(
            "behind it: every field of the config; numbers are values, all else labels", (ANY,), (ANY,)
        ),
        "run.config_changed": Meaning(
            "a resumed run has another value of a field that may change", labels=("field", "change")
        ),
        "run.resume": Meaning("the run goes on from `step`; rows behind it were dropped", ("num_rows_dropped",)),
        "run.text": Meaning("a table or another text, in Markdown", labels=("title", "text")),
        "run.plot": Meaning("a plot was written", labels=("path",)),
        "run.stop": Meaning(
            "the run was closed; `outcome` is completed, or the name of the exception",
            ("seconds",),
            ("outcome", "reason"),
        ),
        "run.metrics": Meaning("the row of a step: the one event that is a row of `metrics.jsonl` instead", (ANY,)),
        "phase.start": Meaning("a phase of a run of several begins", labels=("phase", "workflow")),
        "phase.stop": Meaning("it ends, one way or another", ("seconds",), ("phase", "outcome")),
    },
    "Of the workflow": {
        "workflow.start": Meaning("a workflow begins to run", labels=("workflow",)),
        "workflow.stop": Meaning("it has come to its end", ("seconds",), ("workflow",)),
        "workflow.exception": Meaning("it ended by an exception", ("seconds",), ("workflow", "error")),
        "stage.start": Meaning("a stage begins; inside the loop `step` says for which step", labels=("stage",)),
        "stage.stop": Meaning("it has returned", ("seconds",), ("stage",)),
        "stage.exception": Meaning("it has raised", ("seconds",), ("stage", "error")),
    },
    "Of the data": {
        "dataset.load": Meaning(
            "the rows of a data set are there", ("num_train", "num_test", "num_skipped"), ("dataset",)
        ),
        "dataset.batch": Meaning(
            "the data of a step are taken",
            ("num_datums", "num_tokens", "num_groups", "num_prompts"),
            ("groups",),
        ),
        "answers.complete": Meaning("a teacher has answered all texts", ("num_texts", "num_chats", "num_unmatched")),
        "dpo.dataset_built": Meaning(
            "pairs of answers are tokens", ("num_pairs", "num_batches", "num_untrainable", "num_ties")
        ),
        "reward_model.dataset_built": Meaning(
            "comparisons are data of a reward model",
            ("num_comparisons", "num_test", "num_untrainable", "num_test_untrainable"),
        ),
        "rl.env_group_built": Meaning(
            "problems are groups of environments", ("num_train", "num_test", "num_left_out", "group_size")
        ),
    },
    "Of training": {
        "training.step": Meaning("the row of a supervised step is complete", ("loss", "learning_rate", "epoch")),
        "training.epoch": Meaning(
            "an epoch is over: the mean of each metric of its steps, times left out", ("epoch", "num_steps", ANY)
        ),
        "training.checkpoint": Meaning("a checkpoint is saved and recorded", labels=("name",)),
        "model.registered": Meaning("the final weights are in `models.jsonl`, once", labels=("base_model", "path")),
        "eval.complete": Meaning("a round of evaluation: all its metrics", (ANY,)),
        "dpo.step": Meaning(
            "a step on pairs; the options of the loss (`beta` ...) are among the values",
            ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "num_pairs", ANY),
        ),
        "distillation.step": Meaning(
            "a step of distillation; the distance to each teacher by its data set",
            ("loss", "learning_rate", "teacher_kl", ANY),
        ),
    },
    "Of reinforcement learning": {
        "rl.rollout_complete": Meaning(
            "the groups of a step are played", ("num_groups", "num_episodes", "reward_mean", "reward_std")
        ),
        "rl.advantages_computed": Meaning("advantages of these groups are there", ("num_groups", "num_trajectories")),
        "rl.batch_assembled": Meaning("they are data to train on", ("num_datums", "num_tokens")),
        "rl.ppo_update": Meaning(
            "several clipped updates on a batch are done", ("policy_loss", "entropy", "num_updates")
        ),
        "rl.step": Meaning(
            "the row of a step is complete",
            ("reward_mean", "reward_std", "policy_loss", "kl_div", "entropy", "clip_fraction"),
        ),
    },
}
BY_NAME = {name: meaning for group in EVENTS.values() for name, meaning in group.items()}
FROM_THE_STREAM = {"run.config": "CONFIG", "run.metrics": "METRICS", "run.text": "TEXT"}  # of tracking/events.py


def page() -> str:
    """The page as it should be."""
    places = emitted()
    lines = [INTRODUCTION]
    for title, events in EVENTS.items():
        lines += [f"## {title}\n", "| event | when | values | labels | emitted in |", "|---|---|---|---|---|"]
        for name, meaning in events.items():
            where = ", ".join(f"`{place}`" for place in sorted(places[name]))
            lines.append(
                f"| `{name}` | {meaning.when} | {_shown(meaning.values)} | {_shown(meaning.labels)} | {where} |"
            )
        lines.append("")
    return "\n".join(lines)


def _shown(fields: tuple[str, ...]) -> str:
    return ", ".join("and more" if field == ANY else f"`{field}`" for field in fields)


def emitted() -> dict[str, set[str]]:
    """The events that the code emits, with the files that do."""
    places: dict[str, set[str]] = defaultdict(set)
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "emit" in text:
            for name in _names(ast.parse(text)):
                places[name].add(file.relative_to(SOURCE).as_posix())
    for name in FROM_THE_STREAM:
        places[name].add("tracking/events.py")
    return places


def _names(tree: ast.Module) -> Iterator[str]:
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="emit"), args=[ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Call(func=ast.Attribute(attr="emit"), args=[ast.Name(id=constant), *_]) if constant in constants:
                yield str(constants[constant])
            case ast.Call(func=ast.Name(id="span"), args=[ast.Constant(value=str(name)), *_]):
                yield from (f"{name}.{end}" for end in ("start", "stop", "exception"))
            case _:
                pass


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
