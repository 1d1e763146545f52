"""The stages that the workflows are made of, one file for each concern."""

from stovetop.kitchen.stage import AnyStage, Stage


def all_stages() -> dict[str, AnyStage]:
    """Every stage of this package, by name."""
    from stovetop.kitchen.stages import (
        distillation,
        environments,
        evaluation,
        policies,
        preference,
        reward_model,
        rl,
        rollout_pool,
        sampling,
        session,
        steps,
        streaming,
        supervised,
    )

    shared = (session, policies, steps, evaluation)
    reinforcement = (rl, environments, sampling, rollout_pool, streaming)
    modules = (*shared, supervised, preference, reward_model, *reinforcement, distillation)
    return {each.name: each for module in modules for each in vars(module).values() if isinstance(each, Stage)}
