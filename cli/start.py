"""The console script `glm53`, and what the `cli` image runs: signals end it without a traceback from its first instruction on."""

from __future__ import annotations

import os
import signal
import sys
import types


def main() -> int:
    """Runs the `glm53` command."""
    # Python's own handler would raise KeyboardInterrupt in the middle of an import. Nothing needs cleaning up yet: `serve` takes signals
    # over before it starts anything. Where Ctrl-C is ignored (a background job) it stays so.
    if os.getpid() == 1:
        # A container's first process: the kernel drops signals that it has no handler for, Ctrl-C and `docker stop` too.
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _end)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli.main import main as run

    return run()


def _end(number: int, _frame: types.FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
