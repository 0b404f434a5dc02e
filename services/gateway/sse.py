"""Server-sent events: one generation as a stream of ``data:`` lines.

What goes wrong after the headers is an event of its own; the stream then ends as every stream of its API ends.
Comments keep a silent stream open while a request is queued or its prompt is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import Cancelled, EngineFailed, Glm53Error
from services.gateway.answers import Answer
from services.gateway.choices import Choices
from services.gateway.generation import until_disconnect

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True)
class StreamPlan:
    """What a stream needs.

    Attributes:
        choices: the events.
        answer: turns them into chunks, and says how they are written.
        keepalive_s: longest silence.
        closed: called once at the end, with the error that ended the stream, if any.
        finishing: awaited when the answer is whole, before the client hears its end.
    """

    choices: Choices
    answer: Answer
    keepalive_s: float
    closed: Callable[[Glm53Error | None], None]
    finishing: Callable[[], Awaitable[None]] | None = None


class EventStreamResponse(Response):
    """Streams a generation and cancels it when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, plan: StreamPlan) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # `Response` counts the empty body; a stream has no length.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the stream."""
        error: Glm53Error | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            error = await until_disconnect(receive, self._write(_Wire(send, scope["state"].get("write_chunk", _never))))
        except Cancelled as cancelled:
            error = cancelled
        finally:
            await self._plan.choices.close()
            self._plan.closed(error)

    async def _write(self, wire: _Wire) -> Glm53Error | None:
        """Everything from the headers to [DONE]; returns the error that was reported to the client."""
        reported: Glm53Error | None = None
        await wire.write(b"")
        keeper = asyncio.create_task(wire.keep_alive(self._plan.keepalive_s))
        try:
            await self._write_chunks(wire)
        except Glm53Error as error:
            reported = error
        except Exception:
            log.exception("the stream failed")
            reported = EngineFailed("The server failed while it wrote the answer.")
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if reported is not None:
            await wire.write(self._plan.answer.wire.error(reported))
        await wire.write(self._plan.answer.wire.end, more=False)
        return reported

    async def _write_chunks(self, wire: _Wire) -> None:
        choices, answer, encode = self._plan.choices, self._plan.answer, self._plan.answer.wire.event
        left = len(choices)
        chunks = answer.begin()
        while left or chunks:
            if chunks:
                await wire.write(b"".join(map(encode, chunks)))
            if not left:
                return
            index, event = await choices.next_event()
            kind = event.WhichOneof("event")
            if kind == "tokens":
                tokens = event.tokens.tokens
                data, taken = answer.quick(index, tokens)
                if data:
                    await wire.write(data)
                chunks = answer.take(index, tokens[taken:]) if taken < len(tokens) else []
            elif kind == "finished":
                chunks = answer.finish(index, event.finished)
                left -= 1
                if left == 0 and self._plan.finishing is not None:
                    await self._plan.finishing()
            elif kind == "prefill" and event.prefill.prompt_tokens:
                chunks = answer.prompt(index, event.prefill.prompt_tokens)
            else:
                chunks = []


def _never(data: bytes) -> bool:
    del data
    return False


class _Wire:
    """The way to the client: knows when it was silent for too long. A client that does not read is cut off by its connection.

    Args:
        send: the way through the app.
        write_chunk: a shorter one for the middle of an answer; False when it cannot be taken now.
    """

    def __init__(self, send: Send, write_chunk: Callable[[bytes], bool]) -> None:
        self._send = send
        self._write_chunk = write_chunk
        self._has_begun = False
        self._last_write = time.monotonic()
        self._sending = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends bytes, and waits while the client's buffers are full."""
        # What lies in between looks at the beginning and the end of an answer only.
        if self._has_begun and more and self._write_chunk(data):
            self._last_write = time.monotonic()
            return
        self._has_begun = self._has_begun or bool(data)
        self._sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending = False
        self._last_write = time.monotonic()

    async def keep_alive(self, interval_s: float) -> None:
        """Breaks every silence with a comment."""
        while True:
            silent_s = time.monotonic() - self._last_write
            if self._sending or silent_s < interval_s:
                await asyncio.sleep(interval_s if self._sending else interval_s - silent_s)
            else:
                await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._last_write = time.monotonic()
