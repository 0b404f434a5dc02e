"""The figures of `bench.gpu_fast`: made of its rows, of stock's in the slice's result file, and of the kernel's. No GPU."""

from __future__ import annotations

import contextlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from bench.kept_rows import Row, reasons

ROUND_TRIP = "round trips between device and host"
RMS = "relative RMS against fp64"
NOISE = "noise floor"
LARGEST = 0.02  # of stock's error: fp16 makes a thousandth of it, another expert's bytes make it 1
FAST, TWO_THREADS, MANY_STEPS = "fast", "fast, two threads", "fast, 2000 steps"
RESIDENT = "every expert in VRAM"  # names of rows that no card of 24 GB could run begin so
HINT_PART = "hints"
NO_HINTS, HINTS, TWO_HINTS = "fast, no hints", "fast, hints", "fast, hints of two records"
HALF_HINTS, PERFECT_HINTS = "fast, hints with half the recall", "fast, perfect hints"
EXACT_NO_HINTS, EXACT_HINTS = "exact, no hints", "exact, hints"
AGAIN = ", again"  # of the names of rows that are measured a second time, behind others
EXACT_HALF_HINTS, EXACT_PERFECT_HINTS = "exact, hints with half the recall", "exact, perfect hints"
FULL_RECORDS = 42 * 288  # of the whole model
ENOUGH_STEPS = 2000
UPPER_BOUNDS = "publish_to_seen_us and flag_to_add_us are at most so much: round trips, since device and host have no common clock"
# What is quoted, with what it is made of.
NEEDS = {
    "c1_tok_s": "speed: fast at C1",
    "c2_tok_s": "speed: fast at C2",
    "c4_tok_s": "speed: fast at C4",
    "step_over_bound": "speed: fast at C1, every expert in VRAM at C1",
    "c4_vs_exact": "speed: fast and exact at C4",
    "c1_vs_stock151": "speed: fast at C1, and stock/C1 of bench.gpu_exact_slice in the same boot",
    "c1_vs_exact": "speed: fast and exact at C1",
    "c1_vs_exact_derated": "speed: fast and exact at C1, link_derate 2",
    "c1_vs_stock151_derated": "speed: fast at C1, link_derate 2, and stock/C1 of bench.gpu_exact_slice in the same boot",
    "planner_error_pct": "speed: fast at C1",
    "placement_invariant": "fidelity: two placements",
    "int_kernel_vs_stock_m1": "bench.gpu_int_kernel with exllamav3's extension",
    "int_kernel_vs_stock_m4": "bench.gpu_int_kernel with exllamav3's extension",
    "int_kernel_vs_stock_m8": "bench.gpu_int_kernel with exllamav3's extension",
    "kl_fast_vs_exact": "fidelity: exact and one placement",
    "kl_noise_floor": "fidelity: one seed of noise",
    "top1_fast": "fidelity: exact and one placement",
    "top1_noise_floor": "fidelity: one seed of noise",
    "ram_total_gib_full_size": "speed: memory beside the arena at fast",
    "idle_core_pct": "fidelity: the idle server",
    "publish_to_seen_us": "speed: the round trips",
    "flag_to_add_us": "speed: the round trips",
    "hint_c1_vs_fast": "hints: fast at C1 with hints and without",
    "hint_c1_vs_fast_half": "hints: fast at C1 with half the recall and without hints",
    "hint_c1_vs_fast_perfect": "hints: fast at C1 with perfect hints and without",
    "hint_c4_vs_fast": "hints: fast at C4 with hints and without",
    "hint_exact_c1_vs_exact": "hints: exact at C1 with hints and without",
    "hint_recall_on_misses": "hints: fast at C1 with hints",
    "hint_precision_on_misses": "hints: fast at C1 with hints",
}


@dataclass(frozen=True)
class Others:
    """Result files of other benches; one that is missing or of another boot gives no figure."""

    slice_file: Path | None = None
    kernel_file: Path | None = None

    def stock_tok_s(self, boot_id: str) -> float | None:
        """Of stock's CPU split at C1."""
        document = _read(self.slice_file)
        if document.get("facts", {}).get("boot_id") != boot_id:
            return None
        row = next((row for row in document["rows"] if row["name"] == "stock/C1" and "error" not in row), {})
        return row.get("tok_s")

    def kernel_ratios(self) -> Row:
        """Time of the integer kernel over stock's, at 1, 4 and 8 tokens."""
        summary = _read(self.kernel_file).get("summary", {})
        return {name: summary.get(name) for name in NEEDS if name.startswith("int_kernel")}


