"""A trajectory in colour, for a terminal: what was shown, what was said, and what became of it. Pages of rollouts are
in `tracking.rollout_pages`."""

from collections.abc import Sequence

from stovetop.renderers.display import format_colorized
from stovetop.rl.advantages import Advantage
from stovetop.rl.types import Observation, Trajectory
from stovetop.tokenizing import Tokenizer
from stovetop.types import EncodedTextChunk, ImageChunk


def format_trajectory(trajectory: Trajectory, tokenizer: Tokenizer, advantage: Advantage | None = None) -> str:
    """Turn by turn. Observed tokens are yellow, those of actions green or, with a negative advantage, red; without
    advantages, and where nothing is trained, they follow the sign of the turn's reward. An observation that begins with
    all before it is shown from there on."""
    turns = trajectory.transitions
    advantages_U = advantage if isinstance(advantage, Sequence) else [advantage] * len(turns)
    lines: list[str] = []
    shown: list[int | ImageChunk] = []
    for number, (turn, turn_advantage) in enumerate(zip(turns, advantages_U, strict=True), start=1):
        observed = _elements(turn.ob)
        extends = observed[: len(shown)] == shown
        weight = turn.reward if turn_advantage is None else turn_advantage
        about = f"reward {turn.reward:g}" + ("" if turn_advantage is None else f", advantage {turn_advantage:g}")
        numbers = [f"{name} {value:g}" for name, value in turn.metrics.items()]
        lines.append(f"---- turn {number}: {', '.join([about, *numbers])}{'' if extends else ', begins anew'}")
        lines.append(
            _observed(observed[len(shown) :] if extends else observed, tokenizer)
            + format_colorized(turn.ac.tokens, [weight if turn.trainable else 0.0] * len(turn.ac.tokens), tokenizer)
        )
        shown = [*observed, *turn.ac.tokens]
    lines.append(f"---- {trajectory.stop_reason}, {len(turns)} turns, rewards {sum(turn.reward for turn in turns):g}")
    return "\n".join(lines)


def _elements(observation: Observation) -> list[int | ImageChunk]:
    elements: list[int | ImageChunk] = []
    for chunk in observation.chunks:
        elements.extend(chunk.tokens if isinstance(chunk, EncodedTextChunk) else [chunk])
    return elements


def _observed(elements: Sequence[int | ImageChunk], tokenizer: Tokenizer) -> str:
    pieces: list[str] = []
    tokens: list[int] = []
    for element in [*elements, None]:
        if isinstance(element, int):
            tokens.append(element)
            continue
        pieces.append(format_colorized(tokens, [0.0] * len(tokens), tokenizer))
        tokens = []
        if element is not None:
            pieces.append(f"<{element.format} of {element.length} tokens>")
    return "".join(pieces)
