"""Keys: made once, kept as digests, good until they are revoked, while the server runs."""

from pathlib import Path

import httpx
import pytest
from running import Running, running

from stovetop.cli import main
from stovetop.errors import AuthenticationError, InvalidRequest, StovetopError
from stovetop.server.keys import FILE, Keys, add_key, local_owner, read_keys, revoke_key
from stovetop.server.limits import OwnerLimits


def status(server: Running, key: str) -> int:
    answer = httpx.post(f"{server.url}/api/v1/client/config", json={}, headers={"X-API-Key": key})
    return answer.status_code


def test_of_a_key_only_the_digest_is_kept(tmp_path: Path) -> None:
    key = add_key(tmp_path, "alice")
    assert key.startswith("tml-")
    assert len(key) > 40
    text = (tmp_path / FILE).read_text()
    assert key not in text
    assert key.removeprefix("tml-") not in text
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    assert Keys(tmp_path).owner_of(key) == "alice"


def test_a_running_server_sees_a_key_that_is_added_or_revoked(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with running(tmp_path, owner_of=keys.owner_of, limits_of=keys.limits_of) as server:
        assert status(server, "tml-local") == 200
        alice = add_key(tmp_path, "alice")
        assert (status(server, "tml-local"), status(server, alice)) == (401, 200)
        bob = add_key(tmp_path, "bob")
        revoke_key(tmp_path, "alice")
        assert (status(server, alice), status(server, bob)) == (401, 200)
        revoke_key(tmp_path, "bob")
        assert (status(server, bob), status(server, "tml-local")) == (401, 401)


def test_the_next_key_of_a_name_reaches_what_the_one_before_has_made(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with running(tmp_path, owner_of=keys.owner_of) as server:
        with server.http("tml-local") as http:
            session = http.post("create_session", json={}).json()["session_id"]
        with server.http(add_key(tmp_path, "alice")) as http:
            assert http.post("session_heartbeat", json={"session_id": session}).status_code == 404
        for _ in range(2):
            with server.http(add_key(tmp_path, "local")) as http:
                assert http.post("session_heartbeat", json={"session_id": session}).status_code == 200
            revoke_key(tmp_path, "local")


def test_a_file_that_has_vanished_or_is_torn_lets_nobody_in(tmp_path: Path) -> None:
    key = add_key(tmp_path, "alice")
    keys = Keys(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    for damage in (lambda: (tmp_path / FILE).unlink(), lambda: (tmp_path / FILE).write_bytes(content[:30])):
        damage()
        for each in (key, "tml-local"):
            with pytest.raises(AuthenticationError, match="wants a key of its own"):
                keys.owner_of(each)
    with pytest.raises(StovetopError, match="put back a copy of it"):
        Keys(tmp_path)
    (tmp_path / FILE).write_bytes(content)
    assert keys.owner_of(key) == "alice"


def test_limits_are_those_of_the_key(tmp_path: Path) -> None:
    add_key(tmp_path, "alice", OwnerLimits(max_models=3))
    keys = Keys(tmp_path)
    assert keys.limits_of("alice").max_models == 3
    assert keys.limits_of("nobody").max_models is not None


@pytest.mark.parametrize("name", ["", "a b", "../x", "-rf", "a" * 65, "é"])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="a name has letters"):
        add_key(tmp_path, name)


def test_without_a_file_any_key_of_the_form_is_the_owners() -> None:
    assert local_owner("tml-whatever") == "local"
    with pytest.raises(AuthenticationError, match="begins with tml-"):
        local_owner("sk-whatever")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = ["--storage", str(tmp_path)]
    assert main(["serve", "keys", "add", "alice", "--max-models", "2", *storage]) == 0
    key = capsys.readouterr().out.strip().removeprefix("export TINKER_API_KEY=")
    assert Keys(tmp_path).owner_of(key) == "alice"
    assert main(["serve", "keys", "add", "alice", *storage]) == 1
    assert "revoke it first" in capsys.readouterr().err
    assert main(["serve", "keys", "list", *storage]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed
    assert "max_models 2" in listed
    assert key not in listed
    assert main(["serve", "keys", "revoke", "alice", *storage]) == 0
    assert main(["serve", "keys", "revoke", "alice", *storage]) == 1
    assert "there is no key of this name" in capsys.readouterr().err
    assert read_keys(tmp_path / FILE) == ()


def test_another_host_needs_keys_and_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "tiny=" + str(tmp_path), "--storage", str(tmp_path)]
    assert main([*words, "--host", "0.0.0.0"]) == 2
    assert "--name gpu.example.org" in capsys.readouterr().err
    assert main([*words, "--host", "192.0.2.1"]) == 2
    assert "needs keys" in capsys.readouterr().err
    assert main([*words, "--host", "0.0.0.0", "--name", "*"]) == 2
    assert "is the name of a machine" in capsys.readouterr().err
