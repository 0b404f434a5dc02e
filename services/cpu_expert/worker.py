"""Attach, serve, notice a restarted gpu_worker, drain."""

from __future__ import annotations

import logging
import os
import time
from typing import Protocol

from kernels.python import segments
from kernels.python.arena import Arena
from kernels.python.errors import ShmAbsent, ShmInUse, ShmMismatch
from kernels.python.job_server import JobServer, ServerStep
from services.common.errors import ConfigError, PeerError
from services.cpu_expert.settings import CpuExpertSettings

log = logging.getLogger(__name__)

SERVE_SLICE_MS = 100  # between two looks at signals and at the region's name
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 0.5
MISMATCH_PATIENCE_S = 60.0  # while a worker restarts, arena and region of two generations lie side by side
DRAIN_LIMIT_S = 10.0
BIG_RECORD_BYTES = 1 << 20  # below this a record takes microseconds: more threads would only wake each other


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

    def run(self) -> None:
        """Returns when a signal asked for it and the running job is finished.

        Raises PeerError when a worker's segments stay unusable for MISMATCH_PATIENCE_S (the text has both values), ConfigError when
        this host lacks the chosen kernel or CPUs.
        """
        check_cpus(self._settings.cpus)
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
        arena = Arena.attach(self._arena_path)
        threads, why = resolve_threads(self._settings, arena.shape(0).record_bytes)
        arena.close()
        try:
            server = JobServer(self._ctl_path, self._arena_path, variant=self._settings.ct_isa, threads=threads, cpus=self._settings.cpus)
        except ValueError as error:
            raise ConfigError(f"GLM53_CT_ISA, GLM53_CT_CPUS or GLM53_CT_THREADS: {error}", param="GLM53_CT_ISA") from None
        stats = server.stats()
        log.info("attached to %s: kernel %s (%s), %d threads (%s)", self._ctl_path, stats["kernel"], stats["kernel_reason"], threads, why)
        self._last_reason = ""
        return server

    def _serve(self, server: JobServer) -> bool:
        """Serves one attachment; True when a signal ended it."""
        while True:
            step = server.run(SERVE_SLICE_MS)
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
        if reason != self._last_reason:
            self._last_reason = reason
            log.info("waiting for a gpu_worker: %s", reason)


def check_cpus(cpus: list[int]) -> None:
    """Refuses CPUs that this process may not run on: pinning to them would fail, or silently do nothing.

    Raises:
        ConfigError: names them and what may be used.
    """
    usable = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - usable):
        raise ConfigError(
            f"GLM53_CT_CPUS names CPUs {missing} that this process may not use; usable are {sorted(usable)}", param="GLM53_CT_CPUS"
        )


def resolve_threads(settings: CpuExpertSettings, record_bytes: int) -> tuple[int, str]:
    """Number of kernel threads, and why."""
    if settings.ct_threads:
        return settings.ct_threads, "GLM53_CT_THREADS"
    if settings.cpus:
        return len(settings.cpus), "one per CPU of GLM53_CT_CPUS"
    if record_bytes < BIG_RECORD_BYTES:
        return 1, "small experts"
    usable = len(os.sched_getaffinity(0))
    return max(1, usable - 2), f"{usable} usable CPUs, two for the other processes"


def _summary(server: JobServer) -> str:
    stats = server.stats()
    return ", ".join(f"{name} {stats[name]}" for name in ("jobs", "picks", "dropped", "stale", "bad"))
