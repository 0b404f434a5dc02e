"""Limits: one contract for counters in memory, in fakeredis and in a real Redis, and what clients see of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fakeredis
import openai
import pytest

from services.common.errors import QueueFull
from services.gateway.access.admission import AccessPolicy, duration
from services.gateway.access.keys import ApiKey
from services.gateway.access.limits import Charge, Counters, Lease, Limit, LocalCounters, Standing, Verdict, limits_of
from services.gateway.errors import RateLimited
from services.gateway.shared.counters import FallbackCounters, RedisCounters
from services.gateway.shared.link import RedisLink, SharedStateDown
from tests.gateway.access import ask, write_keys
from tests.gateway.fake_worker import Fail, Finish, Forever, Say, Script, Wait
from tests.gateway.redis_server import RedisServer
from tests.gateway.stack import Stack, until
from tests.gateway.test_validation import check_error

# Long enough for a busy machine to renew it in time.
LEASE_S = 2.0
# So long that no test meets the end of a window, however slow the machine is.
DAY_S = 86_400
REQUESTS = Limit("requests", 3, DAY_S)
TOKENS = Limit("tokens", 100, DAY_S)
QUICK = Limit("tokens", 10, 1)
T = TypeVar("T")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture(params=["memory", "fakeredis", "redis-server"])
async def counters(request: pytest.FixtureRequest) -> AsyncIterator[Counters]:
    """Fresh counters of each kind."""
    if request.param == "memory":
        yield LocalCounters()
        return
    if request.param == "fakeredis":
        link = RedisLink(fakeredis.FakeAsyncRedis(), timeout_s=5.0)
    else:
        link = RedisLink.connect(request.getfixturevalue("redis_server").url, timeout_s=20.0)
        await link.client.flushall()
    yield RedisCounters(link)
    await link.close()


async def fresh_window(window_s: int = DAY_S, need_s: float = 60.0) -> None:
    """Waits out the end of a window, so that a test does not straddle two."""
    left = window_s - time.time() % window_s
    if left < need_s:
        await asyncio.sleep(left + 0.05)


# ---- the contract --------------------------------------------------------------------------------------------------------------


async def test_a_limit_gives_what_it_has_and_no_more(counters: Counters) -> None:
    """Three requests of three pass, the fourth does not; the standing counts down; another key has its own."""
    await fresh_window()
    left = [(await counters.take("a", [Charge(REQUESTS, 1)], None)).standings[0].remaining for _ in range(3)]
    assert left == [2, 1, 0]
    verdict = await counters.take("a", [Charge(REQUESTS, 1)], None)
    assert (verdict.taken, verdict.refused, verdict.standings[0].remaining) == (False, 0, 0)
    assert (await counters.take("b", [Charge(REQUESTS, 1)], None)).taken


async def test_all_limits_are_charged_or_none(counters: Counters) -> None:
    """A request that one limit refuses costs the others nothing."""
    await fresh_window()
    assert (await counters.take("a", [Charge(REQUESTS, 1), Charge(TOKENS, 90)], None)).taken
    verdict = await counters.take("a", [Charge(REQUESTS, 1), Charge(TOKENS, 20)], None)
    assert verdict.refused == 1
    assert [standing.remaining for standing in verdict.standings] == [2, 10]
    assert [standing.remaining for standing in (await counters.take("a", [Charge(REQUESTS, 1), Charge(TOKENS, 10)], None)).standings] == [
        1,
        0,
    ]


async def test_the_real_use_replaces_the_estimate(counters: Counters) -> None:
    """A refund gives back, a surcharge is booked even beyond the limit, and then nothing more passes."""
    await fresh_window()
    await counters.take("a", [Charge(TOKENS, 90)], None)
    await counters.settle("a", [Charge(TOKENS, -80)], None)
    assert (await counters.take("a", [Charge(TOKENS, 0)], None)).standings[0].remaining == 90
    await counters.settle("a", [Charge(TOKENS, 150)], None)
    verdict = await counters.take("a", [Charge(TOKENS, 1)], None)
    assert (verdict.refused, verdict.standings[0].used) == (0, 160)
    await counters.settle("a", [Charge(TOKENS, -160)], None)
    assert (await counters.take("a", [Charge(TOKENS, 100)], None)).taken


async def in_one_window(work: Callable[[str], Awaitable[T]], window_s: int = QUICK.window_s) -> T:
    """Runs `work` with a key of its own until one run lies within one window: on a busy machine the first may not."""
    for attempt in range(50):
        await fresh_window(window_s, window_s / 2)
        began = int(time.time() // window_s)
        found = await work(f"key-{attempt}")
        if int(time.time() // window_s) == began:
            return found
    raise AssertionError("the machine is too slow: no run lay within one window")


async def test_what_was_used_fades_with_its_window(counters: Counters) -> None:
    """After two windows everything is free again, and a refusal said how long that takes."""

    async def fill(key: str) -> tuple[str, Verdict]:
        assert (await counters.take(key, [Charge(QUICK, 10)], None)).taken
        return key, await counters.take(key, [Charge(QUICK, 10)], None)

    key, verdict = await in_one_window(fill)
    assert verdict.refused == 0
    wait_s = verdict.standings[0].wait_s(10)
    assert wait_s is not None
    assert 0 < wait_s <= 2
    await asyncio.sleep(wait_s + 0.1)
    assert (await counters.take(key, [Charge(QUICK, 10)], None)).taken


async def test_the_window_before_counts_by_what_overlaps(counters: Counters) -> None:
    """No burst of twice the limit at a window's border."""
    for _ in range(20):
        key, window = await in_one_window(lambda key: _taken(counters, key))
        await asyncio.sleep(1 - time.time() % 1 + 0.1)
        verdict = await counters.take(key, [Charge(QUICK, 10)], None)
        little = await counters.take(key, [Charge(QUICK, 1)], None)
        if int(time.time()) == window + 1:
            break
    else:
        raise AssertionError("the machine is too slow: no run met the next window")
    assert verdict.refused == 0
    assert verdict.standings[0].previous == 10
    assert little.taken


