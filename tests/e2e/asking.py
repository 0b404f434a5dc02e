"""Asking the server: what the end-to-end tests and the expectations share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

EXPECTATIONS = Path(__file__).parent / "expectations.json"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City name"}}, "required": ["city"]},
    },
}


def expectations() -> list[dict[str, Any]]:
    """The committed questions and their greedy answers: [{name, body, message, finish_reason}]."""
    return list(json.loads(EXPECTATIONS.read_text()))


@dataclass
class Stream:
    """What one streamed chat completion delivered."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    events: int = 0

    def feed(self, payload: str) -> None:
        """Takes the payload of one `data:` line."""
        if payload == "[DONE]":
            self.done = True
            return
        self.events += 1
        chunk = json.loads(payload)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self.content += delta.get("content") or ""
            self.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(self.tool_calls):
                    self.tool_calls.append({"name": call["function"]["name"], "arguments": ""})
                self.tool_calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def lines_of(response: httpx.Response) -> Iterator[str]:
    """The payloads of the `data:` lines of an event stream."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def stream(url: str, body: dict[str, Any], *, on_event: Any = None, timeout_s: float = 120.0) -> Stream:
    """Streams one chat completion; `on_event(stream)` runs after each event."""
    got = Stream()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=timeout_s) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {response.read().decode()}")
        for payload in lines_of(response):
            got.feed(payload)
            if on_event is not None:
                on_event(got)
    return got


def ask(url: str, body: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
    """One chat completion without streaming: the whole response."""
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s)
    if response.status_code != 200:
        raise AssertionError(f"{response.status_code}: {response.text}")
    return dict(response.json())


def model_of(url: str) -> str:
    """The served model's name."""
    return str(httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"])


def until(condition: Any, timeout_s: float, what: str) -> None:
    """Waits until `condition()` is true.

    Raises:
        AssertionError: it did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")
