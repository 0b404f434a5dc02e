"""`python -m cli.doctor`: the same command in a container that has one service's packages only."""

from __future__ import annotations

import argparse
import sys

from cli.doctor import command
from services.common.logs import configure_logging

if __name__ == "__main__":
    configure_logging("doctor")
    parser = argparse.ArgumentParser(prog="python -m cli.doctor", description=command.SUMMARY)
    command.add_arguments(parser)
    sys.exit(command.run(parser.parse_args()))
