"""What happens around every request: its id, its count, its log line."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import EngineFailed
from services.common.logs import request_id_var
from services.common.trace_context import TRACEPARENT, checked, traceparent_var
from services.gateway.drain import Traffic
from services.gateway.error_shapes import response_for
from services.gateway.http_head import header_of
from services.gateway.metrics import GatewayMetrics
from services.gateway.turnstile import Turnstile

log = logging.getLogger(__name__)

_BUG = "The server failed; its log has the reason under this request's id."
# Requests that may begin in one round of the event loop.
_PER_ROUND = 1
_SLASHES = re.compile("//+")
_TRACEPARENT = TRACEPARENT.encode()
_USABLE_ID = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}\Z")


def _never() -> bool:
    return False


class RequestScope:
    """Gives a request its id, counts it while it is answered, and logs how it ended.

    The client's X-Request-Id is echoed when it is short and printable, and is otherwise replaced; it never names the job in the
    worker, so two requests may carry the same one.
    """

    def __init__(self, app: ASGIApp, traffic: Traffic, metrics: GatewayMetrics) -> None:
        self._app = app
        self._traffic = traffic
        self._metrics = metrics
        self._turnstile = Turnstile(_PER_ROUND)
        self._counts: dict[tuple[str, int], Counter] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own_id = os.urandom(16).hex()
        given = header_of(scope, b"x-request-id") or ""
        echoed = given if _USABLE_ID.match(given) else own_id
        state = scope.setdefault("state", {})
        state["request_id"] = own_id
        body_is_pending: Callable[[], bool] = state.get("body_is_pending", _never)
        path = scope["path"]
        if "//" in path or path.endswith("/"):
            # What clients make of a base URL that ends with a slash.
            scope = {**scope, "path": _SLASHES.sub("/", path).rstrip("/") or "/"}
        # Answered as GET is; the server sends the head alone.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", echoed.encode())]
                if self._traffic.draining or body_is_pending():
                    # What is left of the body would be taken for the next request, or be read for nothing.
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        token = request_id_var.set(echoed)
        trace_token = traceparent_var.set(checked(header_of(scope, _TRACEPARENT) or ""))
        began = time.monotonic()
        try:
            with self._traffic.request() if scope["method"] == "POST" else contextlib.nullcontext():
                await self._turnstile.enter()
                await self._app(inner, receive, send_with_id)
        except Exception:
            # A bug. The client learns that, and where to look; what was already sent cannot be taken back.
            log.exception("unexpected error")
            if status is None:
                await response_for(scope["path"], EngineFailed(_BUG))(scope, receive, send_with_id)
        finally:
            request_id_var.reset(token)
            route = getattr(inner.get("route"), "path", "unknown")
            ended = 499 if status is None else status
            self._count(route, ended)
            level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
            if log.isEnabledFor(level):
                took_s = round(time.monotonic() - began, 3)
                extra = {"request_id": echoed, "took_s": took_s, "own_id": own_id}
                log.log(level, "%s %s %d", scope["method"], route, ended, extra=extra)
            traceparent_var.reset(trace_token)

    def _count(self, route: str, status: int) -> None:
        counter = self._counts.get((route, status))
        if counter is None:
            counter = self._counts[route, status] = self._metrics.responses.labels(route, str(status))
        counter.inc()
