"""A thousand clients that leave at random, on the real stack: nothing of them stays in queue, streams or context memory."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from bench.server import Server
from tests.e2e import asking

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 1000
AT_ONCE = 32


async def visit(port: int, body: dict[str, Any], leaves_after_s: float | None) -> tuple[str, bytes]:
    """Sends a request and leaves after a while, or stays to the end; returns which, and what was read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    got = b""
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        async with asyncio.timeout(leaves_after_s):
            while chunk := await reader.read(65536):
                got += chunk
        return "stayed", got
    except (TimeoutError, ConnectionError):
        return "left", got
    finally:
        writer.close()


async def storm(port: int, model: str) -> list[tuple[str, bytes]]:
    rng = random.Random(5)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[str, bytes]:
        long = "What is the capital of France? " * (60 if number % 10 == 0 else 1)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": long}],
            "temperature": 0,
            "max_tokens": 12,
            "stream": number % 3 > 0,
        }
        leaves_after_s = None if number % 8 == 0 else rng.random() * 0.25
        async with room:
            return await visit(port, body, leaves_after_s)

    return await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))


# Room for those who have left and are not yet noticed: a full queue is another test's subject.
@pytest.mark.parametrize("own_stack", [{"GLM53_MAX_QUEUED": "1000"}], indirect=True)
def test_a_thousand_random_disconnects_leave_the_counters_at_zero(own_stack: Server) -> None:
    """Queue, running requests and used context are zero; who stayed got a whole answer; the next answer is the one from before."""
    model = asking.model_of(own_stack.url)
    question = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 40}
    before = asking.stream(own_stack.url, dict(question))
    ended = asyncio.run(storm(own_stack.port, model))
    stayed = [got for how, got in ended if how == "stayed"]
    assert len(stayed) >= NUM_REQUESTS / 8
    statuses = {got[9:12] for got in stayed}
    assert statuses == {b"200"}, [got for got in stayed if got[9:12] != b"200"][:3]

    def idle() -> bool:
        engine = own_stack.get_json("/stats")["engine"]
        return not any(engine[name] for name in ("queue_depth", "running_requests", "context_tokens_used"))

    asking.until(idle, 60, "the engine is empty")
    gateway = own_stack.get_json("/stats")["gateway"]
    assert gateway["client_disconnects_total"] > 100
    after = asking.stream(own_stack.url, dict(question))
    assert (after.reasoning, after.content) == (before.reasoning, before.content)
