"""A call in a copy of this process: whatever it changes goes with the copy. For worker processes, which have one thread
that does the work.
"""

import os
from collections.abc import Callable
from typing import NoReturn, TypeVarTuple

from stovetop.errors import WorkerDied

Ts = TypeVarTuple("Ts")

_YES, _NO = b"yes", b"no"


def in_a_copy(question: Callable[[*Ts], bool], *arguments: *Ts) -> bool:
    """The answer to a question of yes or no, asked in a fork. A RuntimeError has the words of what was raised there; a
    WorkerDied says that the copy ended before it answered."""
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as answered:
        try:
            copy = os.fork()
            if copy == 0:
                _answer(write_fd, question, *arguments)
        finally:
            os.close(write_fd)
        answer = answered.read()
    os.waitpid(copy, 0)
    if answer in (_YES, _NO):
        return answer == _YES
    if not answer:
        raise WorkerDied(f"the process of {question.__name__} ended before it answered")
    raise RuntimeError(answer.decode(errors="replace"))


def _answer(write_fd: int, question: Callable[[*Ts], bool], *arguments: *Ts) -> NoReturn:
    """In the copy, which ends with it."""
    try:
        os.write(write_fd, _YES if question(*arguments) else _NO)
    except BaseException as error:
        os.write(write_fd, f"{type(error).__name__}: {error}".encode()[:4096])
    finally:
        os._exit(0)
