"""OpenTelemetry traces, with the optional extra `otel`: one span a request, none an event of a stream.

Prompts and answers are never part of a span. A caller's `traceparent` is continued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import otel
from services.common.trace_context import traceparent_var
from services.gateway.access.control import OPEN_PATHS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_SERVICE = "glm53-gateway"


def provider_for(endpoint: str) -> TracerProvider:
    """Sends the gateway's spans to an OTLP/HTTP endpoint. Raises as `otel.provider_for`."""
    return otel.provider_for(endpoint, _SERVICE)


class TraceRequests:
    """ASGI middleware: a span around every request but those of probes and scrapers.

    Args:
        app: what is traced.
        provider: takes the spans.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = provider.get_tracer(_SERVICE)
        self._extract = TraceContextTextMapPropagator().extract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind

        headers = Headers(scope=scope)
        parent = self._extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        span = self._tracer.start_span(scope["method"], context=parent, kind=SpanKind.SERVER)
        status: int | None = None
        # What happens from here on, in the worker too, happens inside this span.
        own = span.get_span_context()
        token = traceparent_var.set(f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}")

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and message.get("body") and not scope["state"].get("began"):
                scope["state"]["began"] = True
                span.add_event("first byte")
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            traceparent_var.reset(token)
            route = getattr(scope.get("route"), "path", "unknown")
            span.update_name(f"{scope['method']} {route}")
            span.set_attributes({"http.request.method": scope["method"], "http.route": route, "http.response.status_code": status or 499})
            span.set_attributes(_attributes(scope["state"]))
            span.end()


def _attributes(state: dict[str, Any]) -> dict[str, str | int | float]:
    """What the request was, as far as it came."""
    found: dict[str, str | int | float] = {"glm53.request_id": state.get("request_id", "")}
    if key := state.get("key"):
        found["glm53.key_id"] = key.id
    admission = state.get("admission")
    if admission is not None and admission.finished:
        done = admission.finished
        found |= {
            "gen_ai.system": "glm53-offload",
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": sum(finished.prompt_tokens for finished in done),
            "gen_ai.usage.output_tokens": sum(finished.completion_tokens for finished in done),
            "glm53.cached_tokens": sum(finished.cached_tokens for finished in done),
            "glm53.queue_s": max(finished.queue_s for finished in done),
            "glm53.prefill_s": max(finished.prefill_s for finished in done),
            "glm53.decode_s": max(finished.decode_s for finished in done),
        }
    return found
