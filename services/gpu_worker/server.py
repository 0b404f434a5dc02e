"""The gRPC side of the worker: protobuf in, engine requests, protobuf out. Errors become statuses in one place, `ErrorInterceptor`."""

# gRPC prescribes the methods' names and arguments.
# ruff: noqa: N802, ARG002

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio

from services.common.errors import DeadlineExceeded, EngineFailed, Glm53Error, NotReady
from services.common.grpc_status import ERROR_METADATA_KEY, status_of
from services.common.lifecycle import ServiceState
from services.common.logs import request_id_var
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc
from services.common.trace_context import incoming
from services.common.version import VERSION
from services.gpu_worker import convert
from services.gpu_worker.compiling import GrammarQueue
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.loop import EngineLoop
from services.gpu_worker.reader import EventReader
from services.gpu_worker.request import Event, Failed, Finished, OutToken, PrefillProgress, Request, RequestSpec
from services.gpu_worker.stats import StatsReport
from services.gpu_worker.status import ModelFacts, WorkerStatus
from services.gpu_worker.tracing import CallSpans

log = logging.getLogger(__name__)

_MODES = {"fast": pb.MODE_FAST, "exact": pb.MODE_EXACT, "nvme": pb.MODE_NVME, "nvme-exact": pb.MODE_NVME_EXACT}
# A stopped worker answers as one that drains: the proto has no word for it, and nobody connects any more.
_STATES = {state: int(state) for state in ServiceState} | {ServiceState.STOPPED: int(ServiceState.DRAINING)}


@dataclass(frozen=True)
class Serving:
    """What exists once the model is loaded."""

    engine: EngineLoop
    tokens: TokenTable
    facts: ModelFacts
    limits: convert.RequestLimits
    report: StatsReport
    grammars: GrammarQueue


class WorkerService(pb_grpc.WorkerServicer):  # type: ignore[misc]
    """The Worker service. It answers Info from the first moment; everything else needs `serving`.

    Args:
        status: state and progress.
        buffer_events: events that may wait for one stream's reader.

    Attributes:
        serving: what exists once the model is loaded.
        spans: makes a trace's spans; None where nobody wants them.
    """

    def __init__(self, status: WorkerStatus, buffer_events: int) -> None:
        self._status = status
        self._buffer_events = buffer_events
        self.serving: Serving | None = None
        self.spans: CallSpans | None = None

    def _ready(self) -> Serving:
        state = self._status.state
        if self.serving is None or state is not ServiceState.READY:
            fraction, step = self._status.progress
            told = f"{step}, {fraction:.0%}" if state in (ServiceState.STARTING, ServiceState.LOADING) else state.name.lower()
            raise NotReady(f"the worker is not ready ({told}): try again later", retry_after_s=5.0)
        return self.serving

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        """State, progress and, once loaded, what is served."""
        fraction, step = self._status.progress
        answer = pb.InfoResponse(
            state=_STATES[self._status.state],  # type: ignore[arg-type]
            load_progress=fraction,
            load_step=step,
            version=VERSION,
            created_unix_s=self._status.created_unix_s,
            instance_id=self._status.instance_id,
        )
        facts = self._status.facts
        if facts is not None:
            _fill_info(answer, facts)
        return answer

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        """The tokenizer's files, unless the caller has them."""
        facts = self._status.facts
        if facts is None:
            raise NotReady("the tokenizer is not loaded yet: try again later", retry_after_s=1.0)
        files = facts.tokenizer
        if request.known_sha256 == files.sha256:
            return pb.GetTokenizerResponse(sha256=files.sha256)
        return pb.GetTokenizerResponse(
            sha256=files.sha256,
            tokenizer_json=files.tokenizer_json,
            tokenizer_config_json=files.tokenizer_config_json,
            chat_template=files.chat_template,
            generation_config_json=files.generation_config_json,
        )

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        """One generation. A lost stream cancels it."""
        serving = self._ready()
        request_id_var.set(request.request_id)
        spec = _traced(convert.spec_of(request, serving.limits), context)
        source = convert.grammar_of(request, serving.limits)
        if source is not None:
            # Milliseconds for an ordinary schema, but clients write it: not on the event loop.
            spec = replace(spec, grammar=await serving.grammars.compiled(source))
        async for event in self._events(serving, spec, "Generate"):
            yield convert.event_pb(event, serving.tokens)

    async def _events(self, serving: Serving, spec: RequestSpec, method: str) -> AsyncIterator[Event]:
        """Submits the request of a call of `method` and yields its events; leaving early cancels it.

        Raises:
            Glm53Error: the request could not be served.
        """
        engine = serving.engine
        reader = EventReader(self._buffer_events, engine.wake)
        live = Request(spec, reader.mailbox)
        with self.spans.around(live, method) if self.spans is not None else contextlib.nullcontext():
            engine.submit(live)
            try:
                while True:
                    for event in convert.merged(await reader.take()):
                        if isinstance(event, Failed):
                            raise event.error
                        yield event
                        if isinstance(event, Finished):
                            return
            finally:
                if not live.done:
                    engine.cancel(spec.request_id)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        """Cancels by id; idempotent."""
        return pb.CancelResponse(found=self.serving is not None and self.serving.engine.cancel(request.request_id))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """Teacher-forced log-probabilities."""
        serving = self._ready()
        spec = _traced(convert.score_spec_of(request, serving.limits), context)
        scored: list[OutToken] = []
        async for event in self._events(serving, spec, "Score"):
            if isinstance(event, PrefillProgress):
                scored += [token for token in event.prompt_tokens if token.logprob is not None]
        return pb.ScoreResponse(tokens=[convert.token_pb(token, serving.tokens) for token in scored])

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        """Counters as JSON and as Prometheus text."""
        if self.serving is None:
            raise NotReady("the worker is still loading: there are no counters yet", retry_after_s=5.0)
        document, text = await asyncio.to_thread(self.serving.report.read)
        return pb.StatsResponse(json=json.dumps(document), prometheus_text=text)

    async def VerifyTiers(self, request: pb.VerifyTiersRequest, context: Any) -> pb.VerifyTiersResponse:
        """Re-reads records and slots."""
        serving = self._ready()
        report = await asyncio.to_thread(serving.report.verify)
        return pb.VerifyTiersResponse(
            records_checked=report.records_checked,
            records_bad=report.records_bad,
            slots_checked=report.slots_checked,
            slots_bad=report.slots_bad,
        )


