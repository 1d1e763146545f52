# pyright: basic
"""What an engine has done since it was made. Its numbers only grow; what happened between two moments is
their difference."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Read from any thread, written by the engine's."""

    training_s: float = 0.0  # in passes that train or score
    sampling_s: float = 0.0  # in steps of the sampler: prompts, and a token for each running sample
    num_training_passes: int = 0
    num_trained_tokens: int = 0  # in these; those that data begin with alike count once. There is no padding
    num_sampling_steps: int = 0
    num_adapters_moved: int = 0  # into memory and out of it, weights and moments each
