"""What large requests cost everybody else: while one is read, checked and refused, the event loop goes on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway import beside
from tests.gateway.hostile import CHAT, Reply, talk
from tests.gateway.stack import HELLO, MODEL, Stack
from tests.gateway.test_validation import check_error

# What the loop itself may do in one go, in CPU time, which no other work on the machine changes; tens of milliseconds are the aim.
MOST_CPU_S = 0.15
# And what it may be kept from working by other threads of the process.
MOST_S = 2.0
USER = HELLO[0]


def tool(index: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
    return {"type": "function", "function": {"name": f"tool_{index}", "parameters": parameters}}


def calls(count: int) -> list[dict[str, Any]]:
    return [{"id": f"c{index}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for index in range(count)]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": HELLO, **fields}).encode()


def text(content: bytes) -> bytes:
    return b'{"model": "tiny", "messages": [{"role": "user", "content": "' + content + b'"}]}'


def listed(part: bytes, count: int) -> bytes:
    return b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "x": [' + b",".join([part] * count) + b"]}"


def items(count: int) -> bytes:
    made = [{"type": "function_call", "call_id": f"c{index}", "name": "f", "arguments": "{}"} for index in range(count)]
    answers = [{"type": "function_call_output", "call_id": f"c{index}", "output": "x"} for index in range(count)]
    return json.dumps({"model": MODEL, "input": [USER, *made, *answers]}).encode()


def blocks(count: int) -> bytes:
    used = [{"type": "tool_use", "id": f"c{index}", "name": "f", "input": {}} for index in range(count)]
    results = [{"type": "tool_result", "tool_use_id": f"c{index}", "content": "x"} for index in range(count)]
    turns = [USER, {"role": "assistant", "content": used}, {"role": "user", "content": results}]
    return json.dumps({"model": MODEL, "max_tokens": 1, "messages": turns}).encode()


MB = 1024 * 1024
LARGE: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "a text of 15 MB": (CHAT, lambda: text(b"a" * 15 * MB), 400),
    "15 MB of halves of pairs": (CHAT, lambda: text(rb"\ud83e" * (15 * MB // 6)), 400),
    "15 MB that break off": (CHAT, lambda: text(b"a" * 15 * MB)[:-1], 400),
    "700,000 numbers": (CHAT, lambda: listed(b"12345", 700_000), 200),
    "700,000 numbers that break off": (CHAT, lambda: listed(b"12345", 700_000)[:-1], 400),
    "150,000 lists": (CHAT, lambda: listed(b"[]", 150_000), 200),
    "100,000 fields": (CHAT, lambda: chat(metadata={f"k{index}": 1 for index in range(100_000)}), 200),
    "100,000 biases": (CHAT, lambda: chat(logit_bias={str(index): 1 for index in range(100_000)}), 400),
    "50,000 parts": (CHAT, lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 50_000}]), 400),
    "8,000 messages": (CHAT, lambda: chat(messages=HELLO * 8000), 400),
    "10,000 tools": (CHAT, lambda: chat(tools=[tool(index) for index in range(10_000)]), 400),
    "1,000 tools": (CHAT, lambda: chat(tools=[tool(index) for index in range(1000)]), 400),
    "10,000 calls": (CHAT, lambda: chat(messages=[USER, {"role": "assistant", "tool_calls": calls(10_000)}, USER]), 400),
    "700,000 ids of a prompt": ("/v1/completions", lambda: json.dumps({"model": MODEL, "prompt": [5] * 700_000}).encode(), 400),
    "700,000 ids of SGLang's": ("/generate", lambda: json.dumps({"input_ids": [5] * 700_000}).encode(), 400),
    "10,000 items": ("/v1/responses", lambda: items(5000), 400),
    "10,000 blocks": ("/v1/messages", lambda: blocks(5000), 400),
    "10,000 blocks to count": ("/v1/messages/count_tokens", lambda: blocks(5000), 400),
    "15 MB to tokenize": ("/tokenize", lambda: b'{"prompt": "' + b"a" * 15 * MB + b'"}', 400),
    "60,000 ids to detokenize": ("/detokenize", lambda: json.dumps({"tokens": [5] * 60_000}).encode(), 200),
}


class Ticks:
    """Looks again and again how long the loop was busy, and how long it did not come round."""

    def __init__(self) -> None:
        self.cpu_s = self.gap_s = 0.0
        self._over = asyncio.Event()

    async def run(self) -> None:
        cpu, now = time.thread_time(), time.monotonic()
        while not self._over.is_set():
            await asyncio.sleep(0.002)
            last_cpu, last, cpu, now = cpu, now, time.thread_time(), time.monotonic()
            self.cpu_s, self.gap_s = max(self.cpu_s, cpu - last_cpu), max(self.gap_s, now - last)

    async def stop(self) -> None:
        self._over.set()


def sent(stack: Stack, path: str, body: bytes, headers: str = "") -> Reply:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    (reply,) = talk(stack, head.encode(), body)
    return reply


@pytest.mark.alone
@pytest.mark.parametrize("name", LARGE)
def test_a_large_request_does_not_hold_the_loop(stack: Stack, name: str) -> None:
    """Whatever is in it and however it ends, all streams go on: the loop is never busy with it for long, nor kept from running."""
    path, made, status = LARGE[name]
    body = made()
    assert stack.post().status_code == 200  # the gateway knows its worker
    ticks = Ticks()
    running = asyncio.run_coroutine_threadsafe(ticks.run(), stack._loop)
    reply = sent(stack, path, body, "Idempotency-Key: k-" + name.replace(" ", "-").replace(",", "") + "\r\n")
    stack.run(ticks.stop())
    running.result(20)
    assert reply.status == status, reply.body[:300]
    assert ticks.cpu_s < MOST_CPU_S
    assert ticks.gap_s < MOST_S


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": HELLO}),
        ("/tokenize", {"messages": HELLO}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
    ],
    ids=str,
)
def test_the_number_of_tools_is_bounded(stack: Stack, path: str, fields: dict[str, Any]) -> None:
    """400 with both numbers and the setting, before a single tool is looked at; as many as the bound are taken."""
    most = stack.settings.max_tools
    error = check_error_of(path, stack, {"model": MODEL, **fields, "tools": [None] * (most + 1)})
    assert error["param"] == "tools"
    assert all(word in error["message"] for word in (str(most), str(most + 1), "GLM53_MAX_TOOLS"))
    error = check_error_of(path, stack, {"model": MODEL, **fields, "tools": [None] * most})
    assert "GLM53_MAX_TOOLS" not in error["message"]


def check_error_of(path: str, stack: Stack, body: dict[str, Any]) -> dict[str, Any]:
    response = stack.http.post(path, json=body)
    assert response.status_code == 400
    return dict(response.json()["error"])


def test_the_number_of_calls_in_a_message_is_bounded(stack: Stack) -> None:
    """400 with both numbers; as many as the bound are taken."""
    most = stack.settings.max_tools
    error = check_error(stack.post(messages=[USER, {"role": "assistant", "tool_calls": calls(most + 1)}, USER]), "messages")
    assert all(word in error["message"] for word in (str(most), str(most + 1), "GLM53_MAX_TOOLS"))
    error = check_error(stack.post(messages=[USER, {"role": "assistant", "tool_calls": calls(most)}, USER]), "messages")
    assert "GLM53_MAX_TOOLS" not in error["message"]


@pytest.mark.parametrize("path", ["chat", "responses", "messages", "count", "generate", "completions"])
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_large_requests_are_answered_as_small_ones(stack: Stack, path: str, wrong: bool) -> None:
    """Another thread, the same answer and the same words of refusal."""
    temperature = -1 if wrong else 1
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": (CHAT, {"model": MODEL, "messages": HELLO, "temperature": temperature, "bad_words": ["x"]}),
        "responses": ("/v1/responses", {"model": MODEL, "input": "Hello", "temperature": temperature}),
        "messages": ("/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": 5, "temperature": temperature}),
        "count": ("/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO if not wrong else [5]}),
        "generate": ("/generate", {"text": "Hello", "sampling_params": {"temperature": temperature}}),
        "completions": ("/v1/completions", {"model": MODEL, "prompt": "Hello", "temperature": temperature, "bad_words": ["x"]}),
    }
    url, fields = bodies[path]
    padding = "y" * (beside.SMALL_BYTES + 1)
    small, large = (stack.http.post(url, json={**fields, "ignored_here": more}) for more in ("", padding))
    assert small.status_code == large.status_code == (400 if wrong else 200), large.text
    sampled = [request.sampling for request in stack.worker.requests]
    assert all(each == sampled[0] for each in sampled)
    if wrong:
        assert small.json() == large.json()


def test_what_prepares_a_request_waits_for_nothing() -> None:
    """Work in a thread has no loop to wait on: a wait is a fault of ours, and says so instead of hanging."""

    async def waits() -> None:
        await asyncio.sleep(0)

    async def large() -> None:
        beside.size_var.set(beside.SMALL_BYTES + 1)
        with pytest.raises(RuntimeError, match="waits"):
            await beside.prepared(waits)

    asyncio.run(large())
