"""What the full-shape slice measures, case by case: names, expected seconds, rows that survive a broken run, and the figures made of them.

Nothing here needs a GPU: the dry run and the tests use all of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench import report

STREAMS = (1, 2, 4, 8)
# ms a step of stock 1.5.1's CPU split as it was measured before (15 threads): slower by more than SLOW, and the run is of no use.
STOCK_MS = {1: 23.3, 2: 36.0, 4: 79.5}
SLOW = 1.15
MOST_FAILURES = 2
Row = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """How experts are placed.

    Attributes:
        name: part of the case's name.
        slots: `share` of the records, `all`, or `one`.
        options: ExpertOptions' fields.
    """

    name: str
    slots: str
    options: dict[str, Any]


MODES = (
    Mode("between_steps", "share", {}),
    Mode("in_step", "share", {"on_demand": True}),
    Mode("in_place", "one", {"admit": False}),
    Mode("resident", "all", {"admit": False}),
)


@dataclass(frozen=True)
class Case:
    """One measurement: `what` is C1, C2, ... or prefill."""

    side: str  # ours, stock, stock_resident
    mode: str
    what: str
    seconds: float  # what it should take

    @property
    def name(self) -> str:
        """Its key among the rows."""
        return "/".join(part for part in (self.side, self.mode, self.what) if part)

    @property
    def streams(self) -> int:
        """Of a decode case."""
        return int(self.what[1:])


# ms a step, for the estimates: measured before, or (in_step) as between_steps.
_EXPECTED_MS = {
    "resident": {1: 6, 2: 9, 4: 11, 8: 16},
    "between_steps": {1: 16, 2: 28, 4: 52, 8: 95},
    "in_step": {1: 16, 2: 28, 4: 52, 8: 95},
    "in_place": {1: 27},
    "stock": {1: 23, 2: 36, 4: 80},
}


def cases(side: str, steps: int) -> list[Case]:
    """All cases of a side in the order in which they run.

    Args:
        steps: warm-up and measured ones together.
    """
    if side == "ours":
        return [
            Case(side, mode.name, what, seconds)
            for mode in MODES
            for what, seconds in [
                *((f"C{n}", 1 + steps * _EXPECTED_MS[mode.name][n] / 1000) for n in STREAMS if n in _EXPECTED_MS[mode.name]),
                *([("prefill", 4.0)] if mode.name != "in_place" else []),
            ]
        ]
    key = "resident" if side == "stock_resident" else "stock"
    decode = [Case(side, "", f"C{n}", 1 + steps * _EXPECTED_MS[key][n] / 1000) for n in (1, 2, 4)]
    return [*decode, Case(side, "", "prefill", 5.0)] if side == "stock_resident" else decode


# Seconds of a command before its first case: import, load, pinning, first kernels.
LOAD_S = {"prepare": 25, "ours": 150, "stock": 140, "stock_resident": 60}


def estimate(command: str, steps: int) -> float:
    """Seconds of a whole command on the machine that the notes describe."""
    return LOAD_S.get(command, 0) + sum(case.seconds for case in cases(command, steps) if command != "prepare")


class Engine(Protocol):
    """One loaded side. `enter` is called when the mode changes."""

    def enter(self, mode: Mode | None) -> None:
        """Places experts for the cases that follow; None: nothing to place."""
        ...

    def decode(self, streams: int) -> Row:
        """ms, tok_s, hit_rate, missed_mib_per_step ... of steady decode."""
        ...

    def prefill(self) -> Row:
        """s, tok_s of one long prompt, the second time."""
        ...

    def after(self) -> Row:
        """Memory since the last call: vram_peak_mib, ram_extra_gib."""
        ...

    def facts(self) -> Row:
        """Of the machine and the load: link rate, load seconds, records, slots."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


class Rows:
    """Rows by case name, kept in a file over commands and written out after each case.

    Args:
        state: the file that the next command goes on with; of another boot it is begun anew.
        out: the result file.
        started: bench.report.start()'s.
        summarise: figures from rows and facts.
    """

    def __init__(self, state: Path, out: Path, started: Row, summarise: Callable[[dict[str, Row], Row], Row]) -> None:
        self._state, self._out, self._started, self._summarise = state, out, started, summarise
        self.rows: dict[str, Row] = {}
        self.facts: Row = {"boot_id": boot_id()}
        with contextlib.suppress(OSError, ValueError, KeyError):
            document = json.loads(state.read_text())
            if document["facts"]["boot_id"] == self.facts["boot_id"]:
                self.rows, self.facts = document["rows"], document["facts"]

    def put(self, name: str, row: Row) -> None:
        """Notes a row and saves all of them."""
        self.rows[name] = row
        print(json.dumps({"name": name, **row}), flush=True)
        self.save()

    def note(self, **facts: Any) -> None:
        """Notes facts and saves."""
        self.facts |= facts
        self.save()

    def done(self, name: str) -> bool:
        """True when the case was measured."""
        return name in self.rows and "error" not in self.rows[name]

    def save(self) -> None:
        """Writes state and result."""
        part = self._state.with_name(self._state.name + ".part")
        part.write_text(json.dumps({"rows": self.rows, "facts": self.facts}, indent=1))
        os.replace(part, self._state)
        rows = [{"name": name, **row} for name, row in self.rows.items()]
        with contextlib.redirect_stdout(io.StringIO()):
            report.write_result(self._out, {**self._started, "facts": self.facts}, rows, self._summarise(self.rows, self.facts))


