"""What a server has done since it started, for those who run it: requests that have ended, by owner and verb, their
tokens and steps, how long they took, the last steps and the last failures. Each that ends is a line of the log.

Nothing of this is kept over a restart, and nothing that a client is answered depends on it.
"""

import json
import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

log = logging.getLogger(__name__)

RATE_S = 30  # of which a speed is the mean: a step of a large model takes seconds, and counts when it ends
HISTORY_S = 300
NUM_RECENT = 20  # steps, and failures
LONGEST_PROMPT = 2000  # characters of it in the log, where it is asked for
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of how long requests take

Outcome = Literal["ok", "user", "server"]  # whose fault a failure was


class Done(NamedTuple):
    """What was done since the server started."""

    num_steps: int = 0
    num_tokens: int = 0  # that were trained on, scored and drawn

    def plus(self, num_steps: int, num_tokens: int) -> "Done":
        return Done(self.num_steps + num_steps, self.num_tokens + num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that has ended."""

    id: str
    owner: str
    verb: str
    seconds: float  # since it was accepted, so with its time in the queue
    num_steps: int = 0
    num_tokens: int = 0
    outcome: Outcome = "ok"
    message: str = ""  # of a failure, as the client is told it
    at_s: float = field(default_factory=time.time)  # since the epoch


class Times:
    """How many requests took how long: the last bucket is that of all that took longer."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class Activity:
    """May be used from any thread."""

    def __init__(self, *, log_prompts: bool = False, now_s: Callable[[], float] = time.monotonic) -> None:
        """`log_prompts`: the text of prompts goes into the log, too."""
        self._log_prompts = log_prompts
        self._now_s = now_s
        self._done = Done()
        self._by_owner: dict[str, Done] = {}
        self._counts = Counter[tuple[str, str, Outcome]]()
        self._times: dict[str, Times] = {}  # by verb
        self._recent: deque[tuple[float, Counter[str]]] = deque()  # tokens of owners, in the second that began then
        self._steps: deque[Ended] = deque(maxlen=NUM_RECENT)
        self._failures: deque[Ended] = deque(maxlen=NUM_RECENT)
        self._lock = threading.Lock()  # protects all of this

    def ended(self, request: Ended, prompt: Callable[[], str] | None = None) -> None:
        """A request has ended; `prompt` tells what it was asked with."""
        with self._lock:
            self._done = self._done.plus(request.num_steps, request.num_tokens)
            of_owner = self._by_owner.get(request.owner, Done())
            self._by_owner[request.owner] = of_owner.plus(request.num_steps, request.num_tokens)
            self._counts[request.owner, request.verb, request.outcome] += 1
            self._times.setdefault(request.verb, Times()).add(request.seconds)
            if request.num_tokens:
                self._second()[request.owner] += request.num_tokens
            if request.num_steps:
                self._steps.appendleft(request)
            if request.outcome != "ok":
                self._failures.appendleft(request)
        log.info("%s", _line(request, _told(prompt) if self._log_prompts and prompt is not None else None))

    def _second(self) -> Counter[str]:
        """The tokens of this second. What is older than the history goes."""
        second = float(int(self._now_s()))
        if not self._recent or self._recent[-1][0] < second:
            self._recent.append((second, Counter()))
        while self._recent[0][0] < second - HISTORY_S:
            self._recent.popleft()
        return self._recent[-1][1]

    # ---- what was done -----------------------------------------------------------------------------------------------

    @property
    def done(self) -> Done:
        """By all owners together."""
        return self._done

    def by_owner(self) -> dict[str, Done]:
        with self._lock:
            return dict(self._by_owner)

    def counts(self) -> Mapping[tuple[str, str, Outcome], int]:
        """Requests that have ended, by owner, verb and outcome."""
        with self._lock:
            return dict(self._counts)

    def times(self) -> dict[str, tuple[list[int], float]]:
        """By verb, how many requests fell into each of `BUCKETS_S`, and behind them, and the seconds of all."""
        with self._lock:
            return {verb: (list(times.counts), times.sum_s) for verb, times in self._times.items()}

    def tokens_per_s(self) -> Counter[str]:
        """Of each owner, as the mean of the last `RATE_S` seconds."""
        since_s = self._now_s() - RATE_S
        with self._lock:
            recent = sum((tokens for second, tokens in self._recent if second >= since_s), Counter[str]())
        return Counter({owner: num_tokens // RATE_S for owner, num_tokens in recent.items()})

    def history(self, num_bins: int) -> list[int]:
        """Tokens of all owners in each of the bins that the last `HISTORY_S` seconds are cut into, the oldest first."""
        begun_s, bins = self._now_s() - HISTORY_S, [0] * num_bins
        with self._lock:
            for second, tokens in self._recent:
                if second >= begun_s:
                    bins[min(int((second - begun_s) * num_bins / HISTORY_S), num_bins - 1)] += tokens.total()
        return bins

    def recent_steps(self) -> list[Ended]:
        """The newest first."""
        with self._lock:
            return list(self._steps)

    def recent_failures(self) -> list[Ended]:
        with self._lock:
            return list(self._failures)


def _line(request: Ended, prompt: str | None) -> str:
    """No message is in it: what a client is told of a failure may say what it had sent."""
    line = f"id={request.id} owner={request.owner} verb={request.verb} ms={1000 * request.seconds:.0f}"
    line += f" tokens={request.num_tokens}" if request.num_tokens else ""
    line += "" if request.outcome == "ok" else f" failed={request.outcome}"
    return line if prompt is None else f"{line} prompt={json.dumps(prompt)}"


def _told(prompt: Callable[[], str]) -> str:
    try:
        return prompt()[:LONGEST_PROMPT]
    except Exception as error:  # of a tokenizer: the request has ended, whatever becomes of its line
        return f"({type(error).__name__})"
