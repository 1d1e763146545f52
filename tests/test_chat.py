"""Talking in the terminal: what is sent, what is shown, and what stops what. The model is the recording backend's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from stovetop.backends import recording
from stovetop.chat import COMMANDS, Chat
from stovetop.cli import main
from stovetop.client import SamplingClient
from stovetop.completers import PIECE_TOKENS
from stovetop.futures import APIFuture, resolved
from stovetop.renderers import get_renderer
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

Line = str | type[KeyboardInterrupt]


class Script:
    """A terminal that somebody has already typed into."""

    def __init__(self, *lines: Line) -> None:
        self._lines = list(lines)
        self.shown = ""
        self.writes: list[str] = []

    def read(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def write(self, text: str) -> None:
        self.writes.append(text)
        self.shown += text


class Saying:
    """A model that says, whatever it is asked, what is next in its book, in pieces as asked for, and notes prompts."""

    def __init__(
        self, tokenizer: Tokenizer, *answers: str, before_piece: Callable[[int], None] = lambda n: None
    ) -> None:
        self._tokenizer = tokenizer
        self._answers = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        self._left: list[int] = []
        self._before_piece = before_piece
        self.prompts: list[str] = []  # of first pieces
        self.params: list[SamplingParams] = []

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> APIFuture[SampleResponse]:
        self._before_piece(len(self.params))
        self.params.append(sampling_params)
        if not self._left:
            self._left = self._answers.pop(0)
            self.prompts.append(self._tokenizer.decode(prompt.to_ints()))
        size = sampling_params.max_tokens or 0
        piece, self._left = self._left[:size], self._left[size:]
        ended = piece[-1] == self._tokenizer.eos_token_id
        return resolved(SampleResponse([SampledSequence("stop" if ended else "length", piece, [0.0] * len(piece))]))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SamplingClient]:
    with recording.open_service(tmp_path) as service:
        yield service.create_sampling_client(base_model="any/model").result()


def chat_of(
    client: "SamplingClient | Saying",
    tokenizer: Tokenizer,
    *lines: Line,
    renderer: str = "chat_template",
    **settings: Any,
) -> Chat:
    chat = Chat(cast(SamplingClient, client), get_renderer(renderer, tokenizer), Script(*lines), **settings)
    chat.run()
    return chat


def shown(chat: Chat) -> str:
    assert isinstance(chat.terminal, Script)
    return chat.terminal.shown


def test_what_is_shown_is_what_one_long_sample_would_have_said(client: SamplingClient) -> None:
    tokenizer = client.get_tokenizer()
    chat = chat_of(client, tokenizer, "Hello", temperature=0.0, max_tokens=60)
    renderer = get_renderer("chat_template", tokenizer)
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "Hello"}])
    params = SamplingParams(max_tokens=60, temperature=0.0, stop=renderer.get_stop_sequences())
    whole, _ = renderer.parse_response(client.sample(prompt, 1, params).result().sequences[0].tokens)
    assert str(whole["content"]) in shown(chat)
    assert [message["content"] for message in chat.turns] == ["Hello", whole["content"]]


def test_an_answer_appears_piece_by_piece_and_without_its_stop_token(client: SamplingClient) -> None:
    tokenizer = client.get_tokenizer()
    chat = chat_of(Saying(tokenizer, "one two three four<|im_end|>"), tokenizer, "Count")
    assert isinstance(chat.terminal, Script)
    assert chat.terminal.writes[:3] == ["one two ", "three fo", "ur"]
    assert "<|im_end|>" not in chat.terminal.shown


def test_a_character_that_is_cut_by_a_piece_is_shown_whole(client: SamplingClient) -> None:
    tokenizer = client.get_tokenizer()
    text = "1234567é and on"  # its two bytes lie in two pieces
    assert len(b"1234567") == PIECE_TOKENS - 1
    chat = chat_of(Saying(tokenizer, f"{text}<|im_end|>"), tokenizer, "Hi")
    assert shown(chat).startswith(f"{text}\n")
    assert "\ufffd" not in shown(chat)


@pytest.mark.parametrize("lead", range(PIECE_TOKENS))
def test_a_stop_string_across_pieces_still_ends_the_answer(client: SamplingClient, lead: int) -> None:
    tokenizer = client.get_tokenizer()
    saying = Saying(tokenizer, f" {'x' * lead}yes\n\nUser: and more{'.' * 40}")
    chat = chat_of(saying, tokenizer, "Well?", renderer="role_colon")
    assert shown(chat) == f" {'x' * lead}yes\n\n"
    assert chat.turns[-1]["content"] == f"{'x' * lead}yes"


def test_the_history_is_messages_and_the_next_prompt_shows_them(client: SamplingClient) -> None:
    tokenizer = client.get_tokenizer()
    saying = Saying(tokenizer, "Hi.<|im_end|>", "Bye.<|im_end|>", "Oh.<|im_end|>")
    chat = chat_of(saying, tokenizer, "/system Be brief", "Hello", "Farewell", "/reset", "Again")
    assert "system\nBe brief" in saying.prompts[0]
    assert (
        "user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nFarewell" in saying.prompts[1]
    )
    assert "Hello" not in saying.prompts[2]
    assert "Be brief" in saying.prompts[2]
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


def test_a_fenced_message_keeps_its_lines(client: SamplingClient) -> None:
    tokenizer = client.get_tokenizer()
    chat = chat_of(Saying(tokenizer, "ok<|im_end|>"), tokenizer, '"""first', "", "  /quit in the text", 'last"""')
    assert chat.turns[0]["content"] == "first\n\n  /quit in the text\nlast"


def test_the_temperature_is_the_next_answers(client: SamplingClient) -> None:
    tokenizer = client.get_tokenizer()
    saying = Saying(tokenizer, "a<|im_end|>")
    chat = chat_of(saying, tokenizer, "/temperature 0.2", "/temperature -1", "/temperature hot", "/temperature", "Hi")
    assert saying.params[0].temperature == 0.2
    assert shown(chat).count("The temperature is 0.2.") == 2
    assert shown(chat).count("a temperature is a number of at least 0") == 2


def test_ctrl_c_stops_the_answer_and_not_the_program(client: SamplingClient) -> None:
    tokenizer = client.get_tokenizer()

    def interrupt(piece: int) -> None:
        if piece == 1:
            raise KeyboardInterrupt

    saying = Saying(tokenizer, "one two three<|im_end|>", before_piece=interrupt)
    chat = chat_of(saying, tokenizer, KeyboardInterrupt, "Count", "/help")
    assert [message["content"] for message in chat.turns] == ["Count", "one two "]
    assert "Nothing was sent" in shown(chat)
    assert "one two  [stopped]\n" in shown(chat)
    assert all(name in shown(chat) for name in COMMANDS)


def test_an_answer_ends_at_its_budget_and_says_so(client: SamplingClient) -> None:
    tokenizer = client.get_tokenizer()
    saying = Saying(tokenizer, "abcdefghijklmnop")
    chat = chat_of(saying, tokenizer, "Go on", max_tokens=11)
    assert shown(chat).startswith("abcdefghijk [cut off after 11 tokens]")
    assert [params.max_tokens for params in saying.params] == [8, 3]


def test_a_question_that_cannot_be_answered_leaves_the_chat_as_it_was(client: SamplingClient) -> None:
    chat = chat_of(client, client.get_tokenizer(), "x" * 200_000, "/sytsem")
    assert chat.turns == []
    assert "the context of any/model is 8192" in shown(chat)
    assert "did you mean '/system'?" in shown(chat)


def test_quit_leaves_and_what_is_typed_after_it_is_not_read(client: SamplingClient) -> None:
    assert "unknown" not in shown(chat_of(client, client.get_tokenizer(), "", "/quit", "/never"))


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def type_lines(*lines: str) -> None:
        script = Script(*lines)
        monkeypatch.setattr("builtins.input", script.read)

    return type_lines


def test_the_command_talks_to_a_model(typed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    typed("Hello", "/quit")
    assert main(["chat", "any/model", "--base-url", "recording", "--max-tokens", "3", "--temperature", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("any/model, spoken to as chat_template writes chats.")
    assert "[cut off after 3 tokens]" in said


def test_the_command_talks_to_a_checkpoint(
    tmp_path: Path, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/model", seed=0)
        path = trainer.save_weights_for_sampler("mine").result().path
    typed()
    assert main(["chat", path, "--base-url", "recording", "--renderer", "role_colon"]) == 0
    assert "spoken to as role_colon" in capsys.readouterr().out
