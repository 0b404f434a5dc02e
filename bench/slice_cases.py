"""What the full-shape slice measures, case by case: names, expected seconds, the order of their worth, and the figures made of their rows.

Nothing here needs a GPU: the dry run and the tests use all of it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bench.kept_rows import Row, Rows, reasons

STREAMS = (1, 2, 4, 8)
THREE_PARTS = "in_step_three_parts"  # prefills stage three layers at a time
GATHER = "gather"
# ms a step of stock 1.5.1's CPU split as it was measured before (15 threads): slower by more than SLOW, and the run is of no use.
STOCK_MS = {1: 23.3, 2: 36.0, 4: 79.5}
SLOW = 1.15
MOST_FAILURES = 2
LONG, LONG_SHARE = "@32k", 3
MOST_STREAMS = 8


@dataclass(frozen=True)
class Mode:
    """How experts are placed.

    Attributes:
        name: part of the case's name.
        slots: `share` of the records (11.4 %, as on a card of 24 GB), `all`, `one`, or `prefill`: prefill_slots.
        options: ExpertOptions' fields.
        link_derate: every miss is copied so many times.
    """

    name: str
    slots: str
    options: dict[str, Any]
    link_derate: int = 1


MODES = (
    Mode("between_steps", "share", {}),
    Mode("in_step", "share", {"on_demand": True}),
    # As in_step, but a layer's misses come by one kernel instead of by the copy engine.
    Mode(GATHER, "share", {"on_demand": True, "copy": "gather"}),
    Mode(THREE_PARTS, "share", {"on_demand": True, "stage_parts": 3}),
    # Nothing is read in place, and every miss is copied twice: as over a link of half the rate.
    Mode("in_step_half_link", "share", {"on_demand": True}, link_derate=2),
    Mode("in_place", "one", {"admit": False}),
    Mode("resident", "all", {"admit": False}),
)


# Of the whole model on a card of 24 GB: 1,376 slots. A prefill lends parts of them, each for the missing experts of one layer.
MODEL_LAYERS, MODEL_SLOTS, STAGED = 42, 1376, 275


def prefill_slots(layers: int, parts: int = 2) -> int:
    """Slots that a prefill of so many layers is measured with, which stages so many of them at a time.

    The share of the records (`share`) would not do: the parts that a prefill stages a layer in do not shrink with the number of layers, so
    on a slice some of each layer would be read in place, as at full size nothing is. These are whole parts, and the slice's share of what
    is left of the model's slots beside them: as much of a layer is staged, and as much of it resident, as at full size.
    """
    return parts * STAGED + round((MODEL_SLOTS - parts * STAGED) * layers / MODEL_LAYERS)


@dataclass(frozen=True)
class Case:
    """One measurement.

    `what` is decode of so many streams (C1, C2, ...; C1@32k: behind a long context), prefill8k or prefill32k, a trace of its own (drift,
    scan; one stream), modules: enqueue and busy time of each kind of module (modules_C4: of four streams), or alternate: long prefills and
    decodes in turns.
    """

    side: str  # ours, stock, stock_resident, stock165
    mode: str
    what: str
    seconds: float  # what it should take

    @property
    def name(self) -> str:
        """Its key among the rows."""
        return "/".join(part for part in (self.side, self.mode, self.what) if part)

    @property
    def kind(self) -> str:
        """decode, prefill, trace, modules or alternate."""
        for kind in ("prefill", "modules"):
            if self.what.startswith(kind):
                return kind
        return {"drift": "trace", "scan": "trace", "alternate": "alternate"}.get(self.what, "decode")

    @property
    def long(self) -> bool:
        """With a context, or a prompt, of 32k."""
        return "32k" in self.what

    @property
    def share(self) -> int:
        """What part of all steps a decode case takes: behind a long context, and of eight streams, the cache is warm by then."""
        return LONG_SHARE if self.long else 2 if self.streams == MOST_STREAMS else 1

    @property
    def streams(self) -> int:
        """Of a decode case, and of what is told of its modules; the other kinds have one."""
        if self.kind == "modules":
            return int(self.what.partition("_C")[2] or 1)
        return int(self.what.removesuffix(LONG)[1:]) if self.kind == "decode" else 1


# ms a step, for the estimates: measured before, or (in_step) as between_steps.
_EXPECTED_MS = {
    "resident": {1: 6, 2: 9, 4: 11, 8: 16},
    "between_steps": {1: 16, 2: 28, 4: 52, 8: 95},
    "in_step": {1: 16, 2: 28, 4: 52, 8: 95},
    "in_step_half_link": {1: 27},
    GATHER: {1: 17, 4: 55},
    "in_place": {1: 27},
    "stock": {1: 23, 2: 36, 4: 80},
    "stock165": {1: 37, 2: 60, 4: 100},
}
# The admission that is faster at C1, and the slower one: known when both have been measured.
BEST, OTHER = "BEST", "OTHER"
ADMISSIONS = ("in_step", "between_steps")
# The most valuable first: what is left out by a lack of time stands last. Each change of the mode costs a second. FIRST is what every
# session must have, so it names its modes; REST is measured when there is time.
_FIRST = (
    ("in_step", "C1"),
    ("resident", "C1 C2 C4"),
    ("in_step", "C4 C2 prefill8k"),
    ("resident", "prefill8k modules"),
    (THREE_PARTS, "prefill8k"),
    ("in_step_half_link", "C1"),
    ("between_steps", "C1 C4"),
)
_REST = (
    (BEST, "C4 C2 prefill8k drift scan C8 C1@32k prefill32k"),  # the first three again where the other admission is the faster one
    ("resident", "modules_C4 C1@32k C8 prefill32k C4@32k"),
    (OTHER, "C4 C2 prefill8k"),
    (BEST, "C4@32k C2@32k C8@32k"),
    ("resident", "C2@32k C8@32k"),
    (GATHER, "C1 C4"),
    ("in_place", "C1"),
    (BEST, "alternate"),
)
# Not worth a load of its own: it is measured when a command has the time, and not missed.
_OPTIONAL = ("stock/C1@32k",)
STOCK_165 = "stock165"  # bench.stock_latest
_STOCK_FIRST = {"stock": "C1 C4 C2", "stock_resident": "C1", STOCK_165: "C1 C4 C2"}
_STOCK_REST = {"stock": "C1@32k", "stock_resident": "C2 C4 prefill8k C1@32k prefill32k", STOCK_165: ""}
_PREFILL_S = {"prefill8k": 4.0, "prefill32k": 10.0}
_STOCK_SPLIT_S = {"C1@32k": 45.0}  # never measured; it has a limit of its own
ENTER_S = 1.5


def _expected_s(mode: str, what: str, steps: int) -> float:
    if what in _PREFILL_S:
        return _PREFILL_S[what]
    if what.startswith("modules"):
        return 3.0
    if what == "alternate":
        return 30.0  # it takes what time there is
    case, known = Case("", mode, what, 0.0), {BEST: "between_steps", OTHER: "between_steps"}.get(mode, mode)
    return 1 + steps / case.share * _EXPECTED_MS[known][case.streams] / 1000 + (2.0 if what == "scan" else 0.0)


def cases(side: str, steps: int, *, first: bool = False) -> list[Case]:
    """All cases of a side in the order in which they run; some may turn out to be the same one.

    Args:
        steps: warm-up and measured ones together.
        first: only what every session must have.
    """
    if side == "ours":
        order = _FIRST if first else _FIRST + _REST
        return [Case(side, mode, what, _expected_s(mode, what, steps)) for mode, names in order for what in names.split()]
    names = _STOCK_FIRST[side].split() + ([] if first else _STOCK_REST[side].split())
    key = "resident" if side == "stock_resident" else side
    known = _STOCK_SPLIT_S if side == "stock" else {"C1@32k": 8 + steps * _EXPECTED_MS[key][1] / 1000}
    return [Case(side, "", what, known.get(what) or _expected_s(key, what, steps)) for what in names]


def only(cases: list[Case], names: list[str]) -> list[Case]:
    """Those of the names, as MODE/CASE or CASE where a side has no modes, in the order of all.

    Raises:
        SystemExit: no case has the name; says which there are.
    """
    known = {case.name.removeprefix(f"{case.side}/"): case for case in cases}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--only: there is no case {', '.join(unknown)}; there are {', '.join(known)}")
    return [case for name, case in known.items() if name in names]


# Seconds of a command before its first case: import, load, pinning, first kernels.
LOAD_S = {"prepare": 25, "ours": 60, "stock": 140, "stock_resident": 60, STOCK_165: 190, "start": 185}


def estimate(command: str, steps: int) -> float:
    """Seconds of a whole command on the machine that the notes describe."""
    todo = cases(command, steps) if command not in ("prepare", "start") else []
    entered = sum(1 for before, case in zip([None, *todo], todo, strict=False) if before is None or before.mode != case.mode)
    return LOAD_S.get(command, 0) + sum(case.seconds for case in todo) + ENTER_S * entered


class Engine(Protocol):
    """One loaded side. `enter` is called when the mode changes."""

    def enter(self, mode: Mode | None) -> None:
        """Places experts for the cases that follow; None: nothing to place."""
        ...

    def measure(self, case: Case) -> Row:
        """decode and trace: ms, tok_s, hit_rate ...; prefill: s, tok_s of a prompt, the second time; modules: a table."""
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


def resolved(case: Case, rows: dict[str, Row]) -> Case:
    """With the mode that BEST or OTHER stands for."""
    if case.mode not in (BEST, OTHER):
        return case
    best = best_of(rows) or ADMISSIONS[1]
    return replace(case, mode=best if case.mode == BEST else next(mode for mode in ADMISSIONS if mode != best))


def placed(mode: Mode | None, case: Case) -> Mode | None:
    """The mode with the slots that the case needs."""
    return replace(mode, slots="prefill") if mode is not None and mode.slots == "share" and case.kind == "prefill" else mode


def missing(todo: list[Case], rows: Rows) -> list[Case]:
    """What is not measured yet; nothing when that is not worth a load of its own. What has failed before comes last: it may fail again."""
    left = [case for case in todo if not rows.done(resolved(case, rows.rows).name)]
    if len(left) < len(todo) and all(case.name in _OPTIONAL for case in left):
        return []
    return sorted(left, key=lambda case: _failed(resolved(case, rows.rows), rows.rows))


def _failed(case: Case, rows: dict[str, Row]) -> bool:
    """True when the case failed, or the first one of its mode, or of the mode that it only varies."""
    mode = "in_step" if case.mode == GATHER else case.mode.removesuffix("_half_link").removesuffix("_three_parts")
    return any("error" in rows.get(name, {}) for name in (case.name, "/".join(part for part in (case.side, mode, "C1") if part)))


def run(
    todo: list[Case], modes: dict[str, Mode], engine: Engine, rows: Rows, deadline: float, check: Callable[[Case, Row], None] | None = None
) -> list[str]:
    """Measures what is not there yet; returns the names of what time did not allow.

    Args:
        deadline: monotonic seconds after which no case begins that would not end before it.
        check: may raise SystemExit when a row shows that the run is of no use.
    """
    skipped, failures = [], 0
    inside: tuple[str, Mode | None] | None = None
    for case in (resolved(each, rows.rows) for each in todo):
        if rows.done(case.name):
            continue
        if time.monotonic() + case.seconds > deadline:
            skipped += [case.name] if case.name not in _OPTIONAL else []
            continue
        try:
            wanted = (case.mode, placed(modes.get(case.mode), case))
            if wanted != inside:
                engine.enter(wanted[1])
                inside = wanted
                engine.after()
            row = engine.measure(case)
            row |= engine.after()
            failures = 0
            if row.get("steps") == 0:
                row = {"error": "the time was over before the first measured step"}
        except Exception as error:  # noqa: BLE001 - the next case may still work, and the row says what broke
            traceback.print_exc()
            row, failures = {"error": f"{type(error).__name__}: {error}"}, failures + 1
            inside = None
        rows.put(case.name, row)
        if check is not None and "error" not in row:
            try:
                check(case, row)
            except SystemExit as stop:
                rows.put(case.name, {**row, "error": str(stop)})  # no figure is made of it, and the next command measures it again
                raise
        if failures >= MOST_FAILURES:
            raise SystemExit(f"{failures} cases in a row failed, the last one with {row['error']}")
    return skipped


def refuse_slow_stock(case: Case, row: Row) -> None:
    """A stock run that is slower than it is known to be would flatter ours.

    Raises:
        SystemExit: names both figures.
    """
    known = STOCK_MS.get(case.streams) if case.side == "stock" and case.kind == "decode" and not case.long else None
    if known is not None and row["ms"] > SLOW * known:
        raise SystemExit(f"stock's CPU split takes {row['ms']} ms a step at {case.what}, {known} are known: this run cannot be compared")


def _modes_of(rows: dict[str, Row]) -> Iterator[str]:
    for mode in ADMISSIONS:
        if "ms" in rows.get(f"ours/{mode}/C1", {}) and "error" not in rows[f"ours/{mode}/C1"]:
            yield mode


def best_of(rows: dict[str, Row]) -> str | None:
    """The admission that is faster at C1, of those that were measured."""
    return min(_modes_of(rows), key=lambda mode: float(rows[f"ours/{mode}/C1"]["ms"]), default=None)


def bound_ms(rows: dict[str, Row], facts: Row, mode: str, what: str) -> float | None:
    """The step with every expert resident plus the distinct missing bytes at the copy engine's rate.

    Args:
        what: C1, C2@32k ...
    """
    resident, row = rows.get(f"ours/resident/{what}", {}), rows.get(f"ours/{mode}/{what}", {})
    rate = facts.get("link_half_gb_s" if mode == "in_step_half_link" else "link_gb_s")
    if "ms" not in resident or "ms" not in row or not rate:
        return None
    return float(resident["ms"] + row["missed_mib_per_step"] * 2**20 / (rate * 1e9) * 1000)


def prefill_limit_s(rows: dict[str, Row], facts: Row, what: str = "prefill8k") -> float | None:
    """The longer of: every expert resident, and all experts but a card's share of them over the link once for each chunk.

    The share is that of decode, 11.4 %: the slots that a prefill is measured with are more of a slice's records than of the model's.
    """
    resident = rows.get(f"ours/resident/{what}", {})
    if "s" not in resident or not facts.get("link_gb_s"):
        return None
    missing = (facts["records"] - facts["slots"]) * facts["record_bytes"] * resident.get("chunks", 1)
    return float(max(resident["s"], missing / (facts["link_gb_s"] * 1e9)))


def ratio(a: Any, b: Any, digits: int = 3) -> float | None:
    """a / b, or None when one of them is not there."""
    return round(float(a) / float(b), digits) if a and b else None


# What is quoted, with the case that it needs on each side.
NEEDS: dict[str, tuple[str, ...]] = {
    "c1_tok_s": ("ours/BEST/C1",),
    "step_over_bound": ("ours/BEST/C1", "ours/resident/C1"),
    "c1_vs_stock151": ("ours/BEST/C1", "stock/C1"),
    "c2_vs_stock151": ("ours/BEST/C2", "stock/C2"),
    "c4_vs_stock151": ("ours/BEST/C4", "stock/C4"),
    "c1_vs_stock165": ("ours/BEST/C1", f"{STOCK_165}/C1"),
    "c4_over_c1": ("ours/BEST/C1", "ours/BEST/C4"),
    "all_resident_time_ratio": ("ours/resident/C1", "stock_resident/C1"),
    "hit_rate": ("ours/BEST/C1",),
    "hit_minus_clock_points": ("ours/BEST/C1",),
    "belady_hit_rate": ("ours/BEST/C1",),
    "prefill8k_of_limit": ("ours/BEST/prefill8k", "ours/resident/prefill8k"),
    "ram_extra_gib": ("ours/BEST/C1",),
    "second_start_s": ("start/second",),
}


def why_null(rows: dict[str, Row], best: str | None, key: str) -> str:
    """Why a figure is not there: the case that is missing or broke."""
    for need in NEEDS.get(key, ()):
        name = need.replace(BEST, best or "in_step")
        if name not in rows:
            return f"{name} was not measured in this run"
        if "error" in rows[name]:
            return f"{name} failed: {rows[name]['error']}"
    return "the rate of the link, the resident experts or the memory beside them were not measured in this run"


def summarise(rows: dict[str, Row], facts: Row) -> Row:
    """The figures that are quoted; None, with a reason, for what was not measured."""

    broken = {name: row for name, row in rows.items() if "error" in row}
    every, rows = rows, {name: row for name, row in rows.items() if name not in broken}

    def ms(name: str) -> Any:
        return rows.get(name, {}).get("ms")

    best = best_of(rows)
    summary: Row = {"dry_run": True} if facts.get("dry_run") else {}
    summary["admission"] = best
    for n in STREAMS:
        summary[f"c{n}_tok_s"] = rows.get(f"ours/{best}/C{n}", {}).get("tok_s")
    for n in (1, 2, 4):
        summary[f"c{n}_vs_stock151"] = ratio(ms(f"stock/C{n}"), ms(f"ours/{best}/C{n}"))
        summary[f"c{n}_vs_stock165"] = ratio(ms(f"{STOCK_165}/C{n}"), ms(f"ours/{best}/C{n}"))
        bound = bound_ms(rows, facts, best, f"C{n}") if best else None
        summary["step_over_bound" if n == 1 else f"c{n}_step_over_bound"] = ratio(ms(f"ours/{best}/C{n}"), bound)
        summary[f"c{n}_bound_ms"] = round(bound, 3) if bound else None
    summary["c4_over_c1"] = ratio(summary["c4_tok_s"], summary["c1_tok_s"])
    for n in (1, 2, 4):
        key = "all_resident_time_ratio" if n == 1 else f"c{n}_all_resident_time_ratio"
        summary[key] = ratio(ms(f"ours/resident/C{n}"), ms(f"stock_resident/C{n}"))
    summary |= _hit_rates(rows, facts, best)
    for what in ("prefill8k", "prefill32k"):
        times = [rows[f"ours/{mode}/{what}"]["s"] for mode in _modes_of(rows) if "s" in rows.get(f"ours/{mode}/{what}", {})]
        summary[f"{what}_of_limit"] = ratio(prefill_limit_s(rows, facts, what), min(times, default=None))
    three_parts = rows.get(f"ours/{THREE_PARTS}/prefill8k", {}).get("s")
    summary["prefill8k_of_limit_three_parts"] = ratio(prefill_limit_s(rows, facts), three_parts)
    summary |= _behind_a_context(rows, best)
    derated = bound_ms(rows, facts, "in_step_half_link", "C1")
    summary["c1_tok_s_half_link"] = rows.get("ours/in_step_half_link/C1", {}).get("tok_s")
    summary["step_over_bound_half_link"] = ratio(ms("ours/in_step_half_link/C1"), derated)
    modules = rows.get("ours/resident/modules", {})
    summary |= {"resident_enqueue_ms": modules.get("enqueue_ms"), "resident_busy_ms": modules.get("busy_ms")}
    summary["resident_kernels_ms"] = modules.get("kernels_ms")
    summary["resident_modules"] = {row["module"]: [row["enqueue_us"], row["busy_us"]] for row in modules.get("modules", ())} or None
    turns = rows.get("start/alternate") or rows.get(f"ours/{best}/alternate", {})
    summary |= {"alternations": turns.get("rounds"), "alternations_equal": turns.get("equal")}
    ours = [row for name, row in rows.items() if name.startswith(("ours/in_step", "ours/between_steps"))]
    summary["ram_extra_gib"] = max((row["ram_extra_gib"] for row in ours if row.get("ram_extra_gib") is not None), default=None)
    summary["vram_peak_gib_alternating"] = round(turns["vram_peak_mib"] / 1024, 2) if turns.get("vram_peak_mib") else None
    summary["vram_peak_gib"] = max((round(row["vram_peak_mib"] / 1024, 2) for row in ours if row.get("vram_peak_mib")), default=None)
    summary["second_start_s"] = rows.get("start/second", {}).get("s")
    summary["errors"] = sorted(broken)
    summary["reason_for_null"] = reasons(summary, tuple(NEEDS), lambda key: why_null(every, best, key))
    return summary


def _hit_rates(rows: dict[str, Row], facts: Row, best: str | None) -> Row:
    """Measured hit rates beside CLOCK's on the same trace, and the smallest lead on any trace by counts alone."""
    traces: dict[str, dict[str, float]] = facts.get("hit_rates", {})
    figures: Row = {}
    for what, trace in (("C1", "steady"), ("drift", "drift"), ("scan", "scan")):
        hit, clock = rows.get(f"ours/{best}/{what}", {}).get("hit_rate"), traces.get(trace, {}).get("clock")
        tail = "" if what == "C1" else f"_{what}"
        figures[f"hit_rate{tail}"] = hit
        figures[f"hit_minus_clock_points{tail}"] = round(100 * (hit - clock), 1) if hit is not None and clock is not None else None
    figures["belady_hit_rate"] = traces.get("steady", {}).get("belady")
    leads = [100 * (rates["heat"] - rates["clock"]) for rates in traces.values()]
    figures["least_points_over_clock_by_counts"] = round(min(leads), 1) if leads else None
    return figures


def _behind_a_context(rows: dict[str, Row], best: str | None) -> Row:
    """Decode behind 32k tokens, and its ratio to stock's."""
    figures: Row = {f"c{n}_tok_s_32k": rows.get(f"ours/{best}/C{n}{LONG}", {}).get("tok_s") for n in STREAMS}
    ours, stock = rows.get(f"ours/{best}/C1{LONG}", {}).get("ms"), rows.get(f"stock/C1{LONG}", {}).get("ms")
    return figures | {"c1_vs_stock151_32k": ratio(stock, ours)}
