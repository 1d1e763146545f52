"""What reinforcement learning on a verifiable reward has taught: held-out problems at temperature 1, several answers
each, before and after."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import stovetop
from recipe_proofs.measuring import best_constant, final_weights, own_renderer, played
from stovetop.client import SamplingClient
from stovetop.recipes import code_rl, guess_number, math_rl, rl_basic
from stovetop.rl.problem_env import answer_builders
from stovetop.rl.types import EnvGroupBuilder
from stovetop.tasks import code, code_grading, math, problems
from stovetop.tasks.code_grading import CodeGrader
from stovetop.tasks.guess_number import GuessNumberGroupBuilder, numbers
from stovetop.tasks.math_grading import grade_number
from stovetop.tasks.math_sets import load_math
from stovetop.tasks.sandbox import find_sandbox

NUM_ANSWERS = 4  # to each held-out problem
NUM_GAMES = 16  # about each held-out number


async def rl_basic_small(folder: Path, seed: int) -> dict[str, float]:
    """Accuracy, word for word."""
    config = replace(rl_basic.PRESETS["small"], seed=seed, log_path=str(folder))
    await rl_basic.main(config)
    test = problems.load(config.dataset, config.test_dataset, config.test_size, config.seed).test

    async def correct(client: SamplingClient) -> float:
        groups = answer_builders(test, own_renderer(client), NUM_ANSWERS)
        return (await played(client, groups, config.max_tokens))["env/all/correct"]

    with stovetop.ServiceClient(storage=folder) as service:
        return {
            "before": await correct(await service.create_sampling_client(base_model=config.model_name)),
            "after": await correct(await service.create_sampling_client(final_weights(folder))),
            "best_constant": best_constant([str(row["answer"]) for row in test]),
        }


async def math_rl_small(folder: Path, seed: int) -> dict[str, float]:
    """Accuracy of the last number of each answer."""
    config = replace(math_rl.PRESETS["small"], seed=seed, log_path=str(folder))
    await math_rl.main(config)
    rows, form, _ = load_math(config.dataset, config.test_dataset, config.test_size, config.seed, config.answers)
    references = [math.problem_of_row(row, grade_number, form=form).reference for row in rows.test]

    async def correct(client: SamplingClient) -> float:
        groups = math.builders(
            rows.test, own_renderer(client), NUM_ANSWERS, grade_number, form=form, few_shot=config.few_shot is True
        )
        return (await played(client, groups, config.max_tokens))["env/all/correct"]

    with stovetop.ServiceClient(storage=folder) as service:
        return {
            "before": await correct(await service.create_sampling_client(base_model=config.model_name)),
            "after": await correct(await service.create_sampling_client(final_weights(folder))),
            "best_constant": best_constant(references),
        }


async def code_rl_small(folder: Path, seed: int) -> dict[str, float]:
    """The share of programs that pass every test; before is after the chats that were shown. All problems have the same
    inputs, so one program is right for as many problems as have the same outputs."""
    config = replace(code_rl.PRESETS["small"], seed=seed, log_path=str(folder))
    await code_rl.main(config)
    test = code.load(config.dataset, config.test_dataset, config.test_size, config.seed).test
    grader = CodeGrader(find_sandbox())

    async def correct(client: SamplingClient) -> float:
        groups = code_grading.builders(test, own_renderer(client), NUM_ANSWERS, grader)
        return (await played(client, groups, config.max_tokens))["env/all/correct"]

    with stovetop.ServiceClient(storage=folder) as service:
        return {
            "before": await correct(await service.create_sampling_client(final_weights(folder / "1_supervised"))),
            "after": await correct(await service.create_sampling_client(final_weights(folder / "2_reinforcement"))),
            "best_constant": best_constant([str(problem.tests) for problem in test]),
        }


async def guess_number_small(folder: Path, seed: int) -> dict[str, float]:
    """Mean reward and turns of games about held-out numbers; before is after the games that were shown."""
    config = replace(guess_number.PRESETS["small"], seed=seed, log_path=str(folder))
    await guess_number.main(config)
    hidden = numbers(config.num_numbers, config.test_size).test

    def games(client: SamplingClient) -> Sequence[EnvGroupBuilder]:
        renderer = own_renderer(client)
        return [
            GuessNumberGroupBuilder(
                number, renderer, NUM_GAMES, config.num_numbers, config.max_turns, hints=config.hints
            )
            for number in hidden
        ]

    found: dict[str, float] = {}
    with stovetop.ServiceClient(storage=folder) as service:
        for phase, reward, turns in (
            ("1_supervised", "before", "turns_before"),
            ("2_reinforcement", "after", "turns_after"),
        ):
            client = await service.create_sampling_client(final_weights(folder / phase))
            metrics = await played(client, games(client), config.max_tokens)
            found |= {
                reward: metrics["env/all/reward/total"],
                turns: metrics["env/all/turns_per_episode"],
                f"malformed_{reward}": metrics.get("env/all/malformed", 0.0),
            }
    return found
