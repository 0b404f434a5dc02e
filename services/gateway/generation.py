"""One running generation: reading its events with a time limit, and ending it when its client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from services.common.errors import Cancelled, EngineFailed, Glm53Error
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb

T = TypeVar("T")


class Generation:
    """The events of one generation.

    Reading waits at most as long as it is told and never loses an event; closing cancels the job in the worker.

    Args:
        events: the worker's stream.
        failed: hears of the worker's error before the client does.

    Attributes:
        first_token_s: seconds until the first token, None before it.
        finished: the worker's last word, None before it.
    """

    def __init__(self, events: AsyncIterator[pb.GenerateEvent], failed: Callable[[Glm53Error], None]) -> None:
        self._events = events
        self._failed = failed
        self._pending: asyncio.Task[pb.GenerateEvent | None] | None = None
        self._abort_error: Glm53Error | None = None
        self._began = time.monotonic()
        self.first_token_s: float | None = None
        self.finished: pb.Finished | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the job was made."""
        return time.monotonic() - self._began

    async def next_event(self, timeout_s: float | None) -> pb.GenerateEvent | None:
        """The next event, or None when there was none within `timeout_s` seconds.

        Raises:
            Glm53Error: what the worker raised; that it is gone; what `abort` was given.
        """
        if self._abort_error is not None:
            raise self._abort_error
        if self._pending is None:
            self._pending = asyncio.create_task(self._advance())
        done, _ = await asyncio.wait({self._pending}, timeout=timeout_s)
        if self._abort_error is not None:
            raise self._abort_error
        if not done:
            return None
        task, self._pending = self._pending, None
        try:
            event = task.result()
        except Glm53Error as error:
            self._failed(error)
            raise
        if event is None:
            raise EngineFailed("the worker ended the generation without a reason")
        kind = event.WhichOneof("event")
        if kind == "tokens" and self.first_token_s is None:
            self.first_token_s = self.age_s
        elif kind == "finished":
            self.finished = event.finished
        return event

    def abort(self, error: Glm53Error) -> None:
        """Makes the reader fail with `error`, now if it waits."""
        self._abort_error = error
        if self._pending is not None:
            self._pending.cancel()

    async def close(self) -> None:
        """Lets the worker's job go; safe to call twice."""
        if self._pending is not None:
            self._pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Glm53Error):
                await self._pending
            self._pending = None
        if isinstance(self._events, AsyncGenerator):
            await self._events.aclose()

    async def _advance(self) -> pb.GenerateEvent | None:
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            return None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` while the client stays.

    Args:
        receive: the request's channel; its body has been read.
        work: is cancelled, and has ended, when this raises.

    Raises:
        Cancelled: the client went away first.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise Cancelled("the client went away")
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
