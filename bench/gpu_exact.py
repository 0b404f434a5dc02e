"""Whether experts in host memory change a bit: `python -m bench.gpu_exact`. Needs an NVIDIA GPU with exllamav3 1.5.1.

Stock exllamav3 against itself first, then against ours with every kind of placement. Everything runs in one process, so that both sides use
the same Triton and GEMM selections. A command goes on where an earlier one of the same boot was cut off (--state): stock's logits are made
again, what was compared is not compared again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report, routing_trace, slice_cases
from bench.backend_info import gpu_info
from bench.gpu_exact_script import SCRIPTS, Script, compare, run
from bench.kept_rows import Rows
from kernels.python.arena import Arena
from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends import arena_fill, cpu_arena
from services.gpu_worker.backends.base import chunk_end
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches import decode_blocks, triton_tuners, upstream
from services.gpu_worker.patches.replace import Replacements

CACHE_TOKENS = 32_768
CHUNKS = (256, 2048, 8192)
FEW = ((SCRIPTS[1], 2048), (SCRIPTS[4], 2048))
NEVER = 1 << 30
# Lower than exllamav3's own choice for widths as small as the shipped model's, so that its path for very hot experts runs too.
RECONSTRUCT_ROWS = 512
ARENA = Path("/dev/shm/glm53-gpu-exact-arena")
SLICES = tuple(report.ROOT / "docs" / "results" / f"gpu_exact_slice{name}.json" for name in ("", "_stock165"))
UNMEASURED = "not measured: needs a run of bench.gpu_exact_slice with twelve layers, stock exllamav3 beside it"
OTHER_FIGURES = tuple(slice_cases.NEEDS)
STOCK = "stock"
HINTS = 3  # as exact is served
Row = dict[str, Any]


@dataclass
class Side:
    """One loaded model."""

    model: Any
    cache: Any
    tokenizer: Any
    served_steps: int = 0  # decode steps that went the worker's way


def decode_as_served(side: Side, into: Replacements) -> None:
    """exllamav3's generator decodes on the patched blocks from now on, as the worker's own steps do (backend.py)."""
    stock = side.model.forward

    def forward(input_ids: torch.Tensor, params: Row | None = None) -> Any:
        rows, tokens = input_ids.shape
        # The generator's prefills have no pinned staging.
        if params is not None and params.get("pinned_staging") and tokens == 1 and rows <= decode_blocks.MAX_ROWS:
            params[decode_blocks.DECODE] = rows
            side.served_steps += 1
        return stock(input_ids, params)

    into.set(side.model, "forward", forward)


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
    rows: Rows
    run: Callable[..., list[torch.Tensor]] = run
    wanted: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

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
            if name != STOCK and self.there(name, script.name, chunk):
                continue
            if time.monotonic() > self.deadline:
                self.skipped.append(f"{name}: {script.name}, chunk {chunk}")
                continue
            began, steps = time.monotonic(), side.served_steps
            got = self.run(self.exl3, side.model, side.cache, side.tokenizer, script, chunk, between)
            seconds = round(time.monotonic() - began, 3)
            want = self.wanted.setdefault((script.name, chunk), got)
            row = {"name": name, "script": script.name, "chunk": chunk, **compare(want, got), "seconds": seconds}
            if side.served_steps > steps:
                row["served_steps"] = side.served_steps - steps
            if facts is not None:
                row["facts"] = facts()
            self.add(row)

    def there(self, name: str, script: str | None = None, chunk: int | None = None) -> bool:
        """True when an earlier command compared it. Bits that differed once stay in the file."""
        return row_name(name, script, chunk) in self.rows.rows

    def moved_before(self, name: str) -> tuple[int, int]:
        """(records that turns of earlier commands moved, turns)."""
        turns = [row for row in self.rows.rows.values() if row["name"].startswith(f"{name}, turn ")]
        return max((row["facts"]["moved"] for row in turns), default=0), len({row["name"] for row in turns})

    def add(self, row: Row) -> None:
        """Notes a result, and saves all so far: a later case may hang."""
        self.rows.put(row_name(row["name"], row.get("script"), row.get("chunk")), row)

    @contextlib.contextmanager
    def with_slots(self, num_slots: int, options: ExpertOptions) -> Iterator[ExpertStore]:
        with Replacements() as into:
            store = loader.make_store(self.loaded, num_slots, self.top_k, options, into)
            try:
                yield store
            finally:
                store.close()


def row_name(name: str, script: str | None, chunk: int | None) -> str:
    """A row's key among all rows."""
    return " | ".join(str(part) for part in (name, script, chunk) if part is not None)


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


