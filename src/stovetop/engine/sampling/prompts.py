# pyright: basic
"""Prompts on their way into the batch: each is computed once, in pieces, and what prompts of the same weights have in
common is not computed again.

A step computes at most `STEP_TOKENS` tokens, at most `PIECE_TOKENS` of them of one prompt, and goes round: a long
prompt neither stalls the sequences that are being drawn nor the short prompts behind it. A prompt whose first half is
just being computed for another waits for that. Keys and values of finished prompts are kept, the last used longest,
up to `KEPT_TOKENS` positions, and the last one in any case, as long as their memory is not needed; they are found
again by the weights they were computed with, so new weights never meet old keys. A prompt that is the same as one of
them is not computed at all, and shares its cache. A prompt whose own logprobs are asked for is computed whole.

A prompt is begun when there is memory for its keys and values; how much there is, the sampler says (`Room`). One whose
memory was taken for others is computed again later.

Shapes: `N` tokens of a pass, `T` tokens of one piece, `E` hidden size, `K` tokens per position asked for.
"""

import math
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stovetop.engine.kernels.attention_plans import Piece, PieceAttention, pack_of_pieces
from stovetop.engine.kernels.kv_cache import KVCache, rounded_up
from stovetop.engine.kernels.packing import MIN_SHARED_TOKENS, common_length
from stovetop.engine.lora.routing import Rows, Stack, prompt_rows, rows_by_owner
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.head import pair_logprobs, top_logprobs
from stovetop.engine.ops import ComputeLogprobs, Sample, Ticket
from stovetop.errors import InvalidRequest

