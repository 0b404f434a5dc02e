"""API keys: the file, who is let in, who may do what, and the command that makes them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cli.main import main as glm53
from services.common.errors import ConfigError
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import ApiKey, KeyTable, digest_of, new_key, parse_keys, read_keys
from services.gateway.openapi import OPERATIONS
from services.gateway.settings import GatewaySettings
from tests.gateway.access import ask, write_keys
from tests.gateway.fake_worker import Finish, Say, Script
from tests.gateway.stack import Stack, until
from tests.gateway.test_validation import check_error


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(key_file: Path) -> dict[str, str]:
    return write_keys(
        key_file,
        user={},
        admin={"admin": True},
        batch={"priority": "batch"},
        other={"models": ["some-other-model"]},
        old={"expires": "2020-01-01T00:00:00Z"},
    )


@pytest.fixture(scope="module")
def locked(keys: dict[str, str], key_file: Path) -> Iterator[Stack]:
    """A gateway that asks for keys."""
    stack = Stack(api_keys_file=str(key_file))
    yield stack
    stack.close()


# ---- the door ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/stats", "/nowhere"])
def test_without_a_key_only_health_and_metrics_answer(locked: Stack, path: str) -> None:
    """401 in OpenAI's shape with WWW-Authenticate, also for URLs that do not exist."""
    response = locked.http.get(path)
    error = check_error(response, None, 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    for open_path in ("/health", "/health/ready", "/health/live", "/metrics"):
        assert locked.http.get(open_path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer " + "x" * 5000},
        {"Authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "wrong"},
        {"Authorization": "Bearer " + "0" * 64},
    ],
)
def test_a_request_without_a_known_key_is_refused_before_its_body_is_read(locked: Stack, headers: dict[str, Any]) -> None:
    """401 for no key, an unknown one, an absurd one; a body that is no JSON does not matter, the worker hears nothing."""
    before = len(locked.worker.requests)
    error = check_error(locked.http.post("/v1/chat/completions", content=b"{broken", headers=headers), None, 401)
    assert error["code"] == "invalid_api_key"
    assert len(locked.worker.requests) == before


def test_a_hash_is_not_a_key(locked: Stack, key_file: Path) -> None:
    """Who has read the file has no key."""
    stolen = json.loads(key_file.read_text())["keys"][0]["sha256"]
    check_error(ask(locked, stolen), None, 401)


def test_both_headers_carry_a_key(locked: Stack, keys: dict[str, str]) -> None:
    """Authorization: Bearer, in any case of the scheme, and x-api-key as Anthropic's clients send it."""
    for headers in ({"Authorization": f"Bearer {keys['user']}"}, {"Authorization": f"bearer  {keys['user']}"}, {"x-api-key": keys["user"]}):
        assert locked.http.get("/v1/models", headers=headers).status_code == 200


def test_the_official_client_names_the_refusal(locked: Stack, keys: dict[str, str]) -> None:
    """openai raises AuthenticationError and PermissionDeniedError with our code."""
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=keys["other"], max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError) as denied:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        assert denied.value.code == "model_not_allowed"
        assert list(client.models.list()) == []


def test_an_expired_key_is_unknown(locked: Stack, keys: dict[str, str]) -> None:
    """401 from the expiry on."""
    check_error(ask(locked, keys["old"]), None, 401)


def test_only_admin_keys_read_stats(locked: Stack, keys: dict[str, str]) -> None:
    """403 permission_denied for a user's key, 200 for an admin's."""
    refused = locked.http.get("/stats", headers={"Authorization": f"Bearer {keys['user']}"})
    assert check_error(refused, None, 403)["code"] == "permission_denied"
    assert locked.http.get("/stats", headers={"Authorization": f"Bearer {keys['admin']}"}).status_code == 200


def test_the_worker_learns_who_asks_and_how_urgent_it_is(locked: Stack, keys: dict[str, str]) -> None:
    """key_id and priority reach the worker's queue; a key gets no better band than its own."""
    locked.worker.script = Script((Say("</think>x"), Finish()))
    for name, priority in (("user", pb.PRIORITY_NORMAL), ("batch", pb.PRIORITY_BATCH)):
        assert ask(locked, keys[name]).status_code == 200
        assert (locked.worker.requests[-1].key_id, locked.worker.requests[-1].priority) == (name, priority)


