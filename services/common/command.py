"""How a person types our command here, for hints that can be copied."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

NAME = "glm53"


def find(argv0: str, executable: str, folder: str, which: Callable[[str], str | None] = shutil.which) -> str:
    """`glm53` where the shell finds this very one, else its path.

    Args:
        argv0: the program as it was called.
        executable: the Python that runs it.
        folder: the current one; a path in it is shown relative to it when it was called from there.
    """
    called = Path(folder, argv0)
    ours = called if called.name == NAME else Path(executable).with_name(NAME)
    found = which(NAME)
    if found is not None and os.path.realpath(found) == os.path.realpath(ours):
        return NAME
    if not ours.exists():
        return "python -m cli.main"
    if ours is called and ours.is_relative_to(folder):
        return str(ours.relative_to(folder))
    return str(ours)


# When this is imported nobody has changed the folder yet.
COMMAND = find(sys.argv[0], sys.executable, str(Path.cwd()))
