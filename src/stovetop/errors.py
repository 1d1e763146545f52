"""The one exception tree. Every message names the thing, the value, the limit and the next step.

StovetopError
├── InvalidRequest        what you passed is wrong; raised at the call, nothing was done (also a ValueError)
│   ├── UnknownName       a name that is in no table; the message suggests the nearest (also a LookupError)
│   ├── ServiceClosed     a call of a client whose service was closed, or of a closed pool of worker processes
│   └── NothingToTrain    an example none of whose tokens would be trained; data sets leave such rows out
├── RequestFailedError    a call that was accepted and then failed; says which call it was
├── CheckpointError       a checkpoint that cannot be used
│   ├── CheckpointNotFound
│   └── TornCheckpoint    a write that did not finish, or bytes that changed since
├── Diverged              a loss or reward that is no longer a finite number
├── EnvError              an environment raised; names the environment and the step
├── GradeError            a grader broke: never counted as a wrong answer
├── WorkerDied            a worker process ended in the middle of a call; says how
└── MissingExtra          an optional dependency is not installed (also an ImportError)
"""

import difflib
from collections.abc import Iterable


def listed(names: Iterable[str], most: int = 4) -> str:
    """Names for a message: the first of them, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


class StovetopError(Exception):
    """Root of everything this package raises on purpose."""


class InvalidRequest(StovetopError, ValueError):
    """What the caller passed is wrong. Raised at the call: nothing was queued, nothing is lost."""


class UnknownName(InvalidRequest, LookupError):
    """A name that no table has."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known)
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        suggestion = f"did you mean {nearest[0]!r}? " if nearest else ""
        choices = f"known: {', '.join(known)}" if known else "none is known"
        super().__init__(f"unknown {kind} {name!r}; {suggestion}{choices}{'. ' + hint if hint else ''}")


class ServiceClosed(InvalidRequest):
    """The service of this client, or this pool of worker processes, was closed: no call of it can succeed any more,
    whatever is passed."""


class NothingToTrain(InvalidRequest):
    """An example in which no token would be trained on. A data set of rows leaves such rows out and reports them."""


class RequestFailedError(StovetopError):
    """An accepted call failed. `category` is "user" for bad input, "server" for a fault of ours."""

    def __init__(self, message: str, category: str = "server") -> None:
        super().__init__(message)
        self.category = category


class CheckpointError(StovetopError):
    """A checkpoint that cannot be used for what was asked."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """No checkpoint at this path."""


class TornCheckpoint(CheckpointError):
    """The checkpoint is incomplete or its bytes do not match their digests."""


class Diverged(StovetopError):
    """Training produced a number that is not finite."""

    def __init__(self, what: str, step: int, value: float) -> None:
        super().__init__(
            f"{what} is not finite at step {step}: {value}. Lower the learning rate, or resume from the last checkpoint"
        )


class EnvError(StovetopError):
    """An environment raised. The original exception is the cause."""


class GradeError(StovetopError):
    """A grader broke on a row. Broken is not wrong: this never becomes a reward."""


class WorkerDied(StovetopError):
    """A worker process ended before it had answered. Whatever called it failed; the process is replaced."""


class MissingExtra(StovetopError, ImportError):
    """An optional integration is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; install it with: pip install 'stovetop[{extra}]'")
