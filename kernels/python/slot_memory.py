"""Device memory for expert slots whose end can be lent and taken back while every address stays (expert_slots.h)."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.python import shm_lib
from kernels.python.errors import raise_last

CHUNK_BYTES = 32 << 20


class SlotMemoryDriver(ctypes.Structure):
    """The driver calls that are made."""

    GRANULARITY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p, ctypes.c_int)
    RESERVE = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ulonglong
    )
    RANGE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t)
    CREATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong)
    RELEASE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
    MAP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ulonglong)
    ALLOW = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
    FREE_MEMORY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
    _fields_ = [
        ("granularity", GRANULARITY),
        ("reserve", RESERVE),
        ("unreserve", RANGE),
        ("create", CREATE),
        ("release", RELEASE),
        ("map", MAP),
        ("unmap", RANGE),
        ("allow", ALLOW),
        ("free_memory", FREE_MEMORY),
    ]


class SlotMemory:
    """A range of device addresses with memory behind its first `mapped_bytes`.

    Args:
        num_bytes: of the range; all of it is mapped at first.
        device: the CUDA device's index; must be the current one.
        chunk_bytes: lent and taken back at a time.
        driver: tests' own, else the CUDA driver's.

    Raises:
        KernelError: the device has too little memory (the text says how much was asked for and is free), or the driver refuses.
        ValueError: a size is 0.
    """

    def __init__(self, num_bytes: int, device: int, chunk_bytes: int = CHUNK_BYTES, driver: SlotMemoryDriver | None = None) -> None:
        self._library = load()
        self._driver = driver  # callbacks must live as long as the memory
        self.num_bytes, self.chunk_bytes = num_bytes, chunk_bytes
        pointer = self._library.glm53_slots_create(num_bytes, chunk_bytes, device, ctypes.byref(driver) if driver is not None else None)
        if not pointer:
            raise_last(self._library)
        self._handle: shm_lib.Handle | None = shm_lib.Handle(pointer, self._library.glm53_slots_close)
        self.address = int(self._library.glm53_slots_address(pointer))

    @property
    def mapped_bytes(self) -> int:
        """Bytes from `address` on that may be used."""
        return int(self._library.glm53_slots_mapped(self._pointer))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """All of the range as uint8 [num_bytes]: torch makes a tensor of it, which keeps this object alive."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}

    def left_after(self, lent_bytes: int) -> int:
        """What `mapped_bytes` would be if at least so many bytes in all were lent: only whole chunks are."""
        return int(self._library.glm53_slots_left(self._pointer, lent_bytes))

    def lend(self, lent_bytes: int) -> None:
        """Gives memory back from the end on until at least so many bytes in all are lent. Nothing on the device may use it any more.

        Raises KernelError when the driver refuses.
        """
        if self._library.glm53_slots_lend(self._pointer, lent_bytes) != 0:
            raise_last(self._library)

    def take_back(self, leave_free: int = 0) -> bool:
        """Maps what is lent again, as long as the device has more than `leave_free` bytes besides. Contents are undefined.

        Returns:
            False when the device has no more to give now: `mapped_bytes` says how far it went.

        Raises:
            KernelError: the driver refuses; what was mapped before stays usable.
        """
        done = int(self._library.glm53_slots_take_back(self._pointer, leave_free))
        if done < 0:
            raise_last(self._library)
        return done == 1

    def close(self) -> None:
        """Gives everything back. The device must be idle."""
        self._handle = None

    @property
    def _pointer(self) -> int:
        if self._handle is None:
            raise ValueError("the slot memory is closed")
        return self._handle.pointer


def load() -> Any:
    """The kernels' library with the signatures of every glm53_slots_* function."""
    library = shm_lib.load()
    if library.glm53_slots_create.argtypes is None:
        pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
        signatures: dict[str, tuple[list[Any], Any]] = {
            "glm53_slots_create": ([u64, u64, ctypes.c_int, pointer], pointer),
            "glm53_slots_address": ([pointer], u64),
            "glm53_slots_mapped": ([pointer], u64),
            "glm53_slots_left": ([pointer, u64], u64),
            "glm53_slots_lend": ([pointer, u64], ctypes.c_int),
            "glm53_slots_take_back": ([pointer, u64], ctypes.c_int),
            "glm53_slots_close": ([pointer], None),
        }
        for name, (argument_types, result_type) in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = argument_types, result_type
    return library
