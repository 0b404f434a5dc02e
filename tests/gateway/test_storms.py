"""Storms: many requests that end badly at once. Afterwards every counter is back at zero and no event was in a wrong stream."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.access import write_keys
from tests.gateway.events import chat_body
from tests.gateway.fake_worker import FakeWorker, Finish, Prefill, Say, Script, Wait
from tests.gateway.redis_server import RedisServer
from tests.gateway.stack import Stack, until
from tests.gateway.test_lifecycle import Process

NUM_REQUESTS = 1000
AT_ONCE = 40
# A client that has left holds its place until the gateway has noticed: more places than clients.
PLACES = 1000


def letters(number: int) -> str:
    """A word of a request's own, which its stream must say and no other may."""
    return "".join(chr(ord("a") + int(digit)) for digit in f"{number:04}")


def script_for(request: pb.GenerateRequest, texts: dict[int, str]) -> Script:
    """Says the request's own word a few times; which one is told by its seed."""
    number = request.sampling.seed
    steps: list[Any] = [Prefill(0.02)] if number % 3 == 0 else []
    steps.append(Say("</think>"))
    for _ in range(6):
        steps += [Say(texts[number] + " "), Wait(0.002)]
    return Script((*steps, Finish()))


class Client:
    """A client on a raw socket that may leave at any moment."""

    def __init__(self, port: int, key: str | None, seed: int) -> None:
        self._port = port
        self._key = key
        self._rng = random.Random(seed)

    async def ask(self, number: int) -> tuple[str, bytes]:
        """Sends one request and leaves at a random point, or never; returns how it went and what was read."""
        streamed = self._rng.random() < 0.7
        leaves_after = self._rng.choice([None, 0.0, self._rng.random() * 0.02, self._rng.random() * 0.1])
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        data = json.dumps(chat_body(stream=streamed, seed=number)).encode()
        auth = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{auth}Content-Length: {len(data)}\r\n\r\n"
        got = b""
        try:
            writer.write(head.encode() + data)
            await writer.drain()
            async with asyncio.timeout(leaves_after):
                while chunk := await reader.read(65536):
                    got += chunk
            return "complete", got
        except TimeoutError:
            return "left", got
        except ConnectionError:
            return "cut", got
        finally:
            writer.close()


def check_words(number: int, got: bytes) -> None:
    """Whatever was read, it is of this request."""
    body = got.partition(b"\r\n\r\n")[2]
    said = set()
    for event in body.split(b"data: ")[1:]:
        if event.startswith(b"{"):
            payload = json.loads(event[: event.rindex(b"}") + 1])
            said |= {choice.get("delta", {}).get("content") or "" for choice in payload.get("choices", [])}
    text = "".join(sorted(said)).replace(" ", "")
    assert set(text) <= set(letters(number)), (number, said)


async def storm(client: Client, numbers: range) -> list[tuple[int, str, bytes]]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[int, str, bytes]:
        async with room:
            return number, *await client.ask(number)

    return await asyncio.gather(*(one(number) for number in numbers))


