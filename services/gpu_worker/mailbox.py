"""The bounded queue between the engine's thread and one reader."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from services.gpu_worker.request import Event, Failed, Finished

# Tokens of one stream may wait so long for the next ones, to go out in one message: a message costs a reader more than a token does.
HOLD_S = 0.005


class Mailbox:
    """Events of one request.

    The engine stops computing for a request whose mailbox is full, so that a slow reader costs neither memory nor other people's time.

    A reader that says that it rests is left alone until the oldest event would have waited for `HOLD_S` when the next one came, until the
    mailbox is full, or until the last event. It must look by itself after a while: the next event may never come.

    Args:
        limit: events that may wait before the mailbox counts as full.
        notify: called from the engine's thread when the reader has something to take.
        on_space: called from the reader's thread when a full mailbox was emptied.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limit: int,
        notify: Callable[[], None],
        on_space: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._notify = notify
        self._on_space = on_space
        self._clock = clock
        self._events: deque[tuple[float, Event]] = deque()  # append and popleft are atomic
        self._newest_at = 0.0
        self.gap_s = 0.0  # between the two newest events
        self.resting = False  # written by the reader

    @property
    def full(self) -> bool:
        """True while the reader must catch up."""
        return len(self._events) >= self._limit

    def put(self, event: Event) -> None:
        """Adds an event. Terminal and admission events come also into a full mailbox: their number is bounded by nature."""
        now = self._clock()
        self.gap_s, self._newest_at = now - self._newest_at, now
        self._events.append((now, event))
        # Looking after adding: whoever emptied the mailbox before this line was told, or has taken this event too.
        if self.resting:
            last = isinstance(event, Finished | Failed)
            if last or self.full or self.stalled_s(now) + self.gap_s > HOLD_S:
                self._notify()
        elif len(self._events) == 1:
            self._notify()

    def stalled_s(self, now: float) -> float:
        """Seconds since the oldest waiting event was put; 0 when none waits."""
        oldest = self.oldest_at
        return 0.0 if oldest is None else max(0.0, now - oldest)

    @property
    def oldest_at(self) -> float | None:
        """When the oldest waiting event was put; None when none waits."""
        try:
            return self._events[0][0]
        except IndexError:
            return None

    def take(self) -> list[Event]:
        """Everything that waits, oldest first."""
        events: list[Event] = []
        while True:
            try:
                events.append(self._events.popleft()[1])
            except IndexError:
                break
        # It was full at some moment only if at least so many were taken.
        if len(events) >= self._limit:
            self._on_space()
        return events
