"""What gateways share: values, messages, keys, cancels; and that they need none of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fakeredis
import httpx
import pytest

from services.gateway.access import cancels
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import ApiKey, digest_of
from services.gateway.shared.bus import Bus
from services.gateway.shared.key_share import KeyShare
from services.gateway.shared.link import RedisLink
from services.gateway.shared.store import MAX_VALUE_BYTES, FallbackStore, MemoryStore, RedisStore, Store
from tests.gateway.access import ask, write_keys
from tests.gateway.events import Streamed, chat_body
from tests.gateway.fake_worker import Finish, Forever, Say, Script
from tests.gateway.redis_server import RedisServer
from tests.gateway.stack import MODEL, Stack, until
from tests.gateway.test_validation import check_error


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
async def link(redis_server: RedisServer) -> AsyncIterator[RedisLink]:
    """A real Redis, empty."""
    made = RedisLink.connect(redis_server.url, timeout_s=5.0)
    await made.client.flushall()
    yield made
    await made.close()


async def eventually(condition: Any, what: str) -> None:
    """Waits in the event loop until `condition()` is true."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


# ---- values --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "fakeredis", "redis-server", "fallback", "fallback without redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    if request.param == "memory":
        yield MemoryStore()
        return
    if request.param == "fakeredis":
        made = RedisLink(fakeredis.FakeAsyncRedis(), timeout_s=5.0)
    elif request.param == "fallback without redis":
        made = RedisLink.connect("redis://127.0.0.1:1/0", timeout_s=1.0)
    else:
        made = RedisLink.connect(request.getfixturevalue("redis_server").url, timeout_s=5.0)
        await made.client.flushall()
    shared = RedisStore(made, "test")
    yield FallbackStore(shared, MemoryStore()) if "fallback" in request.param else shared
    await made.close()


async def test_a_value_is_there_until_its_time_is_over(store: Store) -> None:
    """Written, read, written over, removed; gone after its time."""
    assert await store.get("a") is None
    assert await store.put("a", b"\x00one", 30)
    assert await store.put("a", b"two", 30)
    assert await store.get("a") == b"two"
    assert await store.get("b") is None
    assert await store.delete("a")
    assert not await store.delete("a")
    assert await store.get("a") is None
    await store.put("a", b"short", 0.05)
    await asyncio.sleep(0.1)
    assert await store.get("a") is None


async def test_of_many_that_add_a_value_one_succeeds(store: Store) -> None:
    """The first wins; after its time somebody else may."""
    won = await asyncio.gather(*(store.add("a", b"%d" % i, 30) for i in range(20)))
    assert sum(won) == 1
    assert await store.get("a") == b"%d" % won.index(True)
    await store.put("a", b"x", 0.05)
    await asyncio.sleep(0.1)
    assert await store.add("a", b"y", 30)


async def test_a_value_that_is_too_large_is_not_kept(store: Store) -> None:
    """False, and nothing of it or before it is read."""
    await store.put("a", b"old", 30)
    assert not await store.put("a", b"x" * (MAX_VALUE_BYTES + 1), 30)
    assert await store.get("a") is None