async def _taken(counters: Counters, key: str) -> tuple[str, int]:
    """Takes the whole limit; says in which window."""
    assert (await counters.take(key, [Charge(QUICK, 10)], None)).taken
    return key, int(time.time())


async def test_a_key_has_only_so_many_places(counters: Counters) -> None:
    """The third lease of two is refused and books nothing; a place that is given back is free; asking twice takes one place."""
    await fresh_window()
    for holder in ("r1", "r2", "r2"):
        assert (await counters.take("a", [Charge(TOKENS, 10)], Lease(holder, 2))).taken
    verdict = await counters.take("a", [Charge(TOKENS, 10)], Lease("r3", 2))
    assert (verdict.taken, verdict.busy) == (False, True)
    assert (await counters.take("a", [Charge(TOKENS, 0)], None)).standings[0].used == 30
    await counters.settle("a", [], Lease("r1", 2))
    assert (await counters.take("a", [], Lease("r3", 2))).taken
    assert (await counters.take("b", [], Lease("r9", 2))).taken


async def test_a_lease_that_was_refused_by_a_limit_holds_no_place(counters: Counters) -> None:
    """Everything or nothing includes the place."""
    await fresh_window()
    assert (await counters.take("a", [Charge(TOKENS, 200)], Lease("r1", 1))).refused == 0
    assert (await counters.take("a", [Charge(TOKENS, 1)], Lease("r2", 1))).taken


async def test_many_at_once_never_exceed_a_limit(counters: Counters) -> None:
    """A hundred concurrent charges of one token: exactly as many pass as there are."""
    await fresh_window()
    limit = Limit("tokens", 40, DAY_S)
    verdicts = await asyncio.gather(*(counters.take("a", [Charge(limit, 1)], None) for _ in range(60)))
    assert sum(verdict.taken for verdict in verdicts) == 40


