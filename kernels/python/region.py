"""The control region between a worker and its cpu_expert."""

from __future__ import annotations

import os

from kernels.python import segments, shm_lib
from kernels.python.arena import Arena
from kernels.python.errors import raise_last


class Region:
    """Control words, job ring and job buffers. The worker creates it anew at every start and gives it to its `TierEngine`."""

    def __init__(self, handle: shm_lib.Handle) -> None:
        self._library = shm_lib.load()
        self._handle: shm_lib.Handle | None = handle

    @classmethod
    def create(cls, path: str, arena: Arena, *, top_k: int, max_rows: int = 8, ring_len: int = 8, num_buffers: int = 4) -> Region:
        """Makes a region for the sealed arena and renames it over an old one.

        top_k: picks per row of the model; a job holds up to max_rows * top_k result rows. Raises ShmNoSpace, ValueError.
        """
        library = shm_lib.load()
        segments.reclaim_temporaries(path)
        pointer = library.glm53_region_create(os.fsencode(path), arena.handle.pointer, ring_len, num_buffers, max_rows, max_rows * top_k)
        if not pointer:
            raise_last(library)
        return cls(shm_lib.Handle(pointer, library.glm53_region_close))

    @classmethod
    def attach(cls, path: str, generation: int = 0) -> Region:
        """Maps an existing region. generation: the one that it must have, 0 = any. Raises ShmAbsent, ShmMismatch with both values."""
        library = shm_lib.load()
        pointer = library.glm53_region_attach(os.fsencode(path), generation)
        if not pointer:
            raise_last(library)
        return cls(shm_lib.Handle(pointer, library.glm53_region_close))

    @property
    def handle(self) -> shm_lib.Handle:
        """The native region. Raises ValueError once closed."""
        if self._handle is None:
            raise ValueError("the region is closed")
        return self._handle

    @property
    def generation(self) -> int:
        """Random per creation."""
        return self.field("generation")

    @property
    def total_bytes(self) -> int:
        """Size of the segment."""
        return self.field("total_bytes")

    @property
    def address(self) -> int:
        """Where the segment is mapped: `total_bytes` from there on."""
        address: int = self._library.glm53_region_header(self.handle.pointer)
        return address

    @property
    def current(self) -> bool:
        """True while the path still names this segment."""
        return bool(self._library.glm53_region_current(self.handle.pointer))

    def field(self, name: str) -> int:
        """A number of the header or a control word, by its name in expert_abi.h. Raises ValueError for an unknown name."""
        value = int(self._library.glm53_region_field(self.handle.pointer, name.encode()))
        if value == 2**64 - 1:
            raise ValueError(f"the control region has no field {name}")
        return value

    def close(self) -> None:
        """Lets go of the mapping."""
        self._handle = None

    def unlink(self) -> None:
        """Tells the server that the worker has quit and removes the name, if it still names this segment. Only the creator."""
        if self._library.glm53_region_unlink(self.handle.pointer) != 0:
            raise_last(self._library)
