"""Talking to a model in a terminal: a chat as messages, answers shown as they come, a few commands. How lines are read
and text is shown is the `Terminal`'s business; the real one is in cli/models.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from stovetop.client import SamplingClient
from stovetop.completers import sample_in_pieces, until_stop, without_beginning
from stovetop.errors import InvalidRequest, StovetopError, UnknownName
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message
from stovetop.types import ModelInput, SamplingParams

FENCE = '"""'

COMMANDS = {
    "/system": "TEXT    begin the chat with this system message; without TEXT, with none",
    "/temperature": "T  0 is the most probable answer; without T, what it is now",
    "/reset": "         forget the chat; the system message stays",
    "/help": "          this list",
    "/quit": "          leave; so does Ctrl-D",
}
HELP = f"""\
{"".join(f"  {name} {meaning}{chr(10)}" for name, meaning in COMMANDS.items())}
  {FENCE}            begins a message of several lines, which ends with {FENCE}
  Ctrl-C         stops an answer; what it has said so far stays in the chat
"""


class Terminal(Protocol):
    def read(self, prompt: str) -> str:
        """One line. EOFError where the input ends, KeyboardInterrupt on Ctrl-C."""
        ...

    def write(self, text: str) -> None:
        """Shown at once. Ends a line only where the text does."""
        ...


class _Shown(NamedTuple):
    """What of an answer's tokens can be shown, and whether a stop sequence ends it there."""

    text: str
    ended: bool


@dataclass(slots=True)
class Chat:
    """One conversation. `run` reads, answers, and returns when it is over."""

    client: SamplingClient
    renderer: Renderer
    terminal: Terminal
    temperature: float = 0.7
    max_tokens: int = 512  # of one answer
    system: str = ""
    turns: list[Message] = field(default_factory=list[Message])  # user and assistant, in alternation

    @property
    def messages(self) -> list[Message]:
        opening = [Message(role="system", content=self.system)] if self.system else []
        return [*opening, *self.turns]

    def run(self) -> None:
        while True:
            try:
                said = self._read()
            except EOFError:
                self.terminal.write("\n")
                return
            except KeyboardInterrupt:
                self.terminal.write("\nNothing was sent. /quit leaves.\n")
                continue
            try:
                if said == "/quit":
                    return
                if said.startswith("/"):
                    self._command(said)
                elif said:
                    self._answer(said)
            except StovetopError as error:
                self.terminal.write(f"{error}\n")

    def _read(self) -> str:
        """A line, or the lines between two fences."""
        said = self.terminal.read("> ").strip()
        if not said.startswith(FENCE):
            return said
        lines = [said.removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(self.terminal.read(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip()

    def _command(self, said: str) -> None:
        name, _, argument = said.partition(" ")
        match name:
            case "/system":
                self.system = argument.strip()
            case "/temperature":
                self._set_temperature(argument.strip())
            case "/reset":
                self.turns.clear()
            case "/help":
                self.terminal.write(HELP)
            case _:
                raise UnknownName("command", name, COMMANDS)

    def _set_temperature(self, argument: str) -> None:
        if argument:
            try:
                self.temperature = SamplingParams(temperature=float(argument)).temperature
            except ValueError as error:
                raise InvalidRequest(f"a temperature is a number of at least 0: {argument!r}") from error
        self.terminal.write(f"The temperature is {self.temperature:g}.\n")

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, said: str) -> None:
        """Adds a question and its answer to the chat. A question without an answer leaves it as it was."""
        question = Message(role="user", content=said)
        prompt = self.renderer.build_generation_prompt([*self.messages, question])
        tokens: list[int] = []
        note = self._show(prompt, tokens)
        self.terminal.write(f"{note}\n")
        if tokens:
            answer, _ = self.renderer.parse_response(tokens)
            self.turns += [question, answer]

    def _show(self, prompt: ModelInput, tokens: list[int]) -> str:
        """Draws an answer into `tokens` and shows it; a note if it was cut off."""
        on_screen = ""
        try:
            for shown in self._pieces(prompt, tokens):
                if shown.text.startswith(on_screen):
                    self.terminal.write(shown.text.removeprefix(on_screen))
                    on_screen = shown.text
                if shown.ended:
                    return ""
        except KeyboardInterrupt:
            return " [stopped]"
        except StovetopError as error:
            if not tokens:
                raise
            return f" [{error}]"
        return f" [cut off after {self.max_tokens} tokens]"

    def _pieces(self, prompt: ModelInput, tokens: list[int]) -> Iterator[_Shown]:
        stop = self.renderer.get_stop_sequences()
        params = SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, stop=stop)
        for piece in sample_in_pieces(self.client, prompt, params, self.renderer.tokenizer):
            tokens += piece.tokens
            yield self._visible(tokens, piece.stop_reason == "stop")

    def _visible(self, tokens: Sequence[int], stopped: bool) -> _Shown:
        """The answer without its stop. What could be the beginning of one, or of a character, waits for the next
        piece."""
        stops = [stop for stop in self.renderer.get_stop_sequences() if isinstance(stop, str)]
        text = self.renderer.tokenizer.decode(tokens)
        cut = until_stop(text, stops)
        if cut is not None:
            return _Shown(cut, ended=True)
        if stopped:  # the last token is what stopped it
            return _Shown(self.renderer.tokenizer.decode(tokens[:-1]), ended=True)
        return _Shown(without_beginning(text.rstrip("\ufffd"), stops), ended=False)
