"""What the device pager hits on the slice's traces, without a GPU: `python -m bench.pager_rates` → docs/results/pager_rates.json.

The pager is the real one, with the roles of slots that the backend gives it; its driver does at once what it is asked for, and copies no
record. By counts (bench/slice_traces.py) every slot holds a record that stays; here some are taken by records that pass. `scan` lends every
slot but the transit ones to a prompt half way through what is counted, as a prompt of 8,192 tokens does on the slice.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from bench import report, routing_trace, slice_traces
from kernels.python.cache_sim import CachePolicy
from kernels.python.pager import WORDS_BYTES, Pager, PagerDriver, PagerLayout, PagerPolicy
from services.gpu_worker.backends.exl3.on_demand import PASSING, TRANSIT_SLOTS

OUT = report.ROOT / "docs" / "results" / "pager_rates.json"
MAX_ROWS, STRIDE, STREAM = 8, 64, 1
TRACES = ("steady", *slice_traces.TRACES)


def _write_word(_stream: int, address: int, value: int, _flags: int) -> int:
    ctypes.c_uint32.from_address(address).value = value
    return 0


def _copy_to_host(to: int, source: int, size: int, _stream: int) -> int:
    ctypes.memmove(to, source, size)
    return 0


def immediate_driver() -> PagerDriver:
    """A device that is never late and has no memory: picks and words travel, records do not."""
    return PagerDriver(
        PagerDriver.CONTEXT_GET(lambda _out: 0),
        PagerDriver.CONTEXT_SET(lambda _context: 0),
        PagerDriver.COPY_TO_HOST(_copy_to_host),
        PagerDriver.COPY_TO_DEVICE(lambda _to, _source, _size, _stream: 0),
        PagerDriver.WORD(_write_word),
        PagerDriver.WORD(lambda _stream, _address, _value, _flags: 0),
    )


@dataclasses.dataclass(frozen=True)
class Roles:
    """Slots, and what they are for."""

    slots: int
    transit: int = TRANSIT_SLOTS
    passing: int = PASSING


@dataclasses.dataclass(frozen=True)
class Counts:
    """Behind the warm-up."""

    picks: int
    hits: int
    in_place: int


def drive(trace: slice_traces.Trace, roles: Roles, warm: int, *, lent_at: int | None = None, policy: PagerPolicy | None = None) -> Counts:
    """Decodes a trace, uint16 [tokens, streams, layers, 8].

    Args:
        lent_at: the token before which every slot but the transit ones is emptied.
    """
    tokens, streams, layers, top_k = trace.shape
    experts = routing_trace.EXPERTS
    picks = np.ascontiguousarray(trace.transpose(0, 2, 1, 3)).astype(np.int64)
    memory = {
        "host": np.zeros((layers * experts, STRIDE), np.uint8),
        "slots": np.zeros((roles.slots, STRIDE), np.uint8),
        "table": np.zeros((layers, 1, experts), np.int64),
        "mirror": np.zeros((layers, 1, experts), np.int64),
        "picks": np.zeros((layers, MAX_ROWS * top_k), np.int64),
        "words": np.zeros(WORDS_BYTES, np.uint8),
    }
    at = {name: values.ctypes.data for name, values in memory.items()}
    layout = PagerLayout(
        num_layers=layers,
        experts_per_layer=experts,
        num_slots=roles.slots,
        num_transit=roles.transit,
        max_rows=MAX_ROWS,
        top_k=top_k,
        record_stride=STRIDE,
        host_address=at["host"],
        host_device=at["host"],
        slots_device=at["slots"],
        table_device=at["table"],
        mirror_address=at["mirror"],
        picks_address=at["picks"],
        words_address=at["words"],
        words_device=at["words"],
        copy_stream=STREAM,
        num_passing=roles.passing,
    )
    pager = Pager(layout, np.zeros((layers, 1), np.int64), policy, immediate_driver())
    try:
        before = pager.counters()
        for token in range(tokens):
            if token == warm:
                before = pager.counters()
            if token == lent_at:
                pager.vacate(roles.transit, roles.slots - roles.transit)
            for layer in range(layers):
                pager.step(layer, streams, picks[token, layer].ctypes.data, STREAM)
            pager.catch_up()
        after = pager.counters()
    finally:
        pager.close()
    return Counts(after.picks - before.picks, after.hits - before.hits, after.in_place - before.in_place)


def measure(seed: int, warm: int, streams: int) -> list[dict[str, Any]]:
    """A row for each trace of a seed, as long behind the warm-up as in it. CLOCK is counted for one stream."""
    depths, tokens = routing_trace.SLICE_DEPTHS, 2 * warm
    roles = Roles(round(routing_trace.SLOT_SHARE * routing_trace.EXPERTS * len(depths)))
    steady = routing_trace.make(seed, tokens, streams=streams, depths=depths)
    rows = []
    for name in TRACES:
        trace = slice_traces.drifting(seed, tokens, depths, streams) if name == "drift" else steady
        scan = name == "scan"
        got = drive(trace, roles, warm, lent_at=slice_traces.middle(warm, tokens) if scan else None)
        row = {"trace": name, "seed": seed, "streams": streams, "steps": warm, "hit_rate": round(got.hits / got.picks, 4)}
        row["read_in_place_per_step"] = round(got.in_place / warm, 2)
        if streams == 1:
            row["clock"] = slice_traces.rates(trace[:, 0], roles.slots, warm, scan=scan)[CachePolicy.CLOCK.name.lower()]
        rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means by trace and streams; for one stream the least distance to CLOCK, in points, of any seed."""
    result: dict[str, Any] = {}
    for streams in sorted({row["streams"] for row in rows}):
        for trace in TRACES:
            these = [row for row in rows if row["trace"] == trace and row["streams"] == streams]
            result[f"{trace}_c{streams}_hit_rate"] = round(statistics.mean(row["hit_rate"] for row in these), 4)
            if all("clock" in row for row in these):
                over = [100 * (row["hit_rate"] - row["clock"]) for row in these]
                result[f"{trace}_c{streams}_least_points_over_clock"] = round(min(over), 1)
    return result


def main() -> None:
    """Measures and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[*range(5), *range(20, 30)], help="10 to 19 are what the policy was chosen on"
    )
    parser.add_argument("--warm", type=int, default=150, help="decode steps before counting, and so many counted")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    started = report.start("bench.pager_rates")
    rows = [row for streams in args.streams for seed in args.seeds for row in measure(seed, args.warm, streams)]
    report.write_result(args.out, started, rows, summary(rows))


if __name__ == "__main__":
    main()
