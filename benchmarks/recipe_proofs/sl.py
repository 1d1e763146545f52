"""What the presets of supervised learning, and of prompt distillation, have learnt on chats that they have not trained
on. The runs measure it themselves, before their first step and at their end."""

from dataclasses import replace
from pathlib import Path

from recipe_proofs.measuring import first_and_last
from stovetop.recipes import chat_sl, prompt_distillation, sl_basic


async def sl_basic_small(folder: Path, seed: int) -> dict[str, float]:
    """The loss of chats that are held out."""
    await sl_basic.main(replace(sl_basic.PRESETS["small"], log_path=str(folder), seed=seed))
    return first_and_last(folder, "test/nll")


async def chat_sl_small(folder: Path, seed: int) -> dict[str, float]:
    """The same."""
    await chat_sl.main(replace(chat_sl.PRESETS["small"], log_path=str(folder), seed=seed))
    return first_and_last(folder, "test/nll")


async def prompt_distillation_small(folder: Path, seed: int) -> dict[str, float]:
    """The share of held-out texts to which the student, without the prompt, gives the answer of the teacher with it."""
    await prompt_distillation.main(replace(prompt_distillation.PRESETS["small"], log_path=str(folder), seed=seed))
    return first_and_last(folder / "2_student", "agreement/env/all/correct")
