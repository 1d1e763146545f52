"""The stages that the workflows are made of, one file for each concern."""

from stovetop.kitchen.stage import AnyStage, Stage


def all_stages() -> dict[str, AnyStage]:
    """Every stage of this package, by name."""
    from stovetop.kitchen.stages import (
        distillation,
        evaluation,
        policies,
        preference,
        rl,
        session,
        steps,
        streaming,
        supervised,
    )

    modules = (session, policies, steps, evaluation, supervised, preference, rl, streaming, distillation)
    return {each.name: each for module in modules for each in vars(module).values() if isinstance(each, Stage)}
