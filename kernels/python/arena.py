"""The home of the expert records in shared memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.python import segments, shm_lib
from kernels.python.errors import ShmAbsent, ShmMismatch, raise_last
from kernels.python.expert import ExpertShape

HASH_BYTES = 32


class Arena:
    """Records of all experts, one slot each: slot = layer * experts_per_layer + expert.

    `create`, fill every `record`, `seal`; or `attach_or_create` and fill only when `reattached` is False. A worker owns its arena
    (its lock, and the right to unlink it); others `attach` to read.
    """

    def __init__(self, handle: shm_lib.Handle, *, owner: bool, sealed: bool, reattached: bool, note: str = "") -> None:
        self._library = shm_lib.load()
        self._handle: shm_lib.Handle | None = handle
        self._owner = owner
        self._sealed = sealed
        self.reattached = reattached
        self.note = note  # why an existing arena was replaced, or ""

    @classmethod
    def create(cls, path: str, shapes: Sequence[ExpertShape], experts_per_layer: int, checkpoint_hash: bytes) -> Arena:
        """Makes an arena under a temporary name, all of its memory reserved.

        shapes: one per MoE layer (at most 128, one `hidden`). checkpoint_hash: 32 bytes.
        Raises ShmNoSpace when the tmpfs is too small (the text has the size to pass), ValueError for a count out of range.
        """
        library = shm_lib.load()
        segments.reclaim_temporaries(path)
        array, digest = _spec(shapes, checkpoint_hash)
        pointer = library.glm53_arena_create(os.fsencode(path), array, len(shapes), experts_per_layer, digest)
        if not pointer:
            raise_last(library)
        return cls(shm_lib.Handle(pointer, library.glm53_arena_close), owner=True, sealed=False, reattached=False)

    @classmethod
    def attach(cls, path: str, generation: int = 0) -> Arena:
        """Maps a READY arena to read it. generation: the one that it must have, 0 = any.

        Raises ShmAbsent, or ShmMismatch naming the field and both values.
        """
        library = shm_lib.load()
        pointer = library.glm53_arena_attach(os.fsencode(path), generation)
        if not pointer:
            raise_last(library)
        return cls(shm_lib.Handle(pointer, library.glm53_arena_close), owner=False, sealed=True, reattached=True)

    @classmethod
    def attach_or_create(cls, path: str, shapes: Sequence[ExpertShape], experts_per_layer: int, checkpoint_hash: bytes) -> Arena:
        """Takes over the READY arena that a dead worker left for this checkpoint and layout, or makes a new one.

        Any other arena at `path` is removed first (two do not fit into memory); `note` says why. Raises ShmInUse while its worker lives,
        and what `create` raises.
        """
        library = shm_lib.load()
        array, digest = _spec(shapes, checkpoint_hash)
        pointer = library.glm53_arena_adopt(os.fsencode(path), array, len(shapes), experts_per_layer, digest)
        if pointer:
            handle = shm_lib.Handle(pointer, library.glm53_arena_close)
            return cls(handle, owner=True, sealed=True, reattached=True)
        note = ""
        try:
            raise_last(library)
        except ShmAbsent:
            pass
        except ShmMismatch as error:
            note = str(error)
            os.unlink(path)
        arena = cls.create(path, shapes, experts_per_layer, checkpoint_hash)
        arena.note = note
        return arena

    @property
    def handle(self) -> shm_lib.Handle:
        """The native arena, for the engine. Raises ValueError once closed."""
        if self._handle is None:
            raise ValueError("the arena is closed")
        return self._handle

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self._field("num_layers")

    @property
    def experts_per_layer(self) -> int:
        """Routed experts of a layer."""
        return self._field("experts_per_layer")

    @property
    def num_records(self) -> int:
        """Slots of the arena."""
        return self._field("num_slots")

    @property
    def total_bytes(self) -> int:
        """Size of the segment."""
        return self._field("total_bytes")

    @property
    def generation(self) -> int:
        """Random per creation."""
        return self._field("generation")

    def shape(self, layer: int) -> ExpertShape:
        """The record layout of a layer, as the arena states it."""
        pointer = self._library.glm53_arena_shape(self.handle.pointer, layer)
        if not pointer:
            raise ValueError(f"layer is {layer}: the arena has layers 0..{self.num_layers - 1}")
        return ExpertShape.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(ExpertShape)))

    def record(self, layer: int, expert: int) -> npt.NDArray[np.uint8]:
        """The record's bytes, uint8 [record_bytes]: to be filled before `seal`, read-only afterwards. Keeps the mapping alive."""
        num_bytes = self.shape(layer).record_bytes
        pointer = self._library.glm53_arena_record(self.handle.pointer, self._slot(layer, expert))
        buffer = (ctypes.c_uint8 * num_bytes).from_address(pointer)
        buffer._keep = self.handle
        view = np.frombuffer(buffer, dtype=np.uint8)
        view.flags.writeable = not self._sealed
        return view

    def finish(self, layer: int, first_expert: int = 0, count: int | None = None) -> None:
        """Computes the checksums of filled records; loader threads may call it for different ranges. `seal` does what is left."""
        count = self.experts_per_layer - first_expert if count is None else count
        if self._library.glm53_arena_finish(self.handle.pointer, self._slot(layer, first_expert), count) != 0:
            raise_last(self._library)

    def seal(self) -> None:
        """Checksums, READY, rename into place: from here on others can attach."""
        if self._library.glm53_arena_seal(self.handle.pointer) != 0:
            raise_last(self._library)
        self._sealed = True

    def rewrite(self, layer: int, expert: int, data: npt.NDArray[np.uint8]) -> None:
        """Replaces a record of a sealed arena under a new generation: jobs that name the old one become STALE_RECORD.

        data: uint8 [record_bytes]. Only the owner, and only when no pass of an engine reads the record.
        """
        slot = self._slot(layer, expert)
        num_bytes = self.shape(layer).record_bytes
        if data.dtype != np.uint8 or data.shape != (num_bytes,):
            raise ValueError(f"data: expected uint8 [{num_bytes}], got {data.dtype} {list(data.shape)}")
        if self._library.glm53_arena_rewrite_begin(self.handle.pointer, slot) != 0:
            raise_last(self._library)
        pointer = self._library.glm53_arena_record(self.handle.pointer, slot)
        ctypes.memmove(pointer, np.ascontiguousarray(data).ctypes.data, num_bytes)
        if self._library.glm53_arena_rewrite_end(self.handle.pointer, slot) != 0:
            raise_last(self._library)

    def generation_of(self, layer: int, expert: int) -> int:
        """The slot's generation: 0 never filled, odd while being rewritten, even when whole."""
        return int(self._library.glm53_arena_generation_of(self.handle.pointer, self._slot(layer, expert)))

    def check(self, layer: int, expert: int) -> bool:
        """True when the record equals its checksum."""
        result = int(self._library.glm53_arena_check(self.handle.pointer, self._slot(layer, expert)))
        if result < 0:
            raise_last(self._library)
        return result == 1

    def close(self) -> None:
        """Lets go of the mapping; it goes away with the last view. The segment stays: a restarted worker takes it over."""
        self._handle = None

    def unlink(self) -> None:
        """Removes the segment's name, if it still names this segment. Raises ValueError unless this process owns it."""
        if self._library.glm53_arena_unlink(self.handle.pointer) != 0:
            raise_last(self._library)

    def _field(self, name: str) -> int:
        return int(self._library.glm53_arena_field(self.handle.pointer, name.encode()))

    def _slot(self, layer: int, expert: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}: the arena has layers 0..{self.num_layers - 1}")
        if not 0 <= expert < self.experts_per_layer:
            raise ValueError(f"expert is {expert}: a layer has experts 0..{self.experts_per_layer - 1}")
        return layer * self.experts_per_layer + expert


def _spec(shapes: Sequence[ExpertShape], checkpoint_hash: bytes) -> tuple[ctypes.Array[ExpertShape], bytes]:
    if len(checkpoint_hash) != HASH_BYTES:
        raise ValueError(f"checkpoint_hash: expected {HASH_BYTES} bytes, got {len(checkpoint_hash)}")
    if not shapes:
        raise ValueError("shapes: at least one layer is needed")
    return (ExpertShape * len(shapes))(*shapes), bytes(checkpoint_hash)
