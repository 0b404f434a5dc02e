"""Time of one decode step of a MoE layer on the GPU: the integer expert kernel and stock exllamav3's decode kernels, in one run.

    python -m bench.gpu_int_kernel [--out FILE] [--seconds 20]

GLM-5.3-Flash's expert (4096 x 2048, MUL1, K = 3), 8 picks a token, 128 experts in VRAM (1.2 GB) visited in rotation, so that weights never
come from the L2 cache. Both sides run from CUDA graphs of 16 steps with different picks, in turns; a figure is the median over replays,
timed with CUDA events. Both read the same records. One token is also timed as a step with a CPU lane has it (`lane`: three launches where a
step without one is one launch), and both with 4 of its 8 picks on the GPU, which stock has nothing like. Needs an NVIDIA GPU and torch;
stock's figures need exllamav3 1.5.1's extension. Every timed configuration is first compared with the CPU kernel, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench import report, slice_rates
from kernels.python.cuda_expert import CudaExperts, Routing
from kernels.python.expert import ExpertPool, ExpertShape
from tests.gpu.int_expert_steps import Step, differing, expected_out, expected_rows

HIDDEN, INTER, BITS, LIMIT, TOP_K, EXPERTS = 4096, 2048, 3, 10.0, 8, 128
MAX_ROWS = 8
STEPS = 16  # in a graph
# (tokens, distinct experts): what random routing over 288 experts gives, and 8 tokens that agree.
SHAPES = ((1, 8), (2, 16), (4, 28), (8, 48), (8, 8))
HERE = 4  # picks of one token that a CPU lane leaves to the GPU
DEFAULT_OUT = report.ROOT / "docs" / "results" / "gpu_int_kernel.json"


class Layer:
    """The records of one layer in VRAM, and what both kernels need to find their parts."""

    def __init__(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(1)
        self.shape = ExpertShape.create(HIDDEN, INTER, BITS, act_limit=LIMIT)
        self.records = torch.randint(
            -(2**31), 2**31 - 1, (EXPERTS, self.shape.record_bytes // 4), dtype=torch.int32, device="cuda", generator=generator
        ).view(torch.uint8)
        for name, part in self.shape.parts().items():
            if name.endswith("trellis"):
                continue
            size = torch.rand((EXPERTS, *part.shape), device="cuda", generator=generator) * 0.4 + 0.8
            sign = torch.randint(0, 2, size.shape, device="cuda", generator=generator) * 2 - 1
            scale = part.shape[0] ** -0.5 if name.endswith("svh") else 1.0
            values = (size * sign * scale).half().view(torch.uint8)
            self.records[:, part.offset : part.offset + part.nbytes] = values.view(EXPERTS, -1)
        self.addresses = self._table(0)

    def _table(self, offset: int) -> torch.Tensor:
        first = self.records.data_ptr() + offset
        return torch.tensor([first + e * self.shape.record_bytes for e in range(EXPERTS)], dtype=torch.int64, device="cuda")

    def part_tables(self, matrix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Addresses of a matrix's trellis, suh and svh for all experts, int64 [EXPERTS]."""
        parts = self.shape.parts()
        trellis, suh, svh = (self._table(parts[f"{matrix}_{kind}"].offset) for kind in ("trellis", "suh", "svh"))
        return trellis, suh, svh

    def host_records(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A copy in page-aligned host memory."""
        host = self.shape.empty_records(EXPERTS)
        host[:] = self.records.cpu().numpy()
        return host


@dataclasses.dataclass(frozen=True)
class Batch:
    """Activations and the picks of STEPS steps of one shape, in VRAM."""

    rows: int
    distinct: int
    x: torch.Tensor  # fp16 [rows, HIDDEN]
    selected: list[torch.Tensor]  # int64 [rows, TOP_K]
    weights: torch.Tensor  # fp16 [rows, TOP_K]


def picks(rows: int, distinct: int, turn: int, order: list[int], generator: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[rows, TOP_K] picks over exactly `distinct` experts, distinct in a row; consecutive turns take other experts."""
    chosen = [order[(turn * distinct + i) % EXPERTS] for i in range(distinct)]
    if distinct == TOP_K:
        return np.array([[chosen[(k + m) % TOP_K] for k in range(TOP_K)] for m in range(rows)], np.int64)
    while True:
        spare = [chosen[min(generator.integers(0, distinct, 2))] for _ in range(rows * TOP_K - distinct)]
        tokens: list[list[int]] = [[] for _ in range(rows)]
        for e in generator.permutation(np.array(chosen + spare)):
            free = [token for token in tokens if len(token) < TOP_K and e not in token]
            if not free:
                break
            min(free, key=len).append(int(e))
        if all(len(token) == TOP_K for token in tokens):
            return np.array(tokens, np.int64)


def make_batch(rows: int, distinct: int) -> Batch:
    generator = np.random.default_rng(rows * 100 + distinct)
    order = [int(e) for e in generator.permutation(EXPERTS)]
    selected = [torch.from_numpy(picks(rows, distinct, turn, order, generator)).cuda() for turn in range(STEPS)]
    x = torch.from_numpy(generator.standard_normal((rows, HIDDEN)).astype(np.float16)).cuda()
    weights = torch.from_numpy(generator.uniform(0.05, 0.65, (rows, TOP_K)).astype(np.float16)).cuda()
    return Batch(rows, distinct, x, selected, weights)


def half_elsewhere(batch: Batch) -> Batch:
    """The batch with the first HERE picks of each token; the others are no experts, as those of another lane are not."""
    selected = [picks.clone() for picks in batch.selected]
    for picks in selected:
        picks[:, HERE:] = -1
    return dataclasses.replace(batch, distinct=HERE, selected=selected)


Call = Callable[[int], None]


def our_call(layer: Layer, experts: CudaExperts, batch: Batch, out: torch.Tensor, *, serial: bool = False, lane: bool = False) -> Call:
    """One step of our kernel on the current stream, by the number of the step. lane: another lane may take part in it."""
    routings = [
        Routing(layer.addresses.data_ptr(), selected.data_ptr(), batch.weights.data_ptr(), EXPERTS, batch.rows, TOP_K)
        for selected in batch.selected
    ]

    def call(turn: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        # In a model the router's kernel comes before a step; in the graph it is the step before.
        experts.run(
            routings[turn], batch.x.data_ptr(), out=out.data_ptr(), serial=serial, after_kernel=turn > 0, all_here=not lane, stream=stream
        )

    return call


class Stock:
    """exllamav3 1.5.1's decode kernels for routed experts, on the same records."""

    def __init__(self, layer: Layer) -> None:
        import exllamav3_ext as extension  # only where it is installed: the bench also runs without

        self._extension = extension
        self._tables = [layer.part_tables(name) for name in ("gate", "up", "down")]
        slots = MAX_ROWS * TOP_K

        def buffer(dtype: torch.dtype, *dims: int) -> torch.Tensor:
            return torch.empty(dims, dtype=dtype, device="cuda")

        half = torch.half
        self._scratch = (
            buffer(half, slots, HIDDEN),
            buffer(half, slots, HIDDEN),
            buffer(half, slots, INTER),
            buffer(half, slots, INTER),
            buffer(half, slots, INTER),
            buffer(torch.float, slots, HIDDEN),
            torch.zeros(slots * (INTER // 128) + MAX_ROWS * (HIDDEN // 128) + 2 * slots + 3, dtype=torch.int, device="cuda"),
        )
        self.out = buffer(torch.float, MAX_ROWS, HIDDEN)

    def call(self, batch: Batch) -> Call:
        gate, up, down = self._tables
        bits = float(BITS)

        def call(turn: int) -> None:
            self._extension.exl3_moe_coop(
                batch.x,
                batch.selected[turn],
                batch.weights,
                -1,
                -1,
                HIDDEN,
                *gate,
                *up,
                *down,
                None,
                None,
                None,
                bits,
                bits,
                bits,
                False,
                True,
                0,
                LIMIT,
                True,
                *self._scratch,
                self.out,
                None,
                None,
            )

        return call


def make_graph(call: Call) -> torch.cuda.CUDAGraph:
    """STEPS steps in a graph, after one run of each outside it."""
    for turn in range(STEPS):
        call(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(STEPS):
            call(turn)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, replays: int = 4) -> float:
    """Microseconds of one step, over a few replays back to back."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (replays * STEPS)


def measure(graphs: dict[str, torch.cuda.CUDAGraph], seconds: float) -> dict[str, list[float]]:
    """Samples of every graph, taken in turns so that a change of the machine's pace meets all of them."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        replay_us(graph)
    deadline = time.monotonic() + seconds
    while len(samples[next(iter(samples))]) < 20 or time.monotonic() < deadline:
        for name, graph in graphs.items():
            samples[name].append(replay_us(graph))
    return samples


def check(layer: Layer, batch: Batch, call: Call, out: torch.Tensor, host: Any, pool: ExpertPool) -> None:
    """Step 0 of a batch against the CPU kernel. Raises AssertionError when a bit differs."""
    out.fill_(float("nan"))
    call(0)
    torch.cuda.synchronize()
    step = Step(batch.x.cpu().numpy(), batch.selected[0].cpu().numpy(), batch.weights.cpu().numpy(), np.ones(EXPERTS, np.bool_))
    expected = expected_out(step, expected_rows(pool, layer.shape, host, step))
    wrong = differing(out[: batch.rows].cpu().numpy(), expected)
    assert wrong == 0, f"{batch.rows} rows: {wrong} of {expected.size} outputs differ from the CPU kernel"


def stock_or_reason(layer: Layer) -> tuple[Stock | None, str]:
    try:
        return Stock(layer), ""
    except ImportError as error:
        return None, str(error)


def summary_of(rows: list[dict[str, Any]], copy_rate: float, reason: str) -> dict[str, Any]:
    """The quoted figures; a ratio is null, with the reason, where stock did not run."""
    summary: dict[str, Any] = {"bit_identical_to_cpu": True, "device_copy_gb_s": round(copy_rate, 1)}
    for row in rows:
        name = f"m{row['rows']}" if row["distinct"] != TOP_K or row["rows"] == 1 else f"m{row['rows']}_8_experts"
        if row["distinct"] < TOP_K:
            name += f"_{row['distinct']}_here"
        summary[f"us_{name}"] = row["ours_us"]
        summary[f"floor_us_{name}"] = row["floor_us"]
        if "lane_us" in row:
            summary[f"lane_us_{name}"] = row["lane_us"]
        if row["distinct"] >= TOP_K:
            summary[f"int_kernel_vs_stock_{name}"] = row.get("ratio")
        if "lane_ratio" in row:
            summary[f"lane_vs_stock_{name}"] = row["lane_ratio"]
    if reason:
        summary["why_no_stock"] = reason
    return summary


def main() -> None:
    """Measures, prints a table and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=DEFAULT_OUT)
    parser.add_argument("--seconds", type=float, default=20.0, help="for all timed configurations together")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: made-up times")
    args = parser.parse_args()
    started = report.start("bench.gpu_int_kernel")
    if args.dry_run:
        rows = dry_rows()
        report.write_result(args.out, started, rows, summary_of(rows, 4000.0, "") | {"dry_run": True})
        return
    layer = Layer()
    host = layer.host_records()
    stock, reason = stock_or_reason(layer)
    experts = CudaExperts(layer.shape, MAX_ROWS * TOP_K, torch.cuda.current_device())
    started["gpu"] = {"kernel": experts.description, "torch": torch.__version__, "cuda": torch.version.cuda}
    copy_rate = slice_rates.copy_rate() / 1e9
    rows = []
    with ExpertPool(threads=max(1, min(16, os.cpu_count() or 1))) as pool:
        batches = [make_batch(tokens, distinct) for tokens, distinct in SHAPES]
        for batch in (*batches, half_elsewhere(batches[0])):
            out = torch.empty((MAX_ROWS, HIDDEN), device="cuda")
            calls = {name: our_call(layer, experts, batch, out, serial=name == "ours_serial") for name in ("ours", "ours_serial")}
            if batch.rows == 1:
                calls["lane"] = our_call(layer, experts, batch, out, lane=True)
            for call in calls.values():
                check(layer, batch, call, out, host, pool)
            if stock is not None and batch.distinct >= TOP_K:
                calls["stock"] = stock.call(batch)
            samples = measure({name: make_graph(call) for name, call in calls.items()}, args.seconds / (len(batches) + 1))
            rows.append(row_of(batch, samples, copy_rate))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items() if key != "samples"), flush=True)
    report.write_result(args.out, started, rows, summary_of(rows, copy_rate, reason))


def dry_rows() -> list[dict[str, Any]]:
    """Rows of this bench's shape whose times mean nothing."""
    rows = []
    for tokens, distinct in (*SHAPES, (1, HERE)):
        samples = {"ours": [50.0, 51.0], "ours_serial": [60.0, 61.0]}
        samples |= {"lane": [51.0, 52.0]} if tokens == 1 else {}
        samples |= {"stock": [100.0, 102.0]} if distinct >= TOP_K else {}
        rows.append(row_of(Batch(tokens, distinct, torch.empty(0), [], torch.empty(0)), samples, 4000.0))
    return rows


def row_of(batch: Batch, samples: dict[str, list[float]], copy_rate: float) -> dict[str, Any]:
    """Medians, quartiles and the rate at which weights were read."""
    weight_bytes = batch.distinct * 3 * HIDDEN * INTER * BITS // 8
    row: dict[str, Any] = {"rows": batch.rows, "distinct": batch.distinct, "floor_us": round(weight_bytes / copy_rate / 1e3, 1)}
    for name, values in samples.items():
        row[f"{name}_us"] = round(statistics.median(values), 2)
    row["gb_s"] = round(weight_bytes / row["ours_us"] / 1e3, 1)
    if "stock" in samples:
        row["ratio"] = round(row["ours_us"] / row["stock_us"], 4)
        if "lane" in samples:
            row["lane_ratio"] = round(row["lane_us"] / row["stock_us"], 4)
    row["samples"] = {name: [round(q, 2) for q in statistics.quantiles(values, n=4)] + [len(values)] for name, values in samples.items()}
    return row


if __name__ == "__main__":
    main()
