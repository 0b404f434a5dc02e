"""Key files and stacks with keys, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from services.gateway.access.keys import digest_of, new_key
from tests.gateway.events import chat_body
from tests.gateway.stack import Stack


def write_keys(path: Path, **entries: dict[str, Any]) -> dict[str, str]:
    """Writes a key file with an entry for each name; returns the keys by name."""
    keys = {name: new_key() for name in entries}
    body = {"keys": [{"id": name, "sha256": digest_of(keys[name]).hex(), **fields} for name, fields in entries.items()]}
    path.write_text(json.dumps(body))
    return keys


def ask(stack: Stack, key: str | None, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    """A chat request with a key."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return stack.http.post(path, json=chat_body(**fields), headers=headers)
