"""The examples of a page of the documentation, which Sybil finds and evaluates in order.

- A fenced block of Python is a program, and goes on from those above it. One whose first line is `# name.py` is a file.
- A fenced block of text behind a program is what that prints.
- An indented block is commands, a line each. `stovetop` understands each of its own; one that only reads, or that runs
  on the fake model, is also carried out, and so is one about keys. Of other programs we check what we can know.
- Inline code that begins as a command is understood.
- Fenced blocks in other languages are shown only.
"""

import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown import CodeBlockParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from missing import PROJECT
from stovetop.cli import COMMANDS, main, understand
from stovetop.cli.words import entry
from stovetop.errors import MissingExtra

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

SHOWN = {"none", "ini", "json", "nginx", "yaml"}  # languages of blocks that nothing is done with
READS = {"list", "describe", "runs", "report", "resume"}  # commands that take no model, or that of the run
OTHERS = {"duckdb", "rsync", "systemctl"}  # programs of which we can check nothing
INDENTED = re.compile(r"(?<=\n\n)    \S[^\n]*\n(?:(?:    [^\n]*)?\n)*")
INLINE = re.compile(r"`((?:stovetop|make|pip|python)\s[^`]+)`")
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b|\.\.\.")


def name_of(page: Path) -> str:
    """As a test is called."""
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def work_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of pages are written in it and imported anew; runs go into runs/."""
    (folder / "runs").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name in {file_of(program) for page in PAGES for program in programs_of(page)} - {None}:
        monkeypatch.delitem(sys.modules, str(name).removesuffix(".py"), raising=False)


def file_of(program: str) -> str | None:
    """The name of the file that a program is, if it is one."""
    first = re.match(r"# (\w+\.py)\n", program)
    return None if first is None else first[1]


def programs_of(page: Path) -> list[str]:
    """The blocks of Python of a page."""
    document = Sybil([CodeBlockParser("python", lambda example: None)]).parse(page)
    return [str(example.parsed) for example in document.examples()]


def is_written_by_a_program(page: Path) -> bool:
    """Then its blocks of text are compared as part of the whole page (test_docs.py)."""
    return "This page is written by" in page.read_text(encoding="utf-8")


@dataclass(eq=False)
class Reader:
    """Does what a page says, in the working folder, which should be an empty one."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    replaced: Mapping[str, str] = field(default_factory=dict[str, str])  # in programs and commands: text by text
    names: dict[str, object] = field(default_factory=dict[str, object])  # of the programs until now
    printed: str | None = None  # by the last program, until the page has shown it
    all_printed: list[str] = field(default_factory=list[str])

    def read(self, page: Path) -> None:
        """All of it, in order. What a program prints must be shown, unless something was replaced in it."""
        parsers = [self._blocks, _commands(INLINE, self.understands), _commands(INDENTED, self.does)]
        if is_written_by_a_program(page):
            parsers[0] = CodeBlockParser("python", self.runs)
        for example in Sybil(parsers).parse(page).examples():
            try:
                example.evaluate()
            except Exception as error:
                error.add_note(f"{page.name}, line {example.line}")
                raise
        assert not self.printed, f"the page does not say that its program prints: {self.printed}"

    def _blocks(self, document: Document) -> Iterator[Region]:
        evaluators = {"python": self.runs, "text": self.shows} | dict.fromkeys(SHOWN, lambda example: None)
        for region in _fences(document):
            language, source = region.lexemes["language"], region.lexemes["source"]
            assert language in evaluators, f"no one knows what to do with this language: {language!r}"
            yield Region(region.start, region.end, source, evaluators[language])

    def runs(self, example: Example) -> None:
        """A program, from a file, so that what is defined in it has a source."""
        assert not self.printed, f"the page does not say that its program prints: {self.printed}"
        program = str(example.parsed)
        if (name := file_of(program)) is not None:
            Path(name).write_text(program.partition("\n")[2], encoding="utf-8")
            return
        replaced = self._replaced(program)
        Path("program.py").write_text(replaced, encoding="utf-8")
        before = {name: self.names[name] for name in self.names if not name.startswith("__")}
        self.capsys.readouterr()
        self.names = runpy.run_path("program.py", before)
        self.printed = self.capsys.readouterr().out
        self.all_printed.append(self.printed)
        if self.replaced:
            self.printed = None

    def shows(self, example: Example) -> None:
        """What the program above has printed."""
        assert self.printed == example.parsed, f"printed: {self.printed}\nshown: {example.parsed}"
        self.printed = None

    def does(self, example: Example) -> None:
        """The commands of an indented block."""
        for line in re.sub(r"\\\n\s*", "", self._replaced(example.parsed)).splitlines():
            if words := shlex.split(line, comments=True):
                self._does(words[: words.index(">")] if ">" in words else words)

    def _does(self, words: Sequence[str]) -> None:
        match words:
            case ["stovetop", verb, *more] if (
                (verb in READS and "--watch" not in more)
                or any("recording" in word for word in more)
                or (verb, more[:1]) == ("serve", ["keys"])
            ):
                assert main(words[1:]) == 0, words
                self.capsys.readouterr()
            case ["export", assignment]:
                name, _, value = assignment.partition("=")
                self.monkeypatch.setenv(name, value)
            case _:
                _understands(words)

    def understands(self, example: Example) -> None:
        """Inline code; one with a placeholder, or a mere name of a command, is not a whole command."""
        words = shlex.split(example.parsed.replace("\n", " "))
        if words[0] == "stovetop" and (len(words) == 2 or PLACEHOLDER.search(example.parsed)):
            entry("command", words[1], COMMANDS)
        else:
            _understands(words)

    def _replaced(self, text: str) -> str:
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text


