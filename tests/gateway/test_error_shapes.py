"""Every refusal speaks the client's language: OpenAI's shape everywhere, Anthropic's on its URLs, whoever in the gateway refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from services.common import errors
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway import anthropic as messages
from services.gateway import chat
from tests.gateway.access import write_keys
from tests.gateway.fake_worker import Fail, Script
from tests.gateway.stack import HELLO, MODEL, Stack, until

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return {"file": str(path), **write_keys(path, user={}, elsewhere={"models": ["other"]}, slow={"requests_per_minute": 1})}


@pytest.fixture(scope="module")
def locked(keys: dict[str, str]) -> Iterator[Stack]:
    """A gateway with keys and small limits."""
    stack = Stack(api_keys_file=keys["file"], max_body_bytes=70_000, max_header_bytes=4096)
    yield stack
    stack.close()


@pytest.fixture
def door(locked: Stack) -> Iterator[Stack]:
    """The same with its worker as new."""
    locked.worker.script = Script()
    yield locked
    locked.worker.state = pb.SERVICE_STATE_READY
    until(lambda: locked.http.get("/health").status_code == 200, "the worker is ready again")


def send(stack: Stack, path: str, key: str | None = None, method: str = "POST", **more: Any) -> httpx.Response:
    headers = {} if key is None else {"x-api-key": key}
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5, **more.pop("fields", {})}
    return stack.http.request(method, path, json=body if method == "POST" else None, headers=headers | more.pop("headers", {}))


def failing(error: errors.Glm53Error) -> Callable[[Stack, str, dict[str, str]], httpx.Response]:
    """The worker refuses."""

    def ask(stack: Stack, path: str, keys: dict[str, str]) -> httpx.Response:
        stack.play(Fail(error), admit=False)
        return send(stack, path, keys["user"])

    return ask


def used_up(stack: Stack, path: str, keys: dict[str, str]) -> httpx.Response:
    send(stack, path, keys["slow"])
    return send(stack, path, keys["slow"])


def loading(stack: Stack, path: str, keys: dict[str, str]) -> httpx.Response:
    stack.worker.state = pb.SERVICE_STATE_LOADING
    until(lambda: stack.http.get("/health").status_code == 503, "the gateway notices")
    return send(stack, path, keys["user"])


Ask = Callable[[Stack, str, dict[str, str]], httpx.Response]
# Who refuses what: the door, the body's reader, the schema, the key's limits, the gateway's state, the worker.
REFUSALS: dict[str, tuple[int, str, str, Ask]] = {
    "no key": (401, "authentication_error", "authentication_error", lambda s, p, k: send(s, p)),
    "unknown key": (401, "authentication_error", "authentication_error", lambda s, p, k: send(s, p, "wrong")),
    "headers": (431, "invalid_request_error", "invalid_request_error", lambda s, p, k: send(s, p, headers={"x-a": "b" * 5000})),
    "method": (405, "invalid_request_error", "invalid_request_error", lambda s, p, k: send(s, p, k["user"], "GET")),
    "body": (413, "invalid_request_error", "request_too_large", lambda s, p, k: send(s, p, k["user"], fields={"x": "y" * 80_000})),
    "field": (400, "invalid_request_error", "invalid_request_error", lambda s, p, k: send(s, p, k["user"], fields={"messages": []})),
    "model": (404, "invalid_request_error", "not_found_error", lambda s, p, k: send(s, p, k["user"], fields={"model": "x"})),
    "permission": (403, "permission_error", "permission_error", lambda s, p, k: send(s, p, k["elsewhere"])),
    "loading": (503, "server_error", "overloaded_error", loading),
}  # fmt: skip
# Counting tokens neither runs nor costs anything.
GENERATING: dict[str, tuple[int, str, str, Ask]] = {
    "limit": (429, "rate_limit_error", "rate_limit_error", used_up),
    "queue full": (503, "server_error", "overloaded_error", failing(errors.QueueFull("full", retry_after_s=3))),
    "queue timeout": (503, "server_error", "overloaded_error", failing(errors.QueueTimeout("waited", retry_after_s=3))),
    "engine": (500, "server_error", "api_error", failing(errors.EngineFailed("broken"))),
}  # fmt: skip
CASES = [(name, path) for name in REFUSALS for path in (CHAT, MESSAGES, COUNT)] + [(n, p) for n in GENERATING for p in (CHAT, MESSAGES)]


@pytest.mark.parametrize(("name", "path"), CASES)
def test_a_refusal_has_the_shape_of_its_url(door: Stack, keys: dict[str, str], name: str, path: str) -> None:
    """Status, shape and kind; 429 and 503 say when to come back."""
    status, openais, anthropics, ask = (REFUSALS | GENERATING)[name]
    response = ask(door, path, keys)
    assert response.status_code == status, response.text
    body = response.json()
    if path == CHAT:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["type"] == openais
    else:
        assert body["type"] == "error"
        assert body["error"]["type"] == anthropics
    assert body["error"]["message"]
    assert ("retry-after-ms" in response.headers) == ("retry-after" in response.headers) == (status in (429, 503))
    assert ("www-authenticate" in response.headers) == (status == 401)


def test_what_does_not_exist_has_the_shape_of_its_neighbours(door: Stack, keys: dict[str, str]) -> None:
    """Anthropic's client asks for URLs that this server does not have, and reads its own shape."""
    for path in ("/v1/messages/batches", "/v1/messages/x/y"):
        response = send(door, path, keys["user"])
        assert (response.status_code, response.json()["type"], response.json()["error"]["type"]) == (404, "error", "not_found_error")
    assert set(send(door, "/v1/messagesx", keys["user"]).json()) == {"error"}


def test_a_bug_has_the_shape_too(door: Stack, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody expected is still an api_error for Anthropic's client."""

    async def broken(*_: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(chat, "prepare", broken)
    monkeypatch.setattr(messages, "plan_chat", broken)
    for path, kind in ((CHAT, "server_error"), (MESSAGES, "api_error")):
        response = send(door, path, keys["user"])
        assert (response.status_code, response.json()["error"]["type"]) == (500, kind)


def test_anthropics_client_raises_its_own_classes(door: Stack, keys: dict[str, str], tmp_path: Path) -> None:
    """401, 403, 404 and 503 are the classes that agents catch."""
    for key, fields, expected in (
        ("wrong", {}, anthropic.AuthenticationError),
        (keys["elsewhere"], {}, anthropic.PermissionDeniedError),
        (keys["user"], {"model": "x"}, anthropic.NotFoundError),
    ):
        with anthropic.Anthropic(base_url=door.url, api_key=key, max_retries=0) as client, pytest.raises(expected) as caught:
            client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": HELLO, **fields})  # type: ignore[call-overload]
        assert caught.value.body["type"] == "error"
    door.play(Fail(errors.QueueTimeout("waited", retry_after_s=3)), admit=False)
    with anthropic.Anthropic(base_url=door.url, api_key=keys["user"], max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            client.messages.create(model=MODEL, max_tokens=5, messages=HELLO)  # type: ignore[arg-type]
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "3")
