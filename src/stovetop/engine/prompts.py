# pyright: basic
"""Prompts on their way into the batch: each is computed once, in pieces, and what prompts of the same weights have in
common is not computed again.

A step computes at most `STEP_TOKENS` tokens, at most `PIECE_TOKENS` of them of one prompt, and goes round: a long
prompt neither stalls the sequences that are being drawn nor the short prompts behind it. A prompt whose first half is
just being computed for another waits for that. Keys and values of finished prompts are kept, the last used longest, up
to `KEPT_TOKENS` positions; they are found again by the weights they were computed with, so new weights never meet old
keys. A prompt that is the same as one of them is not computed at all, and shares its cache. A prompt whose own logprobs
are asked for is computed whole.

Shapes: `N` tokens of a pass, `T` tokens of one piece, `E` hidden size, `K` tokens per position asked for.
"""

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stovetop.engine.attention import Piece, PieceAttention, pack_of_pieces
from stovetop.engine.kv_cache import KVCache
from stovetop.engine.logprobs import pair_logprobs, top_logprobs
from stovetop.engine.lora import AdapterWeights
from stovetop.engine.model import BaseModel
from stovetop.engine.ops import ComputeLogprobs, Sample, Ticket
from stovetop.engine.packing import MIN_SHARED_TOKENS, Segment, common_length
from stovetop.engine.routing import Parts, Rows

