"""The one exception tree. Every message names the thing, the value, the limit and the next step.

StovetopError
├── InvalidRequest        what you passed is wrong; raised at the call, nothing was done (also a ValueError)
│   ├── UnknownName       a name that is in no table; the message suggests the nearest (also a LookupError)
│   ├── SeveralProblems   several things at once, such as the fields of a config; `problems` has each
│   ├── RunNotFound       no training client of this name is at work or has saved anything
│   ├── ServiceClosed     a call of a client whose service was closed or runs in another process, or of a closed pool
│   └── NothingToTrain    an example none of whose tokens would be trained; data sets leave such rows out
├── RequestFailedError    a call that was accepted and then failed; says which call it was
├── Cancelled             a call that was taken back before it was done
├── QueueFull             too much waits for this client's turns; nothing was queued (also a RateLimitError)
├── CheckpointError       a checkpoint that cannot be used
│   ├── CheckpointNotFound
│   ├── CheckpointExists  one of that name is there already
│   └── TornCheckpoint    a write that did not finish, or bytes that changed since
├── WriteFailed           the disk did not take what was to be written (also an OSError)
├── Diverged              a loss or reward that is no longer a finite number
├── StageFailed           a stage of a workflow raised; names the stage, the workflow and the step
├── EnvError              an environment raised; names the environment and the step
├── GradeError            a grader broke: never counted as a wrong answer
├── SandboxError          a sandbox failed: says nothing about the program in it
│   └── SandboxUnavailable  none can be made on this machine; says why, and what to do
├── WorkerDied            a worker process ended in the middle of a call; says how
├── MissingExtra          an optional dependency is not installed (also an ImportError)
└── APIError              what the Tinker SDK calls a service's refusals, see below

Programs written for the SDK catch its names: `TinkerError` is StovetopError, an InvalidRequest is a `BadRequestError`,
a missing checkpoint or run a `NotFoundError`, a checkpoint that exists a `ConflictError`. The others only a remote
service raises. All are names of the package too: `except stovetop.QueueFull`.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path


def listed(names: Iterable[str], most: int = 4) -> str:
    """Names for a message: the first of them, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


class StovetopError(Exception):
    """Root of everything this package raises on purpose."""

    @property
    def message(self) -> str:
        return str(self)


# ---- the SDK's names -------------------------------------------------------------------------------------------------

TinkerError = StovetopError


class APIError(StovetopError):
    """A service refused or could not be asked."""


class APIStatusError(APIError):
    """A service answered, with a status that means failure."""

    status_code: int = 500


class BadRequestError(APIStatusError):
    """What was asked for is wrong."""

    status_code = 400


class AuthenticationError(APIStatusError):
    """The key is missing or not valid."""

    status_code = 401


class BillingError(APIStatusError):
    """The account cannot pay."""

    status_code = 402


class PermissionDeniedError(APIStatusError):
    """The key is valid, and not allowed to do this."""

    status_code = 403


class NotFoundError(APIStatusError):
    """What was named does not exist."""

    status_code = 404


class ConflictError(APIStatusError):
    """What was to be made exists."""

    status_code = 409


class UnprocessableEntityError(APIStatusError):
    """The request could be read, and means nothing."""

    status_code = 422


class RateLimitError(APIStatusError):
    """Too many requests."""

    status_code = 429


class InternalServerError(APIStatusError):
    """A fault of the service."""


class APIConnectionError(APIError):
    """The service could not be reached."""


class APITimeoutError(APIConnectionError):
    """The service did not answer in time."""


class APIResponseValidationError(APIError):
    """The service's answer has another form than it should."""


class ExperimentalWarning(UserWarning):
    """What the SDK warns with. Nothing here does."""


# ---- our own ---------------------------------------------------------------------------------------------------------


class InvalidRequest(BadRequestError, ValueError):
    """What the caller passed is wrong. Raised at the call: nothing was queued, nothing is lost."""


