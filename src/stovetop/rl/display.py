"""Trajectories for people: one in colour, for a terminal (what was shown, what was said, and what became of it), and
groups of them in numbers, as a page."""

from collections.abc import Iterable, Sequence
from html import escape

from stovetop.client import Tokenizer
from stovetop.renderers.display import format_colorized
from stovetop.rl.advantages import Advantage
from stovetop.rl.types import Observation, Trajectory, TrajectoryGroup
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


# ---- pages -------------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font-family: sans-serif; margin: 2rem; }} table {{ border-collapse: collapse; margin: 0.5rem 0 1.5rem; }}
th, td {{ border: 1px solid #bbb; padding: 0.2rem 0.6rem; text-align: right; }} tfoot td {{ font-weight: bold; }}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


def trajectories_page(groups_P: Sequence[TrajectoryGroup], title: str, num_groups: int = 4) -> str:
    """HTML with a table for each trajectory of the first groups: a row a turn with the lengths of observation and
    action and the reward, then what the group added at the end, and the total."""
    parts: list[str] = []
    for number, group in enumerate(groups_P[:num_groups], start=1):
        totals_G = group.get_total_rewards()
        for index, trajectory in enumerate(group.trajectories_G):
            parts.append(f"<h2>group {number}, trajectory {index + 1}: {escape(str(trajectory.stop_reason))}</h2>")
            parts.append(_table(trajectory, group.final_rewards_G[index], totals_G[index]))
    left_out = len(groups_P) - num_groups
    parts += [f"<p>{left_out} more groups are not shown.</p>"] if left_out > 0 else []
    return _PAGE.format(title=escape(title), body="".join(parts))


def _table(trajectory: Trajectory, final: float, total: float) -> str:
    turns = trajectory.transitions
    rows = [
        _row("td", [number, turn.ob.length, len(turn.ac.tokens), f"{turn.reward:g}"])
        for number, turn in enumerate(turns, start=1)
    ]
    lengths = [sum(turn.ob.length for turn in turns), sum(len(turn.ac.tokens) for turn in turns)]
    head = _row("th", ["step", "ob_len", "ac_len", "reward"])
    foot = _row("td", ["final", "", "", f"{final:g}"]) + _row("td", ["total", *lengths, f"{total:g}"])
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody><tfoot>{foot}</tfoot></table>"


def _row(cell: str, values: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(str(value))}</{cell}>" for value in values) + "</tr>"
