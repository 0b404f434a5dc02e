"""A stand-in for a loaded side: the same calls and keys, times from a simple model, no GPU. For `--dry-run` and tests."""

from __future__ import annotations

import numpy as np

from bench import routing_trace
from bench.kept_rows import Row
from bench.slice_cases import STOCK_165, Case, Mode, prefill_slots
from kernels.python.cache_sim import CachePolicy, simulate

RECORD_BYTES = 9_474_048
LINK_GB_S, GATHER_GB_S = 51.5, 50.0


class DryEngine:
    """Times are those of a link that is always busy; hit rates come from the cache simulator on the same trace."""

    def __init__(self, side: str, layers: int, trace: np.ndarray, steps: int, broken: str = "") -> None:
        self._side, self._layers, self._trace, self._steps, self._broken = side, layers, trace, steps, broken
        self._mode: Mode | None = None
        self.records = layers * routing_trace.EXPERTS
        self.entered: list[str] = []
        self.closed = False

    def enter(self, mode: Mode | None) -> None:
        self._mode = mode
        self.entered.append(mode.name if mode else "")

    def measure(self, case: Case) -> Row:
        if case.kind == "prefill":
            return self._prefill(4 if case.long else 1)
        if case.kind == "modules":
            modules = [{"module": "TransformerBlock", "calls": self._layers, "enqueue_us": 4800.0, "busy_us": 700.0}]
            return {
                "steps": self._steps,
                "ms": 5.9,
                "enqueue_ms": 4.8,
                "busy_ms": 0.7,
                "beside_the_modules_ms": 1.1,
                "kernels_ms": 0.6,
                "modules": modules,
            }
        if case.kind == "alternate":
            return {"rounds": 50, "wanted": 50, "equal": True, "different": 0, "s": 200.0, "steps": 200}
        row = self._decode(case.streams)
        if self._mode is not None and self._mode.link_derate > 1:
            row["ms"] = round(1.1 * (0.4 * self._layers + row["missed_mib_per_step"] * 2**20 / (LINK_GB_S / 2 * 1e9) * 1000), 3)
            row["tok_s"] = round(1000 / row["ms"], 2)
        return row

    def _decode(self, streams: int) -> Row:
        if self._broken and self._mode is not None and self._mode.name == self._broken:
            raise RuntimeError("the device is gone")
        resident = 0.4 * self._layers * (1 + 0.25 * (streams - 1))
        if self._side in (known := {"stock": {1: 22.0, 2: 36.0, 4: 79.0}, STOCK_165: {1: 33.0, 2: 54.0, 4: 95.0}}):
            ms, hit, missed = known[self._side][streams] * self._layers / 12, None, 0.0
        elif self._side == "stock_resident" or (self._mode is not None and self._mode.slots == "all"):
            ms, hit, missed = resident, 1.0, 0.0
        else:
            slots = 1 if self._mode is None or self._mode.slots == "one" else round(routing_trace.SLOT_SHARE * self.records)
            one = np.ascontiguousarray(self._trace[:, :streams].reshape(len(self._trace), -1, routing_trace.TOP_K))
            hit = simulate(CachePolicy.LRU, one[:, : self._layers], routing_trace.EXPERTS, slots, warm_tokens=len(one) // 2).hit_ratio
            missed = streams * self._layers * routing_trace.TOP_K * (1 - hit) * RECORD_BYTES / 2**20
            ms = 1.1 * (resident + missed * 2**20 / (LINK_GB_S * 1e9) * 1000)
        return {
            "steps": self._steps,
            "ms": round(ms, 3),
            "tok_s": round(streams * 1000 / ms, 2),
            "hit_rate": round(hit, 4) if hit is not None else None,
            "missed_mib_per_step": round(missed, 1),
        }

    def _prefill(self, chunks: int) -> Row:
        resident = 0.0825 * self._layers
        seconds = (
            resident if self._mode is None or self._mode.slots == "all" else max(resident, self.records * RECORD_BYTES / LINK_GB_S / 1e9)
        )
        row = {"tokens": 8192 * chunks, "chunks": chunks, "s": round(seconds * chunks, 3), "tok_s": round(8192 / seconds)}
        return row | (
            {"slots": min(self.records, prefill_slots(self._layers))} if self._mode is not None and self._mode.slots == "prefill" else {}
        )

    def after(self) -> Row:
        return {"vram_peak_mib": 11_000, "ram_extra_gib": 2.5} if self._side == "ours" else {}

    def facts(self) -> Row:
        slots = round(routing_trace.SLOT_SHARE * self.records)
        return (
            {
                "records": self.records,
                "slots": slots,
                "record_bytes": RECORD_BYTES,
                "link_gb_s": LINK_GB_S,
                "link_half_gb_s": LINK_GB_S / 2,
                "gather_gb_s": GATHER_GB_S,
            }
            if self._side == "ours"
            else {}
        )

    def close(self) -> None:
        self.closed = True


def dry_start(*_how: object) -> tuple[Row, Row | None]:
    """A start that finds everything, and nothing behind it."""
    found: Row = {"arena": "re-attached: made up", "slots": 1376, "mode": "exact", "pins": "shipped", "tuned": False}
    return {"load_s": 12.0, **found, "s": 19.0}, None