def settled(stack: Stack, workers: list[FakeWorker]) -> None:
    """Every counter is back at zero."""
    services = stack.services
    until(lambda: not any(worker.live for worker in workers), "the worker has no job")
    until(lambda: services.traffic.in_flight == 0, "no request is in flight")
    until(lambda: services.access.num_running == 0, "no key runs anything")
    stack.run(services.access.settled())
    assert len(services.client.live) == 0
    assert services.metrics.snapshot()


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[Stack, str]]:
    """A gateway whose only key has limits that all are counted and never reached."""
    keys = write_keys(tmp_path / "keys.json", a={"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "concurrency": PLACES})
    stack = Stack(api_keys_file=str(tmp_path / "keys.json"))
    texts = {number: letters(number) for number in range(NUM_REQUESTS)}
    stack.worker.script_for = lambda request: script_for(request, texts)
    yield stack, keys["a"]
    stack.close()


def test_a_thousand_clients_that_leave_at_random_leave_nothing_behind(keyed: tuple[Stack, str]) -> None:
    """Before, during and after the prompt, streaming or not: counters at zero, no word in a wrong stream, the next request works."""
    stack, key = keyed
    ended = asyncio.run(storm(Client(stack.port, key, 1), range(NUM_REQUESTS)))
    for number, _, got in ended:
        check_words(number, got)
    how = [what for _, what, _ in ended]
    assert how.count("complete") > 100
    assert how.count("left") > 300
    settled(stack, [stack.worker])
    assert stack.services.access.counters.num_leases == 0
    complete = [got for _, what, got in ended if what == "complete"]
    assert all(got.startswith(b"HTTP/1.1 200") for got in complete)


def test_a_storm_while_the_worker_dies_and_returns(keyed: tuple[Stack, str]) -> None:
    """Every request that stays gets an answer or an error in our shape; afterwards the counters are zero and requests work again."""
    stack, key = keyed

    async def with_kills() -> list[tuple[int, str, bytes]]:
        running = asyncio.create_task(storm(Client(stack.port, key, 2), range(400)))
        for _ in range(3):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(stack.run, stack.worker.stop())
            stack.worker.live.clear()
            await asyncio.sleep(0.2)
            await asyncio.to_thread(stack.run, stack.worker.start())
        return await running

    for number, what, got in asyncio.run(with_kills()):
        check_words(number, got)
        if what == "complete":
            status = int(got[9:12])
            assert status in (200, 503), got
            assert status == 200 or b'"error"' in got
    settled(stack, [stack.worker])
    until(lambda: stack.http.get("/health").status_code == 200, "ready again")
    answer = stack.http.post("/v1/chat/completions", json=chat_body(seed=7), headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text


def test_a_storm_while_redis_dies_and_returns(tmp_path: Path) -> None:
    """No request that stays is lost or refused because of it."""
    server = RedisServer()
    keys = write_keys(tmp_path / "keys.json", a={"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "concurrency": PLACES})
    stack = Stack(api_keys_file=str(tmp_path / "keys.json"), redis_url=server.url, redis_timeout_ms=500)
    texts = {number: letters(number) for number in range(NUM_REQUESTS)}
    stack.worker.script_for = lambda request: script_for(request, texts)

    async def with_kills() -> list[tuple[int, str, bytes]]:
        running = asyncio.create_task(storm(Client(stack.port, keys["a"], 3), range(400)))
        for _ in range(2):
            await asyncio.sleep(0.4)
            server.kill()
            await asyncio.sleep(0.4)
            await asyncio.to_thread(server.start)
        return await running

    try:
        for number, what, got in asyncio.run(with_kills()):
            check_words(number, got)
            if what == "complete":
                assert got.startswith(b"HTTP/1.1 200"), got
        settled(stack, [stack.worker])
        stack.run(stack.services.link.probe())
        leases = stack.run(stack.services.link.client.zcard("glm53:lease:{a}"))
        # Leases that could not be given back while Redis was away run out by themselves within 30 s.
        assert leases <= PLACES
    finally:
        stack.close()
        server.close()


@pytest.mark.e2e
def test_killing_the_gateway_frees_the_worker(stack: Stack) -> None:
    """SIGKILL in the middle of forty streams: the worker's jobs end by themselves, another gateway serves on."""
    texts = {number: letters(number) for number in range(NUM_REQUESTS)}
    stack.worker.script_for = lambda request: Script((Say("</think>" + texts[request.sampling.seed]), Wait(30)))
    process = Process(stack.worker.address)
    try:
        port = int(process.url().rpartition(":")[2])
        until(lambda: "the worker is ready" in process.messages, "ready", 20)

        async def streams() -> list[tuple[str, bytes]]:
            async def one(number: int) -> tuple[str, bytes]:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                data = json.dumps(chat_body(stream=True, seed=number)).encode()
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
                got = b""
                try:
                    while chunk := await reader.read(65536):
                        got += chunk
                except ConnectionError:
                    pass
                writer.close()
                return "cut", got

            tasks = [asyncio.create_task(one(number)) for number in range(40)]
            while len(stack.worker.live) < 40:
                await asyncio.sleep(0.01)
            process.process.kill()
            return await asyncio.gather(*tasks)

        for number, (_, got) in enumerate(asyncio.run(streams())):
            check_words(number, got)
            assert b"[DONE]" not in got
        until(lambda: not stack.worker.live, "the jobs are gone", 10)
        assert len(stack.worker.cancelled) == 40
    finally:
        process.close()
    stack.worker.script_for = None
    assert stack.post().status_code == 200
