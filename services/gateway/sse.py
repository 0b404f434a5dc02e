"""Server-sent events: one generation as a stream of ``data:`` lines.

The stream always ends with ``data: [DONE]``; what goes wrong after the headers comes before it as ``data: {"error": …}``.
Comments keep a silent stream open while a request is queued or its prompt is read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import Cancelled, EngineFailed, Glm53Error
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway import errors
from services.gateway.answers import Answer
from services.gateway.generation import Generation, until_disconnect

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

# A client that takes nothing for so long is gone, whatever TCP thinks.
_SEND_TIMEOUT_S = 60.0


def data_event(payload: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


@dataclass(frozen=True)
class StreamPlan:
    """What a stream needs.

    Attributes:
        generation: the events.
        answer: turns them into chunks.
        first: an event that was read before the headers went out.
        keepalive_s: longest silence.
        closed: called once at the end, with the error that ended the stream, if any.
    """

    generation: Generation
    answer: Answer
    first: pb.GenerateEvent | None
    keepalive_s: float
    closed: Callable[[Glm53Error | None], None]


class EventStreamResponse(Response):
    """Streams a generation and cancels it when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, plan: StreamPlan) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # `Response` counts the empty body; a stream has no length.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._plan = plan
        self._last_write = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the stream."""
        del scope
        error: Glm53Error | None = None
        try:
            error = await until_disconnect(receive, self._write(send))
        except Cancelled as cancelled:
            error = cancelled
        finally:
            await self._plan.generation.close()
            self._plan.closed(error)

    async def _write(self, send: Send) -> Glm53Error | None:
        """Everything from the headers to [DONE]; returns the error that was reported to the client."""

        async def write(data: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": data, "more_body": more})
            self._last_write = time.monotonic()

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        reported: Glm53Error | None = None
        try:
            await write(b"")
            await self._write_chunks(write)
        except Glm53Error as error:
            reported = error
        except TimeoutError:
            raise Cancelled("the client stopped reading") from None
        except Exception:
            log.exception("the stream failed")
            reported = EngineFailed("The server failed while it wrote the answer.")
        if reported is not None:
            await write(data_event(errors.body_of(reported)))
        await write(DONE, more=False)
        return reported

    async def _write_chunks(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        plan = self._plan
        event = plan.first
        while True:
            if event is None:
                event = await plan.generation.next_event(self._until_keepalive())
            if event is None or self._until_keepalive() <= 0:
                await write(KEEP_ALIVE)
            if event is None:
                continue
            kind = event.WhichOneof("event")
            if kind == "tokens":
                chunks = plan.answer.take(event.tokens.tokens)
            elif kind == "finished":
                chunks = plan.answer.finish(event.finished)
            else:
                chunks = []
            if chunks:
                await write(b"".join(map(data_event, chunks)))
            if kind == "finished":
                return
            event = None

    def _until_keepalive(self) -> float:
        return self._plan.keepalive_s - (time.monotonic() - self._last_write)
