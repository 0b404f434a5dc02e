"""The console script `glm53`: Ctrl-C ends it without a traceback from its first instruction on."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the `glm53` command."""
    # Python's own handler would raise KeyboardInterrupt in the middle of an import. Nothing needs cleaning up yet: `serve` takes the signal
    # over before it starts anything. Where Ctrl-C is ignored (a background job) it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
