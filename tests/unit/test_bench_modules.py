"""The table of single kernels of a decode step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bench import slice_modules


def test_kernels_are_summed_by_name_and_time_of_several_at_once_counts_once() -> None:
    """Two steps: a before b in one, a beside b in the other; a gap between the steps belongs to nobody."""
    seen = [("a", 0.0, 10.0), ("b", 10.0, 14.0), ("b", 105.0, 109.0), ("a", 100.0, 110.0)]
    table = slice_modules.kernel_table(seen, 2)
    assert (table["kernels_per_step"], table["kernels_ms"], table["device_busy_ms"]) == (2.0, 0.014, 0.012)
    assert table["kernels"] == [{"kernel": "a", "calls": 1.0, "us": 10.0}, {"kernel": "b", "calls": 1.0, "us": 4.0}]


def test_a_long_list_of_kernels_is_cut_and_its_sum_is_not() -> None:
    """The sums are of all kernels."""
    seen = [(f"kernel {i}", float(100 * i), float(100 * i + i)) for i in range(1, 40)]
    table = slice_modules.kernel_table(seen, 1)
    assert len(table["kernels"]) == slice_modules.KERNELS_TOLD
    assert table["kernels"][0]["kernel"] == "kernel 39"
    assert table["kernels_ms"] == round(sum(range(1, 40)) / 1000, 3)


def test_no_kernels_make_an_empty_table() -> None:
    """A step that the profiler saw nothing of."""
    assert slice_modules.kernel_table([], 4) == {"kernels_per_step": 0.0, "kernels_ms": 0, "device_busy_ms": 0.0, "kernels": []}


def test_gaps_are_where_no_kernel_runs() -> None:
    """Copies do not count, kernels beside one another are one stretch, and short gaps are left out."""
    seen = [
        ("Memcpy HtoD (Pinned -> Device)", 1000.0, 9000.0),
        ("a", 3000.0, 4000.0),
        ("b", 3500.0, 4500.0),
        ("c", 4600.0, 5000.0),
        ("Memset (Device)", 7500.0, 7600.0),
    ]
    assert slice_modules.compute_gaps(seen) == [{"at_ms": 0.0, "ms": 2.0}, {"at_ms": 4.0, "ms": 2.5}]
    assert slice_modules.compute_gaps(seen[:1]) == []
