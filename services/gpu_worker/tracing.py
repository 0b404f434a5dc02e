"""OpenTelemetry spans of the worker, with the optional extra `otel`: each call, and within it the queue, the prefill and the decoding.

They are made when a call has ended, from the moments that the engine notes anyway: nothing is added to a step. A gateway's `traceparent` is
continued. Prompts and answers are never part of a span.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.common.errors import Glm53Error
from services.common.trace_context import TRACEPARENT
from services.gpu_worker.request import Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SERVICE = "glm53-gpu-worker"
_RPC_SERVICE = "glm53.worker.v1.Worker"


class CallSpans:
    """Makes the spans of calls.

    Args:
        provider: takes them.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer(SERVICE)
        self._extract = TraceContextTextMapPropagator().extract

    @contextlib.contextmanager
    def around(self, request: Request, method: str) -> Iterator[None]:
        """A call, from here on until its request has ended or is given up.

        Args:
            request: not submitted yet.
            method: name of the RPC.
        """
        began = time.monotonic()
        failure: Glm53Error | None = None
        try:
            yield
        except Glm53Error as error:
            failure = error
            raise
        finally:
            self._record(request, method, began, failure)

    def _record(self, request: Request, method: str, began: float, failure: Glm53Error | None) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        clock = _WallClock()
        ended = time.monotonic()
        caller = self._extract({TRACEPARENT: request.spec.traceparent}) if request.spec.traceparent else None
        call = self._tracer.start_span(f"{_RPC_SERVICE}/{method}", context=caller, kind=SpanKind.SERVER, start_time=clock.ns(began))
        if call.is_recording():
            call.set_attributes({"rpc.system": "grpc", "rpc.service": _RPC_SERVICE, "rpc.method": method, **_facts(request)})
            if failure is not None:
                call.set_attribute("error.type", failure.code)
                call.set_status(StatusCode.ERROR)
            inside = set_span_in_context(call)
            for name, start, end in _phases(request, ended):
                self._tracer.start_span(name, context=inside, start_time=clock.ns(start)).end(clock.ns(end))
        call.end(clock.ns(ended))


class _WallClock:
    """Moments of the monotonic clock as nanoseconds since 1970, by one comparison of the two clocks."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset


def _phases(request: Request, ended: float) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of what the request went through; the last one lasts until it ended."""
    times = request.times
    end = ended if times.finished is None else times.finished
    if not times.submitted:
        return
    yield "queue", times.submitted, end if times.admitted is None else times.admitted
    if times.admitted is not None:
        yield "prefill", times.admitted, end if times.prefilled is None else times.prefilled
    if times.prefilled is not None and request.num_generated:
        yield "decode", times.prefilled, end


def _facts(request: Request) -> dict[str, str | int]:
    """What a request cost, and never what it said."""
    found: dict[str, str | int] = {
        "glm53.request_id": request.spec.request_id,
        "glm53.state": request.state.value,
        "gen_ai.usage.input_tokens": len(request.spec.prompt),
        "gen_ai.usage.output_tokens": request.num_generated,
        "glm53.cached_tokens": request.num_cached,
    }
    if request.finish_reason is not None:
        found["glm53.finish_reason"] = request.finish_reason.name.lower()
    return found