def _read(path: Path | None) -> Row:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text())) if path is not None else {}
    return {}


def quotable(path: Path) -> list[Row]:
    """Rows of fidelity in a result file, each with the boot and the commit that it is of.

    No row that failed, and no noise floor made of an error of stock's that cannot be one.

    Raises:
        OSError, ValueError: there is no such file, or it is no result.
    """
    document = json.loads(path.read_text())
    rows = [row for row in document["rows"] if row["part"] == "fidelity" and "error" not in row]
    believed = any(row["name"] == RMS and row["stock"] <= LARGEST for row in rows)
    origin = {"boot_id": document["facts"]["boot_id"], "commit": document.get("commit")}
    return [{**origin, **row} for row in rows if believed or row["name"] not in (RMS, NOISE)]


def key_of(row: Row) -> str:
    """A row's name among all rows."""
    more = [
        f"{short}{row[name]}" for name, short in (("streams", "C"), ("link_derate", "x"), ("seed", "seed ")) if row.get(name) is not None
    ]
    return "/".join([row["part"], row["name"], *more])


def summarise(rows: list[Row], facts: Row, others: Others) -> Row:
    """All figures; None, with what would make it, for what is missing."""
    figures: Row = {"dry_run": True} if facts.get("dry_run") else {}
    figures |= _speed(rows, others.stock_tok_s(facts["boot_id"])) | _memory(rows, facts) | _fidelity(rows) | others.kernel_ratios()
    figures |= _hints(rows)
    idle = next((row for row in rows if row["part"] == "idle"), {})
    figures["idle_core_pct"] = round(idle["worker_core_pct"] + idle["cpu_expert_core_pct"], 2) if idle else None
    trip = next((row for row in rows if row["name"] == ROUND_TRIP and "error" not in row), {})
    figures |= {name: trip.get(name) for name in ("publish_to_seen_us", "flag_to_add_us")}
    figures["upper_bounds"] = UPPER_BOUNDS if trip else None
    figures["round_trip_us"] = {name: value for name, value in trip.items() if name.endswith(("_p50_us", "_p99_us"))} or None
    hidden = {row["name"]: row["relative_rms"] for row in rows if row["part"] == "hidden" and "relative_rms" in row}
    figures["hidden_relative_rms_last_layer"] = {name.removeprefix("hidden states: "): rms[-1] for name, rms in hidden.items()} or None
    figures |= {name: facts[name] for name in ("link_gb_s", "link_half_gb_s", "dram_gb_s", "gpu") if name in facts}
    figures["reason_for_null"] = reasons(figures, tuple(NEEDS), lambda key: f"not measured: {NEEDS[key]}")
    return figures


def _speed(rows: list[Row], stock_tok_s: float | None) -> Row:
    measured = {(row["name"], row["streams"], row["link_derate"]): row for row in rows if row["part"] == "speed" and row.get("tok_s")}
    speeds = {key: row["tok_s"] for key, row in measured.items()}

    def exact(streams: int, derate: int) -> float | None:
        return max((v for (name, s, d), v in speeds.items() if name.startswith("exact") and (s, d) == (streams, derate)), default=None)

    def over(a: float | None, b: float | None) -> float | None:
        return round(a / b, 3) if a and b else None

    def fast(streams: int, derate: int = 1) -> float | None:
        return speeds.get((FAST, streams, derate))

    one = measured.get((FAST, 1, 1), {})
    many = measured.get((MANY_STEPS, 1, 1), {})
    planned = many if (many.get("planner_steps") or 0) >= ENOUGH_STEPS else one
    return {
        **{f"c{n}_tok_s": fast(n) for n in (1, 2, 4, 8)},
        **{f"c{n}_vs_exact": over(fast(n), exact(n, 1)) for n in (1, 2, 4)},
        "c1_vs_stock151": over(fast(1), stock_tok_s),
        "c1_vs_exact_derated": over(fast(1, 2), exact(1, 2)),
        # Stock's split reads no expert over the link while it decodes: half a link leaves it as it is.
        "c1_vs_stock151_derated": over(fast(1, 2), stock_tok_s),
        "two_threads_vs_exact": over(speeds.get((TWO_THREADS, 1, 1)), exact(1, 1)),
        "step_over_bound": one.get("step_over_bound"),
        "step_over_lanes_bound": one.get("step_over_lanes_bound"),
        "planner_error_pct": planned.get("planner_error_pct"),
        "planner_steps": planned.get("planner_steps"),
    }