class UnknownName(InvalidRequest, LookupError):
    """A name that no table has."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known)
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        suggestion = f"did you mean {nearest[0]!r}? " if nearest else ""
        choices = f"known: {', '.join(known)}" if known else "none is known"
        super().__init__(f"unknown {kind} {name!r}; {suggestion}{choices}{'. ' + hint if hint else ''}")


class SeveralProblems(InvalidRequest):
    """Several things that are wrong, each a sentence."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = [each.replace("\n", "\n    ") for each in self.problems]
        super().__init__(f"{len(lines)} things are wrong:" + "".join(f"\n  - {line}" for line in lines))


class RunNotFound(InvalidRequest, NotFoundError):
    """No training client of this name is at work or has saved anything."""


class ServiceClosed(InvalidRequest):
    """The service of this client, or this pool of worker processes, was closed, or belongs to the process that this one
    was forked from: no call of it can succeed any more, whatever is passed."""


class NothingToTrain(InvalidRequest):
    """An example in which no token would be trained on. A data set of rows leaves such rows out and reports them."""


class RequestFailedError(StovetopError):
    """An accepted call failed. `category` is "user" for bad input, "server" for a fault of ours."""

    def __init__(self, message: str, category: str = "server") -> None:
        super().__init__(message)
        self.category = category


class Cancelled(StovetopError):
    """The call was taken back with `future.cancel()` before it was done."""

    def __init__(self) -> None:
        super().__init__("the call was cancelled before it was done")


class QueueFull(RateLimitError):
    """So much waits for the turns of this client that no more is accepted. Nothing was queued: wait for some of its
    results, then call again. How much that is, `max_queued_calls` and `max_queued_tokens` of the ServiceClient say."""


class CheckpointError(StovetopError):
    """A checkpoint that cannot be used for what was asked."""


class CheckpointNotFound(CheckpointError, NotFoundError, FileNotFoundError):
    """No checkpoint at this path."""


class CheckpointExists(CheckpointError, ConflictError):
    """A checkpoint of this name exists, and it was not said to replace it."""


class TornCheckpoint(CheckpointError):
    """The checkpoint is incomplete or its bytes do not match their digests."""


class WriteFailed(StovetopError, OSError):
    """A file or folder could not be written; says which, and why. What was written before is as it was."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(
            f"cannot write {path}: {cause.strerror or cause}. What was written before is kept. Make room, or allow "
            f"writing there, then try again; a run goes on from there with behavior_if_exists=resume"
        )


class Diverged(StovetopError):
    """Training produced a number that is not finite."""

    def __init__(self, what: str, step: int, value: float) -> None:
        super().__init__(
            f"{what} is not finite at step {step}: {value}. Lower the learning rate, or resume from the last checkpoint"
        )


class StageFailed(StovetopError):
    """A stage of a workflow raised, or the condition of a stage: `kind` says which. The original exception is the
    cause."""

    def __init__(self, stage: str, workflow: str, step: int | None, why: str, kind: str = "stage") -> None:
        where = "" if step is None else f" at step {step}"
        super().__init__(f"{kind} {stage!r} of workflow {workflow!r} failed{where}: {why}")
        self.stage, self.workflow, self.step, self.kind = stage, workflow, step, kind


class EnvError(StovetopError):
    """An environment raised. The original exception is the cause."""


class GradeError(StovetopError):
    """A grader broke on a row. Broken is not wrong: this never becomes a reward."""


class SandboxError(StovetopError):
    """A sandbox failed before it could say what became of its program. That is never a wrong answer."""


class SandboxUnavailable(SandboxError):
    """No sandbox can be made on this machine. Says why, where that is known, and what to do."""


class WorkerDied(StovetopError):
    """A worker process ended before it had answered. Whatever called it failed; the process is replaced."""


class MissingExtra(StovetopError, ImportError):
    """An optional integration is not installed."""

    def __init__(self, package: str, extra: str, why: str = "") -> None:
        needed = f"{why} {package} is needed, which is not installed" if why else f"{package} is not installed"
        super().__init__(
            f"{needed}; install it with: pip install 'stovetop[{extra}]' (in a clone: pip install -e '.[{extra}]')"
        )