async def test_memory_keeps_within_its_bounds() -> None:
    """The oldest values go first, by number and by bytes."""
    store = MemoryStore(max_bytes=100, max_values=3)
    for i in range(5):
        await store.put(str(i), b"x" * 10, 30)
    assert [await store.get(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    await store.put("big", b"x" * 95, 30)
    assert (len(store), store.num_bytes) == (1, 95)
    assert not await store.put("huge", b"x" * 101, 30)


async def test_what_was_written_without_redis_is_still_read_with_it() -> None:
    """Values survive the outage in both directions as far as one process can tell."""
    server = RedisServer()
    link = RedisLink.connect(server.url, timeout_s=0.5)
    store = FallbackStore(RedisStore(link, "test"), MemoryStore())
    server.kill()
    assert await store.put("a", b"while away", 30)
    assert await store.add("b", b"while away", 30)
    server.start()
    await link.probe()
    assert await store.get("a") == b"while away"
    assert not await store.add("b", b"again", 30)
    assert await store.put("a", b"back", 30)
    assert await store.get("a") == b"back"
    await link.close()
    server.close()


# ---- messages ------------------------------------------------------------------------------------------------------------------


async def test_every_gateway_hears_a_message_and_survives_a_bad_one(link: RedisLink, redis_server: RedisServer) -> None:
    """Broken JSON, an unknown kind and a handler that fails do not stop the listening."""
    heard: list[Any] = []
    other = RedisLink.connect(redis_server.url, timeout_s=5.0)
    buses = [Bus(link), Bus(other)]

    async def note(message: dict[str, Any]) -> None:
        heard.append(message["n"] / message["by"])

    tasks = []
    for bus in buses:
        bus.on("note", note)
        tasks.append(asyncio.create_task(bus.run()))
    await eventually(lambda: all(bus.is_listening for bus in buses), "both listen")
    for bad in (b"{", b"[]", b'{"kind": "unknown"}', b'{"kind": "note", "n": 1, "by": 0}', b"x" * 100_000):
        await link.client.publish("glm53:bus", bad)
    assert await buses[0].send("note", n=6, by=2) == 2
    await eventually(lambda: heard == [3, 3], "both heard it")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await other.close()


async def test_a_bus_listens_again_after_redis_was_away() -> None:
    """The connection is lost and made anew by itself."""
    server = RedisServer()
    link = RedisLink.connect(server.url, timeout_s=1.0)
    bus = Bus(link)
    task = asyncio.create_task(bus.run())
    await eventually(lambda: bus.is_listening, "it listens")
    server.kill()
    await eventually(lambda: not bus.is_listening, "it noticed")
    server.start()
    await eventually(lambda: bus.is_listening, "it listens again")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await link.close()
    server.close()


# ---- keys ----------------------------------------------------------------------------------------------------------------------


class Gateway:
    """The keys of one gateway among several."""

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.ring = KeyRing(path)
        self.link = RedisLink.connect(url, timeout_s=5.0)
        self.bus = Bus(self.link)
        self.share = KeyShare(self.ring, self.link, self.bus)
        self._listening = asyncio.create_task(self.bus.run())

    async def find(self, key: str) -> ApiKey | None:
        return self.ring.find(key) or await self.share.find(key)

    async def close(self) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self.link.close()


async def test_keys_of_one_file_count_everywhere_and_withdrawn_ones_nowhere(
    link: RedisLink, redis_server: RedisServer, tmp_path: Path
) -> None:
    """A new key counts in a gateway whose file is older; a withdrawn one is refused there at once, also after it published its old copy."""
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    old = write_keys(paths[0], old={})
    paths[1].write_text(paths[0].read_text())
    one, two = (Gateway(path, redis_server.url) for path in paths)
    await eventually(lambda: one.bus.is_listening and two.bus.is_listening, "both listen")
    await two.share.publish(two.ring.table.keys)
    assert await two.find(old["old"]) is not None

    new = write_keys(paths[0], new={"requests_per_minute": 7})
    assert await two.find(new["new"]) is None
    assert one.ring.reload_if_changed()
    await eventually(lambda: two.ring.is_revoked(digest_of(old["old"])), "the old key is withdrawn")
    assert await one.find(old["old"]) is None
    assert await two.find(old["old"]) is None
    found = await two.find(new["new"])
    assert found is not None
    assert (found.id, found.requests_per_minute) == ("new", 7)

    # A third gateway with the old file starts: what it publishes does not bring the key back, and it learns that.
    three = Gateway(paths[1], redis_server.url)
    assert await three.find(old["old"]) is not None
    await three.share.publish(three.ring.table.keys)
    assert await three.find(old["old"]) is None
    assert await one.find(old["old"]) is None

    # The first file has it again: the mark is lifted everywhere.
    paths[0].write_text(paths[1].read_text())
    assert one.ring.reload_if_changed()
    await eventually(lambda: not two.ring.is_revoked(digest_of(old["old"])), "it is back")
    assert await two.find(old["old"]) is not None
    for gateway in (one, two, three):
        await gateway.close()


async def test_guessing_keys_does_not_load_redis(link: RedisLink, redis_server: RedisServer, tmp_path: Path) -> None:
    """An unknown key is looked up once in five seconds; nothing in Redis that is not an entry of this hash counts."""
    write_keys(tmp_path / "keys.json", a={})
    gateway = Gateway(tmp_path / "keys.json", redis_server.url)
    before = (await link.client.info("commandstats")).get("cmdstat_get", {}).get("calls", 0)
    for _ in range(50):
        assert await gateway.find("sk-glm53-guess") is None
    assert (await link.client.info("commandstats"))["cmdstat_get"]["calls"] - before <= 1
    forged = {"id": "a", "sha256": "0" * 64, "admin": True}
    for guess, text in (("guess-2", "{"), ("guess-3", json.dumps(forged))):
        await link.client.set(f"glm53:{{keys}}:{digest_of(guess).hex()}", text)
        assert await gateway.find(guess) is None
    await gateway.close()


async def test_redis_holds_hashes_and_never_keys(link: RedisLink, redis_server: RedisServer, tmp_path: Path) -> None:
    """Who reads Redis has no key."""
    keys = write_keys(tmp_path / "keys.json", a={}, b={"admin": True})
    gateway = Gateway(tmp_path / "keys.json", redis_server.url)
    await gateway.share.publish(gateway.ring.table.keys)
    names = await link.client.keys("*")
    text = repr(names) + repr([await link.client.get(name) for name in names])
    assert len(names) == 2
    assert not any(key in text for key in keys.values())
    await gateway.close()


# ---- cancels -------------------------------------------------------------------------------------------------------------------


class Running:
    """A streamed request that runs until it is cancelled."""

    def __init__(self, stack: Stack, key: str) -> None:
        self.got: list[bytes] = []
        self._first = threading.Event()
        self._id = ""
        self._thread = threading.Thread(target=self._run, args=(stack, key))
        self._thread.start()
        assert self._first.wait(10)

    def _run(self, stack: Stack, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=chat_body(stream=True), headers=headers, timeout=30) as answer:
            for line in answer.iter_lines():
                self.got.append(line.encode() + b"\n")
                if line.startswith("data: {") and not self._first.is_set():
                    self._id = json.loads(line[6:])["id"]
                    self._first.set()

    @property
    def id(self) -> str:
        return self._id

    def end(self) -> Streamed:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return Streamed.of(b"".join(self.got))


@pytest.fixture(scope="module")
def pair(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Stack, dict[str, str]]]:
    """Two gateways with the same keys and the same Redis, each with a worker of its own."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = write_keys(path, a={}, b={}, admin={"admin": True})
    shared = {"api_keys_file": str(path), "redis_url": redis_server.url, "redis_timeout_ms": 5000}
    stacks = Stack(**shared), Stack(**shared)
    for stack in stacks:
        stack.worker.script = Script((Say("</think>Hello"), Forever()))
        until(lambda stack=stack: stack.services.bus.is_listening, "the bus listens")
    yield *stacks, keys
    for stack in stacks:
        stack.close()


def cancel(stack: Stack, key: str, answer_id: str) -> httpx.Response:
    return stack.http.post(f"/v1/requests/{answer_id}/cancel", headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("who", ["a", "admin"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_request_is_cancelled_by_its_owner_or_an_admin_through_any_gateway(
    pair: tuple[Stack, Stack, dict[str, str]], who: str, where: int
) -> None:
    """The stream ends with an error event and [DONE], the worker's job is gone, whichever gateway was asked."""
    first, keys = pair[0], pair[2]
    running = Running(first, keys["a"])
    response = cancel(pair[where], keys[who], running.id)
    assert response.status_code == 200, response.text
    ended = running.end()
    assert ended.error is not None
    assert (ended.error["code"], ended.done) == ("cancelled", True)
    until(lambda: not first.worker.live, "the job is gone")
    until(lambda: len(first.services.client.live) == 0, "nothing runs")


def test_another_keys_request_cannot_be_cancelled(pair: tuple[Stack, Stack, dict[str, str]]) -> None:
    """404 as for a request that does not exist, whichever gateway is asked, and the stream goes on."""
    first, second, keys = pair
    running = Running(first, keys["a"])
    for stack in (first, second):
        error = check_error(cancel(stack, keys["b"], running.id), "id", 404)
        assert error["code"] == "request_not_found"
    assert first.worker.live
    assert not first.worker.cancel_asked & first.worker.live
    assert cancel(first, keys["a"], running.id).status_code == 200
    running.end()


def test_what_does_not_run_is_not_cancelled_anywhere(pair: tuple[Stack, Stack, dict[str, str]]) -> None:
    """Unknown ids, requests that have ended, responses that are complete: no gateway claims to have cancelled them."""
    first, second, keys = pair
    headers = {"Authorization": f"Bearer {keys['a']}"}
    first.worker.script = Script()
    ended = first.http.post("/v1/chat/completions", json=chat_body(), headers=headers).json()["id"]
    kept = first.http.post("/v1/responses", json={"model": MODEL, "input": "x"}, headers=headers).json()["id"]
    first.worker.script = Script((Say("</think>Hello"), Forever()))
    for who in ("a", "admin"):
        for answer_id in ("chatcmpl-nothing", ended):
            check_error(cancel(second, keys[who], answer_id), "id", 404)
    for stack in (first, second):
        assert "complete" in check_error(stack.http.post(f"/v1/responses/{kept}/cancel", headers=headers), "response_id")["message"]
        check_error(stack.http.post("/v1/responses/resp_nothing/cancel", headers=headers), "response_id", 404)


def test_a_gateway_that_does_not_answer_holds_a_cancel_up_for_a_moment_only(
    pair: tuple[Stack, Stack, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it hangs: what nobody has found in time does not run."""
    monkeypatch.setattr(cancels, "_ANSWER_S", 0.3)
    first, second, keys = pair

    async def silent(_: object) -> None:
        """Says nothing."""

    monkeypatch.setitem(first.services.bus._handlers, "cancel", silent)
    began = time.monotonic()
    check_error(cancel(second, keys["a"], "chatcmpl-nothing"), "id", 404)
    assert 0.3 <= time.monotonic() - began < 5


def test_an_unknown_request_is_404_without_redis(stack: Stack) -> None:
    """One gateway alone knows what does not run."""
    error = check_error(stack.http.post("/v1/requests/chatcmpl-nothing/cancel"), "id", 404)
    assert error["code"] == "request_not_found"


def test_without_keys_everybody_may_cancel_by_either_id(stack: Stack) -> None:
    """The answer's id and the request's own."""
    for prefix in ("", "chatcmpl-"):
        stack.worker.script = Script((Say("</think>Hello"), Forever()))
        running = Running(stack, "none")
        response = stack.http.post(f"/v1/requests/{prefix}{running.id.removeprefix('chatcmpl-')}/cancel")
        assert (response.status_code, response.json()["cancelled"]) == (200, True)
        assert running.end().done


# ---- Redis is never needed -----------------------------------------------------------------------------------------------------


def test_redis_may_be_away_at_start_and_come_later(tmp_path: Path) -> None:
    """The gateway serves at once, says that it is degraded, and shares when Redis is there."""
    server = RedisServer()
    server.kill()
    keys = write_keys(tmp_path / "keys.json", a={"requests_per_minute": 1000})
    stack = Stack(api_keys_file=str(tmp_path / "keys.json"), redis_url=server.url, redis_timeout_ms=1000)
    try:
        stack.worker.script = Script((Say("</think>Hello"), Finish()))
        for _ in range(6):
            assert ask(stack, keys["a"]).status_code == 200
        ready = stack.http.get("/health/ready")
        assert (ready.status_code, ready.json()["degraded"]) == (200, ["redis"])
        server.start()
        stack.run(stack.services.link.probe())
        assert "degraded" not in stack.http.get("/health/ready").json()
        assert ask(stack, keys["a"]).headers["x-ratelimit-remaining-requests"] == "999"
    finally:
        stack.close()
        server.close()


def test_killing_redis_in_mid_load_loses_no_request(tmp_path: Path) -> None:
    """200 requests with limits, Redis killed and started in between: every single one is answered, none twice."""
    server = RedisServer()
    keys = write_keys(tmp_path / "keys.json", a={"requests_per_minute": 100_000, "tokens_per_day": 10**9, "concurrency": 64})
    stack = Stack(api_keys_file=str(tmp_path / "keys.json"), redis_url=server.url, redis_timeout_ms=200)
    stack.worker.script = Script((Say("</think>Hello"), Finish()))
    headers = {"Authorization": f"Bearer {keys['a']}"}

    async def load() -> list[int]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=30, headers=headers) as client:
            done = 0

            async def one(i: int) -> int:
                nonlocal done
                response = await client.post("/v1/chat/completions", json=chat_body(stream=i % 2 == 0))
                done += 1
                if done == 60:
                    server.kill()
                elif done == 140:
                    await asyncio.to_thread(server.start)
                assert b"Hello" in response.content
                return response.status_code

            room = asyncio.Semaphore(8)

            async def bounded(i: int) -> int:
                async with room:
                    return await one(i)

            return await asyncio.gather(*(bounded(i) for i in range(200)))

    try:
        assert asyncio.run(load()) == [200] * 200
        assert len(stack.worker.requests) == 200
        assert stack.services.access.counters.fallbacks > 0
        stack.run(stack.services.access.settled())
        until(lambda: stack.services.access.num_running == 0, "nothing runs")
    finally:
        stack.close()
        server.close()


def test_a_redis_url_that_is_none_stops_the_start() -> None:
    """Names the setting."""
    with pytest.raises(Exception, match="GLM53_REDIS_URL"):
        Stack(start_worker=False, redis_url="localhost:6379")
