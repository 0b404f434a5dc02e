"""Entry point: settings, log, attach and serve."""

from __future__ import annotations

import logging
import sys

from kernels.python.lib import KernelsMissingError
from services.common.errors import ConfigError, PeerError
from services.common.lifecycle import ExitCode, Signals
from services.common.logs import configure_logging
from services.cpu_expert.settings import CpuExpertSettings
from services.cpu_expert.worker import ExpertWorker

log = logging.getLogger("services.cpu_expert")


def main() -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    try:
        settings = CpuExpertSettings.load()
    except ConfigError as error:
        configure_logging("cpu_expert")
        log.error("%s", error)
        return ExitCode.CONFIG
    configure_logging("cpu_expert", level=settings.log_level, json_lines=settings.log_format == "json")
    for name, value, source in settings.describe():
        log.debug("setting %s = %s (%s)", name, value, source)
    signals = Signals()
    try:
        ExpertWorker(settings, signals).run()
    except ConfigError as error:
        log.error("%s", error)
        return ExitCode.CONFIG
    except PeerError as error:
        log.error("%s", error)
        return ExitCode.PEER
    except KernelsMissingError as error:
        log.error("%s", error)
        return ExitCode.BOOT
    except Exception:
        log.exception("cpu_expert failed")
        return ExitCode.BOOT
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
