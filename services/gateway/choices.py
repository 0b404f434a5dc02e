"""All generations of one request, read as one stream: n choices, several prompts, or just one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from services.common.errors import Glm53Error, InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.generation import Generation

# Events that may wait for the writer; a client that reads slowly slows its own generations down.
_MAX_WAITING = 64

Open = Callable[[], AsyncIterator[pb.GenerateEvent]]


class Choices:
    """The generations of one request.

    Args:
        sources: one for each generation; called when its turn has come.
        at_once: how many run at the same time; the others wait here and not in the worker's queue.
        failed: hears of the worker's errors before the client does.
        params: the worker's names of fields → the client's, for errors.
    """

    def __init__(
        self,
        sources: Sequence[Open],
        at_once: int,
        failed: Callable[[Glm53Error], None],
        params: Mapping[str, str],
    ) -> None:
        self._params = params
        self._generations = [Generation(source, failed) for source in sources]
        self._room = asyncio.Semaphore(max(1, at_once))
        self._events: asyncio.Queue[tuple[int, pb.GenerateEvent | Glm53Error]] = asyncio.Queue(_MAX_WAITING)
        self._pumps: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def first_token_s(self) -> float | None:
        """Seconds until the first token of any choice, None before it."""
        return min((g.first_token_s for g in self._generations if g.first_token_s is not None), default=None)

    @property
    def age_s(self) -> float:
        """Seconds since the request was made."""
        return self._generations[0].age_s

    @property
    def finished(self) -> list[pb.Finished]:
        """The worker's last words, of the generations that have ended."""
        return [g.finished for g in self._generations if g.finished is not None]

    @property
    def last_token_at(self) -> float:
        """When the newest token came, on the monotonic clock; 0 before the first."""
        return max(g.last_token_at for g in self._generations)

    async def verdict(self, timeout_s: float) -> None:
        """Waits until the worker has taken the first generation, at most `timeout_s` seconds; no event is lost.

        Raises:
            Glm53Error: the worker refused it, or `abort` was called.
        """
        try:
            await self._generations[0].verdict(timeout_s)
        except Glm53Error as error:
            raise self._named(error) from None

    async def next_event(self) -> tuple[int, pb.GenerateEvent]:
        """The next event and the generation that it belongs to.

        Raises:
            Glm53Error: what any of them raised; what `abort` was given.
        """
        if len(self._generations) == 1:
            try:
                return 0, await self._generations[0].next_event()
            except Glm53Error as error:
                raise self._named(error) from None
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._generations))]
        index, event = await self._events.get()
        if isinstance(event, Glm53Error):
            raise self._named(event)
        return index, event

    def abort(self, error: Glm53Error) -> None:
        """Makes the reader fail with `error`."""
        for generation in self._generations:
            generation.abort(error)

    async def close(self) -> None:
        """Lets the worker's jobs go; nobody may be reading. Safe to call twice."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for generation in self._generations:
            await generation.close()

    async def _pump(self, index: int) -> None:
        """Reads one generation to its end when there is room for it."""
        generation = self._generations[index]
        with contextlib.suppress(asyncio.CancelledError):
            async with self._room:
                try:
                    while generation.finished is None:
                        await self._events.put((index, await generation.next_event()))
                except Glm53Error as error:
                    await self._events.put((index, error))

    def _named(self, error: Glm53Error) -> Glm53Error:
        """The error with the client's name of the field at fault."""
        if isinstance(error, InvalidRequest) and error.param is not None:
            error.param = self._params.get(error.param, error.param)
        return error
