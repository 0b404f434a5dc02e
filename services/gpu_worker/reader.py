"""The reading end of a request's mailbox on the event loop: the first token at once, those of a fast stream a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from services.gpu_worker.mailbox import HOLD_S, Mailbox
from services.gpu_worker.request import Event, Tokens


class EventReader:
    """Takes the events of one request; for one task.

    Args:
        buffer_events: events that may wait before the engine pauses the request.
        on_space: called when a full mailbox was emptied.

    Attributes:
        mailbox: where the engine's thread puts them.
    """

    def __init__(self, buffer_events: int, on_space: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._told = False
        self.mailbox = Mailbox(buffer_events, self._notify, on_space)
        self._tokens_at = 0.0  # when the newest tokens were taken

    async def take(self) -> list[Event]:
        """At least one event, and every event that waits.

        Tokens wait for HOLD_S at most while the engine keeps its pace, and for one token's time more when it is held up.
        """
        box = self.mailbox
        if box.resting:
            await self._rest()
            box.resting = False
        while True:
            # Before looking: what comes after the look sets it again.
            self._told = False
            self._wake.clear()
            if events := box.take():
                box.resting = self._is_fast(events)
                return events
            await self._wake.wait()

    def _is_fast(self, events: list[Event]) -> bool:
        """True when the next tokens are likely to come while it pays to wait for them."""
        count = sum(isinstance(event, Tokens) for event in events)
        if not count:
            return False
        now = time.monotonic()
        gap, self._tokens_at = now - self._tokens_at, now
        return count > 1 or gap < HOLD_S

    async def _rest(self) -> None:
        """Until the mailbox asks for it, or until it has had the time to and did not: the engine is held up, or the stream is slow."""
        due = self._tokens_at + HOLD_S + min(HOLD_S, self.mailbox.gap_s)
        while not self._told:
            left = due - time.monotonic()
            if left > 0:
                timer = self._loop.call_later(left, self._wake.set)
                await self._wake.wait()
                timer.cancel()
                self._wake.clear()
                continue
            oldest = self.mailbox.oldest_at
            if oldest is None or oldest + HOLD_S <= due:
                return
            due = oldest + HOLD_S

    def _notify(self) -> None:
        # The loop is closed when the process ends while the engine still works on a request: nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._told = True
        self._wake.set()