# ---- Redis only ----------------------------------------------------------------------------------------------------------------


async def test_two_gateways_share_limits_and_places(redis_server: RedisServer) -> None:
    """What one charges, the other sees."""
    await fresh_window()
    links = [RedisLink.connect(redis_server.url, timeout_s=5.0) for _ in range(2)]
    await links[0].client.flushall()
    one, two = (RedisCounters(link) for link in links)
    assert (await one.take("a", [Charge(TOKENS, 60)], Lease("r1", 1))).taken
    assert (await two.take("a", [Charge(TOKENS, 60)], None)).refused == 0
    assert (await two.take("a", [Charge(TOKENS, 10)], Lease("r2", 1))).busy
    for link in links:
        await link.close()


async def test_the_lease_of_a_dead_gateway_runs_out_and_a_live_one_is_renewed(redis_server: RedisServer) -> None:
    """Nobody gives back what a killed gateway held; time does. `renew` keeps what still runs."""
    link = RedisLink.connect(redis_server.url, timeout_s=5.0)
    await link.client.flushall()
    dead, alive = RedisCounters(link, lease_s=LEASE_S), RedisCounters(link, lease_s=LEASE_S)
    assert (await dead.take("a", [], Lease("r1", 2))).taken
    assert (await alive.take("a", [], Lease("r2", 2))).taken
    assert (await alive.take("a", [], Lease("r3", 2))).busy
    began = time.monotonic()
    while not (await alive.take("a", [], Lease("r3", 2))).taken:
        assert time.monotonic() - began < 10 * LEASE_S
        await asyncio.sleep(0.1)
        await alive.renew()
    assert (await alive.take("a", [], Lease("r4", 2))).busy
    await link.close()


async def test_names_of_one_key_share_a_hash_tag_and_expire(redis_server: RedisServer) -> None:
    """A cluster keeps them together; nothing stays for ever."""
    link = RedisLink.connect(redis_server.url, timeout_s=5.0)
    await link.client.flushall()
    await RedisCounters(link).take("team-a", [Charge(REQUESTS, 1), Charge(TOKENS, 5)], Lease("r", 1))
    names = sorted(await link.client.keys("*"))
    assert names == [b"glm53:lease:{team-a}", b"glm53:rl:{team-a}:requests", b"glm53:rl:{team-a}:tokens"]
    for name in names:
        assert 0 < await link.client.pttl(name) <= 2 * DAY_S * 1000
    await link.close()


async def test_one_request_costs_two_calls(redis_server: RedisServer) -> None:
    """One at admission, one at the end, however many limits the key has."""
    link = RedisLink.connect(redis_server.url, timeout_s=5.0)
    await link.client.flushall()
    counters = RedisCounters(link)
    policy = AccessPolicy(counters, link)
    key = ApiKey(id="a", sha256="0" * 64, requests_per_minute=99, tokens_per_minute=9999, tokens_per_day=9999, concurrency=9)
    await counters.take("warm-up", [], None)
    calls = 0
    original = link.call

    async def counted(make: Any) -> Any:
        nonlocal calls
        calls += 1
        return await original(make)

    link.call = counted  # type: ignore[method-assign]
    admission = policy.enter(key, "r1")
    await admission.charge(100)
    admission.used(50)
    policy.leave(admission)
    policy.settle_later(admission)
    await policy.settled()
    assert calls == 2
    await link.close()


async def test_the_breaker_opens_after_five_failures_and_closes_by_a_probe() -> None:
    """Closed: every call is tried. Open: none is, which costs nothing. The probe closes it when Redis is back."""
    server = RedisServer()
    link = RedisLink.connect(server.url, timeout_s=0.5)
    counters = RedisCounters(link)
    assert (await counters.take("a", [], None)).taken
    server.kill()
    for _ in range(5):
        assert link.is_up
        with pytest.raises(SharedStateDown):
            await counters.take("a", [], None)
    assert not link.is_up
    failures = link.failures
    for _ in range(100):
        with pytest.raises(SharedStateDown):
            await counters.take("a", [], None)
    assert link.failures == failures
    await link.probe()
    assert not link.is_up
    server.start()
    await link.probe()
    assert link.is_up
    # The new server does not know the script: that is no failure.
    assert (await counters.take("a", [], None)).taken
    await link.close()
    server.close()