@pytest.mark.parametrize(
    ("own", "asked", "got"),
    [
        ("normal", pb.PRIORITY_UNSPECIFIED, pb.PRIORITY_NORMAL),
        ("normal", pb.PRIORITY_HIGH, pb.PRIORITY_NORMAL),
        ("normal", pb.PRIORITY_BATCH, pb.PRIORITY_BATCH),
        ("high", pb.PRIORITY_NORMAL, pb.PRIORITY_NORMAL),
        ("high", pb.PRIORITY_HIGH, pb.PRIORITY_HIGH),
        ("batch", pb.PRIORITY_HIGH, pb.PRIORITY_BATCH),
    ],
)
def test_a_request_may_step_back_but_not_forward(own: str, asked: int, got: int) -> None:
    """What is asked for counts only where it is no better than the key's own band."""
    assert ApiKey(id="a", sha256="0" * 64, priority=own).priority_of(asked) == got  # type: ignore[arg-type]


def test_nobody_logs_a_key(locked: Stack, keys: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Neither accepted nor refused keys reach the log."""
    with caplog.at_level("DEBUG"):
        ask(locked, keys["user"])
        ask(locked, "sk-glm53-not-a-key-at-all-but-secret")
    text = "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert keys["user"] not in text
    assert "not-a-key-at-all" not in text


# ---- without keys --------------------------------------------------------------------------------------------------------------


def test_without_a_key_file_everybody_may_do_everything(stack: Stack) -> None:
    """On one's own machine nothing is asked for; a key that is sent does not matter."""
    assert ask(stack, None).status_code == 200
    assert ask(stack, "whatever").status_code == 200
    assert stack.http.get("/stats").status_code == 200
    # The worker must not take everybody for one greedy key.
    assert stack.worker.requests[-1].key_id == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_public_address_needs_keys_or_a_word(host: str, tmp_path: Path) -> None:
    """Without a key file the start is refused and says what to do; with one, or GLM53_ALLOW_PUBLIC_WITHOUT_KEYS=1, it is not."""
    with pytest.raises(ConfigError, match="GLM53_ALLOW_PUBLIC_WITHOUT_KEYS=1"):
        GatewaySettings.load({"HOST": host})
    assert GatewaySettings.load({"HOST": host, "GLM53_ALLOW_PUBLIC_WITHOUT_KEYS": "1"}).host == host
    assert GatewaySettings.load({"HOST": host, "GLM53_API_KEYS_FILE": str(tmp_path / "k")}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    """The default start works without keys."""
    assert GatewaySettings.load({"HOST": host}).host == host


# ---- headers, CORS -------------------------------------------------------------------------------------------------------------


def test_too_large_or_too_many_headers_are_refused_in_words() -> None:
    """431 in OpenAI's shape, which names the setting."""
    stack = Stack(max_header_bytes=4096)
    try:
        error = check_error(stack.http.get("/v1/models", headers={"x-a": "b" * 5000}), None, 431)
        assert error["code"] == "headers_too_large"
        assert "GLM53_MAX_HEADER_BYTES" in error["message"]
        many = {f"x-{i}": "1" for i in range(300)}
        check_error(stack.http.get("/v1/models", headers=many), None, 431)
        assert stack.http.get("/v1/models", headers={"x-a": "b" * 3000}).status_code == 200
    finally:
        stack.close()


def test_cors_is_off_by_default_and_allows_only_what_is_listed(stack: Stack, key_file: Path, keys: dict[str, str]) -> None:
    """No header for a web page by default; with a list, preflights of listed pages pass without a key and others fail."""
    page = {"Origin": "https://chat.example.com"}
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    assert "access-control-allow-origin" not in stack.http.get("/v1/models", headers=page).headers
    listed = Stack(cors_origins="https://chat.example.com, https://other.example.com", api_keys_file=str(key_file))
    try:
        allowed = listed.http.options("/v1/chat/completions", headers=preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.example.com")
        # Every method of the API, or a page could make responses that it cannot delete.
        methods = {operation.method.upper() for operation in OPERATIONS}
        assert methods == set(allowed.headers["access-control-allow-methods"].split(", "))
        stranger = listed.http.options("/v1/chat/completions", headers={**preflight, "Origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in stranger.headers
        # A page must be able to read why it was refused.
        refused = listed.http.get("/v1/models", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example.com")
    finally:
        listed.close()


# ---- the file ------------------------------------------------------------------------------------------------------------------


def entries(*changes: dict[str, Any]) -> str:
    """A key file with one entry for each dict of changes; the id alone is an entry without a hash."""
    whole = {"id": "a", "sha256": "a" * 64}
    return json.dumps({"keys": [change if change == {"id": "a"} else {**whole, **change} for change in changes]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "must be"),
        ('{"keys": {}}', "must be"),
        (entries({"id": "a"}), r"keys\[0\].sha256"),
        (entries({"sha256": "abc"}), r"keys\[0\].sha256"),
        (entries({"id": "a b"}), r"keys\[0\].id"),
        (entries({"rpm": 3}), r"keys\[0\].rpm"),
        (entries({"requests_per_minute": 0}), r"keys\[0\].requests_per_minute"),
        (entries({"requests_per_minute": "9"}), r"keys\[0\].requests_per_minute"),
        (entries({"admin": "yes"}), r"keys\[0\].admin"),
        (entries({"priority": "top"}), r"keys\[0\].priority"),
        (entries({"expires": "2020-01-01T00:00:00"}), r"keys\[0\].expires"),
        (entries({}, {"id": "b"}), r"keys\[1\].sha256 is there twice"),
        (entries({}, {"sha256": "b" * 64}), r"keys\[1\].id is there twice"),
    ],
)
def test_a_wrong_file_is_refused_and_names_the_entry(text: str, words: str) -> None:
    """A misspelt limit must not silently become no limit."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_keys(text, "keys.json")
    assert caught.value.param == "GLM53_API_KEYS_FILE"


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    """A gateway that was told to ask for keys does not start without them."""
    missing = tmp_path / "none.json"
    with pytest.raises(ConfigError, match=f"GLM53_API_KEYS_FILE: cannot read the key file {missing}: .*keys create --file {missing} --id"):
        KeyRing(missing)
    with pytest.raises(ConfigError, match=f"GLM53_API_KEYS_FILE: cannot read the key file {tmp_path}: Is a directory$"):
        KeyRing(tmp_path)


def test_a_table_finds_exactly_its_keys() -> None:
    """Every key of a thousand is found, nothing else is, hashes that share their first bytes included."""
    keys = [new_key() for _ in range(1000)]
    table = KeyTable(ApiKey(id=f"k{i}", sha256=digest_of(key).hex()) for i, key in enumerate(keys))
    for i, key in enumerate(keys):
        found = table.find(digest_of(key))
        assert found is not None
        assert found.id == f"k{i}"
        near = bytearray(digest_of(key))
        near[-1] ^= 1
        assert table.find(bytes(near)) is None


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """New keys count, withdrawn ones do not; a broken or missing file changes nothing and is counted."""
    path = tmp_path / "keys.json"
    first = write_keys(path, a={}, b={})
    ring = KeyRing(path)
    heard: list[set[str]] = []
    ring.listen(lambda _table, gone, _added: heard.append(gone))
    assert not ring.reload_if_changed()
    path.write_text("{")
    assert not ring.reload_if_changed()
    path.unlink()
    assert not ring.reload_if_changed()
    assert ring.failed_reloads == 2
    assert ring.find(first["a"]) is not None
    second = write_keys(path, c={})
    assert ring.reload_if_changed()
    assert ring.find(first["a"]) is None
    assert ring.find(second["c"]) is not None
    assert heard == [{digest_of(key).hex() for key in first.values()}]


def test_a_word_from_another_gateway_withdraws_a_key_until_the_file_changes(tmp_path: Path) -> None:
    """Our copy of the file may be older than theirs; once it changes, it is the truth again."""
    path = tmp_path / "keys.json"
    keys = write_keys(path, a={})
    ring = KeyRing(path)
    ring.revoke(digest_of(keys["a"]).hex())
    assert ring.find(keys["a"]) is None
    os.utime(path, (1, 1))
    assert ring.reload_if_changed()
    assert ring.find(keys["a"]) is not None


def test_a_running_gateway_takes_up_a_changed_file(tmp_path: Path) -> None:
    """Within seconds, without a restart."""
    path = tmp_path / "keys.json"
    before = write_keys(path, a={})
    stack = Stack(api_keys_file=str(path))
    try:
        assert ask(stack, before["a"]).status_code == 200
        after = write_keys(path, b={})
        until(lambda: ask(stack, after["b"]).status_code == 200, "the new key counts")
        check_error(ask(stack, before["a"]), None, 401)
    finally:
        stack.close()


# ---- glm53 keys ----------------------------------------------------------------------------------------------------------------


def test_glm53_keys_makes_lists_and_withdraws(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed key fits the file, the file does not hold it and is private; a withdrawn key is gone; wrong use is code 78."""
    # The command sends logs to standard error for good, which is the test's only until its end.
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    path = tmp_path / "keys.json"
    create = ["keys", "create", "--file", str(path), "--id", "team", "--requests-per-minute", "5", "--model", "tiny", "--priority", "batch"]
    assert glm53(create) == 0
    key = capsys.readouterr().out.strip()
    found = read_keys(path).find(digest_of(key))
    assert found is not None
    assert (found.id, found.requests_per_minute, found.models, found.priority) == ("team", 5, ("tiny",), "batch")
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert glm53(create) == 78
    assert glm53(["keys", "list", "--file", str(path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["id"] == "team"
    assert "sha256" not in listed
    monkeypatch.setattr("sys.stdin", io.StringIO(key + "\n"))
    assert glm53(["keys", "hash"]) == 0
    assert capsys.readouterr().out.strip() == found.sha256
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert glm53(["keys", "hash"]) == 78
    assert glm53(["keys", "revoke", "--file", str(path), "--id", "team"]) == 0
    assert read_keys(path).keys == ()
    assert glm53(["keys", "revoke", "--file", str(path), "--id", "team"]) == 78
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.json"]


def test_glm53_keys_writes_over_nothing_but_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file is refused and stays; a link to the keys stays a link, and the keys behind it change."""
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    other, real, link = tmp_path / "diary", tmp_path / "disk" / "keys.json", tmp_path / "keys.json"
    other.write_text("day 1")
    assert glm53(["keys", "create", "--file", str(other), "--id", "a"]) == 78
    assert other.read_text() == "day 1"
    real.parent.mkdir()
    write_keys(real, ada={})
    link.symlink_to(real)
    assert glm53(["keys", "create", "--file", str(link), "--id", "a"]) == 0
    key = capsys.readouterr().out.strip()
    assert link.is_symlink()
    assert read_keys(real).find(digest_of(key)) is not None


def test_glm53_keys_takes_the_file_that_the_server_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --file it is GLM53_API_KEYS_FILE, from where the server starts; without both, the error names them."""
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    monkeypatch.delenv("GLM53_API_KEYS_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    for action in (["create", "--id", "a"], ["list"], ["revoke", "--id", "a"]):
        caplog.clear()
        assert glm53(["keys", *action]) == 78
        assert "Give --file, or set GLM53_API_KEYS_FILE" in caplog.text
    (tmp_path / "root").mkdir()
    monkeypatch.setenv("GLM53_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("GLM53_API_KEYS_FILE", "keys.json")
    assert glm53(["keys", "create", "--id", "a"]) == 0
    key = capsys.readouterr().out.strip()
    assert read_keys(tmp_path / "root" / "keys.json").find(digest_of(key)) is not None
    assert glm53(["keys", "list"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "a"
    caplog.clear()
    assert glm53(["keys", "create", "--id", "a"]) == 78
    assert "has a key 'a' already: take another --id" in caplog.text
    assert glm53(["keys", "revoke", "--id", "a"]) == 0
    assert read_keys(tmp_path / "root" / "keys.json").keys == ()
