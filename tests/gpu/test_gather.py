"""On a GPU: records that are gathered have their bytes, a gather runs beside a stream that waits, and no bit of a step depends on it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels.python import cuda_expert, pager
from kernels.python.pager import WORDS_BYTES, PagerLayout
from services.gpu_worker.backends import select
from tests.gpu import programs

GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not GPU, reason="there is no GPU here"),
    pytest.mark.skipif(not cuda_expert.is_built(), reason="libglm53_cuda.so is not built: no nvcc"),
]
PROBLEM = select.gpu_problem()
PIECE = 256 * 8 * 16  # bytes that a block of the kernel has under way


def pinned(size: int, seed: int) -> torch.Tensor:
    """Random bytes that the device reaches by the same address."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).pin_memory()


def stream_of(stream: torch.cuda.Stream | None = None) -> int:
    return int((stream or torch.cuda.current_stream()).cuda_stream)


@pytest.mark.parametrize("count", [1, 2, 5, 64, 65, 130])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 4096, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 16 * 77 + 5])
def test_what_is_gathered_is_what_lay_there(size: int, count: int) -> None:
    """Sizes around every boundary of the kernel, one range to more than two launches take; sources in any order; not a byte beside them."""
    stride = -(-size // 16) * 16 + 32
    source = pinned(count * stride, count)
    target = torch.full((count * stride,), 0xA5, dtype=torch.uint8, device="cuda")
    order = np.random.default_rng(size).permutation(count)
    torch.cuda.synchronize()
    pairs = [(target.data_ptr() + to * stride + 16, source.data_ptr() + int(at) * stride) for to, at in enumerate(order)]
    cuda_expert.gather(pairs, size, stream=stream_of())
    torch.cuda.synchronize()
    want = torch.full((count, stride), 0xA5, dtype=torch.uint8)
    want[:, 16 : 16 + size] = source.view(count, stride)[torch.from_numpy(order), :size]
    assert torch.equal(target.cpu().view(count, stride), want)


def test_sources_that_changed_between_two_gathers_are_read_anew() -> None:
    """No cache of the device keeps what the host has written over since."""
    source, target = pinned(PIECE + 48, 1), torch.zeros(PIECE + 48, dtype=torch.uint8, device="cuda")
    for value in range(1, 40):
        source.fill_(value)
        cuda_expert.gather([(target.data_ptr(), source.data_ptr())], PIECE + 48, stream=stream_of())
        torch.cuda.synchronize()
        assert int(target.min()) == int(target.max()) == value


@pytest.fixture
def layout() -> Iterator[PagerLayout]:
    """Twelve records of odd size in pinned memory and six slots; a copy stream as the store makes it."""
    layers, experts, slots, stride = 2, 6, 6, 3 * PIECE + 16 * 5
    host, words = pinned(layers * experts * stride, 3), torch.zeros(WORDS_BYTES // 4, dtype=torch.int32).pin_memory()
    device, copies = torch.zeros((slots, stride), dtype=torch.uint8, device="cuda"), torch.cuda.Stream(priority=-1)
    torch.cuda.synchronize()
    yield PagerLayout(
        layers, experts, slots, 1, 8, 8, stride, host.data_ptr(), host.data_ptr(), device.data_ptr(), device.data_ptr(),
        words.data_ptr(), words.data_ptr(), words.data_ptr(), words.data_ptr(), stream_of(copies),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert not words.numpy().any(), "the pager's words are as it expects them"
    records, held = host.view(layers * experts, stride), device.cpu()
    assert all(any(torch.equal(slot, record) for record in records) for slot in held[:4])


def test_both_ways_are_measured_beside_a_stream_that_waits(layout: PagerLayout) -> None:
    """The driver's own calls and the kernel: rates in a bounded time, whole records in the slots, words as they were."""
    driver = pager.gather_driver(cuda_expert.gather_function())
    offsets = np.zeros((2, 1), np.int64)
    began = time.perf_counter()
    engine, gather = pager.copy_rates(layout, offsets, driver, compute_stream=stream_of(), group=4, budget_s=0.05)
    took = time.perf_counter() - began
    print(json.dumps({"engine_gb_s": engine / 1e9, "gather_gb_s": gather / 1e9, "s": took}))  # noqa: T201 - where the test is asked to show it
    assert min(engine, gather) > 1e6
    assert took < 2.0


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
def test_a_step_has_the_same_bits_however_its_misses_came() -> None:
    """The shipped checkpoint in both modes, with hints and without, one stream and four: logits of all passes, slots, what is told."""
    result = programs.result_of("tests.gpu.gathered_passes", timeout_s=500)
    print(json.dumps(result, indent=1))  # noqa: T201 - the rates, where the test is asked to show them
    assert result["no_gather"] == ""
    rows = result["rows"]
    assert len(rows) == (4 if result["no_fast"] else 8)
    for row in rows:
        for copy in ("engine", "gather", "auto"):
            told = row[copy]
            assert (told["equal"], told["bad"]) == (row["passes"], 0), (row["mode"], copy)
            assert told["bytes_copied"] >= row["stride"] * (told["admissions"] + told["records_in_transit"]) > 0
        assert (row["engine"]["copy_way"], row["gather"]["copy_way"]) == ("engine", "gather")
        assert min(row["auto"]["copy_engine_gb_s"], row["auto"]["copy_gather_gb_s"]) > 0
        faster = row["auto"]["copy_gather_gb_s"] / row["auto"]["copy_engine_gb_s"]
        assert (row["auto"]["copy_way"] == "gather") == (faster >= 1.03) or abs(faster - 1.03) < 0.01
