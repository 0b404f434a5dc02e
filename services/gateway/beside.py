"""Long work on requests, beside the event loop: few at a time, so that running streams keep a processor, and never for a client that left.

A thread keeps the interpreter from the loop for a few milliseconds at a time, or for one call into a library: what is done here must be
made of calls that are short.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from starlette.types import Receive

from services.gateway.generation import until_disconnect

P = ParamSpec("P")
T = TypeVar("T")

# What is shorter is encoded where it stands, in a few milliseconds.
SMALL_CHARS = 4000
# Requests with more bytes than these are read and checked beside the loop; smaller ones cost it less than handing them over does.
SMALL_BYTES = 64 * 1024
_THREADS = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="text")
# The channel of the request that the current task works for, once its body is read; None outside of requests.
receive_var: contextvars.ContextVar[Receive | None] = contextvars.ContextVar("receive", default=None)
# Bytes of its body.
size_var: contextvars.ContextVar[int] = contextvars.ContextVar("size", default=0)
_inside_var: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


async def beside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, run in one of a few threads when its turn comes; at once where the caller runs in one of them.

    Raises:
        Cancelled: the client left before that. What has begun ends in its own time; nobody waits for it.
    """

    if _inside_var.get():
        return work(*args, **kwargs)

    async def run() -> T:
        context = contextvars.copy_context()
        context.run(_inside_var.set, True)
        return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: context.run(work, *args, **kwargs))

    receive = receive_var.get()
    return await (run() if receive is None else until_disconnect(receive, run()))


async def by_size(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns: beside the loop for a large request, in place for another."""
    if size_var.get() <= SMALL_BYTES:
        return work(*args, **kwargs)
    return await beside(work, *args, **kwargs)


async def prepared(work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `by_size`, for work that goes beside the loop in places of its own, and waits for nothing else."""
    if size_var.get() <= SMALL_BYTES:
        return await work(*args, **kwargs)
    return await beside(lambda: _to_end(work(*args, **kwargs)))


def _to_end(work: Coroutine[Any, Any, T]) -> T:
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("the preparation of a request waits for something")
