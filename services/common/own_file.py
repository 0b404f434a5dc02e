"""Files that settings name and we write. One that holds something else is refused at the start, and never replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from services.common.errors import ConfigError

Recognise = Callable[[BinaryIO], bool]  # of a file that is not empty, opened at its beginning: whether we wrote it


class NotOursError(OSError):
    """What lies at the path was not written by us; `strerror` says what it is."""

    def __init__(self, found: str) -> None:
        super().__init__(errno.EEXIST, found)


def look(path: Path, recognise: Recognise, kind: str) -> None:
    """Looks at what lies at the path: nothing, an empty file and one of ours are fine.

    Args:
        recognise: whether a file is ours.
        kind: what ours is called, e.g. "heat file".

    Raises:
        NotOursError: anything else lies there, or it cannot be read.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotOursError(f"it is {_in_words(found.st_mode)}")
        if found.st_size == 0:
            return
        with path.open("rb") as file:
            ours = recognise(file)
    except NotOursError:
        raise
    except FileNotFoundError:
        if path.is_symlink():
            raise NotOursError("it is a link to a file that does not exist") from None
        return
    except OSError as error:
        raise NotOursError(f"it cannot be read: {error.strerror}") from None
    if not ours:
        raise NotOursError(f"it has {found.st_size} bytes that are no {kind} of ours")


def refuse_another(setting: str, path: Path, recognise: Recognise, kind: str) -> None:
    """`look`, at a start.

    Args:
        setting: the environment name of the setting that names the file.

    Raises:
        ConfigError: names the setting, what was found and what to do.
    """
    try:
        look(path, recognise, kind)
    except NotOursError as error:
        raise ConfigError(
            f"{setting}={path} is not written to: {error.strerror}. Name a file that does not exist yet, or move what is there away",
            param=setting,
        ) from None


def replace(path: Path, data: bytes, recognise: Recognise, kind: str) -> None:
    """Writes the file whole or not at all. A link stays one, and a file that was there leaves its mode to the new one.

    Raises:
        NotOursError: another's file lies there.
        OSError: it cannot be written.
    """
    look(path, recognise, kind)
    target = Path(os.path.realpath(path))
    # A name that nobody else has: what lies beside the file is not ours either, and its leftover must not stop a later run.
    part = target.with_name(f"{target.name}.tmp.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def is_blank(file: BinaryIO) -> bool:
    """Whether it has NULs alone, as a loss of power may leave a file that was just written."""
    file.seek(0)
    while piece := file.read(1 << 20):
        if piece.count(0) != len(piece):
            return False
    return True


def _in_words(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISSOCK, "a socket"), (stat.S_ISFIFO, "a pipe"))
    return next((words for is_kind, words in kinds if is_kind(mode)), "a device")