STEP_TOKENS = 2048
PIECE_TOKENS = 512
KEPT_TOKENS = 4096


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and what is known of it so far."""

    ticket: Ticket
    op: Sample | ComputeLogprobs
    tokens: list[int]
    cache: KVCache  # of one slot
    num_computed: int = 0
    num_reused: int = 0  # of these, taken over from an earlier prompt
    last_hidden_E: Tensor | None = None  # of the last token, once it is computed
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=lambda: [None])

    @property
    def weights(self) -> AdapterWeights | None:
        return self.op.weights

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.tokens)

    @property
    def wants_logprobs(self) -> bool:
        return isinstance(self.op, ComputeLogprobs) or self.op.include_prompt_logprobs

    @property
    def is_computed_whole(self) -> bool:
        """Nothing is taken over from others, for logprobs of all its tokens are asked for."""
        return self.wants_logprobs or self.num_top > 0

    @property
    def num_top(self) -> int:
        return self.op.topk_prompt_logprobs if isinstance(self.op, Sample) else 0

    def forget_cache(self) -> None:
        """Its samples are on their way, and have taken what they need."""
        self.cache = KVCache(0)


class Prompts:
    """All prompts that are not yet computed, and those that may be used again."""

    def __init__(
        self, model: BaseModel, parts_of: Callable[[Sequence[AdapterWeights | None], Sequence[Segment]], Parts]
    ) -> None:
        """`parts_of` tells which rows of a pass belong to which adapter, from the owner of each segment."""
        self._model = model
        self._parts_of = parts_of
        self._waiting: deque[Prompt] = deque()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by number, the last used at the end
        self._number = 0

    def add(self, ticket: Ticket) -> None:
        assert isinstance(ticket.op, Sample | ComputeLogprobs), "the scheduler sends only these"
        cache = KVCache(self._model.num_layers)
        self._waiting.append(Prompt(ticket, ticket.op, ticket.op.prompt.to_ints(), cache))

    @property
    def idle(self) -> bool:
        return not self._waiting

    @property
    def waiting(self) -> list[Prompt]:
        return list(self._waiting)

    def drop_all(self) -> list[Ticket]:
        tickets = [prompt.ticket for prompt in self._waiting]
        self._waiting.clear()
        self._kept.clear()
        return tickets

    def step(self) -> list[Prompt]:
        """Computes a piece of as many prompts as fit; the ones that are done with it."""
        known, taken = self._known(), self._taken()
        turns: list[_Turn] = []
        first_row = 0
        for prompt, length in sorted(taken, key=lambda item: id(item[0].weights)):  # those of one adapter side by side
            turns.append(_Turn(prompt, Piece(prompt.cache, prompt.num_computed, length, first_row)))
            first_row += length
        try:
            if turns:
                self._compute(turns)
        except BaseException:
            self._waiting.extendleft([*known, *(prompt for prompt, _ in taken)])  # nobody is lost: see `drop_all`
            raise
        done = [prompt for prompt, _ in taken if prompt.is_computed]
        for prompt in done:
            self._keep(prompt)
        # behind those that had no turn
        self._waiting.extend(prompt for prompt, _ in taken if not prompt.is_computed)
        return [*known, *done, *self._known()]

    def _taken(self) -> list[tuple[Prompt, int]]:
        """Prompts whose turn it is, and how many tokens of each."""
        taken: list[tuple[Prompt, int]] = []
        put_off: list[Prompt] = []
        begun = [prompt for prompt in self._waiting if prompt.num_computed]
        room = STEP_TOKENS
        while self._waiting and room > 0:
            prompt = self._waiting.popleft()
            if prompt.num_computed == 0:
                found = self._best_kept(prompt)
                if _is_half_on_its_way(prompt, begun, 0 if found is None else found[1]):
                    put_off.append(prompt)
                    continue
                self._start(prompt, found)
                begun.append(prompt)
            length = min(len(prompt.tokens) - prompt.num_computed, PIECE_TOKENS, room)
            taken.append((prompt, length))
            room -= length
        self._waiting.extendleft(reversed(put_off))
        return taken

    def _compute(self, turns: "list[_Turn]") -> None:
        """One pass over all pieces: their keys and values enter the caches, their last rows are remembered."""
        pieces = [turn.piece for turn in turns]
        packed = pack_of_pieces(pieces, [turn.tokens for turn in turns])
        plan = PieceAttention(pieces, self._model.arithmetic, self._model.device)
        parts = self._parts_of([turn.prompt.weights for turn in turns], packed.segments)
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
        if prompt.wants_logprobs and following:
            rows_P, targets_P = torch.arange(len(following)), torch.tensor(following)
            device = hidden_TE.device
            prompt.logprobs += pair_logprobs(head, rows_TE, rows_P.to(device), targets_P.to(device)).tolist()
        if prompt.num_top and following:
            tokens_TK, logprobs_TK = top_logprobs(head, rows_TE, prompt.num_top)
            rows = zip(tokens_TK.tolist(), logprobs_TK.tolist(), strict=True)
            prompt.top_logprobs += [list(zip(*row, strict=True)) for row in rows]

    # ---- what was computed before ------------------------------------------------------------------------------------

    def _known(self) -> list[Prompt]:
        """Those that wait and are the same as one that is kept: there is nothing to compute."""
        known, others = [], deque[Prompt]()
        for prompt in self._waiting:
            number = self._same_as(prompt) if prompt.num_computed == 0 and not prompt.is_computed_whole else None
            if number is None:
                others.append(prompt)
                continue
            self._kept.move_to_end(number)
            prompt.cache, prompt.last_hidden_E = self._kept[number].cache, self._kept[number].last_hidden_E
            prompt.num_computed = prompt.num_reused = len(prompt.tokens)
            known.append(prompt)
        self._waiting = others
        return known

    def _same_as(self, prompt: Prompt) -> int | None:
        """The number of the kept prompt with the same tokens."""
        for number, kept in self._kept.items():
            if kept.tokens == prompt.tokens and kept.is_of(prompt.weights):
                return number
        return None

    def _best_kept(self, prompt: Prompt) -> "tuple[_Kept, int] | None":
        """The earlier prompt of the same weights that shares the longest beginning, and its length. The last token is
        always computed: drawing needs its hidden state."""
        best, best_length = None, MIN_SHARED_TOKENS - 1
        for number, kept in self._kept.items() if not prompt.is_computed_whole else ():
            length = common_length(kept.tokens, prompt.tokens[:-1]) if kept.is_of(prompt.weights) else 0
            if length > best_length:
                best, best_length = number, length
        if best is None:
            return None
        self._kept.move_to_end(best)
        return self._kept[best], best_length

    def _start(self, prompt: Prompt, found: "tuple[_Kept, int] | None") -> None:
        """From what is known of its beginning."""
        prompt.cache.reserve(1, len(prompt.tokens))
        if found is not None:
            kept, length = found
            prompt.cache.copy_from(kept.cache, 0, [0], length)
            prompt.num_computed = prompt.num_reused = length

    def _keep(self, prompt: Prompt) -> None:
        """Keeps a computed prompt for others; those of weights that nobody holds any more go, then the least recently
        used ones make room."""
        for number in [number for number, kept in self._kept.items() if kept.is_orphan]:
            del self._kept[number]
        of_weights = None if prompt.weights is None else weakref.ref(prompt.weights)
        self._number += 1
        self._kept[self._number] = _Kept(of_weights, prompt.tokens, prompt.cache, prompt.last_hidden_E)
        while sum(len(kept.tokens) for kept in self._kept.values()) > KEPT_TOKENS:
            self._kept.popitem(last=False)


def _is_half_on_its_way(prompt: Prompt, begun: Sequence[Prompt], num_known: int) -> bool:
    """Whether a prompt that is being computed begins with the first half of this one, which can wait for it: it knows
    less than that from prompts that were computed before."""
    if prompt.is_computed_whole or len(prompt.tokens) <= MIN_SHARED_TOKENS:
        return False
    half = max(MIN_SHARED_TOKENS, (len(prompt.tokens) + 1) // 2)
    if num_known >= half:
        return False
    return any(other.weights is prompt.weights and other.tokens[:half] == prompt.tokens[:half] for other in begun)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
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
