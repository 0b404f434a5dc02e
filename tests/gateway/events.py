"""Reading event streams in tests, from the raw bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.stack import HELLO, MODEL, Stack


@dataclass
class Streamed:
    """One event stream, taken apart."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    done: bool = False
    error: dict[str, Any] | None = None

    @classmethod
    def of(cls, data: bytes) -> Streamed:
        """Checks the framing byte by byte: events end with an empty line, [DONE] is last."""
        found = cls()
        assert data.endswith(b"\n\n")
        assert b"\r" not in data
        for event in data.decode().removesuffix("\n\n").split("\n\n"):
            assert not found.done, "something after [DONE]"
            assert "\n" not in event
            if event.startswith(":"):
                found.comments += 1
                continue
            assert event.startswith("data: ")
            payload = event.removeprefix("data: ")
            if payload == "[DONE]":
                found.done = True
                continue
            chunk = json.loads(payload)
            if "error" in chunk:
                found.error = chunk["error"]
            else:
                found.chunks.append(chunk)
        return found

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choice of every chunk that has one."""
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def deltas(self) -> list[dict[str, Any]]:
        """The delta of every chat chunk."""
        return [choice["delta"] for choice in self.choices]

    def text(self, name: str) -> str:
        """One text field of the deltas, joined."""
        return "".join(delta.get(name) or "" for delta in self.deltas)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls put together as clients do it."""
        calls: list[dict[str, Any]] = []
        for delta in self.deltas:
            for part in delta.get("tool_calls") or []:
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": {"name": part["function"]["name"], "arguments": ""}})
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        return calls

    @property
    def finish_reasons(self) -> list[str]:
        """Every finish reason that was sent."""
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"]]

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """All entries of logprobs.content."""
        return [entry for choice in self.choices for entry in (choice["logprobs"] or {}).get("content", [])]


def stream(stack: Stack, path: str = "/v1/chat/completions", **fields: Any) -> Streamed:
    """A whole stream."""
    response = stack.post(path, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return Streamed.of(response.content)


def chat_body(**fields: Any) -> dict[str, Any]:
    """A chat body for raw sockets and other clients."""
    return {"model": MODEL, "messages": HELLO, **fields}