def _hints(rows: list[Row]) -> Row:
    """Tokens per second with hints over those without, from rows that were measured one behind the other, some of them twice."""
    measured = {(row["name"], row["streams"]): row for row in rows if row["part"] == HINT_PART and row.get("tok_s") and "error" not in row}

    def rate(name: str, streams: int) -> float | None:
        found = [measured[key]["tok_s"] for key in ((name, streams), (name + AGAIN, streams)) if key in measured]
        return statistics.harmonic_mean(found) if found else None

    def over(name: str, base: str, streams: int = 1) -> float | None:
        with_hints, without = rate(name, streams), rate(base, streams)
        return round(with_hints / without, 3) if with_hints and without else None

    best = measured.get((HINTS, 1), {})
    return {
        "hint_c1_vs_fast": over(HINTS, NO_HINTS),
        "hint_c1_vs_fast_two_records": over(TWO_HINTS, NO_HINTS),
        "hint_c1_vs_fast_half": over(HALF_HINTS, NO_HINTS),
        "hint_c1_vs_fast_perfect": over(PERFECT_HINTS, NO_HINTS),
        "hint_c4_vs_fast": over(HINTS, NO_HINTS, 4),
        "hint_c4_vs_fast_half": over(HALF_HINTS, NO_HINTS, 4),
        "hint_c4_vs_fast_perfect": over(PERFECT_HINTS, NO_HINTS, 4),
        "hint_exact_c1_vs_exact": over(EXACT_HINTS, EXACT_NO_HINTS),
        "hint_exact_c4_vs_exact": over(EXACT_HINTS, EXACT_NO_HINTS, 4),
        "hint_exact_c1_vs_exact_half": over(EXACT_HALF_HINTS, EXACT_NO_HINTS),
        "hint_exact_c1_vs_exact_perfect": over(EXACT_PERFECT_HINTS, EXACT_NO_HINTS),
        **{name: best.get(name) for name in ("hint_recall_on_misses", "hint_precision_on_misses")},
    }


def _memory(rows: list[Row], facts: Row) -> Row:
    """Host memory of the whole model's size: its records, and what the slice's processes took beside theirs."""
    extra = max(
        (row["ram_extra_gib"] for row in rows if row["name"].startswith(FAST) and row.get("ram_extra_gib") is not None), default=None
    )
    peaks = [(row["name"].startswith(RESIDENT), row["vram_peak_mib"]) for row in rows if row.get("vram_peak_mib")]
    card, resident = (max((peak for every, peak in peaks if every == wanted), default=None) for wanted in (False, True))
    stride = facts.get("record_bytes")
    total = round(FULL_RECORDS * stride / 2**30 + extra, 2) if stride and extra is not None else None
    return {
        "ram_extra_gib": extra,
        "ram_total_gib_full_size": total,
        "vram_peak_gib": round(card / 1024, 2) if card else None,
        "vram_peak_gib_every_expert": round(resident / 1024, 2) if resident else None,
    }


def _fidelity(rows: list[Row]) -> Row:
    placed = [row for row in rows if row.get("placement") and "hash" in row]
    # Bits are compared within a boot: another one may be of another GPU.
    hashes = {boot: {row["hash"] for row in placed if row.get("boot_id") == boot} for boot in {row.get("boot_id") for row in placed}}
    noise = [row for row in rows if row["name"] == NOISE and "kl" in row]
    ours = next((row for row in rows if row["name"] == "fast against exact"), {})
    rms = next((row for row in rows if row["name"] == RMS and "error" not in row), {})
    floor = statistics.fmean(row["kl"] for row in noise) if noise else None
    return {
        "placement_invariant": all(len(found) == 1 for found in hashes.values()) if len(placed) > len(hashes) else None,
        "placements": len(placed),
        # Distances of an earlier boot may stand beside a noise floor of this one as long as `exact` has the same bits in both.
        "exact_as_in_the_earlier_boot": next((row.get("bits_of_an_earlier_boot") for row in rows if row["name"] == "exact"), None),
        "fidelity_boot_ids": sorted({row["boot_id"] for row in rows if "boot_id" in row}),
        "positions": ours.get("positions"),
        "kl_fast_vs_exact": ours.get("kl"),
        "kl_fast_vs_exact_95": ours.get("kl_95"),
        "kl_noise_floor": floor,
        "kl_over_floor": ours["kl"] / floor if floor and "kl" in ours else None,
        "top1_fast": ours.get("top1"),
        "top1_noise_floor": statistics.fmean(row["top1"] for row in noise) if noise else None,
        "noise_seeds": len(noise),
        "stock_relative_rms": rms.get("stock"),
        "fast_relative_rms": rms.get("ours"),
    }
