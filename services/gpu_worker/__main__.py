"""`python -m services.gpu_worker`: settings, logging, worker."""

from __future__ import annotations

import logging
import os
import sys

# Before gRPC is loaded, which reads it once: connections that are polled by the threads that wait for them cost a fifth less CPU time a
# message than those that gRPC's pool of threads polls.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

from services.common import event_loop
from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode
from services.common.logs import configure_logging
from services.common.version import VERSION
from services.gpu_worker.backends import select
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.worker import Worker

log = logging.getLogger("services.gpu_worker")

# The engine's thread asks for the GIL after every pass: nobody who talks to clients meanwhile may keep it for Python's usual 5 ms.
SWITCH_INTERVAL_S = 0.0002


async def _serve(settings: GpuWorkerSettings) -> int:
    return await Worker(settings, select.load).run()


def main() -> int:
    """Runs the worker until it is told to stop; returns the exit code."""
    try:
        settings = GpuWorkerSettings.load()
    except ConfigError as error:
        configure_logging(GpuWorkerSettings.service)
        log.error("%s", error.message)
        return ExitCode.CONFIG
    configure_logging(settings.service, level=settings.log_level, json_lines=settings.log_format == "json")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log.info("%s %s", settings.service, VERSION)
    for name, value, source in settings.describe():
        log.info("%s=%s (%s)", name, value or "-", source)
    return event_loop.run(_serve(settings))


if __name__ == "__main__":
    sys.exit(main())