def boot_id() -> str:
    """Of this boot: figures of one run belong to one boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def run(
    todo: list[Case], modes: dict[str, Mode], engine: Engine, rows: Rows, deadline: float, check: Callable[[Case, Row], None] | None = None
) -> list[str]:
    """Measures what is not there yet; returns the names of what time did not allow.

    Args:
        deadline: monotonic seconds after which no case begins that would not end before it.
        check: may raise SystemExit when a row shows that the run is of no use.
    """
    skipped, inside, failures = [], "", 0
    for case in todo:
        if rows.done(case.name):
            continue
        if time.monotonic() + case.seconds > deadline:
            skipped.append(case.name)
            continue
        try:
            if case.mode != inside:
                engine.enter(modes.get(case.mode))
                inside = case.mode
                engine.after()
            row = engine.prefill() if case.what == "prefill" else engine.decode(case.streams)
            row |= engine.after()
            failures = 0
            if row.get("steps") == 0:
                row = {"error": "the time was over before the first measured step"}
        except Exception as error:  # noqa: BLE001 - the next case may still work, and the row says what broke
            traceback.print_exc()
            row, failures = {"error": f"{type(error).__name__}: {error}"}, failures + 1
            inside = "?"
        rows.put(case.name, row)
        if check is not None and "error" not in row:
            check(case, row)
        if failures >= MOST_FAILURES:
            raise SystemExit(f"{failures} cases in a row failed, the last one with {row['error']}")
    return skipped


def refuse_slow_stock(case: Case, row: Row) -> None:
    """A stock run that is slower than it is known to be would flatter ours.

    Raises:
        SystemExit: names both figures.
    """
    known = STOCK_MS.get(case.streams) if case.side == "stock" and case.what != "prefill" else None
    if known is not None and row["ms"] > SLOW * known:
        raise SystemExit(f"stock's CPU split takes {row['ms']} ms a step at {case.what}, {known} are known: this run cannot be compared")


def _modes_of(rows: dict[str, Row]) -> Iterator[str]:
    for mode in ("in_step", "between_steps"):
        if "ms" in rows.get(f"ours/{mode}/C1", {}):
            yield mode


def bound_ms(rows: dict[str, Row], facts: Row, mode: str, streams: int) -> float | None:
    """The step with every expert resident plus the distinct missing bytes at the copy engine's rate."""
    resident, row = rows.get(f"ours/resident/C{streams}", {}), rows.get(f"ours/{mode}/C{streams}", {})
    if "ms" not in resident or "ms" not in row or not facts.get("link_gb_s"):
        return None
    return float(resident["ms"] + row["missed_mib_per_step"] * 2**20 / (facts["link_gb_s"] * 1e9) * 1000)


def prefill_limit_s(rows: dict[str, Row], facts: Row) -> float | None:
    """The longer of: every expert resident, and all experts but the resident ones over the link once."""
    resident = rows.get("ours/resident/prefill", {})
    if "s" not in resident or not facts.get("link_gb_s"):
        return None
    missing = (facts["records"] - facts["slots"]) * facts["record_bytes"]
    return float(max(resident["s"], missing / (facts["link_gb_s"] * 1e9)))


def ratio(a: Any, b: Any, digits: int = 3) -> float | None:
    """a / b, or None when one of them is not there."""
    return round(float(a) / float(b), digits) if a and b else None


def summarise(rows: dict[str, Row], facts: Row) -> Row:
    """The figures that are quoted; None for what was not measured."""

    def ms(name: str) -> Any:
        return rows.get(name, {}).get("ms")

    best = min(_modes_of(rows), key=lambda mode: ms(f"ours/{mode}/C1"), default=None)
    summary: Row = {"admission": best}
    for n in STREAMS:
        summary[f"c{n}_tok_s"] = rows.get(f"ours/{best}/C{n}", {}).get("tok_s")
    for n in (1, 2, 4):
        summary[f"c{n}_vs_stock151"] = ratio(ms(f"stock/C{n}"), ms(f"ours/{best}/C{n}"))
        bound = bound_ms(rows, facts, best, n) if best else None
        summary["step_over_bound" if n == 1 else f"c{n}_step_over_bound"] = ratio(ms(f"ours/{best}/C{n}"), bound)
    summary["c4_over_c1"] = ratio(summary["c4_tok_s"], summary["c1_tok_s"])
    summary["all_resident_time_ratio"] = ratio(ms("ours/resident/C1"), ms("stock_resident/C1"))
    hit = rows.get(f"ours/{best}/C1", {}).get("hit_rate")
    clock = facts.get("clock_hit_rate")
    summary["hit_rate"] = hit
    summary["hit_minus_clock_points"] = round(100 * (hit - clock), 1) if hit is not None and clock is not None else None
    summary["belady_hit_rate"] = facts.get("belady_hit_rate")
    prefills = [rows[f"ours/{mode}/prefill"]["s"] for mode in _modes_of(rows) if "s" in rows.get(f"ours/{mode}/prefill", {})]
    summary["prefill8k_of_limit"] = ratio(prefill_limit_s(rows, facts), min(prefills, default=None))
    ours = [row for name, row in rows.items() if name.startswith(("ours/in_step", "ours/between_steps"))]
    summary["ram_extra_gib"] = max((row["ram_extra_gib"] for row in ours if row.get("ram_extra_gib") is not None), default=None)
    summary["vram_peak_gib"] = max((round(row["vram_peak_mib"] / 1024, 2) for row in ours if row.get("vram_peak_mib")), default=None)
    summary["c1_vs_stock165"] = None
    summary["errors"] = sorted(name for name, row in rows.items() if "error" in row)
    summary["reason_for_null"] = "not measured in this run; stock 1.6.5 needs a build of 270 s of its own"
    return summary