async def test_a_frozen_redis_costs_its_deadline_and_no_more() -> None:
    """A Redis that accepts and never answers is given up after the timeout, and opens the breaker."""
    server = RedisServer()
    link = RedisLink.connect(server.url, timeout_s=0.05)
    fallback = FallbackCounters(RedisCounters(link), LocalCounters())
    try:
        await link.client.ping()
        server.freeze()
        for _ in range(5):
            assert (await fallback.take("a", [Charge(TOKENS, 1)], None)).taken
        assert not link.is_up
        assert fallback.fallbacks == 5
        server.thaw()
        async with asyncio.timeout(20):  # on a busy machine the first answers may come later than the link waits
            while not link.is_up:
                await link.probe()
    finally:
        await link.close()
        server.close()


async def test_without_redis_each_gateway_allows_its_part() -> None:
    """Four replicas: a quarter of every limit, at least one; leases likewise."""
    link = RedisLink.connect("redis://127.0.0.1:1/0", timeout_s=0.5)
    fallback = FallbackCounters(RedisCounters(link), LocalCounters(1 / 4))
    limit = Limit("tokens", 40, DAY_S)
    await fresh_window()
    assert (await fallback.take("a", [Charge(limit, 10)], Lease("r1", 5))).taken
    verdict = await fallback.take("a", [Charge(limit, 1)], None)
    assert (verdict.refused, verdict.standings[0].limit.amount) == (0, 10)
    assert (await fallback.take("a", [], Lease("r2", 5))).busy
    await fallback.settle("a", [Charge(limit, -10)], Lease("r1", 5))
    assert (await fallback.take("a", [Charge(limit, 10)], Lease("r2", 5))).taken
    await link.close()


# ---- arithmetic ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "current", "elapsed_s", "cost", "wait_s"),
    [
        (0, 0, 10, 100, 0),
        (0, 50, 10, 50, 0),
        (0, 100, 10, 101, None),
        # The old window fades: 100 * rest + 0 + 50 <= 100 at half of it.
        (100, 0, 10, 50, 20),
        # The current window must end (50 s) and fade to 50: another 30 s.
        (0, 100, 10, 50, 80),
        (0, 100, 10, 100, 110),
    ],
)
def test_the_wait_is_computed_from_both_windows(previous: int, current: int, elapsed_s: float, cost: int, wait_s: float | None) -> None:
    """Retry-After is when the request would pass, not a guess."""
    standing = Standing(Limit("tokens", 100, 60), previous, current, elapsed_s)
    assert standing.wait_s(cost) == (wait_s if wait_s is None else pytest.approx(wait_s, abs=0.01))


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.85, "850ms"), (1, "1s"), (59.2, "1m0s"), (72, "1m12s"), (3603, "1h0m3s")])
def test_durations_look_like_openais(seconds: float, text: str) -> None:
    """Clients parse 6m0s and 850ms."""
    assert duration(seconds) == text


def test_limits_of_a_key_are_those_it_has() -> None:
    """Absent limits do not exist."""
    assert limits_of(ApiKey(id="a", sha256="0" * 64)) == ()
    assert limits_of(ApiKey(id="a", sha256="0" * 64, tokens_per_day=7)) == (Limit("tokens_day", 7, 86_400),)


# ---- over HTTP -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture
def limited(key_file: Path) -> Iterator[tuple[Stack, dict[str, str]]]:
    """A gateway with limited keys; its counters are new."""
    keys = write_keys(
        key_file,
        free={},
        rpm={"requests_per_minute": 2},
        tpm={"tokens_per_minute": 400},
        tpd={"tokens_per_day": 400, "tokens_per_minute": 100_000},
        one={"concurrency": 1},
    )
    stack = Stack(api_keys_file=str(key_file))
    stack.worker.script = Script((Say("</think>Hello"), Finish()))
    yield stack, keys
    stack.close()


