"""What the configs of recipes share: the kinds of values that their fields take, and what can be said of a config
before a model is loaded. The rule of a field is in its annotation and held by `checks.check` (see `rules.py`); whether
a run that goes on may have another value is in its metadata (`tracking.configs`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from stovetop.arguments import is_local
from stovetop.backends import check_base_url
from stovetop.checkpoints import refuse_another_adapter
from stovetop.checks import check_all
from stovetop.errors import CheckpointError, CheckpointNotFound, InvalidRequest, UnknownName
from stovetop.hyperparams import GivenRate, get_lr
from stovetop.losses import LOSSES, parse_loss
from stovetop.model_store import check_model_name
from stovetop.renderers import supported_renderers
from stovetop.rules import AnyOf, OneOf, Whole, number
from stovetop.saved_states import SavedState, describe

Positive = Annotated[int, Whole(1)]  # of what there has to be one of
Count = Annotated[int, Whole(0)]  # of what there may be none of; for cadences, 0 is never
Rate = Annotated[float, number(above=0)]  # of learning
LearningRate = Annotated[GivenRate, AnyOf((number(above=0), OneOf(("auto",))))]  # auto: derived from the model
Beta = Annotated[float, number(at_least=0, below=1)]  # of Adam
Epsilon = Annotated[float, number(at_least=0)]
NotNegative = Annotated[float, number(at_least=0)]
Temperature = Annotated[float, number(above=0)]  # of answers that are trained on
POLICY_INPUTS = {"target_tokens", "logprobs", "advantages"}  # that a recipe makes of rollouts


def check_renderer_name(name: str | None) -> None:
    """Refuses a renderer that no table has. One of the user's own, "package.module:Name", is imported when used."""
    if name is not None and ":" not in name and name not in supported_renderers():
        raise UnknownName("renderer_name", name, supported_renderers())


def check_policy_loss(name: str, config: Mapping[str, float], temperature: float) -> None:
    """Refuses a loss that there is not, and one whose inputs are not made of rollouts."""
    usable = [each for each, loss in LOSSES.items() if set(loss.inputs) <= POLICY_INPUTS]
    if name in LOSSES and name not in usable:
        needed = ", ".join(sorted(set(LOSSES[name].inputs) - POLICY_INPUTS))
        raise InvalidRequest(
            f"loss_fn must be {' or '.join(usable)}; {name} needs {needed}, which rollouts do not have: {name!r}"
        )
    parse_loss(name, {**config, "temperature": temperature})


def check_rate(learning_rate: GivenRate, model_name: str) -> None:
    """Refuses "auto" for a model of which no formula is known."""
    if learning_rate == "auto":
        get_lr(model_name)


def check_at_most(name: str, value: int, limit: int, of_what: str) -> None:
    if value > limit:
        raise InvalidRequest(f"{name} must be at most {limit}, the number of {of_what}: {value}")


def check_num_steps(num: int, batch_size: int, num_epochs: int, max_steps: int | None, warmup_steps: int) -> None:
    """Refuses a warm-up that is longer than a run on `num` chats, problems or pairs."""
    num_steps = -(-num // batch_size) * num_epochs
    check_at_most("warmup_steps", warmup_steps, min(num_steps, max_steps or num_steps), "steps")


def check_weights(
    base_url: str | None, model_name: str, load_checkpoint_path: str | None = None, **others: str | None
) -> None:
    """Refuses a place that is none, and a model or a checkpoint that is not to be had where they would come from this
    machine. `others` are further fields that are checkpoints, by name."""
    check_base_url(base_url)
    if not is_local(base_url):
        return
    checkpoints = {"load_checkpoint_path": load_checkpoint_path, **others}
    check_all(
        lambda: check_model_name(model_name),
        *(partial(check_checkpoint, name, path) for name, path in checkpoints.items() if path is not None),
    )


def check_checkpoint(name: str, path: str) -> SavedState:
    """Refuses what is no folder of a saved adapter. `name` is that of the field."""
    if not Path(path).is_dir():
        raise CheckpointNotFound(f"{name} is no folder of a checkpoint: {path}")
    try:
        return describe(Path(path))
    except CheckpointError as error:
        raise InvalidRequest(f"{name}: {error}") from error


def check_start(name: str, path: str | None, lora_rank: int, train_unembed: bool) -> None:
    """Refuses to start from an adapter on this machine that is another one than the config says."""
    if path is not None and Path(path).is_dir():
        refuse_another_adapter(check_checkpoint(name, path).lora, lora_rank, train_unembed)
