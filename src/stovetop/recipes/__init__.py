"""The table of recipes. One is a module with a frozen dataclass `Config` and `async def main(config: Config) -> None`:
one file, from its config to its last table.
"""

from typing import NamedTuple


class Recipe(NamedTuple):
    module: str
    summary: str  # one line


RECIPES = {
    "sl_loop": Recipe("stovetop.recipes.sl_loop", "Supervised fine-tuning on chats, in one flat loop"),
    "rl_loop": Recipe("stovetop.recipes.rl_loop", "Reinforcement learning on checkable answers, likewise"),
    "sl_basic": Recipe("stovetop.recipes.sl_basic", "Supervised fine-tuning on chats, as a workflow"),
    "chat_sl": Recipe(
        "stovetop.recipes.chat_sl", "Supervised fine-tuning on chats by name, evaluated on public sets meanwhile"
    ),
    "rl_basic": Recipe("stovetop.recipes.rl_basic", "Reinforcement learning on school mathematics, as a workflow"),
    "math_rl": Recipe("stovetop.recipes.math_rl", "Reinforcement learning on mathematics, by data set"),
    "code_rl": Recipe("stovetop.recipes.code_rl", "Reinforcement learning on programming problems, in a sandbox"),
    "guess_number": Recipe("stovetop.recipes.guess_number", "Reinforcement learning over several turns"),
    "dpo": Recipe("stovetop.recipes.dpo", "Direct preference optimization on pairs of answers, as a workflow"),
    "rlhf": Recipe("stovetop.recipes.rlhf", "A supervised model, a reward model, and the first judged by the second"),
    "on_policy_distillation": Recipe(
        "stovetop.recipes.on_policy_distillation", "Learning from a teacher that scores the student's own answers"
    ),
    "distill_composite": Recipe(
        "stovetop.recipes.distill_composite", "Learning from several teachers, each for prompts of its own"
    ),
    "prompt_distillation": Recipe(
        "stovetop.recipes.prompt_distillation", "Answering without a long prompt as with it, in two phases"
    ),
    "sort_digits_demo": Recipe("stovetop.recipes.sort_digits_demo", "Sorting digits: supervised, then by reward"),
}