def _is_understood(words: Sequence[str]) -> None:
    """Or refused, since it needs an extra that the tests do without."""
    try:
        understand(words)
    except MissingExtra as missing:
        extra = re.search(r"stovetop\[[\w-]+\]", str(missing))
        if extra is None or extra[0] in PROJECT["optional-dependencies"]["dev"]:
            raise


def _understands(words: Sequence[str]) -> None:
    match words:
        case ["stovetop", "run", recipe, *more]:
            own = [] if any("log_path" in word for word in more) else ["log_path=runs/of_its_own"]
            _is_understood(["run", recipe, "base_url=recording", *own, *more])
        case ["stovetop", *more]:
            _is_understood(more)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
        case ["pip", "install", *packages]:
            asked = re.findall(r"(?:stovetop|\.)\[([\w,-]+)\]", " ".join(packages))
            assert asked, f"it installs nothing of ours: {words}"
            for extra in ",".join(asked).split(","):
                entry("extra", extra, PROJECT["optional-dependencies"])
        case ["python", "-m", module, *_]:
            assert find_spec(module.partition(".")[0]), f"there is no such module: {module}"
        case ["python", file, *_]:
            assert (ROOT / file).is_file(), f"there is no such program: {file}"
        case [program, *_]:
            assert program in OTHERS, f"an indented block has commands; other things go into a fenced one: {words}"


def _fences(document: Document) -> list[Region]:
    info = re.compile(r"(?P<language>\S*)[^\n]*\n")
    return list(RawFencedCodeBlockLexer(info)(document))


def _commands(pattern: re.Pattern[str], evaluator: Callable[[Example], None]) -> Callable[[Document], Iterator[Region]]:
    """Matches outside of fenced blocks."""

    def parse(document: Document) -> Iterator[Region]:
        text = document.text
        for fence in _fences(document):
            text = text[: fence.start] + re.sub(r"[^\n]", "~", text[fence.start : fence.end]) + text[fence.end :]
        if pattern is INLINE:
            text = INDENTED.sub(lambda match: re.sub(r"[^\n]", "~", match[0]), text)
        for match in pattern.finditer(text):
            yield Region(match.start(), match.end(), match[match.re.groups], evaluator)

    return parse
