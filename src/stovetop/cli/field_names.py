"""Other names of config fields that the command line takes: short ones, and those of the cookbook's recipes where ours
differ. What the cookbook has and we have not is refused with what to do instead.
"""

import sys
from collections.abc import Collection, Iterable, Mapping

from stovetop.errors import InvalidRequest

FIELD_ALIASES = {
    "model": "model_name",
    "epochs": "num_epochs",
    "reference_model": "reference_model_name",
    "teacher_model": "teacher_model_name",
    "teacher_checkpoint": "teacher_checkpoint_path",
}
COOKBOOK_ALIASES = {
    "base_model": "model_name",  # in rlhf
    "env": "dataset",  # in math_rl
    "batch_size": "groups_per_batch",  # where problems are solved: an alias is one only where no field has its name
    "rl_group_size": "group_size",
    "rl_max_tokens": "max_tokens",
    "behavior_if_log_dir_exists": "behavior_if_exists",
}  # said when used
_NAMED_BY_FOLDER = "a run is named by its folder, log_path=runs/NAME"
_KEPT = "keep_checkpoints=2 keeps the last two, until their folder is removed"
NOT_HERE = {
    "wandb_project": "trackers=wandb:PROJECT sends the run there, trackers='wandb:PROJECT tensorboard' to several",
    "wandb_name": _NAMED_BY_FOLDER,
    "session_name": _NAMED_BY_FOLDER,
    "short_name": _NAMED_BY_FOLDER,
    "ttl_seconds": _KEPT,
    "rolling_save_every": f"{_KEPT}; save_every says how often one is written",
    "rolling_ttl_seconds": _KEPT,
    "run_sft": "sft_checkpoint_path=... gives the supervised model, and none is trained",
    "run_rm": "rm_weights_path=... gives the reward model, and none is trained",
    "stream_minibatch_config": "a recipe of your own can have the workflow STREAMING (docs/workflows.md)",
    "async_config": "max_steps_off_policy=1 samples ahead of training",
    "output_file": "the answers are in RUN/1_answers/chats.jsonl",
}


class FieldNames:
    """The names under which the fields of a recipe's config may be given."""

    def __init__(self, fields: Collection[str], cookbook: Mapping[str, str] | None = None) -> None:
        """`cookbook`: further names that the recipe of the cookbook has."""
        self.fields = fields
        self._cookbook = self._usable(COOKBOOK_ALIASES | dict(cookbook or {}))
        self.aliases = self._usable(FIELD_ALIASES) | self._cookbook

    def _usable(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """The name of a field is no alias of another."""
        return {alias: field for alias, field in aliases.items() if field in self.fields and alias not in self.fields}

    def check(self, given: Iterable[str]) -> None:
        """Says which field is meant by a name of the cookbook; refuses one beside another name of the same field."""
        names = list(dict.fromkeys(given))
        for name in (name for name in names if name in self._cookbook):
            field = self._cookbook[name]
            if others := [other for other in names if other != name and self.aliases.get(other, other) == field]:
                raise InvalidRequest(f"{name} and {others[0]} are one field, {field}; give it once")
            print(f"{name} is {field} here", file=sys.stderr)
