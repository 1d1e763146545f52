"""What Sphinx is told: pages are Markdown, docstrings are read from the code. `build.py` gathers the sources."""

import re
from typing import Any

import stovetop

project = "Stovetop"
release = stovetop.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Stovetop {release}"
html_copy_source = False
html_show_copyright = False
exclude_patterns = ["src"]
myst_heading_anchors = 3
default_role = "code"
nitpicky = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
suppress_warnings = [
    "ref.python",  # of a type whose short name several modules have
    "misc.highlighting_failure",
]


def as_restructured_text(lines: list[str]) -> list[str]:
    """Docstrings are plain text: `code`, lists with "- ", and indented blocks, which are code or tables of files."""
    text = "\n".join(lines)
    blocks = re.split(r"\n(?=    )|(?<=\n)(?! )", text)  # before and behind what is indented
    out: list[str] = []
    for block in blocks:
        if block.startswith("    "):
            out += ["", "::", "", *(f"{line}" for line in block.rstrip("\n").split("\n")), ""]
        else:
            out += [_escaped(line) for line in block.rstrip("\n").split("\n")]
            out += [""] if block.endswith("\n\n") else []
    return out


def _escaped(line: str) -> str:
    """Marks of reStructuredText are text, but for list items and `code`, behind which a letter wants a mark between."""
    out = ""
    for index, part in enumerate(re.split(r"(`[^`]+`)", line)):
        if index % 2:
            out += f"`{part}`"
        else:
            out += (r"\ " if out and part[:1].isalnum() else "") + re.sub(r"([\\*|_`])", r"\\\1", part)
    return out


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _rewrite)


def _rewrite(_app: Any, _kind: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)