def _traced(spec: RequestSpec, context: Any) -> RequestSpec:
    """With the caller's trace, where it has one."""
    traceparent = incoming(context.invocation_metadata())
    return replace(spec, traceparent=traceparent) if traceparent else spec


def _fill_info(answer: pb.InfoResponse, facts: ModelFacts) -> None:
    backend, files = facts.backend, facts.tokenizer
    answer.model_name = facts.model_name
    answer.architecture = facts.architecture
    answer.checkpoint_hash = facts.checkpoint_hash
    answer.vocab_size = backend.vocab_size
    answer.max_context = backend.max_context
    answer.max_streams = backend.max_streams
    answer.eos_token_ids.extend(facts.eos_token_ids)
    answer.mode = _MODES[backend.mode]
    answer.mode_reason = backend.mode_reason
    answer.device = backend.device
    answer.device_reason = backend.device_reason
    answer.arithmetic_version = backend.arithmetic_version
    answer.abi_version = backend.abi_version
    answer.kernel_variant = backend.kernel_variant
    answer.kernel_reason = backend.kernel_reason
    answer.max_queued = facts.max_queued
    answer.default_temperature = files.default_temperature
    answer.default_top_p = files.default_top_p
    answer.supports_grammar = True


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The one place where exceptions become statuses, with the whole error as JSON in the trailing metadata.

    Args:
        slow_reader_s: how long a connection may take to accept one event before its stream is ended.
    """

    def __init__(self, slow_reader_s: float) -> None:
        self._slow_reader_s = slow_reader_s

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        """Wraps the handler of a call."""
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, self._slow_reader_s), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _unary(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except Exception as error:  # noqa: BLE001 - the boundary: everything becomes a status
            await _abort(context, error)

    return call


def _stream(method: Callable[..., AsyncIterator[Any]], slow_reader_s: float) -> Callable[..., Awaitable[None]]:
    async def call(request: Any, context: Any) -> None:
        # Leaving by whatever way must end the generator at once: its finally is what cancels the request.
        events = method(request, context)
        writer = _Writer(context, slow_reader_s)
        try:
            async for event in events:
                await writer.write(event)
        except asyncio.CancelledError:
            if not writer.gave_up:
                raise
            await _abort(context, DeadlineExceeded(f"the reader took no event for {slow_reader_s:g} s"))
        except Exception as error:  # noqa: BLE001 - the boundary: everything becomes a status
            await _abort(context, error)
        finally:
            writer.close()
            await events.aclose()  # type: ignore[attr-defined]

    return call


class _Writer:
    """Writes events, and cancels its task when the connection does not take one in time. One timer serves all writes of a stream.

    Args:
        context: the call's.
        limit_s: how long one write may take.
    """

    def __init__(self, context: Any, limit_s: float) -> None:
        self._context = context
        self._limit_s = limit_s
        self._task = asyncio.current_task()
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.gave_up = False

    async def write(self, event: Any) -> None:
        """Sends one event; returns when the connection has taken it."""
        self._began = time.monotonic()
        if self._timer is None:
            self._look_in(self._limit_s)
        await self._context.write(event)
        self._began = None

    def close(self) -> None:
        """The stream is over."""
        self._began = None
        if self._timer is not None:
            self._timer.cancel()

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._began is None or self._task is None:
            return
        left = self._began + self._limit_s - time.monotonic()
        if left > 0:
            self._look_in(left)
            return
        self.gave_up = True
        self._task.cancel()


async def _abort(context: Any, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, Glm53Error):
        log.error("a call failed", exc_info=error)
        error = EngineFailed(f"the worker failed: {type(error).__name__}")
    await context.abort(status_of(error), error.message, trailing_metadata=((ERROR_METADATA_KEY, error.to_json().encode()),))
