"""How hot each expert is, kept over restarts: a worker that starts again has the right records in its slots at once."""

from __future__ import annotations

import hashlib
import pathlib
import struct
import threading
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from services.common import own_file

MAGIC = b"glm53 gpu heat 2"
# Ours, whatever their version: a worker that computed on the CPU may have written the file before (kernels/tier/heat.cpp), or may after us.
OURS = (b"glm53 gpu heat ", b"G53heat1")
KIND = "heat file"
SAVE_EVERY_S = 180.0

Heat = tuple[NDArray[np.float32], NDArray[np.float32]]


def save(path: pathlib.Path, checkpoint_hash: bytes, heat: Heat) -> None:
    """Writes the file whole or not at all.

    Args:
        checkpoint_hash: 32 bytes: heat of one checkpoint means nothing to another.
        heat: (popularity, fast) of every record.

    Raises:
        OSError: it cannot be written, or a file that is no heat file lies there.
    """
    slow, fast = (np.ascontiguousarray(values, np.float32) for values in heat)
    body = checkpoint_hash + struct.pack("<I", len(slow)) + slow.tobytes() + fast.tobytes()
    own_file.replace(path, MAGIC + hashlib.sha256(body).digest() + body, is_heat, KIND)


def is_heat(file: BinaryIO) -> bool:
    """Whether the file begins as one that holds heat: of any checkpoint and version, whole or not; or has NULs alone."""
    return file.read(max(map(len, OURS))).startswith(OURS) or own_file.is_blank(file)


def load(path: pathlib.Path, checkpoint_hash: bytes, num_records: int) -> tuple[Heat | None, str]:
    """(heat, "") or (None, why not)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, f"{path} does not exist yet"
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}"
    head = len(MAGIC) + 32
    body = data[head:]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != data[len(MAGIC) : head]:
        return None, f"{path} is no heat file of this version, or damaged"
    if body[:32] != checkpoint_hash or struct.unpack_from("<I", body, 32)[0] != num_records:
        return None, f"{path} belongs to another checkpoint"
    values = np.frombuffer(body, np.float32, offset=36).reshape(2, num_records).copy()
    return (values[0], values[1]), ""


class HeatKeeper:
    """Saves heat now and then, in a thread of its own: a disk must not delay a step.

    Args:
        path: the file.
        checkpoint_hash: of the served checkpoint.
        read: a copy of the current heat.
        failed: told what went wrong; serving goes on.
    """

    def __init__(self, path: pathlib.Path, checkpoint_hash: bytes, read: Callable[[], Heat], failed: Callable[[str], None]) -> None:
        self._path, self._hash, self._read, self._failed = path, checkpoint_hash, read, failed
        self._due = 0.0
        self._writing: threading.Thread | None = None

    def tick(self, now: float) -> None:
        """Called between steps with monotonic seconds."""
        if self._due == 0.0:
            self._due = now + SAVE_EVERY_S
        if now < self._due or (self._writing is not None and self._writing.is_alive()):
            return
        self._due = now + SAVE_EVERY_S
        self._writing = threading.Thread(target=self._save, args=(self._read(),), name="heat", daemon=True)
        self._writing.start()

    def close(self) -> None:
        """Saves a last time."""
        if self._writing is not None:
            self._writing.join(10.0)
        self._save(self._read())

    def _save(self, heat: Heat) -> None:
        try:
            save(self._path, self._hash, heat)
        except OSError as error:
            self._failed(f"the heat cannot be saved to {self._path}: {error.strerror}")
