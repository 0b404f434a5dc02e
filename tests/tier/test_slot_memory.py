"""Slot memory against a stand-in for the CUDA driver, which keeps the books of a device: what is mapped where, and what is free."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.python.errors import KernelError
from kernels.python.slot_memory import SlotMemory, SlotMemoryDriver

MIB = 1 << 20
STEP, CHUNK, BASE = 2 * MIB, 8 * MIB, 1 << 40
OUT_OF_MEMORY, OTHER = 2, 999


class Device:
    """A device with so much free memory. A code in `refuse` is what the next calls of that name return."""

    def __init__(self, free: int) -> None:
        self.free, self.total = free, free
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # address: bytes
        self._owner: dict[int, int] = {}  # address: handle
        self.allowed: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuse: dict[str, int] = {}
        self.after: dict[str, int] = {}  # so many calls go through first
        self._next = 1
        driver = SlotMemoryDriver
        self.driver = driver(
            driver.GRANULARITY(self._granularity),
            driver.RESERVE(self._reserve),
            driver.RANGE(self._unreserve),
            driver.CREATE(self._create),
            driver.RELEASE(self._release),
            driver.MAP(self._map),
            driver.RANGE(self._unmap),
            driver.ALLOW(self._allow),
            driver.FREE_MEMORY(self._free_memory),
        )

    def _refused(self, name: str) -> int:
        self.calls.append(name)
        if name in self.refuse and self.after.get(name, 0) == 0:
            return self.refuse[name]
        self.after[name] = max(0, self.after.get(name, 0) - 1)
        return 0

    def _granularity(self, out: Any, _kind: Any, recommended: int) -> int:
        assert recommended == 0
        out[0] = STEP
        return self._refused("granularity")

    def _reserve(self, out: Any, size: int, _alignment: int, _wanted: int, _flags: int) -> int:
        if code := self._refused("reserve"):
            return code
        assert size % STEP == 0
        self.reserved[BASE] = size
        out[0] = BASE
        return 0

    def _unreserve(self, address: int, size: int) -> int:
        assert not self.mapped, "addresses go while memory is mapped"
        assert self.reserved.pop(address) == size
        return self._refused("unreserve")

    def _create(self, out: Any, size: int, kind: Any, _flags: int) -> int:
        assert kind
        assert size % STEP == 0
        if code := self._refused("create"):
            return code
        if size > self.free:
            return OUT_OF_MEMORY
        self.free -= size
        out[0] = self._next
        self.handles[self._next] = size
        self._next += 1
        return 0

    def _release(self, handle: int) -> int:
        size = self.handles.pop(handle)
        if handle not in self._owner.values():
            self.free += size
        return self._refused("release")

    def _map(self, address: int, size: int, offset: int, handle: int, _flags: int) -> int:
        if code := self._refused("map"):
            return code
        assert offset == 0
        assert self.handles[handle] == size
        assert BASE <= address <= BASE + self.reserved[BASE] - size
        assert address not in self.mapped
        self.mapped[address] = size
        self._owner[address] = handle
        return 0

    def _unmap(self, address: int, size: int) -> int:
        if code := self._refused("unmap"):
            return code
        assert self.mapped.pop(address) == size
        self.allowed.discard(address)
        assert self._owner.pop(address) not in self.handles, "the handle was kept: the memory is not given back"
        self.free += size
        return 0

    def _allow(self, address: int, size: int, access: Any, count: int) -> int:
        if code := self._refused("allow"):
            return code
        assert access
        assert count == 1
        assert self.mapped[address] == size
        self.allowed.add(address)
        return 0

    def _free_memory(self, free: Any, total: Any) -> int:
        free[0], total[0] = self.free, self.total
        return self._refused("free_memory")

    def check(self, mapped: int) -> None:
        """Exactly the first `mapped` bytes of the range can be used."""
        assert sum(self.mapped.values()) == mapped == self.total - self.free
        end = BASE
        for address, size in sorted(self.mapped.items()):
            assert address == end
            end += size
        assert self.allowed == set(self.mapped)
        assert not self.handles


def test_memory_is_mapped_chunk_by_chunk_and_given_back() -> None:
    """Reserve, then create, map, let go of the handle and allow for each chunk, the last one as small as it can be."""
    device = Device(64 * MIB)
    memory = SlotMemory(21 * MIB, 0, CHUNK, device.driver)
    assert (memory.address, memory.mapped_bytes) == (BASE, 21 * MIB)
    assert device.calls == ["granularity", "reserve", *["create", "map", "release", "allow"] * 3]
    assert sorted(device.mapped.values()) == [6 * MIB, CHUNK, CHUNK]
    device.check(22 * MIB)
    view = memory.__cuda_array_interface__
    assert (view["shape"], view["data"], view["typestr"]) == ((21 * MIB,), (BASE, False), "|u1")
    memory.close()
    assert device.calls[-4:] == ["unmap", "unmap", "unmap", "unreserve"]
    assert (device.free, device.reserved) == (64 * MIB, {})


@pytest.mark.parametrize(
    ("lent", "left"), [(0, 37), (1, 32), (5, 32), (6, 32), (7, 24), (14, 24), (15, 16), (30, 8), (31, 0), (38, 0), (1000, 0)]
)
def test_whole_chunks_are_lent_from_the_end(lent: int, left: int) -> None:
    """As few as give so much; what is left is foretold; taken back, everything is where it was."""
    device = Device(64 * MIB)
    memory = SlotMemory(37 * MIB, 0, CHUNK, device.driver)
    for _ in range(3):
        assert memory.left_after(lent * MIB) == left * MIB
        memory.lend(lent * MIB)
        assert memory.mapped_bytes == left * MIB
        device.check(left * MIB if lent else 38 * MIB)
        memory.lend(0)  # never maps
        assert memory.mapped_bytes == left * MIB
        assert memory.take_back()
        assert (memory.address, memory.mapped_bytes) == (BASE, 37 * MIB)
        device.check(38 * MIB)
    assert device.calls.count("reserve") == 1


def test_lending_more_goes_on_from_what_is_lent() -> None:
    """The figure is what is lent in all."""
    device = Device(64 * MIB)
    memory = SlotMemory(32 * MIB, 0, CHUNK, device.driver)
    memory.lend(CHUNK)
    memory.lend(2 * CHUNK)
    assert memory.mapped_bytes == 16 * MIB
    memory.lend(CHUNK)
    assert memory.mapped_bytes == 16 * MIB
    device.check(16 * MIB)


def test_what_somebody_else_took_meanwhile_is_not_taken_back() -> None:
    """As much as there is, leaving what is to stay free; later the rest."""
    device = Device(40 * MIB)
    memory = SlotMemory(32 * MIB, 0, CHUNK, device.driver)
    memory.lend(24 * MIB)
    device.free -= 12 * MIB  # 20 are left
    device.total -= 12 * MIB
    assert not memory.take_back(leave_free=5 * MIB)
    assert memory.mapped_bytes == 16 * MIB
    device.check(16 * MIB)
    assert not memory.take_back(leave_free=5 * MIB)
    device.free += 12 * MIB
    device.total += 12 * MIB
    assert memory.take_back(leave_free=5 * MIB)
    device.check(32 * MIB)
    memory.lend(32 * MIB)
    device.refuse["create"], device.after["create"] = OUT_OF_MEMORY, 3
    assert not memory.take_back()
    device.check(24 * MIB)


def test_too_little_memory_is_said_in_figures() -> None:
    """Asked for and free; what was mapped until then is given back."""
    device = Device(20 * MIB)
    with pytest.raises(KernelError, match=r"^32 MiB of device memory were asked for for expert slots, 20 of 20 MiB are free$"):
        SlotMemory(32 * MIB, 0, CHUNK, device.driver)
    assert (device.free, device.mapped, device.reserved, device.handles) == (20 * MIB, {}, {}, {})


@pytest.mark.parametrize("name", ["granularity", "reserve", "create", "map", "allow"])
def test_a_refusal_while_memory_is_made_leaves_nothing_behind(name: str) -> None:
    """Chunks before it, and what was done for its own."""
    device = Device(64 * MIB)
    device.refuse[name] = OTHER
    device.after[name] = 2 if name in ("create", "map", "allow") else 0
    with pytest.raises(KernelError, match=r"the GPU driver refuses to .* \(CUDA error 999\)"):
        SlotMemory(32 * MIB, 0, CHUNK, device.driver)
    assert (device.free, device.mapped, device.reserved, device.handles) == (64 * MIB, {}, {}, {})


@pytest.mark.parametrize("name", ["create", "map", "allow"])
def test_a_refusal_in_the_middle_of_taking_back_keeps_what_was_mapped(name: str) -> None:
    """It is raised, its own chunk is undone, and the next try goes on."""
    device = Device(64 * MIB)
    memory = SlotMemory(32 * MIB, 0, CHUNK, device.driver)
    memory.lend(32 * MIB)
    device.refuse[name], device.after[name] = OTHER, 2
    with pytest.raises(KernelError, match="CUDA error 999"):
        memory.take_back()
    assert memory.mapped_bytes == 16 * MIB
    device.check(16 * MIB)
    device.refuse.clear()
    assert memory.take_back()
    device.check(32 * MIB)


def test_a_refusal_to_unmap_is_raised_and_the_chunk_counts_as_there() -> None:
    """Nothing is given away twice."""
    device = Device(64 * MIB)
    memory = SlotMemory(32 * MIB, 0, CHUNK, device.driver)
    device.refuse["unmap"], device.after["unmap"] = OTHER, 1
    with pytest.raises(KernelError, match="refuses to unmap"):
        memory.lend(32 * MIB)
    assert memory.mapped_bytes == 24 * MIB
    device.check(24 * MIB)
    device.refuse.clear()
    memory.close()
    assert device.free == 64 * MIB


def test_sizes_of_nothing_are_refused() -> None:
    """By name, before the driver is asked; a closed one is not used."""
    device = Device(64 * MIB)
    for sizes in ((0, CHUNK), (CHUNK, 0)):
        with pytest.raises(ValueError, match="must not be 0"):
            SlotMemory(sizes[0], 0, sizes[1], device.driver)
    assert device.calls == []
    memory = SlotMemory(CHUNK, 0, CHUNK, device.driver)
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.lend(1)
