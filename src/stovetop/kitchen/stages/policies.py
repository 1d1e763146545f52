"""The policies that a loop carries: frozen weights to sample with, as the item `depth` + 1 before has left them."""

from collections.abc import Sequence
from typing import NamedTuple

from stovetop.checkpoints import Start, is_due
from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.errors import CheckpointError
from stovetop.futures import APIFuture, resolved
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.stage import stage
from stovetop.types import SaveWeightsForSamplerResponse


class Policy(NamedTuple):
    """Weights that never change, and how many steps they were trained."""

    client: SamplingClient
    num_updates: int
    saved: APIFuture[SaveWeightsForSamplerResponse] | None  # where a checkpoint may need them


async def saved_paths(policies: Sequence[Policy]) -> list[str]:
    """Where the policies lie that a loop would go on with. None for a single one that is not saved: it is made of the
    state itself."""
    if len(policies) < 2 and all(policy.saved is None for policy in policies):
        return []
    paths: list[str] = []
    for policy in policies:
        if policy.saved is None:
            raise CheckpointError(
                f"a resumed run needs the policy after {policy.num_updates} updates, and it was not saved; what "
                f"freezes it must know save_every and max_steps_off_policy"
            )
        paths.append((await policy.saved).path)
    return paths


@stage(writes="policies")
async def initial_policies(
    service: ServiceClient,
    training_client: TrainingClient,
    start: Start,
    positions: Positions,
    save_every: int = 0,
    max_steps_off_policy: int = 0,
) -> list[Policy]:
    """Those that a checkpoint names, or the weights that the run begins with."""
    paths = () if start.record is None else start.record.policy_paths
    if not paths:
        is_needed = _is_needed(start.batch, positions, save_every, max_steps_off_policy)
        return [await _frozen(training_client, start.batch, is_needed=is_needed)]
    policies: list[Policy] = []
    for index, path in enumerate(paths, start=1):
        client = await service.create_sampling_client(path)
        num_updates = max(0, start.batch - len(paths) + index)
        policies.append(Policy(client, num_updates, resolved(SaveWeightsForSamplerResponse(path))))
    return policies


@stage(writes="policy")
async def freeze_policy(
    training_client: TrainingClient,
    step: int,
    positions: Positions,
    save_every: int = 0,
    max_steps_off_policy: int = 0,
) -> Policy:
    """The weights after this step's update. They are saved too where a checkpoint needs them: one that lies within the
    next `max_steps_off_policy` updates, while items that sample with them are on the line."""
    is_needed = _is_needed(step + 1, positions, save_every, max_steps_off_policy)
    return await _frozen(training_client, step + 1, is_needed=is_needed)


async def _frozen(training_client: TrainingClient, num_updates: int, *, is_needed: bool) -> Policy:
    client = training_client.save_weights_and_get_sampling_client()
    saved = training_client.save_weights_for_sampler(f"policy-{num_updates:06d}") if is_needed else None
    return Policy(await client, num_updates, saved)


def _is_needed(num_updates: int, positions: Positions, save_every: int, depth: int) -> bool:
    """Whether a checkpoint within the next `depth` updates needs the weights of now. Without depth none does."""
    within = range(num_updates, num_updates + depth + 1)
    return depth > 0 and any(is_due(each, save_every) or each == positions.num_steps for each in within)
