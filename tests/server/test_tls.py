"""A reverse proxy that speaks TLS, set up as docs/serving.md says."""

import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from running import KEY, MODELS, Running, running

from stovetop.server.ports import listen

STEPS = Path(__file__).with_name("sdk_steps.py")
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Running, str, Path]]:
    """A server, the address of the proxy before it, and the certificate that its clients must trust."""
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("needs nginx and openssl; to install them: apt-get install nginx openssl")
    make_certificates(tmp_path)
    with running(tmp_path / "storage") as server:
        port = free_port()
        with proxy(tmp_path, port, server):
            yield server, f"https://localhost:{port}", tmp_path / "ca.pem"


def make_certificates(folder: Path) -> None:
    """One of an authority, and by it that of localhost."""
    (folder / "names.txt").write_text("subjectAltName=DNS:localhost\n")
    for words in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=kitchen",
        "req -newkey rsa:2048 -nodes -keyout gpu.key -out gpu.csr -subj /CN=localhost",
        "x509 -req -in gpu.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out gpu.pem -days 2 -extfile names.txt",
    ):
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True, timeout=60)


def free_port() -> int:
    with listen("127.0.0.1", 0) as listening:
        return listening.getsockname()[1]


@contextmanager
def proxy(folder: Path, port: int, server: Running) -> Iterator[None]:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    configuration = f"""
    daemon off; master_process off; pid {folder / "nginx.pid"}; error_log {folder / "nginx.log"};
    events {{}} http {{ access_log off; {places} {as_the_page_says(folder, port, server)} }}
    """
    (folder / "nginx.conf").write_text(configuration)
    words = ["nginx", "-e", str(folder / "nginx.log"), "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + 20
        while time.monotonic() < give_up_s and process.poll() is None:
            try:
                httpx.get(f"https://localhost:{port}/healthz", verify=trusting(folder / "ca.pem"))
                break
            except httpx.TransportError:
                time.sleep(0.05)
        assert process.poll() is None, (folder / "nginx.log").read_text()
        yield
    finally:
        process.terminate()
        process.wait(20)


def as_the_page_says(folder: Path, port: int, server: Running) -> str:
    block = PAGE.read_text().partition("```nginx\n")[2].partition("```")[0]
    for theirs, ours in {
        "listen 443": f"listen 127.0.0.1:{port}",
        "gpu.example.org;": "localhost;",
        "/etc/ssl/gpu.example.org.pem": str(folder / "gpu.pem"),
        "/etc/ssl/gpu.example.org.key": str(folder / "gpu.key"),
        "http://127.0.0.1:8765": server.url,
    }.items():
        assert theirs in block, theirs
        block = block.replace(theirs, ours)
    return block


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def test_a_program_with_the_sdk_works_through_a_proxy_that_speaks_tls(proxied: tuple[Running, str, Path]) -> None:
    _, url, certificate = proxied
    environment = {**os.environ, "SSL_CERT_FILE": str(certificate), "TINKER_TELEMETRY": "0"}  # noqa: TID251  a client's
    command = [sys.executable, str(STEPS), url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_to_files_lead_through_the_proxy(proxied: tuple[Running, str, Path]) -> None:
    _, url, certificate = proxied
    headers = {"X-API-Key": KEY}
    with httpx.Client(base_url=f"{url}/api/v1/", headers=headers, verify=trusting(certificate), timeout=30) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        made = {"session_id": session, "model_seq_id": 0, "base_model": MODELS[0]}
        model_id = http.post("create_model", json=made).json()["model_id"]
        saving = http.post("save_weights_external", json={"model_id": model_id, "seq_id": 1, "path": "files"}).json()
        assert "path" in http.post("retrieve_future", json={"request_id": saving["request_id"]}).json()
        at = f"training_runs/{model_id}/checkpoints/external_weights/files/external_weights_urls"
        urls = http.get(at).json()["urls"]
        assert all(each.startswith(f"{url}/api/v1/download?") for each in urls.values())
        assert all(httpx.get(each, verify=trusting(certificate)).status_code == 200 for each in urls.values())
