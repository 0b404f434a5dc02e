"""Grammars compile beside the event loop: few at a time, so that decoding keeps a processor, and nobody waits for others' for ever."""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.common.errors import QueueFull
from services.gpu_worker.grammar import Grammar, GrammarSource

_AT_ONCE = 2
_WAIT_S = 30.0
_RETRY_S = 5.0


class Compiler(Protocol):
    """`GrammarCompiler` is one."""

    def compile(self, source: GrammarSource) -> Grammar:
        """A grammar ready for use."""


class GrammarQueue:
    """Gives grammars their turn.

    Args:
        compiler: called in threads.
        at_once: how many compile at a time.
        wait_s: how long one may wait for its turn.
    """

    def __init__(self, compiler: Compiler, at_once: int = _AT_ONCE, wait_s: float = _WAIT_S) -> None:
        self._compiler = compiler
        self._room = asyncio.Semaphore(at_once)
        self._wait_s = wait_s

    async def compiled(self, source: GrammarSource) -> Grammar:
        """A grammar ready for use.

        Raises:
            QueueFull: its turn did not come.
            InvalidRequest: as `GrammarCompiler.compile`.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._room.acquire()
        except TimeoutError:
            raise QueueFull("grammars of other requests are being compiled: try again later", retry_after_s=_RETRY_S) from None
        work = asyncio.ensure_future(asyncio.to_thread(self._compiler.compile, source))
        work.add_done_callback(self._done)
        # Nothing interrupts a thread: the place of a client that has left comes free when its work is done.
        return await asyncio.shield(work)

    def _done(self, work: asyncio.Future[Grammar]) -> None:
        self._room.release()
        if not work.cancelled():
            # Nobody may be there any more to hear of it.
            work.exception()
