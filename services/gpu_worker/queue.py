"""The bounded, fair waiting line in front of the engine.

Deficit round robin by tokens over keys (who asks), inside priority bands. Waiting ages a request: after `ageing_s` it counts as one band
better, so that a lower band is slowed down, never starved. No key may take the whole line; where nobody has a key, everybody together may.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.common.errors import QueueFull
from services.gpu_worker.request import Request

# What one visit of the round robin adds to a key's account, in tokens.
QUANTUM_TOKENS = 512
# Output counts for at most this much in advance: clients leave max_tokens at the rest of the context. The truth is settled at the end.
EXPECTED_OUTPUT_TOKENS = 256
# A key's debt or credit is remembered within this bound, in tokens.
MAX_BALANCE = 16 * QUANTUM_TOKENS
MIN_RETRY_S, MAX_RETRY_S = 1.0, 300.0


def expected_tokens(request: Request) -> int:
    """What a request is expected to cost, in tokens."""
    return len(request.spec.prompt) + min(request.spec.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)


@dataclass
class _Line:
    """The requests of one key, oldest first, and its account."""

    requests: deque[Request] = field(default_factory=deque)
    deficit: float = 0.0


class FairQueue:
    """Not thread-safe: the engine loop locks around it.

    Args:
        max_queued: most requests that wait.
        ageing_s: waiting time after which a request counts as one band better.
    """

    def __init__(self, max_queued: int, ageing_s: float = 10.0) -> None:
        self._max_queued = max_queued
        # A quarter of the line is out of reach for any single key. Requests without one come from who knows how many people.
        self._max_per_key = max(1, max_queued - max_queued // 4)
        self._ageing_s = ageing_s
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._balance: OrderedDict[str, float] = OrderedDict()
        self._size = 0
        self._tokens = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line.requests

    @property
    def tokens(self) -> int:
        """Expected cost of everything that waits."""
        return self._tokens

    def put(self, request: Request, tokens_per_s: float, running_tokens: int) -> None:
        """Adds a request at the end of its key's line.

        Args:
            tokens_per_s: the engine's recent speed, for the wait estimate.
            running_tokens: what the running requests still have to do.

        Raises:
            QueueFull: the line, or the key's share of it, is full; carries a wait estimate.
        """
        key = request.spec.key_id
        line = self._lines.get(key)
        if self._size >= self._max_queued:
            raise QueueFull(
                f"{self._size} requests are waiting, the most that this worker keeps: try again later",
                retry_after_s=self.wait_s(tokens_per_s, running_tokens),
            )
        if key and line is not None and len(line.requests) >= self._max_per_key:
            raise QueueFull(
                f"{len(line.requests)} requests of this key are waiting, the most for one key: try again later",
                retry_after_s=self.wait_s(tokens_per_s, running_tokens),
            )
        if line is None:
            line = self._lines[key] = _Line(deficit=self._balance.pop(key, 0.0))
        line.requests.append(request)
        self._size += 1
        self._tokens += expected_tokens(request)

    def pop(self, now: float, fits: Callable[[Request], bool] = lambda _request: True) -> Request | None:
        """The request whose turn it is, or None when nobody waits or that one does not fit yet: nobody overtakes it."""
        if not self._size:
            return None
        band = min(self._band(line.requests[0], now) for line in self._lines.values())
        eligible = [key for key, line in self._lines.items() if self._band(line.requests[0], now) == band]
        self._credit_rounds(eligible)
        for key in eligible:
            line = self._lines[key]
            cost = expected_tokens(line.requests[0])
            if line.deficit >= cost:
                if not fits(line.requests[0]):
                    return None
                line.deficit -= cost
                # The key goes on being served while its account lasts, then it is the next one's turn.
                if line.deficit < QUANTUM_TOKENS:
                    self._lines.move_to_end(key)
                return self._take(key, line.requests[0])
        raise RuntimeError("no line has credit after crediting: a bug in the queue")

    def _credit_rounds(self, keys: list[str]) -> None:
        """Visits every line as often as it takes until one can pay for its first request."""
        missing = min(expected_tokens(self._lines[key].requests[0]) - self._lines[key].deficit for key in keys)
        rounds = max(0, -int(-missing // QUANTUM_TOKENS))
        for key in keys:
            self._lines[key].deficit += rounds * QUANTUM_TOKENS

    def settle(self, request: Request) -> None:
        """Books the difference between what a request was expected to cost and what it did cost."""
        key = request.spec.key_id
        # What a request computes again after it was put back is not its key's fault.
        prefilled = min(max(request.num_prefilled, request.num_lost), len(request.spec.prompt))
        extra = prefilled - request.num_cached + request.num_generated - expected_tokens(request)
        line = self._lines.get(key)
        if line is not None:
            line.deficit = max(-MAX_BALANCE, line.deficit - extra)
            return
        # Credit is not saved up while a key has nothing to ask: only debt is remembered.
        balance = min(0.0, max(-MAX_BALANCE, self._balance.pop(key, 0.0) - extra))
        if balance:
            self._balance[key] = balance
        while len(self._balance) > self._max_queued:
            self._balance.popitem(last=False)

    def remove(self, request: Request) -> bool:
        """Takes a request out wherever it stands; False when it is not here."""
        line = self._lines.get(request.spec.key_id)
        if line is None or request not in line.requests:
            return False
        self._take(request.spec.key_id, request)
        return True

    def expired(self, now: float) -> list[Request]:
        """Takes out and returns the requests that waited longer than they wanted to."""
        late = [request for request in self if now - request.times.submitted > request.spec.queue_timeout_s]
        for request in late:
            self.remove(request)
        return late

    def drain(self) -> list[Request]:
        """Takes out everything."""
        waiting = list(self)
        for request in waiting:
            self.remove(request)
        return waiting

    def _take(self, key: str, request: Request) -> Request:
        line = self._lines[key]
        line.requests.remove(request)
        self._size -= 1
        self._tokens -= expected_tokens(request)
        if not line.requests:
            del self._lines[key]
            if line.deficit < 0:
                self._balance[key] = line.deficit
        return request

    def _band(self, request: Request, now: float) -> int:
        aged = int((now - request.times.submitted) / self._ageing_s)
        return max(1, int(request.spec.priority) - aged)

    def wait_s(self, tokens_per_s: float, running_tokens: int) -> float:
        """Seconds until a place should be free: half of what is ahead is done. Better too short than a client that never comes back."""
        ahead = (self._tokens + running_tokens) / 2
        return round(min(MAX_RETRY_S, max(MIN_RETRY_S, ahead / max(tokens_per_s, 1.0))), 1)
