"""The pool of kernel threads and the choice of a variant."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import pathlib
import threading
import time

import numpy as np
import pytest

from kernels.python import exl3, expert, lib
from kernels.python.exl3 import Codebook
from kernels.python.expert import ExpertPool, ExpertTask, Variant
from tests.kernels.cases import Case, build
from tests.kernels.native_trace import force, force_hot, signatures

FE_UPWARD, FE_TONEAREST = 0x800, 0


def explain(features: int) -> tuple[str, str]:
    """(variant, reason) that "auto" takes with these features."""
    reason = ctypes.create_string_buffer(256)
    variant = signatures().moe_explain_choice(features, reason, len(reason))
    return Variant(variant).name.lower(), reason.value.decode()


def test_a_host_without_avx2_runs_the_scalar_kernel_and_says_so() -> None:
    """Without the features the choice is scalar, and the reason names AVX2."""
    variant, reason = explain(1 << Variant.SCALAR)
    assert variant == "scalar"
    assert reason == "this host has no AVX2 with FMA and F16C, or its system does not save their registers"


@pytest.mark.skipif("avx2" not in expert.variants(), reason="this host has no AVX2")
def test_auto_takes_avx2_after_a_self_test() -> None:
    """With the features the choice is AVX2, and the reason tells of the comparison with the scalar kernel."""
    variant, reason = explain(1 << Variant.SCALAR | 1 << Variant.AVX2)
    assert variant == "avx2"
    assert "same bits as scalar" in reason
    assert " us against scalar " in reason


@pytest.mark.parametrize(
    ("name", "lacks"), [("avx512bw", "AVX-512 F and BW"), ("avx512vbmi", "AVX-512 F, BW, VNNI"), ("avxvnni", "AVX-VNNI")]
)
def test_a_variant_that_the_host_lacks_is_refused_by_name(name: str, lacks: str) -> None:
    """A pool never falls back silently from a variant that was asked for: it runs that one, or refuses with what is missing."""
    if name in expert.variants():
        with ExpertPool(name) as pool:
            assert (pool.variant, pool.reason.split(",")[0]) == (name, "requested; self-test: same bits as scalar")
    else:
        with pytest.raises(ValueError, match=f"variant {name} cannot run: this host has no {lacks}"):
            ExpertPool(name)


def test_an_unknown_variant_is_refused_with_the_names() -> None:
    """The message lists what there is."""
    with pytest.raises(ValueError, match="'sse2' is not one of auto, scalar, avx2"):
        ExpertPool("sse2")


def test_a_requested_variant_says_that_it_was_requested() -> None:
    """variant and reason tell what runs."""
    with ExpertPool("scalar") as pool:
        assert (pool.variant, pool.reason) == ("scalar", "requested")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads = 0"),
        ({"threads": 5000}, "num_threads = 5000"),
        ({"threads": 2, "cpus": [-1]}, "cpus: -1"),
        ({"threads": 2, "cpus": [1000]}, "cpus: "),
    ],
)
def test_a_pool_that_cannot_be_made_is_refused(arguments: dict[str, object], message: str) -> None:
    """Thread counts and CPUs out of range are named."""
    with pytest.raises(ValueError, match=message):
        ExpertPool("scalar", **arguments)  # type: ignore[arg-type]


def test_threads_are_pinned_and_end_with_the_pool() -> None:
    """The extra threads carry their names, sit on the given CPU and are gone after close()."""
    cpu = min(os.sched_getaffinity(0))

    def kernel_threads() -> list[int]:
        tasks = pathlib.Path("/proc/self/task").iterdir()
        return [int(task.name) for task in tasks if (task / "comm").read_text().startswith("moe-")]

    assert kernel_threads() == []
    with ExpertPool("scalar", 3, cpus=[cpu]) as pool:
        found = kernel_threads()
        assert len(found) == 2
        assert all(os.sched_getaffinity(task) == {cpu} for task in found)
    assert kernel_threads() == []
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.run([ExpertTask(*build(Case("", 80))[:2], np.zeros((1, 256), np.float32), np.zeros((1, 256), np.float32))])


def test_an_idle_pool_uses_no_cpu_time() -> None:
    """Threads sleep between calls: eight of them cost next to nothing while nobody asks."""
    shape, record, x = build(Case("", 81))
    with ExpertPool("scalar", 8) as pool:
        pool.run([ExpertTask(shape, record, x, np.zeros((2, 256), np.float32)) for _ in range(32)])
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1


def sleeps_of_threads() -> int:
    """How often the pool's threads gave up their CPU to wait for something."""
    total = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("moe-"):
            total += int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


@pytest.mark.parametrize(("hot_ns", "sleeping"), [(20_000_000_000, False), (0, True)])
def test_threads_stay_awake_between_the_calls_of_a_decode(hot_ns: int, sleeping: bool) -> None:
    """While calls keep coming no thread sleeps in between; threads that may not poll sleep after each."""
    shape, record, x = build(Case("", 85))
    calls = 30
    with ExpertPool("scalar", 2) as pool:
        force(pool, 0, 0.0)
        force_hot(pool, hot_ns)
        call = pool.prepare([ExpertTask(shape, record, x, np.zeros((2, 256), np.float32)) for _ in range(4)])
        for _ in range(3):
            call()
            time.sleep(0.005)
        before = sleeps_of_threads()
        for _ in range(calls):
            call()
            time.sleep(0.005)
        slept = sleeps_of_threads() - before
    assert (slept >= calls / 2) == sleeping
    assert sleeping or slept < calls / 4


