"""Bad bits in an arena that nobody computes from. Needs nothing but the shared-memory library: machines for GPU tests have little more."""

from __future__ import annotations

import pathlib

from kernels.python import segments
from kernels.python.arena import Arena


def damage(shm_dir: pathlib.Path, *records: tuple[int, int]) -> None:
    """Flips a bit in records (layer, expert) of the arena that a stopped worker left."""
    arena = Arena.attach(segments.arena_path(shm_dir, "default"))
    start = [arena.record(layer, expert)[:64].tobytes() for layer, expert in records]
    arena.close()
    path = pathlib.Path(segments.arena_path(shm_dir, "default"))
    data = bytearray(path.read_bytes())
    for first in start:
        at = data.index(first)
        data[at + 5] ^= 0x40
    with path.open("r+b") as file:  # the same file: a worker re-attaches it by name
        file.write(data)
