"""Starts the gateway: settings, logs, app, server."""

from __future__ import annotations

import gc
import logging
import os
import sys

# Before gRPC is loaded, which reads it once: a client that polls its connection itself spends a quarter less CPU time on a message than
# one whose connection is polled by gRPC's pool of threads.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

from services.common import event_loop
from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode
from services.common.logs import configure_logging
from services.common.version import VERSION
from services.gateway.app import create_app
from services.gateway.fleet import worker_for
from services.gateway.server import GatewayServer
from services.gateway.settings import GatewaySettings

log = logging.getLogger("services.gateway")


def main() -> int:
    """Serves until SIGTERM; returns the exit code."""
    try:
        settings = GatewaySettings.load()
    except ConfigError as error:
        configure_logging(GatewaySettings.service)
        log.error("%s", error.message)
        return ExitCode.CONFIG
    configure_logging("gateway", level=settings.log_level, json_lines=settings.log_format == "json")
    log.info("glm53-offload gateway %s", VERSION)
    for name, value, source in settings.describe():
        log.info("  %-34s = %s (%s)", name, value, source)
    return event_loop.run(_serve(settings))


async def _serve(settings: GatewaySettings) -> int:
    try:
        worker = worker_for(settings)
        server = GatewayServer(create_app(settings, worker), settings)
    except ConfigError as error:
        log.error("%s", error.message)
        return ExitCode.CONFIG
    # What is here now stays: the collector need not look at it again whenever a large request comes, which takes it a tenth of a second.
    gc.collect()
    gc.freeze()
    try:
        await server.serve()
    except SystemExit:
        # uvicorn's way to say that it could not listen; it has logged why.
        return ExitCode.BOOT
    return ExitCode.OK if server.started else ExitCode.BOOT


if __name__ == "__main__":
    sys.exit(main())
