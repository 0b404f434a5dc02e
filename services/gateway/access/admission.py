"""One HTTP request of one key: what it was charged, where its limits stand, and its end."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Sequence
from typing import Protocol

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.access.keys import ApiKey
from services.gateway.access.limits import Charge, Counters, Lease, Limit, Standing, Verdict, limits_of
from services.gateway.errors import RateLimited
from services.gateway.shared.link import SharedStateDown

log = logging.getLogger(__name__)

# A place among a key's concurrent requests comes free when one of them ends: nobody knows when that is.
_BUSY_RETRY_S = 1.0
# Keys whose refusals are remembered.
_MAX_REMEMBERED = 10_000


class SharedProbe(Protocol):
    """Tells whether shared counters are exact right now; `RedisLink` is one."""

    @property
    def is_up(self) -> bool:
        """False while they are away."""


class AccessPolicy:
    """Limits of all keys in this process.

    Args:
        counters: where limits are counted.
        shared_is_up: tells whether `counters` counts for all gateways right now.
    """

    def __init__(self, counters: Counters, shared_is_up: SharedProbe | None = None) -> None:
        self.counters = counters
        self._shared_is_up = shared_is_up
        self._running: dict[str, int] = {}
        # key id -> (until, standings): a key that used up its requests is refused without asking the counters again.
        self._spent: dict[str, tuple[float, tuple[Standing, ...]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Requests of keys with a concurrency limit that are being answered."""
        return sum(self._running.values())

    def enter(self, key: ApiKey, request_id: str) -> Admission:
        """Checks what can be checked before the body is read, without asking anybody.

        Raises:
            RateLimited: the key has too many requests running, or has no request left.
            SharedStateDown: the key may only be counted exactly, and that is not possible now.
        """
        if key.fail_closed and self._shared_is_up is not None and not self._shared_is_up.is_up:
            raise SharedStateDown("This key's limits cannot be checked right now; try again.", retry_after_s=2.0)
        spent = self._spent.get(key.id)
        if spent is not None:
            left_s = spent[0] - time.monotonic()
            if left_s > 0 and key.requests_per_minute == spent[1][0].limit.amount:
                error = RateLimited(_used_up(spent[1][0].limit, key), retry_after_s=left_s)
                error.standing = _headers("requests", key.requests_per_minute, 0, left_s)
                raise error
            del self._spent[key.id]
        if key.concurrency is not None:
            running = self._running.get(key.id, 0)
            if running >= key.concurrency:
                raise _busy(key)
            self._running[key.id] = running + 1
        return Admission(self, key, request_id)

    def leave(self, admission: Admission) -> None:
        """The request has ended."""
        key = admission.key
        if key.concurrency is not None:
            running = self._running[key.id] - 1
            if running:
                self._running[key.id] = running
            else:
                del self._running[key.id]

    def remember_refusal(self, key: ApiKey, verdict: Verdict, wait_s: float) -> None:
        """A key without a request left: until then it costs nothing to say so again."""
        if len(self._spent) < _MAX_REMEMBERED:
            self._spent[key.id] = (time.monotonic() + wait_s, verdict.standings)

    def settle_later(self, admission: Admission) -> None:
        """Settles beside the request: the client does not wait for the books."""
        if not admission.owes:
            return
        task = asyncio.create_task(admission.settle())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def settled(self) -> None:
        """Waits until every ended request is settled."""
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)


