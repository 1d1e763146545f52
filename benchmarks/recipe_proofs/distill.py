"""How near the students of on_policy_distillation:small and distill_composite:small have come to their teachers: KL in
nats a token, of the student's own answers to prompts that neither it nor its teacher has trained on."""

from dataclasses import replace
from pathlib import Path

from recipe_proofs.measuring import first_and_last
from stovetop.recipes import distill_composite, on_policy_distillation


async def on_policy(folder: Path, seed: int) -> dict[str, float]:
    """`teacher_nll_after`: of the held-out chats, to show that there was something to learn from the teacher."""
    await on_policy_distillation.main(replace(on_policy_distillation.PRESETS["small"], log_path=str(folder), seed=seed))
    teacher_nll = first_and_last(folder / "1_teacher", "test/nll")
    return {
        **first_and_last(folder / "2_on_policy", "test/teacher_kl"),
        "teacher_nll_before": teacher_nll["before"],
        "teacher_nll_after": teacher_nll["after"],
    }


async def composite(folder: Path, seed: int) -> dict[str, float]:
    """`before` and `after` are over both data sets."""
    config = replace(distill_composite.PRESETS["small"], log_path=str(folder), seed=seed)
    await distill_composite.main(config)
    numbers = first_and_last(folder / "3_student", "test/teacher_kl")
    for index, name in enumerate((config.dataset, config.second_dataset)):
        own = first_and_last(folder / "3_student", f"test/teacher_kl/dataset_{index}")
        numbers |= {f"{when}/{name.removeprefix('sample:')}": value for when, value in own.items()}
    return numbers
