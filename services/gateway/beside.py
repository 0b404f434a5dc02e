"""Long work on texts, beside the event loop: few at a time, so that running streams keep a processor, and never for a client that left."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from starlette.types import Receive

from services.gateway.generation import until_disconnect

P = ParamSpec("P")
T = TypeVar("T")

# What is shorter is encoded where it stands, in a few milliseconds.
SMALL_CHARS = 4000
_THREADS = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="text")
# The channel of the request that the current task works for, once its body is read; None outside of requests.
receive_var: contextvars.ContextVar[Receive | None] = contextvars.ContextVar("receive", default=None)


async def beside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, run in one of a few threads when its turn comes.

    Raises:
        Cancelled: the client left before that. What has begun ends in its own time; nobody waits for it.
    """

    async def run() -> T:
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: context.run(work, *args, **kwargs))

    receive = receive_var.get()
    return await (run() if receive is None else until_disconnect(receive, run()))