STEP_TOKENS = {"cpu": 2048, "cuda": 16384}
PIECE_TOKENS = 512
KEPT_TOKENS = 4096


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and what is known of it so far."""

    ticket: Ticket
    op: Sample | ComputeLogprobs
    weights: AdapterWeights | None  # None: the base model as it is
    tokens: list[int]
    cache: KVCache  # of one slot
    is_again: bool = False  # it was computed before: its logprobs are known, and there is no use in keeping it
    num_computed: int = 0
    num_reused: int = 0  # of these, taken over from an earlier prompt
    last_hidden_E: Tensor | None = None  # of the last token, once it is computed
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=lambda: [None])

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.tokens)

    @property
    def wants_logprobs(self) -> bool:
        return isinstance(self.op, ComputeLogprobs) or self.op.include_prompt_logprobs

    @property
    def is_computed_whole(self) -> bool:
        """Nothing is taken over from others, for logprobs of all its tokens are asked for."""
        return not self.is_again and (self.wants_logprobs or self.num_top > 0)

    @property
    def num_top(self) -> int:
        return self.op.topk_prompt_logprobs if isinstance(self.op, Sample) else 0

    def check_finite(self) -> None:
        """Of the logprobs that are asked for."""
        top = [logprob for row in self.top_logprobs[1:] for _, logprob in row or ()]
        if not all(logprob is None or math.isfinite(logprob) for logprob in (*self.logprobs, *top)):
            raise not_finite(self.weights)

    def forget_cache(self) -> None:
        """All its samples have begun, and have copied what they need."""
        self.cache = KVCache(0)

    @property
    def num_positions(self) -> int:
        """That its cache takes."""
        return rounded_up(len(self.tokens))


def not_finite(weights: AdapterWeights | None) -> InvalidRequest:
    whose = "the base model" if weights is None else "this adapter, which has diverged; go back to an earlier state"
    return InvalidRequest(f"the logits are not finite numbers with {whose}")


@dataclass(slots=True)
class Room:
    """Positions that new prompts may take in a step."""

    num_positions: int
    num_begun: int  # that prompts take which are being computed
    num_ahead: int  # that prompts of samples take which cannot be continued yet: computed, or being computed
    most_ahead: int
    make: Callable[[int], None]  # frees kept prompts until there is memory for so many
    is_shut: bool = False  # to prompts of samples

    def allows(self, prompt: Prompt) -> bool:
        """Whether a prompt may be begun. Behind one that has to wait none of its kind is begun, or it would wait for
        ever. Logprobs may be computed while prompts of samples have to wait for samples to end, but not the other way
        round: what logprobs wait for is soon computed."""
        is_sample = isinstance(prompt.op, Sample)
        if prompt.num_positions > self.num_positions:
            self.num_positions = 0
        if prompt.num_positions > self.num_positions or (is_sample and self.is_shut):
            return False
        ahead = self.num_ahead if is_sample else self.num_begun
        if ahead > 0 and ahead + prompt.num_positions > self.most_ahead:
            self.is_shut = True
            self.num_positions = self.num_positions if is_sample else 0
            return False
        return True

    def take(self, prompt: Prompt) -> None:
        self.make(prompt.num_positions)
        self.num_positions -= prompt.num_positions
        self.num_begun += prompt.num_positions
        self.num_ahead += prompt.num_positions if isinstance(prompt.op, Sample) else 0


class Prompts:
    """All prompts that are not yet computed, and those that may be used again."""

    def __init__(self, model: BaseModel, stack: Stack) -> None:
        """`stack` is that of the adapters that run."""
        self._model = model
        self._stack = stack
        self._waiting: deque[Prompt] = deque()
        self._begun: dict[int, Prompt] = {}  # those of them that have memory, by id
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by number, the last used at the end
        self._number = 0

    def add(self, ticket: Ticket, weights: AdapterWeights | None) -> None:
        assert isinstance(ticket.op, Sample | ComputeLogprobs), "the scheduler sends only these"
        cache = KVCache(self._model.num_layers)
        self._waiting.append(Prompt(ticket, ticket.op, weights, ticket.op.prompt.to_ints(), cache))

    def add_again(self, prompt: Prompt) -> None:
        """One that was computed, and whose memory is freed now; it comes before all others."""
        prompt.cache, prompt.last_hidden_E = KVCache(self._model.num_layers), None
        prompt.num_computed, prompt.is_again = 0, True
        self._waiting.appendleft(prompt)

    def remove(self, prompt: Prompt) -> None:
        self._waiting.remove(prompt)
        self._begun.pop(id(prompt), None)

    @property
    def idle(self) -> bool:
        return not self._waiting

    @property
    def begun_positions(self) -> int:
        """Positions that those take which are being computed."""
        return sum(prompt.num_positions for prompt in self._begun.values())

    @property
    def begun_positions_of_samples(self) -> int:
        """The same of those that samples go on from."""
        return sum(prompt.num_positions for prompt in self._begun.values() if isinstance(prompt.op, Sample))

    def kept_caches(self) -> list[KVCache]:
        return [kept.cache for kept in self._kept.values()]

    def drop_kept(self) -> bool:
        """Forgets the one that was not used for longest; False if there is none."""
        if self._kept:
            self._kept.popitem(last=False)
            return True
        return False

    def drop_begun(self) -> bool:
        """The last one that was begun starts over later; False if there is none."""
        if not self._begun:
            return False
        _, prompt = self._begun.popitem()
        prompt.cache, prompt.num_computed = KVCache(self._model.num_layers), 0
        if not prompt.is_again:
            prompt.logprobs, prompt.top_logprobs = [None], [None]
        return True

    @property
    def waiting(self) -> list[Prompt]:
        return list(self._waiting)

    def drop_all(self) -> list[Ticket]:
        tickets = [prompt.ticket for prompt in self._waiting]
        self._waiting.clear()
        self._begun.clear()
        self._kept.clear()
        return tickets

    def step(self, room: Room, running: Sequence[AdapterWeights]) -> list[Prompt]:
        """Computes a piece of as many prompts as fit; the ones that are done with it. `running` are the adapters that
        keep their places in the stack."""
        before = list(self._waiting)
        try:
            return self._step(room, running)
        except BaseException:
            self._waiting = deque(before)  # so that `drop_all` has the tickets of all
            raise

    def _step(self, room: Room, running: Sequence[AdapterWeights]) -> list[Prompt]:
        done, taken = self._known(), self._taken(room)
        turns: list[_Turn] = []
        first_row = 0
        for index in self._stack.in_order([prompt.weights for prompt, _ in taken]):
            prompt, length = taken[index]
            turns.append(_Turn(prompt, Piece(prompt.cache, prompt.num_computed, length, first_row)))
            first_row += length
        if turns:
            self._compute(turns, running)
        # behind those that had no turn
        self._waiting.extend(prompt for prompt, _ in taken if not prompt.is_computed)
        for prompt in [prompt for prompt, _ in taken if prompt.is_computed]:
            self._begun.pop(id(prompt))
            # before others push it out
            done += [prompt] if prompt.is_again else [prompt, *self._twins(self._keep(prompt))]
        return done

    def _taken(self, room: Room) -> list[tuple[Prompt, int]]:
        """Prompts whose turn it is, and how many tokens of each."""
        taken: list[tuple[Prompt, int]] = []
        put_off: list[Prompt] = []
        num_left = STEP_TOKENS.get(self._model.device.type, STEP_TOKENS["cpu"])
        while self._waiting and num_left > 0:
            prompt = self._waiting.popleft()
            if id(prompt) not in self._begun:
                if not room.allows(prompt) or self._is_half_on_its_way(prompt):
                    put_off.append(prompt)
                    continue
                room.take(prompt)
                self._start(prompt)
            length = min(len(prompt.tokens) - prompt.num_computed, PIECE_TOKENS, num_left)
            taken.append((prompt, length))
            num_left -= length
        self._waiting.extendleft(reversed(put_off))
        return taken

    def _compute(self, turns: "list[_Turn]", running: Sequence[AdapterWeights]) -> None:
        """One pass over all pieces: their keys and values enter the caches, their last rows are remembered."""
        pieces = [turn.piece for turn in turns]
        packed = pack_of_pieces(pieces, [turn.tokens for turn in turns])
        plan = PieceAttention(pieces, self._model.arithmetic, self._model.device)
        owners, device = [turn.prompt.weights for turn in turns], self._model.device
        if self._model.arithmetic.can_stack:
            parts = prompt_rows(owners, packed.segments, device, self._stack, running)
        else:
            parts = rows_by_owner(owners, packed.segments, device)
        hidden_NE = self._model.hidden_states(packed, plan, parts)
        for turn in turns:
            hidden_TE = hidden_NE[turn.piece.rows]
            self._score(turn, hidden_TE)
            turn.prompt.num_computed = turn.piece.end
            if turn.prompt.is_computed:
                turn.prompt.last_hidden_E = hidden_TE[-1].clone()

    def _score(self, turn: "_Turn", hidden_TE: Tensor) -> None:
        """Logprobs of the tokens that follow each row, where they are asked for. The prompt's last row has none."""
        prompt = turn.prompt
        following = prompt.tokens[turn.piece.start + 1 : turn.piece.end + 1]
        parts = [] if prompt.weights is None else [Rows(prompt.weights)]
        head, rows_TE = self._model.head(parts), hidden_TE[: len(following)]
        if prompt.wants_logprobs and not prompt.is_again and following:
            rows_P, targets_P = torch.arange(len(following)), torch.tensor(following)
            device = hidden_TE.device
            prompt.logprobs += pair_logprobs(head, rows_TE, rows_P.to(device), targets_P.to(device)).tolist()
        if prompt.num_top and not prompt.is_again and following:
            tokens_TK, logprobs_TK = top_logprobs(head, rows_TE, prompt.num_top)
            rows = zip(tokens_TK.tolist(), logprobs_TK.tolist(), strict=True)
            prompt.top_logprobs += [list(zip(*row, strict=True)) for row in rows]

    # ---- what was computed before ------------------------------------------------------------------------------------

    def _known(self) -> list[Prompt]:
        """Those that wait and are the same as one that is kept: there is nothing to compute."""
        by_tokens: dict[tuple[int, ...], list[_Kept]] = {}
        for kept in self._kept.values() if self._waiting else ():
            by_tokens.setdefault(tuple(kept.tokens), []).append(kept)
        alike = {id(kept): kept for prompt in self._waiting for kept in by_tokens.get(tuple(prompt.tokens), ())}
        return [twin for kept in alike.values() for twin in self._twins(kept)]

    def _twins(self, kept: "_Kept") -> list[Prompt]:
        """Those that wait and are the same, out of the queue and computed."""
        same = [
            prompt
            for prompt in self._waiting
            if prompt.tokens == kept.tokens
            and kept.is_of(prompt.weights)
            and prompt.num_computed == 0
            and not prompt.is_computed_whole
        ]
        for prompt in same:
            prompt.cache, prompt.last_hidden_E = kept.cache, kept.last_hidden_E
            self._reuse(prompt, len(prompt.tokens))
        if same:
            self._kept.move_to_end(kept.number)
        taken = set(map(id, same))
        self._waiting = deque(prompt for prompt in self._waiting if id(prompt) not in taken)
        return same

    def _reuse(self, prompt: Prompt, num_tokens: int) -> None:
        prompt.num_computed = num_tokens
        if not prompt.is_again:  # what is answered is how it was at first
            prompt.num_reused = num_tokens

    def _is_half_on_its_way(self, prompt: Prompt) -> bool:
        """Whether a prompt that is being computed begins with the first half of this one, and none that is kept."""
        if prompt.is_computed_whole or len(prompt.tokens) <= MIN_SHARED_TOKENS:
            return False
        half = max(MIN_SHARED_TOKENS, (len(prompt.tokens) + 1) // 2)
        first = prompt.tokens[:half]
        begun = self._begun.values()
        if not any(other.weights is prompt.weights and other.tokens[:half] == first for other in begun):
            return False
        return not any(kept.is_of(prompt.weights) and kept.tokens[:half] == first for kept in self._kept.values())

    def _start(self, prompt: Prompt) -> None:
        """From the longest beginning that a kept prompt of the same weights shares. The last token is always computed:
        drawing needs its hidden state."""
        self._begun[id(prompt)] = prompt
        prompt.cache.reserve(1, len(prompt.tokens))
        best, best_length = None, MIN_SHARED_TOKENS - 1
        for number, kept in self._kept.items() if not prompt.is_computed_whole else ():
            length = common_length(kept.tokens, prompt.tokens[:-1]) if kept.is_of(prompt.weights) else 0
            if length > best_length:
                best, best_length = number, length
        if best is not None:
            prompt.cache.copy_from(self._kept[best].cache, 0, [0], best_length)
            self._reuse(prompt, best_length)
            self._kept.move_to_end(best)

    def _keep(self, prompt: Prompt) -> "_Kept":
        """Keeps a computed prompt for others; those of weights that are not held any more go, then the least recently
        used ones make room."""
        for number in [number for number, kept in self._kept.items() if kept.is_orphan]:
            del self._kept[number]
        of_weights = None if prompt.weights is None else weakref.ref(prompt.weights)
        self._number += 1
        newest = _Kept(self._number, of_weights, prompt.tokens, prompt.cache, prompt.last_hidden_E)
        self._kept[newest.number] = newest
        while len(self._kept) > 1 and sum(len(kept.tokens) for kept in self._kept.values()) > KEPT_TOKENS:
            self._kept.popitem(last=False)
        return newest


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    number: int
    weights: "weakref.ref[AdapterWeights] | None"  # None: the base model
    tokens: list[int]
    cache: KVCache  # not written any more
    last_hidden_E: Tensor | None

    def of(self) -> AdapterWeights | None:
        return None if self.weights is None else self.weights()

    @property
    def is_orphan(self) -> bool:
        return self.weights is not None and self.weights() is None

    def is_of(self, weights: AdapterWeights | None) -> bool:
        return not self.is_orphan and self.of() is weights


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """What is computed of a prompt in this step."""

    prompt: Prompt
    piece: Piece

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens[self.piece.start : self.piece.end]
