"""The protocol's conformance list: weights for other programs (items 52 and 53), and the archives of older clients.
Each test names its items."""

import asyncio
import hashlib
import io
import json
import tarfile
import time
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import pytest
import tinker
from click.testing import CliRunner
from running import KEY, Running, made, running, train
from tinker.cli.__main__ import main_cli

from engine import tiny
from stovetop.backends import local
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.errors import NotFoundError, TornCheckpoint
from stovetop.server.protocol import Asked
from stovetop.server.rest import download


def fetched(url: str) -> bytes:
    """Without any header of the client's."""
    with urllib.request.urlopen(url) as answer:
        assert answer.status == 200
        return answer.read()


def command(server: Running, *words: str) -> str:
    """What the `tinker` command prints."""
    environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    done = CliRunner().invoke(main_cli, ["-f", "json", *words], env=environment)
    assert done.exit_code == 0, done.output
    return done.output


def status_of(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url)
    with refused.value as answer:
        assert "detail" in json.loads(answer.read())
        return answer.code


def with_query(url: str, **changes: str) -> str:
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    return urlunsplit(parts._replace(query=urlencode({**query, **changes})))


def test_item_52_each_file_has_a_link_that_needs_no_key(server: Running, sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    train(client)
    path = client.save_weights_external("files").result().path
    assert path == f"tinker://{client.model_id}/external_weights/files"
    response = server.rest().get_external_weights_urls(path).result()
    (folder,) = server.storage.glob("checkpoints/*/sampler_weights/files.*")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {name: fetched(url) for name, url in response.urls.items()} == files


def test_item_52_a_link_that_was_changed_or_is_too_old_is_refused(
    server: Running, sdk: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = made(sdk)
    path = client.save_weights_external("signed").result().path
    other = client.save_weights_external("other").result().path
    url = next(iter(server.rest().get_external_weights_urls(path).result().urls.values()))
    for change in (
        {"path": other},
        {"file": "../../../journal.sqlite"},
        {"file": ""},
        {"expires": "9" * 12},
        {"n": "0"},
        {"signature": "0" * 64},
        {"signature": "ü"},
    ):
        assert status_of(with_query(url, **change)) == 403
    assert status_of(f"{server.url}/api/v1/download") == 400
    monkeypatch.setattr("stovetop.server.rest.GOOD_S", -1)
    late = next(iter(server.rest().get_external_weights_urls(path).result().urls.values()))
    assert status_of(late) == 403
    server.rest().delete_checkpoint_from_tinker_path(path).result()
    assert status_of(url) == 404


def test_item_56_an_archive_has_all_files(server: Running, sdk: tinker.ServiceClient) -> None:
    """Clients before 0.36 ask for one."""
    client = made(sdk)
    client.save_state("archived").result()
    with server.http() as http:
        url = http.get(f"training_runs/{client.model_id}/checkpoints/weights/archived/archive").json()["url"]
    (folder,) = server.storage.glob("checkpoints/*/weights/archived.*")
    with tarfile.open(fileobj=io.BytesIO(fetched(url))) as archive:
        found = {member.name: archive.extractfile(member) for member in archive}
        read = {name: file.read() for name, file in found.items() if file is not None}
    assert read == {file.name: file.read_bytes() for file in folder.iterdir()}


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_file_that_the_servers_disk_has_changed_is_not_sent_and_what_is_sent_comes_with_its_digest(
    server: Running, sdk: tinker.ServiceClient
) -> None:
    client = made(sdk)
    path = client.save_weights_external("flipped").result().path
    urls = server.rest().get_external_weights_urls(path).result().urls
    with server.http() as http:
        archive = http.get(f"training_runs/{client.model_id}/checkpoints/external_weights/flipped/archive").json()
    for url in urls.values():
        with urllib.request.urlopen(url) as answer:
            digest = b64encode(hashlib.sha256(answer.read()).digest()).decode()
            assert answer.headers["repr-digest"] == f"sha-256=:{digest}:"
    (folder,) = server.storage.glob("checkpoints/*/sampler_weights/flipped.*")
    for name, url in urls.items():
        whole = (folder / name).read_bytes()
        flip_a_bit(folder / name)
        for damaged in (url, archive["url"]):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(damaged)
            with refused.value as answer:
                said = answer.read().decode()
            assert answer.code == 400
            assert name in said
            assert path.rpartition("/")[2] in said
            assert str(server.storage) not in said
        (folder / name).write_bytes(whole)
        assert fetched(url) == whole


def test_a_bit_that_was_changed_on_the_way_of_a_download_is_found_when_it_is_read(
    server: Running, sdk: tinker.ServiceClient, service: InProcessServiceClient, tmp_path: Path
) -> None:
    path = made(sdk).save_weights_external("on_the_way").result().path
    urls = server.rest().get_external_weights_urls(path).result().urls
    for damaged in urls:
        folder = tmp_path / damaged
        folder.mkdir()
        for name, url in urls.items():
            (folder / name).write_bytes(fetched(url))
        service.create_sampling_client(str(folder)).result()
        flip_a_bit(folder / damaged)
        with pytest.raises(TornCheckpoint, match=damaged):
            service.create_sampling_client(str(folder)).result()


def test_item_52_encryption_is_refused_by_name(server: Running, sdk: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="age_encryption_recipients"):
        made(sdk).save_weights_external("secret", age_encryption_recipients=["age1x"]).result()


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
def test_item_53_the_tinker_command_downloads(
    server: Running, sdk: tinker.ServiceClient, tmp_path: Path, kind: str
) -> None:
    client = made(sdk)
    save = client.save_state if kind == "weights" else client.save_weights_external
    path = save(f"by-command-{kind}").result().path
    command(server, "checkpoint", "download", path, "--output", str(tmp_path))
    assert list(tmp_path.rglob("manifest.json"))
    left = server.rest().list_user_checkpoints(limit=1000).result().checkpoints
    assert not [each for each in left if each.checkpoint_id.endswith("/download")]


def test_item_54_the_tinker_command_lists_and_changes(server: Running, sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    path = client.save_state("listed").result().path
    assert client.model_id in command(server, "run", "list")
    assert client.model_id in command(server, "run", "info", client.model_id)
    assert path in command(server, "checkpoint", "list", "--run-id", client.model_id)
    assert path in command(server, "checkpoint", "list")
    for words in (["publish", path], ["unpublish", path], ["set-ttl", path, "--ttl", "3600"], ["info", path]):
        command(server, "checkpoint", *words)
    command(server, "checkpoint", "delete", path, "-y")
    assert path not in command(server, "checkpoint", "list")


def test_item_54_who_a_key_belongs_to_the_sdk_asks_of_jwt_alone(server: Running) -> None:
    with pytest.raises(RuntimeError, match="JWT"):
        server.rest().whoami().result()
    with server.http() as http:
        assert http.post("auth/token", json={}).status_code == 404


@pytest.mark.slow
def test_item_52_what_is_downloaded_is_an_adapter_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = tiny.save_model(tmp_path / "model", tiny.llama(0))

    def open_service(storage: Path) -> InProcessServiceClient:
        models = {"tiny/model": str(folder)}
        return local.open_service(storage=storage, models=models, preload=True, threads=1, download=None)

    with running(tmp_path / "storage", open_service) as server, server.sdk() as sdk:
        path = made(sdk).save_weights_external("peft").result().path
        target = tmp_path / "adapter"
        target.mkdir()
        for name, url in server.rest().get_external_weights_urls(path).result().urls.items():
            (target / name).write_bytes(fetched(url))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(target))
    assert model.peft_config["default"].r == 4


def test_the_files_of_a_download_stay_until_they_are_sent(server: Running, sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    path = client.save_weights_external("sent").result().path
    url = next(iter(server.rest().get_external_weights_urls(path).result().urls.values()))
    query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    answers = [asyncio.run(download(server.parts, Asked("", query=query))) for _ in range(2)]
    server.rest().delete_checkpoint_from_tinker_path(path).result()
    assert status_of(url) == 404
    for answer in answers:
        assert answer.file is not None
        assert answer.file.exists()
        assert answer.sent is not None
        answer.sent()
        assert answer.file.exists() == (answer is answers[0])
    with pytest.raises(NotFoundError):
        asyncio.run(download(server.parts, Asked("", query=query)))


def test_a_download_lets_go_of_its_files_when_it_is_sent_or_its_client_has_gone(
    server: Running, sdk: tinker.ServiceClient
) -> None:
    path = made(sdk).save_weights_external("let_go").result().path
    url = next(iter(server.rest().get_external_weights_urls(path).result().urls.values()))
    fetched(url)
    urllib.request.urlopen(url).close()
    server.rest().delete_checkpoint_from_tinker_path(path).result()
    give_up_s = time.monotonic() + 10
    while list(server.storage.glob("checkpoints/*/*/let_go.*")):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