def in_one_minute() -> None:
    """Waits out the end of a minute."""
    if 60 - time.time() % 60 < 6:
        time.sleep(60 - time.time() % 60 + 0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_over_the_limit_hears_429_and_when_to_come_back(limited: tuple[Stack, dict[str, str]], stream: bool) -> None:
    """Before any event: OpenAI's shape, Retry-After, retry-after-ms, x-ratelimit-*; again and again, also without asking the counters."""
    stack, keys = limited
    in_one_minute()
    for left in ("1", "0"):
        response = ask(stack, keys["rpm"], stream=stream)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == left
        assert response.headers["x-ratelimit-reset-requests"][-1] == "s"
        assert "x-ratelimit-limit-tokens" not in response.headers
    before = len(stack.worker.requests)
    for _ in range(3):
        refused = ask(stack, keys["rpm"], stream=stream)
        error = check_error(refused, None, 429)
        assert error["code"] == "rate_limit_exceeded"
        assert "2 requests a minute" in error["message"]
        assert 0 < int(refused.headers["retry-after-ms"]) <= 120_000
        assert int(refused.headers["retry-after"]) >= int(refused.headers["retry-after-ms"]) / 1000
        assert "x-should-retry" not in refused.headers
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"][-1] == "s"
    assert len(stack.worker.requests) == before
    assert ask(stack, keys["free"], stream=stream).status_code == 200


def test_the_official_client_raises_rate_limit_error(limited: tuple[Stack, dict[str, str]]) -> None:
    """openai.RateLimitError with our code."""
    stack, keys = limited
    in_one_minute()
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=keys["rpm"], max_retries=0) as client:
        for _ in range(2):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "rate_limit_exceeded"


def test_tokens_are_charged_in_advance_and_settled_by_real_use(limited: tuple[Stack, dict[str, str]]) -> None:
    """The estimate (prompt plus up to 256) is held while the request runs, afterwards only what it took."""
    stack, keys = limited
    in_one_minute()
    stack.worker.script = Script((Say("</think>a"), Wait(0.5), Finish()))
    first = ask(stack, keys["tpm"], max_tokens=300)
    usage = first.json()["usage"]
    prompt = usage["prompt_tokens"]
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 400 - prompt - 256
    stack.run(stack.services.access.settled())
    second = ask(stack, keys["tpm"], max_tokens=1)
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == 400 - usage["total_tokens"] - prompt - 1


def test_a_request_larger_than_its_limit_is_told_never_to_retry(limited: tuple[Stack, dict[str, str]]) -> None:
    """No wait would help: x-should-retry false and no Retry-After; both numbers are in the message."""
    stack, keys = limited
    refused = ask(stack, keys["tpm"], messages=[{"role": "user", "content": "x y " * 120}])
    error = check_error(refused, None, 429)
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    assert "400 tokens a minute" in error["message"]


def test_the_day_counts_too(limited: tuple[Stack, dict[str, str]]) -> None:
    """The tokens' header shows the limit that has least left; used up for the day is 429 with a long wait."""
    stack, keys = limited
    stack.worker.script = Script((Say("</think>" + "a b " * 150), Finish()))
    assert ask(stack, keys["tpd"], max_tokens=300).headers["x-ratelimit-limit-tokens"] == "400"
    stack.run(stack.services.access.settled())
    refused = ask(stack, keys["tpd"], max_tokens=300)
    assert "400 tokens a day" in check_error(refused, None, 429)["message"]
    assert int(refused.headers["retry-after"]) > 60


