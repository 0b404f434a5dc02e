"""What belongs to one API key is no other key's: stored responses, idempotent answers, models, settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.access import write_keys
from tests.gateway.stack import HELLO, MODEL, Stack


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, dict[str, str]]]:
    """A gateway with the keys of two tenants, of one who may use another model only, and of an admin."""
    path = tmp_path_factory.mktemp("tenants") / "keys.json"
    keys = write_keys(path, ada={}, bob={}, other={"models": ["some-other-model"]}, admin={"admin": True})
    stack = Stack(api_keys_file=str(path))
    yield stack, keys
    stack.close()


def call(stack: Stack, key: str, method: str, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    own = {"Authorization": f"Bearer {key}", **(headers or {})}
    return stack.http.request(method, path, headers=own, json=body or None)


def test_responses_belong_to_their_key(tenants: tuple[Stack, dict[str, str]]) -> None:
    """Another key can neither read, delete, cancel nor go on from a response: for it there is none."""
    stack, keys = tenants
    made = call(stack, keys["ada"], "POST", "/v1/responses", model=MODEL, input="secret").json()
    url = f"/v1/responses/{made['id']}"
    for method, path in (("GET", url), ("GET", url + "/input_items"), ("DELETE", url), ("POST", url + "/cancel")):
        assert call(stack, keys["bob"], method, path).status_code == 404, path
    refused = call(stack, keys["bob"], "POST", "/v1/responses", model=MODEL, input="x", previous_response_id=made["id"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
    assert call(stack, keys["ada"], "GET", url).json() == made


def test_idempotency_keys_belong_to_their_key(tenants: tuple[Stack, dict[str, str]]) -> None:
    """Two tenants may choose the same idempotency key and never see each other's answer."""
    stack, keys = tenants
    header = {"Idempotency-Key": "same"}
    answers = [
        call(stack, keys[name], "POST", "/v1/chat/completions", header, model=MODEL, messages=HELLO).json()["id"]
        for name in ("ada", "bob", "ada")
    ]
    assert answers[0] == answers[2] != answers[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": MODEL, "input": "x"}),
        ("/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO}),
        ("/generate", {"text": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_a_key_without_the_model_is_refused_everywhere(tenants: tuple[Stack, dict[str, str]], path: str, body: dict[str, Any]) -> None:
    """403 on every endpoint, also on those that name no model; 401 without a key."""
    stack, keys = tenants
    assert call(stack, keys["other"], "POST", path, **body).status_code == 403
    assert call(stack, keys["ada"], "POST", path, **body).status_code == 200
    assert stack.http.post(path, json=body).status_code == 401


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_settings_are_for_admins(tenants: tuple[Stack, dict[str, str]], path: str) -> None:
    """How the server is set up is not every key's business."""
    stack, keys = tenants
    assert call(stack, keys["ada"], "GET", path).status_code == 403
    assert call(stack, keys["admin"], "GET", path).status_code == 200


def test_the_document_asks_for_keys(tenants: tuple[Stack, dict[str, str]]) -> None:
    """/openapi.json says that requests need a key."""
    stack, keys = tenants
    assert call(stack, keys["ada"], "GET", "/openapi.json").json()["security"] == [{"key": []}]
