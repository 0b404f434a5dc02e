"""Whether experts in host memory change a bit: `python -m bench.gpu_exact`. Needs an NVIDIA GPU with exllamav3 1.5.1.

Stock exllamav3 against itself first, then against ours with every kind of placement. Everything runs in one process, so that both sides use
the same Triton and GEMM selections.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib
import io
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report, routing_trace
from bench.backend_info import gpu_info
from bench.gpu_exact_script import SCRIPTS, Script, compare, run
from kernels.python.arena import Arena
from services.gpu_worker.backends import arena_fill, cpu_arena
from services.gpu_worker.backends.base import chunk_end
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches import triton_tuners, upstream
from services.gpu_worker.patches.replace import Replacements

CACHE_TOKENS = 32_768
CHUNKS = (256, 2048, 8192)
FEW = ((SCRIPTS[1], 2048), (SCRIPTS[4], 2048))
NEVER = 1 << 30
# Lower than exllamav3's own choice for widths as small as the shipped model's, so that its path for very hot experts runs too.
RECONSTRUCT_ROWS = 512
SLICE = report.ROOT / "docs" / "results" / "gpu_exact_slice.json"
UNMEASURED = "not measured: needs a run of bench.gpu_exact_slice with twelve layers, stock exllamav3 beside it"
OTHER_FIGURES = (
    "c1_tok_s",
    "step_over_bound",
    "c1_vs_stock151",
    "c2_vs_stock151",
    "c4_vs_stock151",
    "c1_vs_stock165",
    "c4_over_c1",
    "all_resident_time_ratio",
    "hit_rate",
    "hit_minus_clock_points",
    "belady_hit_rate",
    "prefill8k_of_limit",
    "ram_extra_gib",
)


@dataclass
class Side:
    """One loaded model."""

    model: Any
    cache: Any
    tokenizer: Any


@dataclass
class Bench:
    """Both sides and what was measured."""

    exl3: Any
    stock: Side
    ours: Side
    loaded: loader.Loaded
    top_k: int
    scripts: list[Script]
    chunks: list[int]
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    wanted: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    save: Callable[[], None] = lambda: None

    def measure(
        self,
        name: str,
        side: Side,
        between: Callable[[int], None] | None = None,
        facts: Callable[[], Any] | None = None,
        *,
        few: bool = False,
    ) -> None:
        """Runs every case (`few`: two of them) on a side; the first side that runs a case says what is wanted."""
        cases = [(script, chunk) for script in self.scripts for chunk in self.chunks]
        for script, chunk in [case for case in cases if case in FEW] if few else cases:
            if time.monotonic() > self.deadline:
                self.skipped.append(f"{name}: {script.name}, chunk {chunk}")
                continue
            began = time.monotonic()
            got = run(self.exl3, side.model, side.cache, side.tokenizer, script, chunk, between)
            seconds = round(time.monotonic() - began, 3)
            want = self.wanted.setdefault((script.name, chunk), got)
            row = {"name": name, "script": script.name, "chunk": chunk, **compare(want, got), "seconds": seconds}
            if facts is not None:
                row["facts"] = facts()
            self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Notes a result, and saves all so far: a later case may hang."""
        self.rows.append(row)
        print(row, flush=True)
        self.save()

    @contextlib.contextmanager
    def with_slots(self, num_slots: int, options: ExpertOptions) -> Iterator[ExpertStore]:
        with Replacements() as into:
            store = loader.make_store(self.loaded, num_slots, self.top_k, options, into)
            try:
                yield store
            finally:
                store.close()


def load_stock(exl3: Any, path: Path) -> Side:
    config = exl3.Config.from_directory(str(path))
    model = exl3.Model.from_config(config)
    cache = exl3.Cache(model, max_num_tokens=CACHE_TOKENS, max_batch_size=8)
    model.load(device="cuda:0", max_chunk_size=max(CHUNKS), progressbar=False)
    return Side(model, cache, exl3.Tokenizer.from_config(config))


def make_arena(checkpoint: Checkpoint, path: Path) -> tuple[Arena, list[Any]]:
    shapes = [cpu_arena.expert_shape(checkpoint, layer) for layer in checkpoint.config.moe_layers]
    arena = Arena.create(str(path), shapes, checkpoint.config.n_routed_experts, checkpoint.hash)
    arena_fill.fill(checkpoint, shapes, arena, lambda _fraction, _what: None)
    arena.seal()
    return arena, shapes


