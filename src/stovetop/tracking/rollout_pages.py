"""Rollouts to read, as HTML: each group with its prompt once and the answers side by side; each answer with its chat,
reward, parts of the reward, metrics, logs; and, for the one that is opened, its tokens in colour.

Chats and rewards need no script. The tokens of a rollout are packed (JSON, deflated, base64) and drawn by a small
script when its view is opened: two hundred rollouts of 4096 tokens are a page of some ten megabytes, of which a browser
first shows a few thousand elements.

What else shows rollouts puts `rollouts_fragment` on its own page, with `ROLLOUTS_CSS` and `ROLLOUTS_SCRIPT` once.
"""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stovetop.tracking.chats import ConversationFormatter
from stovetop.tracking.html_tree import from_data, to_html
from stovetop.tracking.page import asset, html_page, templates, visible
from stovetop.tracking.rollout_rows import RolloutRow

MAX_ELEMENTS = 15_000  # of chats and tables; beyond it they are plain text, so that a page stays below 20,000
LONG = 64  # rollouts; on a page of more a browser lays out only what is in sight: 200 are there in 1 s instead of 4
_UNKNOWN = -32768  # among packed numbers

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Shown(NamedTuple):
    """How much of what there is a page shows."""

    num_groups: int | None  # that there are; None: not known, as some of a group may be left out
    num_rollouts: int
    where: str  # all of them are


def rollouts_page(title: str, rows: Sequence[RolloutRow], shown: Shown | None = None) -> str:
    """A whole page with these rollouts."""
    return html_page(title, rollouts_fragment(rows, shown), css=rollouts_css(), script=rollouts_script())


def rollouts_css() -> str:
    """What `rollouts_fragment` needs on a page that has the CSS of `page.html_page`."""
    return asset("chat.css") + asset("rollouts.css")


def rollouts_script() -> str:
    """Draws the tokens of a rollout when they are opened."""
    return asset("rollouts.js")


def rollouts_fragment(rows: Sequence[RolloutRow], shown: Shown | None = None) -> str:
    """Rollouts as a part of a page, group by group in the order in which they come. Without the script the tokens are
    not shown, and all else is."""
    num_elements = sum(4 * len(row.chat) + 6 * len(row.turns) + 40 for row in rows)
    is_plain = num_elements > MAX_ELEMENTS
    groups = [_group(list(rows_G), is_plain) for _, rows_G in groupby(rows, _of_group)]
    template, is_long = templates().get_template("rollouts.html"), len(rows) > LONG
    return template.render(groups=groups, shown=shown, num_rollouts=len(rows), is_long=is_long)


def _of_group(row: RolloutRow) -> tuple[str, int, int]:
    return row.split, row.step, row.group_idx


def _group(rows_G: Sequence[RolloutRow], is_plain: bool) -> dict[str, Any]:
    first = rows_G[0]
    num_common = _num_common([row.chat for row in rows_G])
    rewards = [row.reward for row in rows_G]
    return {
        "first": first,
        "mean": _number(sum(rewards) / len(rewards)),
        "prompt": _chat(first.chat[:num_common], is_plain),
        "answers": [_answer(row, num_common, is_plain) for row in rows_G],
    }


def _num_common(chats_G: Sequence[Sequence[Any]]) -> int:
    """How many messages all begin with; one is left to each."""
    shortest = min(len(chat) for chat in chats_G)
    same = 0
    while same < shortest - 1 and all(chat[same] == chats_G[0][same] for chat in chats_G):
        same += 1
    return same


def _answer(row: RolloutRow, num_common: int, is_plain: bool) -> dict[str, Any]:
    return {
        "row": row,
        "reward": _number(row.reward),
        "tone": "good" if row.reward > 0 else "bad" if row.reward < 0 else "",
        "facts": _facts(row),
        "chat": _chat(row.chat[num_common:], is_plain),
        "turns": [_turn(number, turn) for number, turn in enumerate(row.turns, start=1)],
        "final": _number(row.final_reward),
        "totals": [sum(turn[name] for turn in row.turns) for name in ("num_observed", "num_sampled")],
        "is_plain": is_plain,
        "logs": [line for number, turn in enumerate(row.turns, start=1) for line in _logs(number, turn)],
        "notes": _markup(to_html(from_data(row.notes))),
        "packed": pack(row),
    }


def _facts(row: RolloutRow) -> list[str]:
    advantage = "not trained on" if row.advantage is None else f"advantage {_number(row.advantage)}"
    return [
        *([advantage] if row.split == "train" else []),
        row.stop_reason,
        *(["cut off"] if row.turns and row.turns[-1]["stop_reason"] == "length" else []),
        f"{row.num_tokens} tokens in {row.num_turns} turns" if row.num_turns > 1 else f"{row.num_tokens} tokens",
        *(f"{name} {_number(value)}" for name, value in row.metrics.items()),
    ]


def _turn(number: int, turn: dict[str, Any]) -> list[str]:
    return [str(number), str(turn["num_observed"]), str(turn["num_sampled"]), _number(turn["reward"])]


def _logs(number: int, turn: dict[str, Any]) -> list[str]:
    return [f"turn {number}, {name}: {value}" for name, value in turn["logs"].items()]


def _chat(messages: Sequence[Any], is_plain: bool) -> Any:
    if is_plain:
        return _markup(templates().get_template("plain_chat.html").render(messages=messages))
    return _markup(ConversationFormatter(messages).to_html())


def _markup(html: str) -> Any:
    from markupsafe import Markup

    return Markup(html)


def _number(value: float) -> str:
    return f"{value:.4g}"


# ---- tokens ----------------------------------------------------------------------------------------------------------


def pack(row: RolloutRow) -> str:
    """The tokens of a rollout as the script reads them, deflated and in base64: the length of a header (4 bytes), the
    header as JSON, which has the distinct tokens and the lengths of the arrays, and the arrays as 16-bit integers, the
    lower bytes of each before its higher ones, which deflates better: which token, its kind, the sampler's logprobs in
    thousandths, the difference of trainer and sampler in ten-thousandths, advantages in thousandths of the largest."""
    numbers: dict[tuple[int, str], int] = {}
    which_N = [numbers.setdefault(token, len(numbers)) for token in zip(row.token_ids, row.pieces, strict=True)]
    advantages_A, logprobs_A = _array(row.advantages), _array(row.logprobs)
    mismatch_A = _array(row.trained_logprobs) - logprobs_A if row.trained_logprobs else _array([])
    most = float(np.nanmax(np.abs(advantages_A), initial=0)) or 1.0
    arrays = {
        "which": np.array(which_N, np.int64),
        "kinds": np.array(row.kinds, np.int64),
        "sampler": _whole(logprobs_A, 1e3),
        "mismatch": _whole(mismatch_A, 1e4),
        "advantage": _whole(advantages_A, 1e3 / most),
    }
    header = json.dumps(
        {
            "tokens": [[number, visible(piece)] for number, piece in numbers],
            "lengths": {name: len(array) for name, array in arrays.items()},
            "most": most,
        }
    ).encode()
    halves = [each.astype("<i2").view(np.uint8).reshape(-1, 2).T.tobytes() for each in arrays.values()]
    data = len(header).to_bytes(4, "little") + header + b"".join(halves)
    return base64.b64encode(zlib.compress(data)).decode()


def _array(values: Sequence[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _whole(values: Floats, per_unit: float) -> Integers:
    """As multiples of 1/per_unit, as far as 16 bits reach; what is not known becomes -32768."""
    return np.where(np.isnan(values), _UNKNOWN, np.clip(np.rint(values * per_unit), -32767, 32767)).astype(np.int64)
