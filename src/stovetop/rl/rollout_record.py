"""What a run keeps of its rollouts: from groups of trajectories to rows, pages of the first groups, and both as files.

    rollouts/000012_train.parquet          all rollouts of step 12: `tracking.rollout_rows`
    iteration_000012/train.html, .jsonl    the first groups of them, to read: `tracking.rollout_pages`
    iteration_000012/eval_test.html, ...   and of the evaluator "test", likewise

Shape suffixes: `P` problems, `G` members of a group, `D` datums, `N` tokens of one rollout, `A` those of them that were
sampled.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stovetop.concurrency import in_thread
from stovetop.durable import make_folders, write_file, writing
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message
from stovetop.rl.metrics import dict_mean
from stovetop.rl.rollouts import Rollouts
from stovetop.rl.types import Observation, Trajectory, TrajectoryGroup, Transition
from stovetop.runs import Run
from stovetop.tokenizing import Tokenizer
from stovetop.tracking.chats import chat_to_json
from stovetop.tracking.html_tree import to_data
from stovetop.tracking.page import encodable
from stovetop.tracking.rollout_pages import Shown, rollouts_page
from stovetop.tracking.rollout_rows import (
    PAGES_FOLDER,
    TRAIN,
    Kind,
    RolloutRow,
    as_json_lines,
    eval_split,
    write_rollouts,
)
from stovetop.types import Datum, EncodedTextChunk, ImageChunk, TensorData

log = logging.getLogger(__name__)


class TrainedOn(NamedTuple):
    """What became of a step's groups: those that were trained on, their data, and the trainer's logprobs of these from
    before the update. Data may be weighed and penalised in between; they are those of `assemble_training_data`, in its
    order."""

    groups_P: Sequence[TrajectoryGroup]
    data_D: Sequence[Datum]
    logprobs_D: Sequence[TensorData]


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Keeps the rollouts of a run."""

    run: Run
    renderer: Renderer
    num_groups_to_log: int = 4  # that come onto a page, of each step and of each evaluation; 0: there are no pages
    _texts: dict[int, str] = field(init=False, default_factory=dict[int, str], repr=False)  # of tokens, once each

    async def keep_step(
        self, step: int, rollouts: Rollouts, trained_on: TrainedOn, policy_step: int | None = None
    ) -> None:
        """Those of a step, after its update. `policy_step` is how many steps the policy that played was trained."""
        await self._keep(TRAIN, step, _tagged(rollouts), _token_values(trained_on), policy_step)

    async def keep_evaluation(self, name: str, rollouts: Rollouts) -> None:
        """Those of an evaluator of this name, with the weights that the next step begins with."""
        await self._keep_evaluation(name, _tagged(rollouts))

    async def keep_answers(self, name: str, groups_P: Sequence[TrajectoryGroup]) -> None:
        """Likewise, of an evaluator that plays without environments."""
        await self._keep_evaluation(name, [(group, ()) for group in groups_P])

    async def _keep_evaluation(self, name: str, tagged_P: "Sequence[_Tagged]") -> None:
        step = self.run.evaluated_step
        await self._keep(eval_split(name), step, tagged_P, {}, step)

    async def _keep(
        self, split: str, step: int, tagged_P: Sequence["_Tagged"], values: "_Values", policy_step: int | None
    ) -> None:
        make = _Rows(self.renderer, split, step, policy_step, values, self._texts)
        rows_P_G = [make.of_group(group_idx, group, tags) for group_idx, (group, tags) in enumerate(tagged_P)]
        if rows_P_G:
            await in_thread(partial(_write, self.run.path, rows_P_G, self.num_groups_to_log))


_Tagged = tuple[TrajectoryGroup, Sequence[str]]


def _tagged(rollouts: Rollouts) -> list[_Tagged]:
    return [(group, builder.logging_tags()) for builder, group in rollouts.owned_groups_P]


def _write(run: Path, rows_P_G: Sequence[Sequence[RolloutRow]], num_shown: int) -> None:
    file = write_rollouts(run, [row for rows_G in rows_P_G for row in rows_G])
    if num_shown == 0:
        return
    rows = [row for rows_G in rows_P_G[:num_shown] for row in rows_G]
    first = rows[0]
    pages = run / PAGES_FOLDER.format(step=first.step)
    with writing(pages):
        make_folders(pages)
    what = "rollouts" if first.split == TRAIN else f"evaluation {first.split.removeprefix('eval_')!r}"
    shown = Shown(len(rows_P_G), sum(map(len, rows_P_G)), f"{file.parent.name}/{file.name}")
    page = rollouts_page(f"{run.name}, step {first.step}: {what}", rows, shown)
    write_file(pages / f"{first.split}.html", page.encode())
    write_file(pages / f"{first.split}.jsonl", as_json_lines(rows))


