"""The page at `/`: what this server is and does, for those who run it. It reads only, and looks again by itself every
two seconds. One file, `page.html`: no build, nothing from the network.

All that clients have named is escaped by the template. A browser runs no script and takes no style but those of the
page, which bear a number that is drawn for each answer (Content-Security-Policy).
"""

import base64
import binascii
import secrets
import time
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from stovetop.concurrency import in_thread
from stovetop.errors import StovetopError
from stovetop.server.activity import HISTORY_S, RATE_S
from stovetop.server.metrics import metrics
from stovetop.server.overview import look_at
from stovetop.server.protocol import Answer, Asked, Dialect, Served, bearer_of
from stovetop.server.recovery import Parts

HTML = "text/html"
NUM_BINS = 60  # of the graph
MOST_ROWS = 100  # of a table


async def page(parts: Parts, _asked: Asked) -> Answer:
    return await in_thread(partial(_page, parts))


def _page(parts: Parts) -> Answer:
    overview, activity, load = look_at(parts), parts.activity, parts.limits.load
    return _rendered(
        200,
        overview=overview,
        load=load,
        tokens_per_s=activity.tokens_per_s().total(),
        rate_s=RATE_S,
        done=activity.done,
        history=activity.history(NUM_BINS),
        history_s=HISTORY_S,
        steps=activity.recent_steps(),
        failures=activity.recent_failures(),
        most=MOST_ROWS,
        problem=None,
    )


def _refused(status: int, message: str, _error: StovetopError | None) -> Answer:
    """A browser asks for a key when it is told that there is one: any name, and the key as its password."""
    answer = _rendered(status, problem=message)
    if status != 401:
        return answer
    asks = {"WWW-Authenticate": 'Basic realm="stovetop: any name, and an operator\'s key", charset="UTF-8"'}
    return Answer(answer.body, HTML, status, headers={**answer.headers, **asks})


def _rendered(status: int, **values: Any) -> Answer:
    nonce = secrets.token_urlsafe(16)
    text = _template().render(nonce=nonce, now_s=time.time(), **values)
    own = f"'nonce-{nonce}'"
    policy = f"default-src 'none'; script-src {own}; style-src {own}; img-src data:; connect-src 'self'; "
    headers = {
        "Content-Security-Policy": f"{policy}frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Answer(text.encode(), HTML, status, headers=headers)


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": size, "ago": ago, "clock": clock}
    return environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def size(num_bytes: float) -> str:
    """1.5 GB, say."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def ago(seconds: float) -> str:
    """4 min, say."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 360_000 else f"{seconds / 86_400:.0f} d"


def clock(at_s: float) -> str:
    """In the time zone of the server."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))


# ---- who may see it ------------------------------------------------------------------------------------------------


def key_of(headers: Mapping[str, str]) -> str | None:
    """As the SDK sends it, as a Bearer token, or as the password of any name, which is all that a browser can do."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        bearer = bearer_of(headers)
        return headers.get("x-api-key") if bearer is None else bearer
    try:
        decoded = base64.b64decode(value.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded.partition(":")[2]


def _refused_as_text(status: int, message: str, _error: StovetopError | None) -> Answer:
    return Answer(f"{message}\n".encode(), "text/plain", status)


PAGE = Dialect(prefix="/", key_of=key_of, refused=_refused)
METRICS = Dialect(prefix="/", key_of=key_of, refused=_refused_as_text)

PAGES = [
    Served("GET", "", page, dialect=PAGE, is_for_operators=True, is_quiet=True),
    Served("GET", "metrics", metrics, dialect=METRICS, is_for_operators=True, is_quiet=True),
]