@pytest.mark.parametrize("stream", [False, True])
def test_a_place_is_free_again_when_its_request_ends(limited: tuple[Stack, dict[str, str]], stream: bool) -> None:
    """A second concurrent request is 429; after the first one's client left, the key may ask again and the counters are zero."""
    stack, keys = limited
    stack.worker.script = Script((Say("</think>a"), Forever()))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    headers = {"Authorization": f"Bearer {keys['one']}"}

    async def leave_early() -> None:
        _reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Authorization: {headers['Authorization']}\r\n\r\n".encode() + data)
        await writer.drain()
        while not stack.worker.live:
            await asyncio.sleep(0.01)
        refused = await asyncio.to_thread(ask, stack, keys["one"])
        assert "1 requests at the same time" in check_error(refused, None, 429)["message"]
        assert int(refused.headers["retry-after-ms"]) == 1000
        writer.close()

    asyncio.run(leave_early())
    until(lambda: not stack.worker.live, "the job is gone")
    until(lambda: stack.services.access.num_running == 0, "the place is free")
    stack.worker.script = Script((Say("</think>a"), Finish()))
    assert ask(stack, keys["one"]).status_code == 200
    stack.run(stack.services.access.settled())
    assert stack.services.access.counters.num_leases == 0


def test_a_request_that_was_cut_off_costs_what_was_computed(limited: tuple[Stack, dict[str, str]]) -> None:
    """Prompt plus the tokens that came before the failure."""
    stack, keys = limited
    in_one_minute()
    stack.worker.script = Script((Say("</think>a"), Fail(QueueFull("too late"))))
    ask(stack, keys["tpm"])
    used = len(stack.worker.requests[-1].prompt_token_ids) + 2
    stack.run(stack.services.access.settled())
    stack.worker.script = Script((Say("</think>a"), Finish()))
    after = ask(stack, keys["tpm"], max_tokens=1)
    assert int(after.headers["x-ratelimit-remaining-tokens"]) == 400 - used - len(stack.worker.requests[-1].prompt_token_ids) - 1


def test_a_refused_request_costs_nothing(limited: tuple[Stack, dict[str, str]]) -> None:
    """The worker's queue is full: 503 with its own wait estimate, and the tokens are given back."""
    stack, keys = limited
    in_one_minute()
    stack.worker.script = Script((Fail(QueueFull("64 requests are waiting", retry_after_s=7.3)),), admit=False)
    refused = ask(stack, keys["tpm"])
    check_error(refused, None, 503)
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("8", "7300")
    stack.run(stack.services.access.settled())
    stack.worker.script = Script((Say("</think>a"), Finish()))
    after = ask(stack, keys["tpm"], max_tokens=1)
    assert int(after.headers["x-ratelimit-remaining-tokens"]) == 400 - len(stack.worker.requests[-1].prompt_token_ids) - 1


async def test_a_paid_key_is_refused_rather_than_miscounted(key_file: Path) -> None:
    """fail_closed: 503 while Redis is away; other keys are served."""
    link = RedisLink.connect("redis://127.0.0.1:1/0", timeout_s=0.5)
    policy = AccessPolicy(FallbackCounters(RedisCounters(link), LocalCounters()), link)
    paid = ApiKey(id="paid", sha256="0" * 64, requests_per_minute=5, fail_closed=True)
    for i in range(5):
        await policy.enter(ApiKey(id="free", sha256="1" * 64, requests_per_minute=50), f"r{i}").charge(1)
    assert not link.is_up
    with pytest.raises(SharedStateDown):
        policy.enter(paid, "r9")
    policy.enter(ApiKey(id="free", sha256="1" * 64), "r10")
    await link.close()


async def test_a_raised_limit_counts_at_once() -> None:
    """A refusal that was remembered is forgotten when the key's limit changes."""
    policy = AccessPolicy(LocalCounters())
    await fresh_window()
    small = ApiKey(id="a", sha256="0" * 64, requests_per_minute=1)
    await policy.enter(small, "r1").charge(1)
    with pytest.raises(RateLimited):
        await policy.enter(small, "r2").charge(1)
    with pytest.raises(RateLimited):
        policy.enter(small, "r3")
    large = ApiKey(id="a", sha256="0" * 64, requests_per_minute=5)
    await policy.enter(large, "r4").charge(1)