def admitting(bench: Bench, num_slots: int, *, on_demand: bool, few: bool) -> None:
    """The cache as it serves, admissions and staging on."""
    name = f"{num_slots} slots, {'on demand' if on_demand else 'between steps'}"
    with bench.with_slots(num_slots, ExpertOptions(PlacementOptions(admit_after=1), on_demand=on_demand)) as store:
        bench.measure(name, bench.ours, facts=lambda: {k: v for k, v in store.stats().items() if k != "arena_bytes"}, few=few)
        torch.cuda.synchronize()
        verified = store.verify()
        row = {"name": f"{name}, verify", "equal": verified.records_bad == verified.slots_bad == 0, "facts": vars(verified)}
        bench.add(row)


def shuffled(bench: Bench, num_slots: int, moves: int) -> None:
    """Between all iterations other records are resident, until so many have moved."""
    draw, moved, count = random.Random(5), 0, bench.loaded.records.num_records
    with bench.with_slots(num_slots, ExpertOptions(admit=False)) as store:

        def between(_step: int) -> None:
            nonlocal moved
            chosen = draw.sample(range(count), draw.randint(0, num_slots))
            moved += len(chosen) + store.placement.slots_used
            store.place(chosen)

        while moved < moves and time.monotonic() < bench.deadline:
            bench.measure(f"random repoints, {num_slots} slots", bench.ours, between, facts=lambda: {"moved": moved}, few=True)


def overwritten(bench: Bench, share: float) -> None:
    """Host records of what is resident are filled with 0xFF: whoever still reads one reads noise."""
    records = bench.loaded.records
    count = int(records.num_records * share)
    chosen = random.Random(6).sample(range(records.num_records), count)
    kept = records.host.clone()
    try:
        with bench.with_slots(count, ExpertOptions(admit=False, stage_min_rows=NEVER)) as store:
            store.place(chosen)
            records.host[torch.tensor(chosen)] = 0xFF
            bench.measure(f"{share:.0%} resident, their host records 0xFF", bench.ours)
    finally:
        torch.cuda.synchronize()
        records.host.copy_(kept)