def admitting(bench: Bench, num_slots: int, *, on_demand: bool, few: bool, hints: int = 0) -> None:
    """The cache as it serves, admissions and staging on.

    Args:
        hints: most records of a layer that a guess brings ahead.
    """
    name = f"{num_slots} slots, {'on demand' if on_demand else 'between steps'}{', hints' if hints else ''}"
    if bench.there(f"{name}, verify"):
        return  # the last of its rows
    options = ExpertOptions(PlacementOptions(admit_after=1), on_demand=on_demand, pager=PagerPolicy(admit_after=1, hint_records=hints))
    with bench.with_slots(num_slots, options) as store:
        bench.measure(name, bench.ours, facts=lambda: {k: v for k, v in store.stats().items() if k != "arena_bytes"}, few=few)
        torch.cuda.synchronize()
        verified = store.verify()
        row = {"name": f"{name}, verify", "equal": verified.records_bad == verified.slots_bad == 0, "facts": vars(verified)}
        bench.add(row)


def shuffled(bench: Bench, num_slots: int, moves: int) -> None:
    """Between all iterations other records are resident, until so many have moved."""
    count, name = bench.loaded.records.num_records, f"random repoints, {num_slots} slots"
    moved, turn = bench.moved_before(name)
    if moved >= moves:
        return
    draw = random.Random(5 + turn)
    with bench.with_slots(num_slots, ExpertOptions(admit=False)) as store:

        def between(_step: int) -> None:
            nonlocal moved
            chosen = draw.sample(range(count), draw.randint(0, num_slots))
            moved += len(chosen) + store.placement.slots_used
            store.place(chosen)

        while moved < moves and time.monotonic() < bench.deadline:
            turn += 1
            bench.measure(f"{name}, turn {turn}", bench.ours, between, facts=lambda: {"moved": moved}, few=True)
    if moved < moves:
        bench.skipped.append(f"{name}: {moved} of {moves} records moved")


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
    name = f"the worker's backend, one stream, {'on demand' if on_demand else 'between steps'}"
    if bench.there(name, None, chunk):
        return
    if time.monotonic() > bench.deadline:
        bench.skipped.append(name)
        return
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
    row = {"name": name, "chunk": chunk}
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
    parser.add_argument("--state", type=Path, default=Path("/dev/shm/glm53-exact-rows.json"), help="what a later command goes on with")
    parser.add_argument(
        "--slice",
        type=Path,
        nargs="+",
        default=SLICES,
        help="results of bench.gpu_exact_slice, for figures of speed: the first that has one",
    )
    parser.add_argument("--dry-run", action="store_true", help="no GPU: three rows with made-up logits")
    parser.add_argument("--report", action="store_true", help="compare nothing, write the file again")
    parser.add_argument("--trace-after", type=float, default=0, help="print where every thread is, every so many seconds")
    args = parser.parse_args()
    began = time.monotonic()
    started = report.start("bench.gpu_exact")
    rows = Rows(args.state, args.out, started, functools.partial(summarise, args.slice))
    if not args.report:
        rows.facts.pop("problem", None)
        skipped: list[str] = []
        try:
            if args.dry_run:
                dry(args, rows, began, skipped)
            else:
                everything(args, started, rows, began, skipped)
        except Exception as error:  # noqa: BLE001 - the result file must say what broke
            traceback.print_exc()
            rows.facts["problem"] = f"{type(error).__name__}: {error}"
        if skipped:
            print(f"no time for: {len(skipped)} comparisons, the first is {skipped[0]}", flush=True)
        rows.facts |= {"skipped": skipped, "seconds": round(time.monotonic() - began, 1)}
    rows.save()
    summary = rows.summary()
    for key, value in summary.items():
        print(f"{key:28} {value}")
    if not args.report and summary["bit_exact"] is not True:
        raise SystemExit(1)


def everything(args: argparse.Namespace, started: Row, rows: Rows, began: float, skipped: list[str]) -> None:
    """All comparisons that the time allows and that are not there yet."""
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
    arena, shapes = make_arena(checkpoint, ARENA)
    try:
        loaded = loader.load_model(checkpoint, arena, shapes, cache_tokens=CACHE_TOKENS, max_streams=8, chunk=max(CHUNKS))
        print(f"ours loaded after {time.monotonic() - began:.1f} s", flush=True)
        ours = Side(loaded.model, loaded.cache, stock.tokenizer)
        decode_as_served(ours, loaded.replacements)
        scripts = [SCRIPTS[1], SCRIPTS[3], SCRIPTS[4]] if args.quick else list(SCRIPTS)
        chunks = [2048] if args.quick else list(CHUNKS)
        top_k = checkpoint.config.num_experts_per_tok
        bench = Bench(exllamav3, stock, ours, loaded, top_k, scripts, chunks, began + args.seconds, rows, skipped=skipped)
        compare_all(bench, checkpoint, args.moves)
    finally:
        arena.unlink()


