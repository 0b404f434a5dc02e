"""The worker process: listens at once, loads, serves, drains. `__main__` hands it the settings."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import otel
from services.common.errors import Cancelled, ConfigError, Glm53Error
from services.common.lifecycle import ExitCode, ServiceState, heed_stop_signals
from services.common.memory import MemoryCollector
from services.common.ops_http import OpsAnswers, OpsServer, Verdict
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc
from services.gpu_worker import convert, download
from services.gpu_worker.backends.base import Backend
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.compiling import GrammarQueue
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.grammar import GrammarCompiler
from services.gpu_worker.lane_log import LaneWatch
from services.gpu_worker.loop import EngineLimits, EngineLoop
from services.gpu_worker.metrics import EngineMetrics
from services.gpu_worker.model_config import ARCHITECTURE
from services.gpu_worker.server import ErrorInterceptor, Serving, WorkerService
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.stats import StatsReport
from services.gpu_worker.status import ModelFacts, WorkerStatus
from services.gpu_worker.tokenizer_files import TokenizerFiles
from services.gpu_worker.tracing import SERVICE, CallSpans
from services.gpu_worker.watchdog import Watchdog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

BackendLoader = Callable[[GpuWorkerSettings, Checkpoint, Callable[[float, str], None]], Backend]

SERVICE_NAME = "glm53.worker.v1.Worker"
CRASH_EXIT = 1  # not a boot failure: the supervisor starts the worker again
IMPATIENT_S = 1.0
_TICK_S = 0.25
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 256 * 1024 * 1024),
    ("grpc.so_reuseport", 0),
    # A gateway that vanished without closing its connection is noticed, and its requests are cancelled.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 30_000),  # of the pings for the bandwidth, which would go before with a patience of 60 s
    # Its own pings are never too many: by the answers it knows that this process is not frozen.
    ("grpc.http2.max_ping_strikes", 0),
)


class Worker:
    """One worker process.

    Args:
        settings: the service's settings.
        load_backend: makes the backend for an opened checkpoint.
        traces: takes spans; made from the settings when None. Shut down with the worker.
    """

    def __init__(self, settings: GpuWorkerSettings, load_backend: BackendLoader, traces: TracerProvider | None = None) -> None:
        self._settings = settings
        self._load_backend = load_backend
        self._traces = traces
        self.status = WorkerStatus()
        self.service = WorkerService(self.status, settings.stream_buffer_events)
        self.port = 0  # the port that was bound, for addresses with port 0
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._backend: Backend | None = None
        self._engine: EngineLoop | None = None
        self._engine_thread: threading.Thread | None = None
        self._stop = asyncio.Event()
        self._signalled = 0.0
        self._began = time.monotonic()

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT, or until the engine is lost; returns the exit code."""
        try:
            server = await self.listen()
        except ConfigError as error:
            log.error("%s", error.message)
            return ExitCode.CONFIG
        except RuntimeError as error:
            log.error("cannot listen on %s: %s", self._settings.worker_address, error)
            return ExitCode.BOOT
        address = self._settings.http_address
        try:
            ops = OpsServer(address, self.ops_answers(), "GLM53_WORKER_HTTP") if address else None
        except ConfigError as error:
            log.error("%s", error.message)
            await server.stop(grace=0)
            return ExitCode.CONFIG
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        heed_stop_signals()
        try:
            code = await self._load_and_serve()
        finally:
            await self.shut_down(server)
            if ops is not None:
                await asyncio.to_thread(ops.close)
        return code

    async def listen(self) -> grpc.aio.Server:
        """Binds the address and answers Info and health from now on.

        Raises:
            ConfigError: spans are wanted and the packages for them are not installed.
            RuntimeError: the address cannot be bound.
        """
        if self._traces is None and self._settings.otlp_endpoint:
            self._traces = otel.provider_for(self._settings.otlp_endpoint, SERVICE)
        if self._traces is not None:
            self.service.spans = CallSpans(self._traces)
        server = grpc.aio.server(interceptors=(ErrorInterceptor(self._settings.slow_reader_s),), options=_SERVER_OPTIONS)
        pb_grpc.add_WorkerServicer_to_server(self.service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health(serving=False)
        self.port = server.add_insecure_port(self._settings.worker_address)
        await server.start()
        log.info("listening on %s", self._settings.worker_address)
        return server

    def ops_answers(self) -> OpsAnswers:
        """For the HTTP endpoint. A worker that answers is alive: one that is wedged or lost ends by itself."""
        return OpsAnswers(
            live=lambda: Verdict(self.status.state is not ServiceState.FAILED, {"status": self.status.state.name.lower()}),
            ready=self._readiness,
            metrics=lambda: self.service.serving.report.metrics.prometheus_text() if self.service.serving is not None else b"",
        )

    def _readiness(self) -> Verdict:
        state, (fraction, step) = self.status.state, self.status.progress
        return Verdict(state is ServiceState.READY, {"status": state.name.lower(), "progress": round(fraction, 3), "step": step})

    async def load(self) -> None:
        """Loads the checkpoint and starts the engine's thread; the worker is READY afterwards.

        Raises:
            Glm53Error: the checkpoint or a setting is wrong.
        """
        self.status.advance(ServiceState.LOADING)
        await asyncio.to_thread(self._load)
        self.status.advance(ServiceState.READY)
        await self._set_health(serving=True)
        log.info("loaded in %.1f s", time.monotonic() - self._began)

    async def _load_and_serve(self) -> int:
        try:
            await self.load()
        except Cancelled as error:
            log.info("%s", error.message)
            return ExitCode.OK
        except Glm53Error as error:
            self.status.advance(ServiceState.FAILED)
            log.error("cannot start: %s", error.message)
            return ExitCode.CONFIG if error.code == "config_error" else ExitCode.BOOT
        except Exception:
            self.status.advance(ServiceState.FAILED)
            log.exception("cannot start")
            return ExitCode.BOOT
        return await self._watch()

    def _load(self) -> None:
        settings, note = self._settings, self._note
        if download.ensure(settings, lambda fraction, step: self._note(fraction / 2, step)):
            note = self._note_second_half
        note(0.0, "reading the checkpoint's headers")
        checkpoint = Checkpoint(settings.model_folder)
        config = checkpoint.config
        files = TokenizerFiles.from_directory(checkpoint.path)
        tokens = TokenTable.from_file(checkpoint.path / "tokenizer.json", config.vocab_size)
        backend = self._load_backend(settings, checkpoint, note)
        self._backend = backend
        facts = ModelFacts(
            settings.served_name or config.default_served_name,
            ARCHITECTURE,
            checkpoint.hash.hex(),
            config.eos_token_ids,
            files,
            backend.info,
            settings.max_queued,
        )
        self.serve_with(backend, tokens, facts)
        for name, value, reason in _resolved(facts):
            log.info("%s = %s (%s)", name, value, reason)

    def _note(self, fraction: float, step: str) -> None:
        """Loading got on; the place where a signal ends it."""
        if self._stop.is_set():
            raise Cancelled("told to stop while loading")
        self.status.note(fraction, step)

    def _note_second_half(self, fraction: float, step: str) -> None:
        self._note(0.5 + fraction / 2, step)

    def serve_with(self, backend: Backend, tokens: TokenTable, facts: ModelFacts) -> None:
        """Starts the engine's thread over a loaded backend."""
        settings, files = self._settings, facts.tokenizer
        chunk_size = facts.backend.chunk_size or settings.chunk_size
        limits = EngineLimits(
            settings.max_queued,
            chunk_size,
            busy_chunk_size=max(16, chunk_size // 4),
            slow_reader_s=settings.slow_reader_s,
            prefix_cache_bytes=settings.prefix_cache_mb << 20,
            max_rq_tokens=settings.max_rq_tokens,
        )
        metrics = EngineMetrics(model_name=facts.model_name)
        metrics.registry.register(MemoryCollector(settings.service, settings.shm_dir))
        engine = EngineLoop(backend, tokens, frozenset(facts.eos_token_ids), limits, metrics)
        self._engine = engine
        # In the context of the load: what it has set there (Triton's allocator on some GPUs) is the engine's too.
        run = contextvars.copy_context().run
        self._engine_thread = threading.Thread(target=run, args=(engine.run_forever,), name="engine", daemon=True)
        self._engine_thread.start()
        self.status.facts = facts
        self.status.note(1.0, "loaded")
        request_limits = convert.RequestLimits(
            facts.backend.vocab_size,
            facts.backend.max_context,
            files.default_temperature,
            files.default_top_p,
            files.default_top_k,
            settings.queue_timeout_s,
        )
        compiler = GrammarCompiler(files.tokenizer_json.decode(), facts.backend.vocab_size, facts.eos_token_ids)
        self.service.serving = Serving(engine, tokens, facts, request_limits, StatsReport(engine, backend, facts), GrammarQueue(compiler))

    async def _watch(self) -> int:
        """Waits for a signal; ends the process when the engine is lost or makes no progress although it has work."""
        engine, backend = self._engine, self._backend
        assert engine is not None
        assert backend is not None
        lane = LaneWatch(backend.stats)
        try:
            return await self._watch_engine(engine, lane)
        finally:
            await lane.end()

    async def _watch_engine(self, engine: EngineLoop, lane: LaneWatch) -> int:
        watchdog = Watchdog(self._settings.watchdog_s, time.monotonic())
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _TICK_S)
            lane.tick()
            if engine.fatal is not None:
                await self._fail("the engine is lost", engine.fatal)
                return CRASH_EXIT
            wedged_s = watchdog.wedged_s(has_work=engine.has_work, progress=engine.progress, now=time.monotonic())
            if wedged_s:
                await self._fail(f"work is pending but nothing moved for {wedged_s:.0f} s (GLM53_WATCHDOG_S)", None)
                # The engine's thread hangs in a call that nobody can end: only leaving the process does.
                logging.shutdown()
                os._exit(CRASH_EXIT)
        return ExitCode.OK

    async def _fail(self, what: str, error: BaseException | None) -> None:
        log.critical("%s; the worker exits and expects to be started again", what, exc_info=error)
        self.status.advance(ServiceState.FAILED)
        await self._set_health(serving=False)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self._stop.is_set():
            log.info("%s: draining", name)
            self._signalled = time.monotonic()
            self._stop.set()
        # One Ctrl-C reaches a worker twice, from the terminal and from its supervisor: only a later one means impatience.
        elif number == signal.SIGINT and time.monotonic() - self._signalled > IMPATIENT_S:
            log.warning("%s again: leaving without waiting", name)
            os._exit(CRASH_EXIT)

    async def drain(self) -> None:
        """Refuses new requests and waits for the live ones, at most `drain_timeout_s`."""
        if self.status.state is ServiceState.READY:
            self.status.advance(ServiceState.DRAINING)
            await self._set_health(serving=False)
        engine = self._engine
        if engine is None:
            return
        engine.drain()
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while engine.num_live and engine.fatal is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if engine.num_live:
            log.warning("%d requests did not end in time and are failed", engine.num_live)

    async def shut_down(self, server: grpc.aio.Server) -> None:
        """Stop accepting, let live streams end, stop the engine, then the server, then give memory back."""
        if not self._stop.is_set() and self.status.state is ServiceState.LOADING:
            self.status.advance(ServiceState.FAILED)
        await self.drain()
        if self._engine is not None and self._engine_thread is not None:
            self._engine.stop()
            await asyncio.to_thread(self._engine_thread.join, 10.0)
        await server.stop(grace=1.0)
        if self._backend is not None and (self._engine_thread is None or not self._engine_thread.is_alive()):
            await asyncio.to_thread(self._backend.close)
        if self._traces is not None:
            await otel.shut_down(self._traces)
        if self.status.state in (ServiceState.DRAINING, ServiceState.FAILED):
            self.status.advance(ServiceState.STOPPED)

    async def _set_health(self, *, serving: bool) -> None:
        value = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, value)


def _resolved(facts: ModelFacts) -> list[tuple[str, str, str]]:
    """Facts that were decided at start, with the reason."""
    backend = facts.backend
    return [
        ("model", facts.model_name, f"checkpoint {facts.checkpoint_hash[:12]}"),
        ("device", backend.device, backend.device_reason),
        ("mode", backend.mode, backend.mode_reason),
        ("context", str(backend.max_context), "tokens of prompt and completion"),
        ("kernel", backend.kernel_variant, backend.kernel_reason),
        ("arithmetic", str(backend.arithmetic_version), "version"),
        ("abi", str(backend.abi_version), "version"),
        ("arena", backend.arena.partition(":")[0], backend.arena.partition(": ")[2]),
    ]