class Admission:
    """Made by `AccessPolicy.enter`, ended by `settle`."""

    def __init__(self, policy: AccessPolicy, key: ApiKey, request_id: str) -> None:
        self._policy = policy
        self.key = key
        self.request_id = request_id
        self._limits = limits_of(key)
        self._lease = None if key.concurrency is None else Lease(request_id, key.concurrency)
        self._charged = False
        self._charged_tokens = 0
        self._real_tokens = 0
        self.standings: tuple[Standing, ...] = ()
        self.finished: list[pb.Finished] = []

    async def charge(self, tokens: int) -> None:
        """Charges one generation before it runs; the request itself counts once, however many it has.

        Args:
            tokens: of its prompt and of the answer that it is expected to get.

        Raises:
            RateLimited: names the limit; `retry_after_s` tells when the request would be taken.
        """
        first, self._charged = not self._charged, True
        lease = self._lease if first else None
        if not self._limits and lease is None:
            return
        charges = [Charge(limit, int(first) if limit.unit == "requests" else tokens) for limit in self._limits]
        verdict = await self._policy.counters.take(self.key.id, charges, lease)
        self.standings = verdict.standings or self.standings
        if verdict.taken:
            self._charged_tokens += tokens
            return
        self._charged = not first
        if verdict.busy:
            raise _busy(self.key)
        assert verdict.refused is not None
        standing, cost = verdict.standings[verdict.refused], charges[verdict.refused].cost
        wait_s = standing.wait_s(cost)
        if wait_s is None:
            raise RateLimited(
                f"This request may take {cost} tokens; the key {self.key.id!r} may use {standing.limit.words}. "
                "Shorten the prompt or lower max_tokens."
            )
        if standing.limit.unit == "requests":
            self._policy.remember_refusal(self.key, verdict, wait_s)
        raise RateLimited(_used_up(standing.limit, self.key), retry_after_s=wait_s)

    def used(self, tokens: int) -> None:
        """A charged generation has taken so many tokens, or has done so when it was cut off."""
        self._real_tokens += tokens

    @property
    def real_tokens(self) -> int:
        """Tokens that its generations took until now, of prompts and answers."""
        return self._real_tokens

    @property
    def owes(self) -> bool:
        """True when there may be something to settle."""
        return self._charged and bool(self._limits or self._lease is not None)

    async def settle(self) -> None:
        """Corrects the charge by what was really used."""
        if not self.owes:
            return
        difference = self._real_tokens - self._charged_tokens
        corrections = [Charge(limit, difference) for limit in self._limits if limit.unit == "tokens" and difference]
        if not corrections and self._lease is None:
            return
        try:
            await self._policy.counters.settle(self.key.id, corrections, self._lease)
        except Exception:
            # What could not be booked fades with its window; the answer was given.
            log.exception("a request could not be settled", extra={"key_id": self.key.id})

    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers: requests, and the tokens' limit that has least left."""
        found: dict[str, Standing] = {}
        for standing in self.standings:
            unit = standing.limit.unit
            if unit not in found or standing.remaining < found[unit].remaining:
                found[unit] = standing
        headers: dict[str, str] = {}
        for unit, standing in found.items():
            headers |= _headers(unit, standing.limit.amount, standing.remaining, standing.reset_s)
        return headers


# The request that the current task works for; None outside of requests.
admission_var: contextvars.ContextVar[Admission | None] = contextvars.ContextVar("admission", default=None)


def _headers(unit: str, amount: int, remaining: int, reset_s: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{unit}": str(amount),
        f"x-ratelimit-remaining-{unit}": str(remaining),
        f"x-ratelimit-reset-{unit}": duration(reset_s),
    }


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: 850ms, 12s, 6m0s, 1h0m3s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if whole >= 60 else "") + f"{rest}s"


def expected_tokens(prompt: Sequence[object], max_tokens: int, expected_answer: int) -> int:
    """What a generation is charged before it runs: clients leave max_tokens at the rest of the context, so its answer counts for
    at most `expected_answer` tokens in advance."""
    return len(prompt) + min(max_tokens, expected_answer)


def _busy(key: ApiKey) -> RateLimited:
    return RateLimited(
        f"The key {key.id!r} may run {key.concurrency} requests at the same time; wait for one to end.", retry_after_s=_BUSY_RETRY_S
    )


def _used_up(limit: Limit, key: ApiKey) -> str:
    return f"The key {key.id!r} may use {limit.words}, and too few are left for this request."