def dry(args: argparse.Namespace, rows: Rows, began: float, skipped: list[str]) -> None:
    """Rows of stand-ins: they compare equal, and mean nothing."""

    def made_up(*_args: Any) -> list[torch.Tensor]:
        return [torch.zeros(1, 4)]

    side = Side(None, None, None)
    loaded: Any = None
    bench = Bench(None, side, side, loaded, 2, [SCRIPTS[3]], [2048], began + args.seconds, rows, made_up, skipped=skipped)
    for name in (STOCK, f"{STOCK} again", "every record read in place"):
        bench.measure(name, side)
    rows.facts["dry_run"] = True


def compare_all(bench: Bench, checkpoint: Checkpoint, moves: int) -> None:
    """Every kind of placement."""
    count = bench.loaded.records.num_records
    bench.measure(STOCK, bench.stock)
    bench.measure(f"{STOCK} again", bench.stock)
    bench.measure("every record read in place", bench.ours)
    overwritten(bench, 1.0)
    for on_demand in (False, True):
        served(bench, checkpoint, on_demand=on_demand)
        admitting(bench, count // 9, on_demand=on_demand, few=False)
        for num_slots in (count, count // 2, 7, 1):
            admitting(bench, num_slots, on_demand=on_demand, few=True)
    admitting(bench, count // 9, on_demand=True, few=False, hints=HINTS)
    admitting(bench, count // 2, on_demand=True, few=True, hints=HINTS)
    shuffled(bench, count // 2, moves)
    overwritten(bench, 0.5)


def bit_exact(rows: dict[str, Row], facts: Row) -> bool | None:
    """None when nothing was compared."""
    compared = [row["equal"] for row in rows.values() if row["name"] != STOCK]
    if "problem" in facts:
        return False
    return all(compared) if compared else None


def slice_figures(path: Path) -> Row:
    """What a run of bench.gpu_exact_slice measured of the figures that are quoted, and why others are null."""
    if not path.is_file():
        return {"reason_for_null": dict.fromkeys(OTHER_FIGURES, UNMEASURED)}
    document = json.loads(path.read_text())
    figures = {name: document["summary"].get(name) for name in OTHER_FIGURES}
    layers = len(document.get("facts", {}).get("depths", document["summary"].get("depths", ())))
    whole = layers == len(routing_trace.SLICE_DEPTHS)
    if not whole:
        figures["c1_tok_s"] = None  # of fewer layers it would be quoted as what it is not
    told = document["summary"].get("reason_for_null")
    known = told if isinstance(told, dict) else {}
    why = {name: known.get(name, UNMEASURED) for name, value in figures.items() if value is None}
    if not whole and document["summary"].get("c1_tok_s") is not None:
        why["c1_tok_s"] = f"the slice had {layers} MoE layers, the speed of {len(routing_trace.SLICE_DEPTHS)} is quoted"
    return {**figures, "slice": f"{layers} MoE layers, {path.name}", "reason_for_null": why}


def figures_of(paths: Sequence[Path]) -> Row:
    """Those of the first run; what is null there, of the first other run that has it, by that run's name. No ratio is made of two runs."""
    figures, *others = (slice_figures(path) for path in paths)
    for other in others:
        for name in [name for name in figures["reason_for_null"] if other.get(name) is not None]:
            figures[name] = other[name]
            del figures["reason_for_null"][name]
            figures.setdefault("of_other_runs", {})[name] = other["slice"]
    return figures


def summarise(slice_files: Sequence[Path], rows: dict[str, Row], facts: Row) -> Row:
    """The figures that are quoted."""
    exact = bit_exact(rows, facts)
    summary: Row = {
        "bit_exact": exact,
        "cases": len(rows),
        "cases_skipped": len(facts["skipped"]) if "skipped" in facts else None,
        "seconds": facts.get("seconds"),
        **dict.fromkeys(OTHER_FIGURES),
        **figures_of(slice_files),
    }
    if exact is None:
        summary["reason_for_null"]["bit_exact"] = "nothing was compared in this run"
    if "problem" in facts:
        summary["problem"] = facts["problem"]
    return ({"dry_run": True} if facts.get("dry_run") else {}) | summary


if __name__ == "__main__":
    main()