# ---- what was trained ------------------------------------------------------------------------------------------------


class _OfTokens(NamedTuple):
    logprobs_A: list[float]  # of the trainer, of the tokens that were trained on
    advantages_A: list[float]


_Values = Mapping[int, _OfTokens]  # by the id of the trajectory


def _token_values(trained_on: TrainedOn) -> _Values:
    """The trained tokens of all data are those of all trajectories, in the same order. Where they are not, a stage has
    made other data of them, and what the trainer thought of which token is not known."""
    trajectories_PG = [trajectory for group in trained_on.groups_P for trajectory in group.trajectories_G]
    tokens_PG = [
        [token for turn in trajectory.transitions if turn.trainable for token in turn.ac.tokens]
        for trajectory in trajectories_PG
    ]
    targets_A = _masked([datum.loss_fn_inputs["target_tokens"] for datum in trained_on.data_D], trained_on)
    logprobs_A = _masked(trained_on.logprobs_D, trained_on)
    advantages_A = _masked([datum.loss_fn_inputs["advantages"] for datum in trained_on.data_D], trained_on)
    if targets_A != [token for tokens in tokens_PG for token in tokens]:
        log.warning("the data of this step are not those of its rollouts: these are kept without the trainer's numbers")
        return {}
    values: dict[int, _OfTokens] = {}
    start = 0
    for trajectory, tokens in zip(trajectories_PG, tokens_PG, strict=True):
        end = start + len(tokens)
        values[id(trajectory)] = _OfTokens(logprobs_A[start:end], advantages_A[start:end])
        start = end
    return values


def _masked(tensors_D: Sequence[TensorData], trained_on: TrainedOn) -> list[Any]:
    masks_D = [datum.loss_fn_inputs["mask"].array.astype(bool) for datum in trained_on.data_D]
    parts = [tensor.array[mask_N] for tensor, mask_N in zip(tensors_D, masks_D, strict=True)]
    return np.concatenate(parts).tolist() if parts else []


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """Makes the rows of one step."""

    renderer: Renderer
    split: str
    step: int
    policy_step: int | None
    values: _Values
    texts: dict[int, str]

    def of_group(self, group_idx: int, group: TrajectoryGroup, tags: Sequence[str]) -> list[RolloutRow]:
        rewards_G = group.get_total_rewards()
        return [
            self._of_trajectory(
                trajectory,
                group_idx=group_idx,
                traj_idx=traj_idx,
                tags=list(tags),
                reward=rewards_G[traj_idx],
                final_reward=group.final_rewards_G[traj_idx],
                metrics=dict_mean([turn.metrics for turn in trajectory.transitions] + [group.metrics_G[traj_idx]]),
            )
            for traj_idx, trajectory in enumerate(group.trajectories_G)
        ]

    def _of_trajectory(self, trajectory: Trajectory, **of_group: Any) -> RolloutRow:
        turns, first = trajectory.transitions, trajectory.transitions[0].ob
        values = self.values.get(id(trajectory))
        tokens = _tokens_of(trajectory, is_trained=values is not None)
        pieces = pieces_of(tokens.ids, self.renderer.tokenizer, self.texts)
        spread = _spread(tokens.kinds, values)
        return RolloutRow(
            split=self.split,
            step=self.step,
            prompt=_digest(first),
            policy_step=self.policy_step,
            advantage=float(np.mean(values.advantages_A)) if values is not None and values.advantages_A else None,
            stop_reason=str(trajectory.stop_reason),
            num_turns=len(turns),
            num_prompt_tokens=first.length,
            num_tokens=sum(len(turn.ac.tokens) for turn in turns),
            prompt_text="".join(pieces[: tokens.num_first]),
            answer="".join(pieces[tokens.num_first :]),
            chat=encodable(chat_to_json(self._chat(trajectory, "".join(pieces[: tokens.num_first])))),
            turns=[encodable(_turn(turn)) for turn in turns],
            notes=encodable(to_data(trajectory.notes)),
            pieces=pieces,
            kinds=[int(kind) for kind in tokens.kinds],
            token_ids=tokens.ids,
            logprobs=_finite(
                [each for turn in turns for each in turn.ac.maybe_logprobs or [None] * len(turn.ac.tokens)]
            ),
            trained_logprobs=_finite(spread.logprobs_A),
            advantages=_finite(spread.advantages_A),
            **of_group,
        )

    def _chat(self, trajectory: Trajectory, prompt_text: str) -> Sequence[Message]:
        """As the environment logged it; else the first observation as one message, then what the policy said."""
        if trajectory.final_chat is not None:
            return trajectory.final_chat
        last = trajectory.transitions[-1]
        if last.chat is not None:
            return [*last.chat, self.renderer.parse_response(last.ac.tokens)[0]]
        answers = [self.renderer.parse_response(turn.ac.tokens)[0] for turn in trajectory.transitions]
        return [Message(role="user", content=prompt_text), *answers]


