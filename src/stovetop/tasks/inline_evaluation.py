"""Evaluation inside a recipe: sets of `evaluation_sets`, now and then while it trains.

WORKFLOW = SUPERVISED.insert_after("make_evaluators", limit_prompts, make_inline_evaluators).insert_before(
    "schedule", When(evaluates_infrequently, evaluate_infrequently)
)
"""

from collections.abc import AsyncIterator, Mapping

from stovetop.client import ServiceClient, TrainingClient
from stovetop.data_record import record_data
from stovetop.errors import InvalidRequest
from stovetop.evaluation.example_set import ExampleSetEvaluator
from stovetop.evaluation.rows import RunRows
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.model_families import context_length
from stovetop.renderers.base import Renderer
from stovetop.runs import Run
from stovetop.tasks.evaluation_kinds import Asking, LoadedSet
from stovetop.tasks.evaluation_sets import check_tools, load_sets, named_kinds, open_tools


@stage(writes="infrequent_evaluators")
async def make_inline_evaluators(
    service: ServiceClient,
    training_client: TrainingClient,
    renderer: Renderer,
    max_tokens: int,
    temperature: float,
    run: Run,
    inline_evals: str | None = None,
    seed: int = 0,
) -> AsyncIterator[Evaluators]:
    """The sets that `inline_evals` names, with a space between them: one answer to each example. Metrics are
    `inline/<set>/pass@1` and the like, with their standard errors; each example's answer is a row in the run's folder,
    `evaluations/<step>_inline/<set>.jsonl`. What grades ends with the workflow."""
    loaded = load_inline_evals(inline_evals, run.revisions)
    for each in loaded:
        record_data(run.path, f"inline {each.name}", each.sources)
    context = context_length(service, training_client)
    asking = Asking(temperature=temperature, max_tokens=max_tokens, context_tokens=context)
    with open_tools(loaded) as tools:
        yield Evaluators(
            sampling=tuple(
                ExampleSetEvaluator(
                    each.make(renderer, asking, tools), (seed,), "inline", RunRows(run, each.settings(asking, None))
                )
                for each in loaded
            )
        )


def load_inline_evals(inline_evals: str | None, revisions: Mapping[str, str] | None = None) -> list[LoadedSet]:
    """Refuses sets that there are not, whose rows are wrong, or that need a judge; None are no sets."""
    loaded = [] if inline_evals is None else load_sets(inline_evals.split(), revisions=revisions)
    for each in loaded:
        if each.needs == "judge":
            raise InvalidRequest(f"a recipe has no judge to evaluate with; leave out of inline_evals: {each.name!r}")
    check_tools(loaded)
    return loaded


def inline_columns(inline_evals: str | None) -> list[str]:
    """Of each set the metric that a table of steps shows. Nothing is read."""
    named = [] if inline_evals is None else named_kinds(inline_evals.split())
    return [f"inline/{name}/{'pass@1' if kind.is_sampled else 'nll'}" for name, kind in named]
