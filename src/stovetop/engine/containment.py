"""Where a failure ends: at the work that it came from. What is done for one ticket may raise anything (a tokenizer in
Rust raises its panics as no Exception at all), so nothing is taken for a failure of the whole but KeyboardInterrupt and
what is derived from it, which end the work from outside. No torch."""

from traceback import clear_frames
from types import TracebackType


class Contained:
    """What is raised in its block ends there, and is its `error`.

    with Contained() as outcome:
        result = work()
    if outcome.error is not None: ...
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> "Contained":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, KeyboardInterrupt):
            return False
        forget_frames(error)
        self.error = error
        return True


def forget_frames(error: BaseException) -> None:
    """An error may be kept for long, and the frames that it came from refer to the activations of a pass, or to all
    that was to be written. They are let go, and so are those of the errors before it: each once, for one that was
    raised again from another may be before that one too."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            clear_frames(each.__traceback__)
            waiting += [each.__cause__, each.__context__]
