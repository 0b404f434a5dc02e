"""All result files of a GPU session from its kept rows, and one table of what is quoted: `python -m bench.gpu_figures STATE`.

STATE holds the rows of the benches' commands (bench/gpu_session.sh) and gets the files. Every figure has a value, or the reason why not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from pathlib import Path
from typing import Any

from bench import fast_figures, gpu_exact, slice_cases
from bench.kept_rows import Row, Rows

SLICE, EXACT, FAST, KERNEL = "gpu_exact_slice.json", "gpu_exact.json", "gpu_fast.json", "gpu_int_kernel.json"
KEPT = "gpu_kept.json"
EXACT_KEYS = ("bit_exact", *slice_cases.NEEDS)
FAST_KEYS = tuple(fast_figures.NEEDS)
# Beside what is quoted: what says how the figures came about.
MORE = {
    SLICE: (
        "admission",
        "c2_tok_s",
        "c4_tok_s",
        "c8_tok_s",
        "c2_step_over_bound",
        "c4_step_over_bound",
        "c1_tok_s_32k",
        "c1_vs_stock151_32k",
        "hit_minus_clock_points_drift",
        "hit_minus_clock_points_scan",
        "least_points_over_clock_by_counts",
        "prefill32k_of_limit",
        "step_over_bound_half_link",
        "resident_enqueue_ms",
        "resident_busy_ms",
        "resident_kernels_ms",
        "vram_peak_gib",
        "alternations",
        "alternations_equal",
    ),
    FAST: (
        "kl_over_floor",
        "placements",
        "planner_steps",
        "two_threads_vs_exact",
        "round_trip_us",
        "fidelity_boot_ids",
        "exact_as_in_the_earlier_boot",
        "vram_peak_gib",
        "hidden_relative_rms_last_layer",
    ),
}


def rows_file(state: Path, result: str) -> Path:
    """Where the rows of a result file are kept."""
    return state / f"{result.removesuffix('.json')}.rows"


def write_all(state: Path) -> dict[str, Row]:
    """Writes the result files of the rows that are there; summaries by file name."""
    state.mkdir(parents=True, exist_ok=True)
    summaries: dict[str, Row] = {}
    made: dict[str, Any] = {
        SLICE: slice_cases.summarise,
        EXACT: functools.partial(gpu_exact.summarise, [state / SLICE]),
        FAST: lambda rows, facts: fast_figures.summarise(list(rows.values()), facts, fast_figures.Others(state / SLICE, state / KERNEL)),
    }
    for name, summarise in made.items():
        kept = Rows(rows_file(state, name), state / name, None, summarise)
        if kept.rows:
            kept.save()
        summaries[name] = kept.summary()
    with contextlib.suppress(OSError, ValueError, KeyError):
        summaries[KEPT] = json.loads((state / KEPT).read_text())["summary"]
    return summaries


def lines(summaries: dict[str, Row]) -> list[str]:
    """The table."""
    result = []
    if any(summary.get("dry_run") for summary in summaries.values()):
        result.append("-- a dry run: no figure here means anything")
    for name, keys in ((EXACT, EXACT_KEYS), (FAST, FAST_KEYS)):
        summary = summaries[name]
        why = summary.get("reason_for_null", {})
        result.append(f"-- {name}")
        result += [line(key, summary.get(key), why.get(key, "not measured")) for key in keys]
    for name, keys in MORE.items():
        result.append(f"-- more of {name}")
        result += [line(key, value, "") for key in keys if (value := summaries[name].get(key)) is not None]
    modules = summaries[SLICE].get("resident_modules") or {}
    if modules:
        result.append("-- one step of one stream, every expert in VRAM: microseconds to enqueue, microseconds busy")
        result += [f"{name:36} {enqueue:8.1f} {busy:8.1f}" for name, (enqueue, busy) in modules.items()]
    if (kept := summaries.get(KEPT, {}).get("bit_exact")) is not None:
        result.append(line("kept_states_bit_exact", kept, ""))
    broken = summaries[SLICE].get("errors", [])
    return result + ([f"-- failed: {', '.join(broken)}"] if broken else [])


def line(key: str, value: Any, why: str) -> str:
    """A figure, or why there is none."""
    if isinstance(value, float):
        value = f"{value:.4g}"
    return f"{key:36} {value}" if value is not None else f"{key:36} null: {why}"


def main(argv: list[str] | None = None) -> None:
    """Writes and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path)
    args = parser.parse_args(argv)
    summaries = write_all(args.state)
    table = lines(summaries)
    (args.state / "figures.txt").write_text("\n".join(table) + "\n")
    (args.state / "figures.json").write_text(json.dumps(summaries, indent=1) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
