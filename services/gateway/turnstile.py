"""Newcomers one by one: a crowd of requests must not keep running streams waiting.

Checking a request takes a part of a millisecond in which nothing else runs. A stream needs several rounds of the event loop for each of its
tokens; if every round began with a dozen requests, it would fall behind for as long as the crowd stays.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets a few requests in for each round of the event loop, in the order of their coming.

    Args:
        per_round: how many.
    """

    def __init__(self, per_round: int) -> None:
        self._per_round = per_round
        self._left = per_round
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Returns when it is the caller's turn: at once unless there is a crowd."""
        loop = asyncio.get_running_loop()
        self._turn(loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._turning:
            self._turning = True
            loop.call_soon(self._next_round, loop)

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turning = False
        self._left = self._per_round
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            # One who went away while waiting takes nobody's turn.
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._waiting:
            self._turn(loop)
