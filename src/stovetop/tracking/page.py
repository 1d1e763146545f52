"""A self-contained HTML page, and text on it: whatever a model or an environment wrote is shown as text, never read as
HTML. Nothing is loaded from a network, and a browser is told to load nothing.

Templates are in `pages/`. All values in them are escaped by jinja2 (autoescape); `Markup` says that something is HTML
already, and only what a template or `logtree` made is ever wrapped in it.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from stovetop.tracking.events import encode_number

if TYPE_CHECKING:
    from jinja2 import Environment

# What has no shape of its own, or turns the text around it: control characters but tab and line feed, marks of
# direction, tags, halves of surrogate pairs. The joiners U+200C and U+200D stay: scripts and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}", re.ASCII)


def visible(text: str) -> str:
    """The text with characters that cannot be seen written out, as ⟨U+202E⟩. It is not escaped."""
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text.replace("\r\n", "\n"))


def encodable(value: Any) -> Any:
    """What JSON and UTF-8 can hold of it: halves of surrogate pairs are written out, and numbers that are none."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case float():
            return encode_number(value)
        case dict():
            entries = cast("dict[Any, Any]", value)
            return {encodable(str(key)): encodable(each) for key, each in entries.items()}
        case list() | tuple():
            return [encodable(each) for each in cast("list[Any]", value)]
        case bool() | int() | None:
            return value
        case _:
            return encodable(str(value))


def is_image(uri: str) -> bool:
    """Whether it is a data: URI of a picture that a page may show; SVG, which can hold scripts, is none."""
    return _IMAGE.fullmatch(uri) is not None


def asset(name: str) -> str:
    """A file of `pages/`."""
    return (files("stovetop.tracking") / "pages" / name).read_text(encoding="utf-8")


@cache
def templates() -> "Environment":
    """Those of `pages/`."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True, loader=FunctionLoader(asset), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    ours: dict[str, Any] = {"visible": visible, "is_image": is_image}
    environment.filters.update(ours)
    return environment


def html_page(title: str, body: str, *, css: str = "", script: str = "") -> str:
    """A whole page. `body` is HTML already; `css` and `script` are ours. A browser runs this script and no other."""
    from markupsafe import Markup

    style = asset("page.css") + css
    return (
        templates()
        .get_template("page.html")
        .render(
            title=title,
            body=Markup(body),
            style=Markup(style),
            script=Markup(script),
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )


def _hash(text: str) -> str:
    """As a Content-Security-Policy names a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