def _turn(turn: Transition) -> dict[str, Any]:
    return {
        "num_observed": turn.ob.length,
        "num_sampled": len(turn.ac.tokens),
        "reward": turn.reward,
        "metrics": dict(turn.metrics),
        "logs": dict(turn.logs),
        "stop_reason": turn.ac.stop_reason,
        "trainable": turn.trainable,
    }


def _digest(observation: Observation) -> str:
    """Of a prompt: equal for equal tokens and images."""
    digest = hashlib.sha256()
    for chunk in observation.chunks:
        data = chunk.data if isinstance(chunk, ImageChunk) else np.asarray(_ids(chunk), np.int64).tobytes()
        digest.update(data)
    return digest.hexdigest()[:12]


def _ids(chunk: object) -> Sequence[int]:
    return chunk.tokens if isinstance(chunk, EncodedTextChunk) else ()


class _Tokens(NamedTuple):
    ids: list[int]  # ids_N; -1 for a place of an image, and where an observation begins anew
    kinds: list[Kind]  # kinds_N
    num_first: int  # of the first observation


def _tokens_of(trajectory: Trajectory, *, is_trained: bool) -> _Tokens:
    """Observed and sampled tokens in order. An observation that begins with all before it is there from then on."""
    ids: list[int] = []
    kinds: list[Kind] = []
    seen: list[int | ImageChunk] = []
    for turn in trajectory.transitions:
        observed: list[int | ImageChunk] = []
        for chunk in turn.ob.chunks:
            observed.extend([chunk] if isinstance(chunk, ImageChunk) else _ids(chunk))
        extends = observed[: len(seen)] == seen
        if not extends:
            ids.append(-1)
            kinds.append(Kind.ANEW)
        new = observed[len(seen) :] if extends else observed
        ids += [each if isinstance(each, int) else -1 for each in new]
        kinds += [Kind.OBSERVED] * len(new)
        ids += turn.ac.tokens
        kinds += [Kind.TRAINED if turn.trainable and is_trained else Kind.SAMPLED] * len(turn.ac.tokens)
        seen = [*observed, *turn.ac.tokens]
    return _Tokens(ids, kinds, _num_first(trajectory))


def _num_first(trajectory: Trajectory) -> int:
    chunks = trajectory.transitions[0].ob.chunks
    return sum(1 if isinstance(chunk, ImageChunk) else len(_ids(chunk)) for chunk in chunks)


def _spread(kinds: Sequence[Kind], values: _OfTokens | None) -> "_Spread":
    """The trainer's numbers over all sampled tokens: None for those that were not trained on."""
    if values is None:
        return _Spread([], [])
    given = iter(zip(values.logprobs_A, values.advantages_A, strict=True))
    sampled = [kind for kind in kinds if kind in (Kind.TRAINED, Kind.SAMPLED)]
    pairs = [next(given) if kind is Kind.TRAINED else (None, None) for kind in sampled]
    return _Spread([logprob for logprob, _ in pairs], [advantage for _, advantage in pairs])


def _finite(values: Sequence[float | None]) -> list[float | None]:
    """To a millionth, which is as exact as they are and half as long in JSON; None for what is no number."""
    return [round(value, 6) if value is not None and math.isfinite(value) else None for value in values]


class _Spread(NamedTuple):
    logprobs_A: list[float | None]
    advantages_A: list[float | None]


def pieces_of(ids: Sequence[int], tokenizer: Tokenizer, texts: dict[int, str]) -> list[str]:
    """The text of each token. That of a character of several tokens is with the last of them, the others have none;
    `texts` keeps what single tokens say. A negative id is an image's place, or none."""
    pieces: list[str] = []
    pending: list[int] = []
    for number in ids:
        if number < 0:
            pieces.append("")
            continue
        if number not in texts:
            texts[number] = tokenizer.decode([number])
        if not pending and _BROKEN not in texts[number]:
            pieces.append(texts[number])
            continue
        pending.append(number)
        text = tokenizer.decode(pending)
        is_whole = _BROKEN not in text or len(pending) >= _LONGEST
        pieces.append(text if is_whole else "")
        pending = [] if is_whole else pending
    if pending and pieces[-1] == "":
        pieces[-1] = tokenizer.decode(pending)
    return pieces


_BROKEN, _LONGEST = "\ufffd", 4  # what stands for half a character; how many bytes one has
