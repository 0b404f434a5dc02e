"""Attach, serve, notice a restarted gpu_worker, drain."""

from __future__ import annotations

import logging
import os
import time
from typing import Protocol

from kernels.python import host, segments
from kernels.python.arena import Arena
from kernels.python.errors import ShmAbsent, ShmInUse, ShmMismatch
from kernels.python.job_server import JobServer, ServerStep
from services.common.errors import ConfigError, PeerError
from services.common.ops_http import OpsServer
from services.cpu_expert import placement
from services.cpu_expert.metrics import ExpertMetrics
from services.cpu_expert.settings import CpuExpertSettings

log = logging.getLogger(__name__)

SERVE_SLICE_MS = 250  # between two looks at signals and at the region's name: a job that comes meanwhile waits for them
TELL_S = 1.0  # between two readings of the counters
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 0.5
MISMATCH_PATIENCE_S = 60.0  # while a worker restarts, arena and region of two generations lie side by side
DRAIN_LIMIT_S = 10.0
NO_LANE = "the one here is still loading, or computes without this process (as in mode exact): there is nothing to do"


class StopSignals(Protocol):
    """Where the request to stop comes from (services.common.lifecycle.Signals)."""

    def wait(self, timeout_s: float) -> object | None:
        """The next signal, or None after timeout_s seconds."""


class ExpertWorker:
    """Serves one gpu_worker after the other until it is told to stop."""

    def __init__(self, settings: CpuExpertSettings, signals: StopSignals) -> None:
        self._settings = settings
        self._signals = signals
        self._arena_path = segments.arena_path(settings.shm_dir, settings.instance)
        self._ctl_path = segments.ctl_path(settings.shm_dir, settings.instance)
        self._last_reason = ""
        self.metrics = ExpertMetrics()
        self._usable: set[int] = set()

    def run(self) -> None:
        """Returns when a signal asked for it and the running job is finished.

        Raises PeerError when a worker's segments stay unusable for MISMATCH_PATIENCE_S (the text has both values), ConfigError when
        this host lacks the chosen kernel, CPUs or memory node, or when the address of GLM53_EXPERT_HTTP is taken.
        """
        placement.check(self._settings)
        self._usable = placement.settle_on_node(self._settings)
        address = self._settings.http_address
        ops = OpsServer(address, self.metrics.answers(), "GLM53_EXPERT_HTTP") if address else None
        try:
            self._run()
        finally:
            if ops is not None:
                ops.close()

    def _run(self) -> None:
        while (server := self._attach()) is not None:
            try:
                stopped = self._serve(server)
            finally:
                server.close()
            if stopped:
                return

    def _attach(self) -> JobServer | None:
        """The next server, or None when a signal came first. Waits for as long as it takes: a big checkpoint loads for minutes."""
        wait_s = FIRST_WAIT_S
        mismatch_since: float | None = None
        while True:
            self.metrics.beat()
            try:
                return self._try_attach()
            except (ShmAbsent, ShmInUse) as reason:
                mismatch_since = None
                self._tell(str(reason))
            except ShmMismatch as reason:
                now = time.monotonic()
                mismatch_since = now if mismatch_since is None else mismatch_since
                self._tell(str(reason))
                if now - mismatch_since > MISMATCH_PATIENCE_S:
                    raise PeerError(str(reason)) from None
            if self._signals.wait(wait_s) is not None:
                log.info("stopped while waiting for a gpu_worker")
                return None
            wait_s = min(LONGEST_WAIT_S, wait_s * 1.5)

    def _try_attach(self) -> JobServer:
        unpin(self._usable)
        arena = Arena.attach(self._arena_path)
        where = placement.place(self._settings, arena.shape(0).record_bytes)
        arena.close()
        try:
            server = self._server(where)
        except ShmAbsent:
            raise ShmAbsent(NO_LANE) from None
        except ValueError as error:
            raise ConfigError(f"GLM53_CT_ISA, GLM53_CT_CPUS or GLM53_CT_THREADS: {error}", param="GLM53_CT_ISA") from None
        # After the server's own threads have started: its heartbeat must not share a CPU with the kernel.
        if where.own_cpu is not None:
            pin(where.own_cpu)
        self._tell_attached(server, where)
        return server

    def _server(self, where: placement.Placement) -> JobServer:
        return JobServer(
            self._ctl_path,
            self._arena_path,
            variant=self._settings.ct_isa,
            threads=where.threads,
            cpus=where.other_cpus,
            tune=True,
            huge_pages=True,
        )

    def _tell_attached(self, server: JobServer, where: placement.Placement) -> None:
        stats = server.stats()
        self.metrics.attached(where.threads)
        log.info("attached to %s: kernel %s (%s)", self._ctl_path, stats["kernel"], stats["kernel_reason"])
        cpus = f" on CPUs {', '.join(map(str, where.cpus))}" if where.cpus else ""
        log.info("kernel threads: %d%s (%s)", where.threads, cpus, where.reason)
        given = f"{stats['huge_bytes'] / 2**20:.0f} MiB" if stats["huge_bytes"] >= 0 else "unknown"
        why = stats["huge_note"] or f"shmem_enabled of this system is {host.shared_huge_policy() or 'not known'}"
        log.info("arena in 2 MiB pages: %s (%s)", given, why)
        self._last_reason = ""

    def _serve(self, server: JobServer) -> bool:
        """Serves one attachment; True when a signal ended it."""
        told = 0.0
        while True:
            step = server.run(SERVE_SLICE_MS)
            self.metrics.beat()
            if step is ServerStep.QUIT or time.monotonic() - told > TELL_S:
                told = time.monotonic()
                self.metrics.served(server.stats())
            if self._signals.wait(0) is not None:
                self._drain(server)
                return True
            if step is ServerStep.QUIT or not server.current:
                log.info("the gpu_worker left or restarted: attaching again (%s)", _summary(server))
                return False

    def _drain(self, server: JobServer) -> None:
        server.drain()
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while server.run(SERVE_SLICE_MS) not in (ServerStep.DRAINED, ServerStep.QUIT):
            if time.monotonic() > deadline:
                log.warning("the running job did not end within %g s", DRAIN_LIMIT_S)
                return
        log.info("drained (%s)", _summary(server))

    def _tell(self, reason: str) -> None:
        """Logs why there is nothing to serve, once per reason."""
        self.metrics.waiting(reason)
        if reason != self._last_reason:
            self._last_reason = reason
            log.info("waiting for a gpu_worker: %s", reason)


def pin(cpu: int) -> None:
    """Keeps this thread on a CPU. A CPU that was taken away since it was chosen is no reason not to serve."""
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError as error:
        log.warning("not pinned to CPU %d: %s", cpu, error)


def unpin(usable: set[int]) -> None:
    """Lets this thread use all of these CPUs again, or all that are left when the CPU set shrank to others meanwhile."""
    try:
        os.sched_setaffinity(0, usable)
    except OSError:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _summary(server: JobServer) -> str:
    stats = server.stats()
    return ", ".join(f"{name} {stats[name]}" for name in ("jobs", "picks", "dropped", "stale", "bad"))
