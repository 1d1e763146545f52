"""What docs/serving.md and docs/openai.md show, works as it is printed: against a server of the fake model."""

import re
from pathlib import Path

import pytest
from running import running

from engine import tiny
from pages import DOCS, Reader
from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.cli import serve, serve_keys, understand

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CLIENTS = {"serving": ["service"], "openai": ["service", "client"]}  # that the programs of a page open


@pytest.mark.parametrize("page", CLIENTS)
def test_a_page_about_a_server_does_what_it_says(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One and a half seconds: the tokenizer of a model that transformers reads."""
    monkeypatch.chdir(tmp_path)
    tiny.save_model(tmp_path / MODEL)  # where the SDK looks before it asks the hub
    for module in (serve, serve_keys):
        monkeypatch.setattr(module, "DEFAULT_STORAGE", tmp_path / "storage")

    def open_service(storage: Path) -> InProcessServiceClient:
        return recording.open_service(storage, models=[MODEL, "smollm2"], preload=True)

    with running(tmp_path / "server", open_service) as server:
        replaced = {"http://127.0.0.1:8765": server.url, "/srv/my-model": str(tmp_path / MODEL)}
        reader = Reader(capsys, monkeypatch, replaced)
        reader.read(DOCS / f"{page}.md")
        for name in CLIENTS[page]:
            server.clients.push(reader.names[name])  # closed before the server
    if page == "serving":
        losses = [float(loss) for loss in reader.all_printed[0].split()]
        assert len(losses) == 5
        assert losses[-1] < losses[0]


def test_the_unit_of_systemd_starts_a_server_that_exists() -> None:
    (words,) = re.findall(r"^ExecStart=\S+/stovetop (.*)$", (DOCS / "serving.md").read_text(), re.MULTILINE)
    understand(words.split())