@pytest.mark.parametrize("hot_ns", [0, 50_000, 4_000_000])
def test_many_short_calls_from_a_sleeping_pool(hot_ns: int) -> None:
    """Calls at random distances, so that threads are met spinning, falling asleep and asleep, all give the same rows."""
    shape, record, x = build(Case("", 82, hidden=128, rows=8))
    generator = np.random.default_rng(1)
    with ExpertPool(threads=4) as pool:
        force(pool, 0, 0.0)
        force_hot(pool, hot_ns)
        expected = np.empty((8, 128), np.float32)
        pool.run([ExpertTask(shape, record, x, expected)])
        for _ in range(2000):
            out = np.full((8, 128), np.nan, np.float32)
            order = generator.permutation(8).astype(np.uint32)
            cuts = np.split(order, np.sort(generator.integers(0, 9, generator.integers(0, 8))))
            pool.run([ExpertTask(shape, record, x, out, rows, rows) for rows in cuts])
            np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
            if generator.random() < 0.1:
                time.sleep(float(generator.random()) * 2e-4)


def test_two_pools_work_at_the_same_time() -> None:
    """Pools share nothing: two callers in two threads get their own rows."""
    shape, record, x = build(Case("", 83, rows=8))
    with ExpertPool() as pool:
        expected = np.empty((8, 256), np.float32)
        pool.run([ExpertTask(shape, record, x, expected)])
    failures: list[int] = []

    def caller(seed: int) -> None:
        with ExpertPool(threads=2) as own:
            for _ in range(100):
                out = np.zeros((8, 256), np.float32)
                own.run([ExpertTask(shape, record, x, out, rows, rows) for rows in np.split(np.arange(8, dtype=np.uint32), 4)])
                if out.tobytes() != expected.tobytes():
                    failures.append(seed)

    callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(2)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []


@pytest.mark.parametrize("variant", expert.variants())
def test_the_callers_rounding_mode_does_not_reach_the_kernel(variant: str) -> None:
    """With the caller's thread rounding upward the bits stay the same, and the caller keeps its mode."""
    shape, record, x = build(Case("", 84, rows=8))
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    expected, found = np.empty((8, 256), np.float32), np.empty((8, 256), np.float32)
    halves = np.split(np.arange(8, dtype=np.uint32), 2)
    with ExpertPool(variant, 2) as pool:
        expected_call = pool.prepare([ExpertTask(shape, record, x, expected, rows, rows) for rows in halves])
        found_call = pool.prepare([ExpertTask(shape, record, x, found, rows, rows) for rows in halves])
        expected_call()
        libm.fesetround(FE_UPWARD)
        try:
            found_call()
            assert libm.fegetround() == FE_UPWARD
        finally:
            libm.fesetround(FE_TONEAREST)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_flushed_subnormals_of_the_caller_do_not_reach_the_kernel() -> None:
    """PyTorch can set a thread to flush subnormals: exp_ and the decoder still give them, and the setting survives the call."""
    torch = pytest.importorskip("torch")
    x, y = np.float32([-100.0, -95.0]), np.empty(2, np.float32)
    trellis = np.random.default_rng(2).integers(0, 1 << 16, (8, 8, 48), dtype=np.uint16)
    small = np.full(128, 2.0**-24, np.float16)
    before = exl3.dequantize(trellis, small, small, Codebook.MUL1)
    assert torch.set_flush_denormal(True)
    try:
        signatures().moe_exp(x.ctypes.data, y.ctypes.data, 2)
        assert (y.view(np.uint32) > 0).all()
        after = exl3.dequantize(trellis, small, small, Codebook.MUL1)
        assert (np.float32(1e-40) * np.ones(1, np.float32)).view(np.uint32)[0] == 0  # the caller's thread still flushes
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(after.view(np.uint32), before.view(np.uint32))


def test_a_library_of_another_version_is_noticed() -> None:
    """A struct whose layout differs from the compiler's is refused with both sides' numbers."""
    expert.check_layout("MoeExpertShape.inter=4:4\n", {"MoeExpertShape": expert.ExpertShape})
    for line in ("MoeExpertShape.inter=8:4", "MoeExpertShape.inter=4:8", "MoeExpertShape.width=4:4", "MoeExpertShape.=0:4"):
        with pytest.raises(lib.KernelsMissingError, match="make kernels"):
            expert.check_layout(line, {"MoeExpertShape": expert.ExpertShape})


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error with the command."""
    monkeypatch.setattr(lib, "LIBRARY_PATH", lib.LIBRARY_PATH.with_name("nowhere.so"))
    # Around the cache, not through an empty one: modules that have declared their functions would be left with another handle.
    with pytest.raises(lib.KernelsMissingError, match="make kernels"):
        lib.load.__wrapped__()
