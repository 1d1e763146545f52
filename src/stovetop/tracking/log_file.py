"""The file in a run's folder with what the package says while the run is open."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from stovetop.tracking.console import ConsoleSink

_OPEN = ContextVar[tuple[Path, ...]]("open runs", default=())  # their files, of this task: a run, a phase of it


@contextmanager
def logging_to(file: Path, console: ConsoleSink) -> Generator[None]:
    """While open, what the package logs goes to this file, and to the console unless the program shows it by itself;
    but for what is said in the course of another run that is open too. Only the logger "stovetop" is touched, and left
    as it was."""
    before = _OPEN.get()
    _OPEN.set((*before, file))
    logger = logging.getLogger("stovetop")
    to_file = logging.FileHandler(file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    shown = console.log_handler()
    shown.addFilter(lambda record: record.exc_info is None)  # tracebacks are for the file: the caller shows the error
    handlers = [to_file] if logging.getLogger().handlers else [to_file, shown]
    with at_info():
        for handler in handlers:
            handler.addFilter(lambda _record: file in (_OPEN.get() or (file,)))
            logger.addHandler(handler)
        try:
            yield
        finally:
            for handler in handlers:
                logger.removeHandler(handler)
                handler.close()
            _OPEN.set(before)  # not reset: a run may be left in another thread than it was entered in


@contextmanager
def at_info() -> Generator[None]:
    """Within, the package says what it does. Runs that are open at once are opened within one of these: the first that
    ends would end the words of the others."""
    logger = logging.getLogger("stovetop")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
