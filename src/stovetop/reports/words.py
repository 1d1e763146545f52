"""Warnings and errors of a run, from the end of logs.log."""

import re
from pathlib import Path
from typing import NamedTuple

from stovetop.errors import StovetopError
from stovetop.run_folder import LOGS_FILE

TAIL_BYTES = 1024 * 1024
MOST = 60  # that are told, the last ones
MOST_CHARACTERS = 8000  # of each
_BEGIN = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.]\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+): ")


class Said(NamedTuple):
    """A warning or an error, with its traceback; the same words, again, count."""

    level: str
    at: str  # when it was said last, in local time
    logger: str
    text: str
    num: int  # how often


def said_in(folder: Path) -> list[Said]:
    """The last ones, in order."""
    try:
        with (folder / LOGS_FILE).open("rb") as file:
            begin = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(begin)
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StovetopError(f"cannot read {folder / LOGS_FILE}: {error.strerror or error}") from error
    found: dict[tuple[str, str, str], Said] = {}
    at = list(_BEGIN.finditer(text))
    ends = [*(following.start() for following in at[1:]), len(text)]
    for begun, end in zip(at, ends, strict=False):  # without any, there is one end too many
        when, level, logger = begun.groups()
        if level not in ("WARNING", "ERROR", "CRITICAL"):
            continue
        words = text[begun.end() : end].strip()[:MOST_CHARACTERS]
        before = found.pop((level, logger, words), None)  # so that it comes last
        found[level, logger, words] = Said(level, when, logger, words, 1 if before is None else before.num + 1)
    return list(found.values())[-MOST:]
