"""Rate limits and leases that all gateways share: the same sliding window counter as in memory, one Redis call a request and end.

A script, because several limits and a lease must be booked together or not at all, and because the answer to one call must say where
every limit stands. All names of one key have the same hash tag, so that a cluster keeps them in one place; the clock is Redis's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from services.gateway.access.limits import Charge, Lease, LocalCounters, Standing, Verdict
from services.gateway.shared.link import PREFIX, RedisLink, SharedStateDown

log = logging.getLogger(__name__)

LEASE_S = 30.0
_RENEW_INTERVAL_S = 10.0

# KEYS: one hash {w: window index, c: its count, p: the count of the one before} a limit, then the sorted set of leases.
# ARGV: 1 to refuse beyond the limits, lease holder, places, lease ms, then amount, window ms, cost a limit. Places 0: no lease.
# -1: end the lease. Returns {refused limit or 0, or -1 for no place; then p, c, elapsed ms a limit}.
_TAKE = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local enforce, holder, places, lease_ms = ARGV[1] == '1', ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local leases = KEYS[#KEYS]
local refused = 0
if places > 0 then
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
  if not redis.call('ZSCORE', leases, holder) and redis.call('ZCARD', leases) >= places then
    return {-1}
  end
end
local rows = {}
for i = 1, #KEYS - 1 do
  local amount, span, cost = tonumber(ARGV[2 + 3 * i]), tonumber(ARGV[3 + 3 * i]), tonumber(ARGV[4 + 3 * i])
  local index = math.floor(now / span)
  local stored = redis.call('HMGET', KEYS[i], 'w', 'c', 'p')
  local w, c, p = tonumber(stored[1]) or index, tonumber(stored[2]) or 0, tonumber(stored[3]) or 0
  if w < index then
    p = (w == index - 1) and c or 0
    c = 0
  end
  local elapsed = now - index * span
  local used = math.floor(p * (span - elapsed) / span) + c
  if enforce and refused == 0 and cost > amount - used then
    refused = i
  end
  rows[i] = {p, c, elapsed, index, span, cost}
end
local answer = {refused}
for i, row in ipairs(rows) do
  if refused == 0 then
    row[2] = row[2] + row[6]
    redis.call('HSET', KEYS[i], 'w', row[4], 'c', row[2], 'p', row[1])
    redis.call('PEXPIRE', KEYS[i], 2 * row[5])
  end
  table.insert(answer, row[1])
  table.insert(answer, row[2])
  table.insert(answer, row[3])
end
if places > 0 and refused == 0 then
  redis.call('ZADD', leases, now + lease_ms, holder)
  redis.call('PEXPIRE', leases, lease_ms)
elseif places == -1 then
  redis.call('ZREM', leases, holder)
end
return answer
"""

# KEYS: the sorted set of leases. ARGV: lease ms, holders. A lease that ran out meanwhile is taken again: its request still runs.
_RENEW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[1]))
"""


class RedisCounters:
    """Counters in Redis.

    Args:
        link: the way to Redis.
        lease_s: how long a lease lives without being renewed, in seconds.
    """

    def __init__(self, link: RedisLink, lease_s: float = LEASE_S) -> None:
        self._link = link
        self._lease_ms = round(lease_s * 1000)
        self._script = link.client.register_script(_TAKE)
        self._renew_script = link.client.register_script(_RENEW)
        self._held: dict[str, set[str]] = {}

    async def take(self, key_id: str, charges: Sequence[Charge], lease: Lease | None) -> Verdict:
        """Books charges if all limits have room and the lease has a place.

        Raises:
            SharedStateDown: Redis does not answer; what it has booked nevertheless is settled by nobody and fades.
        """
        rows = await self._run(key_id, charges, lease, enforce=True)
        if rows[0] == -1:
            return Verdict((), busy=True)
        if lease is not None and rows[0] == 0:
            self._held.setdefault(key_id, set()).add(lease.holder)
        standings = tuple(
            Standing(charge.limit, int(rows[1 + 3 * i]), int(rows[2 + 3 * i]), int(rows[3 + 3 * i]) / 1000)
            for i, charge in enumerate(charges)
        )
        return Verdict(standings, refused=int(rows[0]) - 1 if rows[0] > 0 else None)

    async def settle(self, key_id: str, corrections: Sequence[Charge], lease: Lease | None) -> None:
        """Adds the difference to what was charged, negative for a refund, whatever the limits say; ends the lease.

        Raises:
            SharedStateDown: Redis does not answer; the lease runs out by itself.
        """
        if lease is not None and key_id in self._held:
            self._held[key_id].discard(lease.holder)
            if not self._held[key_id]:
                del self._held[key_id]
        await self._run(key_id, corrections, lease, enforce=False)

    async def renew(self) -> None:
        """Keeps the leases of running requests alive.

        Raises:
            SharedStateDown: Redis does not answer.
        """
        for key_id, holders in list(self._held.items()):
            names, args = [_lease_name(key_id)], [self._lease_ms, *holders]
            await self._link.call(lambda names=names, args=args: self._renew_script(keys=names, args=args))  # type: ignore[misc]

    async def _run(self, key_id: str, charges: Sequence[Charge], lease: Lease | None, *, enforce: bool) -> list[Any]:
        places = 0 if lease is None else lease.most if enforce else -1
        keys = [f"{PREFIX}:rl:{{{key_id}}}:{charge.limit.name}" for charge in charges] + [_lease_name(key_id)]
        args: list[Any] = [int(enforce), "" if lease is None else lease.holder, places, self._lease_ms]
        for charge in charges:
            args += [charge.limit.amount, charge.limit.window_s * 1000, charge.cost]
        return list(await self._link.call(lambda: self._script(keys=keys, args=args)))


def _lease_name(key_id: str) -> str:
    return f"{PREFIX}:lease:{{{key_id}}}"


class FallbackCounters:
    """Shared counters while Redis answers, this process's part of the limits while it does not.

    Args:
        shared: counters in Redis.
        local: this process's.

    Attributes:
        fallbacks: charges that were counted locally because Redis was away.
    """

    def __init__(self, shared: RedisCounters, local: LocalCounters) -> None:
        self._shared = shared
        self._local = local
        self.fallbacks = 0

    async def take(self, key_id: str, charges: Sequence[Charge], lease: Lease | None) -> Verdict:
        """As `Counters.take`; never fails."""
        try:
            return await self._shared.take(key_id, charges, lease)
        except SharedStateDown:
            self.fallbacks += 1
            return await self._local.take(key_id, charges, lease)

    async def settle(self, key_id: str, corrections: Sequence[Charge], lease: Lease | None) -> None:
        """As `Counters.settle`; never fails. A correction goes where charges go now: the other side's fade by themselves."""
        if lease is not None:
            # A lease may have been taken locally just before Redis came back.
            self._local.end_lease(key_id, lease.holder)
        try:
            await self._shared.settle(key_id, corrections, lease)
        except SharedStateDown:
            await self._local.settle(key_id, corrections, lease)

    async def run(self) -> None:
        """Renews leases for ever."""
        while True:
            await asyncio.sleep(_RENEW_INTERVAL_S)
            try:
                await self._shared.renew()
            except SharedStateDown:
                log.debug("leases could not be renewed")
            except Exception:
                log.exception("leases could not be renewed")