def served(bench: Bench, checkpoint: Checkpoint, *, on_demand: bool) -> None:
    """The worker's backend against exllamav3's generator: one stream, the same chunks, greedy."""
    script = next(s for s in SCRIPTS if s.streams == 1)
    chunk, arrival = 2048, script.arrivals[0]
    want = bench.wanted.get((script.name, chunk)) or run(
        bench.exl3, bench.stock.model, bench.stock.cache, bench.stock.tokenizer, script, chunk
    )
    # A Generator took the cache's slots; they go back before the backend takes them.
    bench.ours.cache.reset_states()
    info = gpu_info(checkpoint.config.vocab_size, 16_384, 2, chunk)
    options = ExpertOptions(PlacementOptions(admit_after=1), on_demand=on_demand)
    with bench.with_slots(bench.loaded.records.num_records // 6, options) as store:
        backend = Exl3Backend(bench.ours.model, bench.ours.cache, store, bench.loaded.records, Replacements(), info)
        stream = backend.open_stream()
        ids = torch.randint(10, 2000, (1, arrival.prompt), generator=torch.Generator().manual_seed(arrival.prompt))[0].tolist()
        start, logits = 0, np.zeros((1, 1), np.float32)
        while start < len(ids):
            end = chunk_end(start, len(ids), chunk, PAGE_TOKENS)
            logits = backend.prefill(stream, ids[start:end], all_logits=False)
            start = end
        got = [torch.from_numpy(logits.copy())]
        while len(got) < arrival.new:
            got.append(torch.from_numpy(backend.decode([stream], [int(got[-1].argmax())]).copy()))
        backend.close_stream(stream)
        backend.check_idle()
    width = checkpoint.config.vocab_size
    row = {"name": f"the worker's backend, one stream, {'on demand' if on_demand else 'between steps'}", "chunk": chunk}
    row |= compare([w.float()[:, :width] for w in want], got)
    bench.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=report.ROOT / "models" / "tiny" / "checkpoint")
    parser.add_argument("--out", type=Path, default=report.ROOT / "docs" / "results" / "gpu_exact.json")
    parser.add_argument("--seconds", type=float, default=3600.0, help="leave out what does not fit into this time")
    parser.add_argument("--quick", action="store_true", help="one chunk size, three scripts")
    parser.add_argument("--moves", type=int, default=10_000, help="records that the random repoints move")
    parser.add_argument("--first-config", action="store_true", help="Triton kernels take their first configuration instead of timing all")
    parser.add_argument("--trace-after", type=float, default=0, help="print where every thread is, every so many seconds")
    args = parser.parse_args()
    began = time.monotonic()
    started = report.start("bench.gpu_exact")
    upstream.check()
    import exllamav3
    from exllamav3.modules import moe_batch_recon

    moe_batch_recon.RECON_MAX_ROWS = RECONSTRUCT_ROWS
    if args.first_config:
        # Timing configurations takes minutes; which of them runs does not matter as long as both sides run the same.
        from triton.runtime.autotuner import Autotuner

        importlib.import_module(upstream.TUNED)
        started["triton_tuners_pinned"] = triton_tuners.use_first_configurations(triton_tuners.find(Autotuner))
    if args.trace_after:
        faulthandler.dump_traceback_later(args.trace_after, repeat=True)
    started["machine"]["gpu"] = torch.cuda.get_device_name(0)
    checkpoint = Checkpoint(args.checkpoint)
    stock = load_stock(exllamav3, args.checkpoint)
    print(f"stock loaded after {time.monotonic() - began:.1f} s", flush=True)
    path = Path("/dev/shm/glm53-gpu-exact-arena")
    arena, shapes = make_arena(checkpoint, path)
    problem = ""
    bench = None
    try:
        loaded = loader.load_model(checkpoint, arena, shapes, cache_tokens=CACHE_TOKENS, max_streams=8, chunk=max(CHUNKS))
        print(f"ours loaded after {time.monotonic() - began:.1f} s", flush=True)
        ours = Side(loaded.model, loaded.cache, stock.tokenizer)
        scripts = [SCRIPTS[1], SCRIPTS[3], SCRIPTS[4]] if args.quick else list(SCRIPTS)
        chunks = [2048] if args.quick else list(CHUNKS)
        bench = Bench(exllamav3, stock, ours, loaded, checkpoint.config.num_experts_per_tok, scripts, chunks, began + args.seconds)
        bench.save = functools.partial(write, args.out, started, bench, began, "")
        count = loaded.records.num_records
        bench.measure("stock", stock)
        bench.measure("stock again", stock)
        bench.measure("every record read in place", ours)
        overwritten(bench, 1.0)
        for on_demand in (False, True):
            served(bench, checkpoint, on_demand=on_demand)
            admitting(bench, count // 9, on_demand=on_demand, few=False)
            for num_slots in (count, count // 2, 7, 1):
                admitting(bench, num_slots, on_demand=on_demand, few=True)
        shuffled(bench, count // 2, args.moves)
        overwritten(bench, 0.5)
    except Exception:  # noqa: BLE001 - the result file must say what broke
        problem = traceback.format_exc()
        print(problem, flush=True)
    finally:
        arena.unlink()
    write(args.out, started, bench, began, problem)
    if problem or bench is None or not all_equal(bench):
        raise SystemExit(1)


def all_equal(bench: Bench) -> bool:
    """True when there is something to compare and all of it is equal."""
    compared = [row for row in bench.rows if row["name"] != "stock"]
    return bool(compared) and all(row["equal"] for row in compared)


def slice_figures(path: Path) -> dict[str, Any]:
    """What a run of bench.gpu_exact_slice measured of the figures that are quoted."""
    if not path.is_file():
        return {}
    document = json.loads(path.read_text())
    figures = {name: value for name, value in document["summary"].items() if name in OTHER_FIGURES and value is not None}
    layers = len(document.get("facts", {}).get("depths", document["summary"].get("depths", ())))
    if layers != len(routing_trace.SLICE_DEPTHS):
        figures.pop("c1_tok_s", None)  # of fewer layers it would be quoted as what it is not
    return {**figures, "slice": f"{layers} MoE layers, {path.name}"}


def write(out: Path, started: dict[str, Any], bench: Bench | None, began: float, problem: str) -> None:
    """The result file as it stands."""
    summary: dict[str, Any] = {
        "bit_exact": bench is not None and not problem and all_equal(bench),
        "cases": len(bench.rows) if bench is not None else 0,
        "cases_skipped": len(bench.skipped) if bench is not None else None,
        "seconds": round(time.monotonic() - began, 1),
        **dict.fromkeys(OTHER_FIGURES),
        **slice_figures(SLICE),
        "reason_for_null": UNMEASURED,
    }
    if problem:
        summary["problem"] = problem.splitlines()[-1]
    with contextlib.redirect_stdout(io.StringIO()):
        report.write_result(out, started, bench.rows if bench is not None else [], summary)


if __name__ == "__main__":
    main()
