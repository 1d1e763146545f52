"""How near the students of on_policy_distillation:small and distill_composite:small have come to their teachers: KL in
nats a token, of the student's own answers to prompts that neither it nor its teacher has trained on. And how many of
these prompts each of them answers right, at temperature 1: that there was something to learn, and that it is learnt.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import stovetop
from recipe_proofs.measuring import final_weights, first_and_last, own_renderer, played
from stovetop.client import SamplingClient
from stovetop.recipes import distill_composite, on_policy_distillation
from stovetop.recipes.students import DistillationConfig
from stovetop.rl.problem_env import answer_builders
from stovetop.tasks import chats


async def on_policy(folder: Path, seed: int) -> dict[str, float]:
    """`right_...`: the share of tickets that are right, of the teacher, and of the student before and after."""
    config = replace(on_policy_distillation.PRESETS["small"], log_path=str(folder), seed=seed)
    await on_policy_distillation.main(config)
    weights = {"teacher": folder / "1_teacher", "before": None, "after": folder / "2_on_policy"}
    return {
        **first_and_last(folder / "2_on_policy", "test/teacher_kl"),
        **{f"right_{who}": right for who, right in (await _right(config, config.dataset, weights)).items()},
    }


async def composite(folder: Path, seed: int) -> dict[str, float]:
    """`before` and `after` are over both data sets."""
    config = replace(distill_composite.PRESETS["small"], log_path=str(folder), seed=seed)
    await distill_composite.main(config)
    student = folder / "3_student"
    numbers = first_and_last(student, "test/teacher_kl")
    teachers = {config.dataset: folder / "1_first_teacher", config.second_dataset: folder / "2_second_teacher"}
    for index, (dataset, teacher) in enumerate(teachers.items()):
        name = dataset.removeprefix("sample:")
        distances = first_and_last(student, f"test/teacher_kl/dataset_{index}")
        numbers |= {f"{when}/{name}": distance for when, distance in distances.items()}
        weights = {"teacher": teacher, "before": None, "after": student}
        numbers |= {f"right_{who}/{name}": right for who, right in (await _right(config, dataset, weights)).items()}
    return numbers


async def _right(config: DistillationConfig, dataset: str, weights: Mapping[str, Path | None]) -> dict[str, float]:
    """The share of held-out chats whose last answer is given word for word, by what the runs in these folders have
    learnt; None is the model as it is."""
    rows = [
        {"messages": chat[:-1], "answer": chat[-1]["content"]}
        for chat in chats.load(dataset, None, config.test_size, config.seed).test
    ]

    async def right(client: SamplingClient) -> float:
        groups = answer_builders(rows, own_renderer(client), group_size=1)
        return (await played(client, groups, config.max_tokens))["env/all/correct"]

    with stovetop.ServiceClient(storage=config.log_path, **config.engine_options()) as service:
        return {
            who: await right(
                await service.create_sampling_client(base_model=config.model_name)
                if folder is None
                else await service.create_sampling_client(final_weights(folder))
            )
            for who, folder in weights.items()
        }
