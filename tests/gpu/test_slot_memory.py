"""On a GPU: memory of slots that is lent is torch's to take, comes back under its addresses, and lending changes no bit of an answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.python.errors import KernelError
from kernels.python.slot_memory import SlotMemory
from services.gpu_worker.backends import select
from tests.gpu import programs

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(not GPU, reason="there is no GPU here")]
PROBLEM = select.gpu_problem()
MIB, GIB = 1 << 20, 1 << 30
TABLES = 64 * MIB  # the driver's own, for addresses


def bytes_of(memory: SlotMemory) -> torch.Tensor:
    tensor = torch.as_tensor(memory, device="cuda:0")
    assert (tensor.data_ptr(), tensor.dtype, tensor.shape) == (memory.address, torch.uint8, (memory.num_bytes,))
    return tensor


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda", generator=generator)


def free() -> int:
    return int(torch.cuda.mem_get_info(0)[0])


@pytest.fixture(autouse=True)
def context() -> None:
    """The thread has one, and the kernels that are used are loaded while there is room for them."""
    piece = pattern(MIB, 0)
    assert torch.equal(piece, pattern(MIB, 0))
    assert int(piece.min()) == 0
    assert int(piece.max()) == 255
    piece.fill_(1)
    torch.cuda.synchronize()
    del piece
    torch.cuda.empty_cache()


@pytest.fixture
def nearly_full() -> Iterator[SlotMemory]:
    """2 GiB of slots on a device of which else only half a GiB is free."""
    memory = SlotMemory(2 * GIB, 0)
    # 4 GiB at a time: the rest of a large device is thousands of small chunks.
    ballast = SlotMemory(free() - GIB // 2, 0, 4 * GIB)
    yield memory
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    memory.close()
    ballast.close()


def test_slots_are_memory_like_any_other() -> None:
    """Kernels and copies in both directions, up to the last byte of a size that is no multiple of anything."""
    memory = SlotMemory(100 * MIB + 4096 * 7, 0)
    tensor = bytes_of(memory)
    tensor.copy_(pattern(memory.num_bytes, 1))
    assert torch.equal(tensor, pattern(memory.num_bytes, 1))
    assert int((tensor.view(torch.int64) & 1).sum()) == int((pattern(memory.num_bytes, 1).view(torch.int64) & 1).sum())
    host = torch.arange(4096, dtype=torch.int32).view(torch.uint8).pin_memory()
    tensor[-host.numel() :].copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(tensor[-host.numel() :].cpu(), host)
    del tensor
    memory.close()


def test_what_is_lent_is_torch_s_to_take(nearly_full: SlotMemory) -> None:
    """A GiB that does not fit fits when it is lent; what is not lent keeps its bytes; taken back, all slots work under their addresses."""
    memory = nearly_full
    tensor, address = bytes_of(memory), memory.address
    kept = memory.left_after(GIB)
    assert kept == GIB
    piece = pattern(kept // 16, 2)
    tensor[:kept].view(16, -1).copy_(piece)
    del piece
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
    for turn in range(3):
        torch.cuda.synchronize()
        before = free()
        memory.lend(GIB)
        assert memory.mapped_bytes == kept
        assert free() - before > GIB - TABLES
        taken = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        taken.fill_(turn + 1)
        assert not memory.take_back(leave_free=GIB // 4), "torch has it"
        assert kept <= memory.mapped_bytes < 2 * GIB
        assert int(taken.min()) == int(taken.max()) == turn + 1
        del taken
        torch.cuda.empty_cache()
        assert memory.take_back()
        assert (memory.mapped_bytes, memory.address) == (2 * GIB, address)
        tensor[kept:].fill_(turn)
        assert int(tensor[kept:].min()) == int(tensor[kept:].max()) == turn
    piece = pattern(kept // 16, 2)
    assert all(torch.equal(part, piece) for part in tensor[:kept].view(16, -1))


def test_more_than_there_is_is_refused_with_figures(nearly_full: SlotMemory) -> None:
    """Nothing of it stays taken."""
    before = free()
    with pytest.raises(KernelError, match=r"^3072 MiB of device memory were asked for for expert slots, \d+ of \d+ MiB are free$"):
        SlotMemory(3 * GIB, 0)
    assert free() > before - TABLES
    assert nearly_full.mapped_bytes == 2 * GIB


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
def test_lending_changes_no_bit_of_the_shipped_model() -> None:
    """Decode, prefills with slots lent to them, decode again, in every way to decode: the same logits; slots come back for each step."""
    result = programs.result_of("tests.gpu.lent_slots", timeout_s=280)
    assert set(result["modes"]) >= {"between_steps", "in_step"}
    assert len(result["modes"]) == 3 or result["no_fast"]
    started = result["started"]
    assert (started["slots"], started["slots_usable"], started["slot_lendings"]) == (100, 100, 0), "a start that lends, and had no need"
    for mode, told in result["modes"].items():
        slots = told["slots"]
        assert told["equal"] == told["passes"] == 34, mode
        assert set(told["plain_usable"]) == {slots}
        lent = [usable for usable in told["usable"] if usable < slots]
        assert len(lent) == 4, "every prefill, and no step"
        assert max(lent) < slots - 20
        assert told["slot_lendings"] >= 3
        assert told["staged_passes"] > 0
        assert min(told["needs"].values()) > 0
        if mode == "between_steps":
            assert told["slots_used"] > max(lent), "records are in slots again that were lent"
