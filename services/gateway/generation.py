"""One running generation: reading its events, and ending it when its client is gone."""

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
    """The events of one generation, read by one task; closing cancels the job in the worker.

    Args:
        source: opens the worker's stream; called at the first read.
        failed: hears of the worker's error before the client does.

    Attributes:
        first_token_s: seconds until the first token, None before it.
        last_token_at: when the newest token came, on the monotonic clock; 0 before the first.
        finished: the worker's last word, None before it.
    """

    def __init__(self, source: Callable[[], AsyncIterator[pb.GenerateEvent]], failed: Callable[[Glm53Error], None]) -> None:
        self._source = source
        self._events: AsyncIterator[pb.GenerateEvent] | None = None
        self._failed = failed
        self._first: asyncio.Task[pb.GenerateEvent] | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._abort_error: Glm53Error | None = None
        self._began = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_at = 0.0
        self.finished: pb.Finished | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the job was made."""
        return time.monotonic() - self._began

    async def verdict(self, timeout_s: float) -> None:
        """Waits until the worker has taken the request, at most `timeout_s` seconds; no event is lost.

        Raises:
            Glm53Error: the worker refused it, or `abort` was called.
        """
        self._first = asyncio.create_task(self._read())
        if self._abort_error is not None:
            raise self._abort_error
        self._reader = task = asyncio.current_task()
        try:
            done, _ = await asyncio.wait({self._first}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._raise_abort(task)
            raise
        finally:
            self._reader = None
        if done:
            self._first.result()

    async def next_event(self) -> pb.GenerateEvent:
        """The next event.

        Raises:
            Glm53Error: what the worker raised; that it is gone; what `abort` was given.
        """
        if self._abort_error is not None:
            raise self._abort_error
        self._reader = task = asyncio.current_task()
        try:
            if self._first is None:
                event = await self._read()
            else:
                event = await self._first
                self._first = None
        except asyncio.CancelledError:
            self._raise_abort(task)
            raise
        finally:
            self._reader = None
        kind = event.WhichOneof("event")
        if kind == "tokens":
            self.last_token_at = time.monotonic()
            if self.first_token_s is None:
                self.first_token_s = self.last_token_at - self._began
        elif kind == "finished":
            self.finished = event.finished
        return event

    def abort(self, error: Glm53Error) -> None:
        """Makes the reader fail with `error`, now if it waits."""
        self._abort_error = error
        if self._reader is not None:
            self._reader.cancel()

    async def close(self) -> None:
        """Lets the worker's job go; nobody may be reading. Safe to call twice."""
        if self._first is not None:
            self._first.cancel()
            with contextlib.suppress(asyncio.CancelledError, Glm53Error):
                await self._first
            self._first = None
        if isinstance(self._events, AsyncGenerator):
            await self._events.aclose()

    async def _read(self) -> pb.GenerateEvent:
        if self._events is None:
            self._events = self._source()
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            raise EngineFailed("the worker ended the generation without a reason") from None
        except Glm53Error as error:
            self._failed(error)
            raise

    def _raise_abort(self, reader: asyncio.Task[Any] | None) -> None:
        """Raises abort's error instead of the cancellation by which `abort` reached the waiting task."""
        if self._abort_error is None or reader is None:
            return
        reader.uncancel()
        raise self._abort_error from None


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
