"""The fair queue."""

from __future__ import annotations

from collections import Counter

import pytest

from services.common.errors import QueueFull
from services.gpu_worker.queue import FairQueue, expected_tokens
from services.gpu_worker.request import Priority, Request, RequestSpec, SamplingParams
from tests.unit.test_worker_request import ListSink


def make(
    key: str, size: int = 100, priority: Priority = Priority.NORMAL, at: float = 0.0, timeout_s: float = 60.0, number: int = 0
) -> Request:
    """A request of `size` prompt tokens."""
    spec = RequestSpec(f"{key}-{number}", (1,) * size, SamplingParams(max_tokens=10), key, priority, timeout_s)
    request = Request(spec, ListSink())
    request.times.submitted = at
    return request


def put(queue: FairQueue, request: Request) -> None:
    queue.put(request, tokens_per_s=100.0, running_tokens=0)


def test_one_key_is_served_in_order() -> None:
    """Requests of one key keep their order."""
    queue = FairQueue(10)
    requests = [make("a", number=i) for i in range(5)]
    for request in requests:
        put(queue, request)
    assert [queue.pop(0.0) for _ in requests] == requests
    assert queue.pop(0.0) is None
    assert queue.tokens == 0


def test_tokens_are_shared_not_requests() -> None:
    """A key with long prompts gets as many tokens as one with short prompts, not as many requests."""
    queue = FairQueue(400)
    for i in range(100):
        put(queue, make("short", 90, number=i))
    for i in range(100):
        put(queue, make("long", 990, number=i))
    served: Counter[str] = Counter()
    for _ in range(66):
        request = queue.pop(0.0)
        assert request is not None
        served[request.spec.key_id] += expected_tokens(request)
    assert 0.6 < served["short"] / served["long"] < 1.6


def test_a_flood_does_not_delay_another_key() -> None:
    """One request of a quiet key is served among the first although a flood came before it."""
    queue = FairQueue(100)
    for i in range(60):
        put(queue, make("flood", 400, number=i))
    quiet = make("quiet", 400)
    put(queue, quiet)
    assert quiet in [queue.pop(0.0) for _ in range(3)]


def test_priority_bands_go_first() -> None:
    """High goes before normal, normal before batch."""
    queue = FairQueue(10)
    for key, priority in (("b", Priority.BATCH), ("n", Priority.NORMAL), ("h", Priority.HIGH)):
        put(queue, make(key, priority=priority))
    order = [queue.pop(0.0) for _ in range(3)]
    assert [request.spec.key_id for request in order if request] == ["h", "n", "b"]


def test_waiting_ages_a_band() -> None:
    """A batch request that waited long enough is served before a fresh high one of a later turn: nobody starves."""
    queue = FairQueue(10, ageing_s=10.0)
    old = make("b", priority=Priority.BATCH, at=0.0)
    put(queue, old)
    for i in range(5):
        put(queue, make("h", priority=Priority.HIGH, at=25.0, number=i))
    assert old in [queue.pop(25.0), queue.pop(25.0)]


def test_full_queue_estimates_the_wait() -> None:
    """The estimate grows with what waits and with how slow the engine is."""
    queue = FairQueue(2)
    put(queue, make("a", 1000))
    put(queue, make("b", 1000))
    with pytest.raises(QueueFull) as fast:
        queue.put(make("c"), tokens_per_s=1000.0, running_tokens=0)
    with pytest.raises(QueueFull) as slow:
        queue.put(make("c"), tokens_per_s=50.0, running_tokens=5000)
    assert fast.value.retry_after_s == pytest.approx(1.0, abs=0.1)
    assert slow.value.retry_after_s == pytest.approx(70.2, abs=0.5)
    assert len(queue) == 2


def test_one_key_cannot_fill_the_queue() -> None:
    """A quarter of the places is out of reach for any single key."""
    queue = FairQueue(8)
    for i in range(6):
        put(queue, make("greedy", number=i))
    with pytest.raises(QueueFull, match="of this key"):
        put(queue, make("greedy", number=6))
    put(queue, make("other"))


def test_without_keys_the_whole_queue_is_there() -> None:
    """Where nobody is asked for a key, requests without one fill every place."""
    queue = FairQueue(8)
    for i in range(8):
        put(queue, make("", number=i))
    with pytest.raises(QueueFull, match="8 requests are waiting"):
        put(queue, make("", number=8))


def test_expired_and_removed_requests_leave() -> None:
    """Expired requests are handed out once, removed ones not at all, and the account of tokens stays right."""
    queue = FairQueue(8)
    late, gone, stays = make("a", timeout_s=5.0), make("b"), make("c")
    for request in (late, gone, stays):
        put(queue, request)
    assert queue.expired(6.0) == [late]
    assert queue.remove(gone)
    assert not queue.remove(gone)
    assert queue.tokens == expected_tokens(stays)
    assert queue.drain() == [stays]
    assert len(queue) == 0
    assert queue.tokens == 0


def test_debt_is_remembered_until_the_next_request() -> None:
    """A key whose answers were longer than expected waits its turn with the next request."""
    queue = FairQueue(20)
    first = make("talker", 10)
    put(queue, first)
    assert queue.pop(0.0) is first
    first.num_prefilled, first.num_generated = 10, 3000
    queue.settle(first)
    put(queue, make("talker", 10, number=1))
    for i in range(4):
        put(queue, make("other", 400, number=i))
    order = [queue.pop(0.0) for _ in range(5)]
    assert [request.spec.key_id for request in order if request].index("talker") >= 2
