"""`python -m cli.doctor`: the same command in a container that has one service's packages only."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Runs the doctor as the first process of a container, which must have a handler of its own to be stopped."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    # Late: whoever stops a container that has just been started is not to wait for them.
    import argparse

    from cli.doctor import command
    from services.common.logs import configure_logging

    configure_logging("doctor")
    parser = argparse.ArgumentParser(prog="python -m cli.doctor", description=command.SUMMARY)
    command.add_arguments(parser)
    return command.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
