"""Our side of the full-shape slice: the arena, forced routing, decode and prefill of every placement. For bench/gpu_exact_slice.py and
bench/gpu_fast.py.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench import routing_trace, slice_cases, slice_checkpoint, slice_modules, slice_rates, slice_traces
from bench.backend_info import gpu_info
from bench.kept_rows import Row
from bench.slice_cases import Case, Mode
from bench.slice_checkpoint import HIDDEN, INTER
from bench.slice_machine import Nvml, PeakSampler, ram_extra_gib, vram_of
from kernels.python import segments
from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape
from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends import arena_fill, cpu_arena
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches.replace import Replacements

SHM = "/dev/shm"
PROMPT = 64
# Of the card that the model is meant for: what CUDA has of its 24,564 MiB (23.6 to 23.7 GiB on an RTX 4090), the driver keeps the rest.
# Torch may take no more outside of the resident mode.
CARD_MIB = 24_200
CHUNK = 8192
PAGES_BEHIND = 2 * PAGE_TOKENS  # of a long context: what decode adds to it, rounded up
RANDOM_BYTES = 32 << 20  # that records are made of where no files are
ROUNDS, ROUND_STEPS = 50, 4  # of long prefills and decode steps in turns


def depths_of(layers: int) -> tuple[int, ...]:
    """Which of the model's MoE layers the slice's stand for."""
    every = routing_trace.SLICE_DEPTHS
    return tuple(every[i * len(every) // layers] for i in range(layers))


def write_checkpoint(path: Path, num_moe: int) -> None:
    """The dense part alone."""
    slice_checkpoint.write(path, num_moe, experts=False)


def slice_hash(num_moe: int) -> bytes:
    """What an arena without files is known by: any filling of it measures the same."""
    return bytes([num_moe]) * 32


def open_arena(path: Path, shapes: list[ExpertShape], threads: int = 0) -> Arena:
    """Random records with sane scales; those of an earlier run where they are still there.

    Args:
        threads: that fill it, each another record; 0 for one per processor.

    Raises:
        ShmNoSpace: the file system is too small.
        ShmInUse: another process has the arena.
    """
    arena = Arena.attach_or_create(str(path), shapes, routing_trace.EXPERTS, slice_hash(len(shapes)))
    if arena.reattached:
        return arena
    # Bits out of one pool that stays in the processor's cache, from another place each time: what is written is all that memory sees.
    noise = np.frombuffer(np.random.default_rng(3).bytes(RANDOM_BYTES), np.uint8)
    parts = [record_scales(shape) for shape in shapes]

    def fill(slot: int) -> None:
        layer, expert = divmod(slot, routing_trace.EXPERTS)
        record, size = arena.record(layer, expert), shapes[layer].record_bytes
        start = slot * 65537 % (len(noise) - size)
        record[:] = noise[start : start + size]
        for offset, values in parts[layer]:
            record[offset : offset + len(values)] = values
        arena.finish(layer, expert, 1)

    with concurrent.futures.ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(fill, slot) for slot in range(len(shapes) * routing_trace.EXPERTS)]:
            done.result()
    arena.seal()
    return arena


def record_scales(shape: ExpertShape) -> list[tuple[int, NDArray[np.uint8]]]:
    """Where a record's scales begin, and bytes for them with which no activation grows or dies out."""
    scales = []
    for projection, inputs, outputs in (("gate", HIDDEN, INTER), ("up", HIDDEN, INTER), ("down", INTER, HIDDEN)):
        signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float16), inputs)
        sizes = (np.random.default_rng(2).choice([-1, 1], outputs) * 0.7 * inputs**-0.5).astype(np.float16)
        for part, values in (("suh", signs), ("svh", sizes)):
            scales.append((int(getattr(shape, f"{projection}_{part}")), values.view(np.uint8)))
    return scales


def fill_arena(checkpoint: Checkpoint, path: Path) -> tuple[Arena, list[ExpertShape], Row]:
    """The arena as the worker fills it, from the slice's files; facts of how long that took."""
    shapes = cpu_arena.expert_shapes(checkpoint)
    began = time.perf_counter()
    # Known by the checkpoint's own hash: a worker that starts on the same files takes it over.
    arena = Arena.attach_or_create(str(path), shapes, routing_trace.EXPERTS, checkpoint.hash)
    if arena.reattached:
        return arena, shapes, {"arena": "taken over"}
    reserved = time.perf_counter()
    arena_fill.fill(checkpoint, shapes, arena, lambda _fraction, _words: None)
    filled = time.perf_counter()
    arena.seal()
    size = arena.total_bytes
    return arena, shapes, {
        "arena": "filled",
        "arena_reserve_s": round(reserved - began, 2),
        "arena_fill_s": round(filled - reserved, 2),
        "arena_fill_gb_s": round(size / 1e9 / (filled - reserved), 2),
        "arena_fill_threads": arena_fill.resolve_threads(0),
    }  # fmt: skip


class ForcedRouting:
    """Replaces the router's picks by the trace's, one token of it per decode step."""

    def __init__(self, loaded: loader.Loaded, trace: np.ndarray) -> None:
        self._device = loaded.table.device
        self.use(trace)
        for layer in loaded.layers:
            layer.mlp.routing_fn = self._wrap(layer.mlp.routing_fn, layer.index)

    def use(self, trace: np.ndarray) -> None:
        """Goes on with another trace, [tokens, streams, layers, 8]."""
        self.trace = torch.from_numpy(trace.astype(np.int64)).to(self._device)
        self.step = -1

    def _wrap(self, stock: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def routed(rows: int, config: Any, y: Any, params: Any) -> Any:
            selected, weights = stock(rows, config, y, params)
            if rows <= self.trace.shape[1] and self.step >= 0:
                selected.copy_(self.trace[self.step % len(self.trace), :rows, layer])
                weights.fill_(2.5 / routing_trace.TOP_K)
            return selected, weights

        return routed


def fill_cache(cache: Any) -> None:
    """Noise in every tensor of the key-value cache: what contexts that nobody computed are made of."""
    with torch.inference_mode():
        for tensor in cache.get_all_tensors():
            if tensor.is_floating_point():
                tensor.normal_()


def lengthen(backend: Exl3Backend, stream: Any, tokens: int) -> None:
    """Lets a stream have a context of so many tokens that nobody computed.

    Its recurrent state stays that of its short prompt: a state has the same size behind any number of tokens.
    """
    if not backend.extend(stream, tokens):
        raise RuntimeError(f"the key-value cache has no pages for a context of {tokens} tokens more")
    stream.length = tokens


def decode(
    backend: Exl3Backend,
    routing: ForcedRouting,
    streams: int,
    warm: int,
    steps: int,
    deadline: float,
    *,
    context: int = 0,
    prompt: int = PROMPT,
    before: dict[int, Callable[[], None]] | None = None,
    told: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Steady decode: ms per step, counters.

    Args:
        context: tokens behind which to decode; 0 for those of a short prompt.
        prompt: tokens of each stream's prompt.
        before: what runs before a step of that number, off the clock.
        told: called after each step, with its seconds.
    """
    routing.step = -1
    opened = [backend.open_stream() for _ in range(streams)]
    rng = np.random.default_rng(4)
    times: list[float] = []
    counted: dict[str, Any] = {}
    try:
        for stream in opened:
            backend.prefill(stream, rng.integers(10, 2000, prompt).tolist(), all_logits=False)
            if context:
                lengthen(backend, stream, context)
        for step in range(warm + steps):
            if time.monotonic() > deadline:
                break
            if before and step in before:
                routing.step = -1
                before[step]()
            if step == warm:
                counted = dict(backend.stats())
            routing.step = step
            began = time.perf_counter()
            backend.decode(opened, rng.integers(10, 2000, streams).tolist())
            took = time.perf_counter() - began
            if step >= warm:
                times.append(took)
            if told is not None:
                told(took)
    finally:
        for stream in opened:
            backend.close_stream(stream)
        routing.step = -1
    if not times:
        return {"steps": 0}
    return decode_row(times, streams, counted, backend.stats(), backend.experts._records.stride) | ({"context": context} if context else {})


def decode_row(times: list[float], streams: int, before: dict[str, Any], after: dict[str, Any], stride: int) -> dict[str, Any]:
    """What steps and the counters around them say."""
    picks, hits, missed = (after[k] - before[k] for k in ("decode_picks", "decode_hits", "decode_records_missed"))
    ms = 1000 * float(np.mean(times))
    row = {
        "steps": len(times),
        "ms": round(ms, 3),
        "ms_median": round(1000 * float(np.median(times)), 3),
        "ms_p99": round(1000 * float(np.quantile(times, 0.99)), 3),
        "tok_s": round(streams * 1000 / ms, 2),
        "hit_rate": round(hits / picks, 4) if picks else None,
        "missed_mib_per_step": round(missed * stride / len(times) / 2**20, 1),
        "copied_mib_per_step": round((after["bytes_copied"] - before["bytes_copied"]) / len(times) / 2**20, 1),
    }
    if "records_in_place" in after:
        row["read_in_place_per_step"] = round((after["records_in_place"] - before["records_in_place"]) / len(times), 2)
    return row


def prefill(backend: Exl3Backend, tokens: int, records: int = 0) -> dict[str, Any]:
    """One prompt in passes of CHUNK, the second time.

    Args:
        records: of all layers; the row then has the slots, the experts staged in a pass, and their share of those in no slot. 1: nothing
            was read in place.

    A prompt of one pass runs once more for the times of its kernels and copies: `device_busy_ms` short of `s` is what the device waited.
    """
    times = []
    ids = np.random.default_rng(5).integers(10, 2000, tokens).tolist()

    def once() -> None:
        stream = backend.open_stream()
        try:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for start in range(0, tokens, CHUNK):
                backend.prefill(stream, ids[start : start + CHUNK], all_logits=False)
            times.append(time.perf_counter() - began)
        finally:
            backend.close_stream(stream)

    for _ in range(2):
        before = backend.stats()
        once()
    chunks = -(-tokens // CHUNK)
    row = {"tokens": tokens, "chunks": chunks, "first_s": round(times[0], 3), "s": round(times[1], 3), "tok_s": round(tokens / times[1])}
    if records:
        row |= staged(before, backend.stats(), records, backend.experts._records.stride, chunks)
    if chunks == 1:
        row |= slice_modules.profiled(once, 1)
    return row


def staged(before: Row, after: Row, records: int, stride: int, passes: int) -> Row:
    """Slots of a prefill, and what share of the experts in none of them was staged in each of so many passes."""
    row: Row = {"slots": after["slots"]}
    if missing := records - after["slots_used"]:
        each = (after["bytes_staged"] - before["bytes_staged"]) / stride / passes
        row |= {"staged_per_pass": round(each), "staged_share": round(each / missing, 3)}
    return row


def alternate(backend: Exl3Backend, tokens: int, deadline: float, at_step: Callable[[int], None]) -> Row:
    """The same long prompt and the same steps ROUNDS times, while the cache goes on: every round must have the first one's bits.

    Args:
        tokens: of the prompt.
        deadline: monotonic seconds; no round begins that would end later.
        at_step: called with the number of each decode step before it, and with -1 after the last one of a round.
    """
    ids = np.random.default_rng(7).integers(10, 2000, tokens).tolist()
    digests: list[str] = []
    slowest = 0.0
    began = time.monotonic()
    while len(digests) < ROUNDS and time.monotonic() + slowest < deadline:
        start = time.monotonic()
        digests.append(_round(backend, ids, at_step))
        slowest = max(slowest, time.monotonic() - start)
    different = sum(digest != digests[0] for digest in digests)
    row: Row = {"rounds": len(digests), "wanted": ROUNDS, "equal": different == 0, "different": different}
    return row | {"s": round(time.monotonic() - began, 1), "steps": ROUND_STEPS * len(digests), "prompt_tokens": tokens}


def _round(backend: Exl3Backend, ids: list[int], at_step: Callable[[int], None]) -> str:
    total = hashlib.sha256()
    stream = backend.open_stream()
    try:
        for start in range(0, len(ids), CHUNK):
            logits = backend.prefill(stream, ids[start : start + CHUNK], all_logits=False)
            total.update(logits.tobytes())
        for step in range(ROUND_STEPS):
            at_step(step)
            total.update(backend.decode([stream], [10 + step]).tobytes())
    finally:
        at_step(-1)
        backend.close_stream(stream)
    return total.hexdigest()


class OurEngine:
    """Our side: one loaded model, whose slots change with the mode."""

    def __init__(self, args: argparse.Namespace, trace: np.ndarray, deadline: float) -> None:
        began = time.perf_counter()
        self._args, self._deadline = args, deadline
        checkpoint = Checkpoint(args.folder)
        self._arena_path = Path(segments.arena_path(SHM, "slice"))
        arena, shapes, self._facts = fill_arena(checkpoint, self._arena_path)
        tokens = -(-(args.context + args.warm + args.steps) // PAGES_BEHIND) * PAGES_BEHIND  # of a stream
        self._loaded = loader.load_model(checkpoint, arena, shapes, cache_tokens=8 * tokens, max_streams=8, chunk=CHUNK)
        fill_cache(self._loaded.cache)
        self._trace = trace
        self._routing = ForcedRouting(self._loaded, trace)
        self._info = gpu_info(checkpoint.config.vocab_size, tokens, 8, CHUNK)
        self._records = self._loaded.records.num_records
        self._slots = round(routing_trace.SLOT_SHARE * self._records)
        self._total = torch.cuda.mem_get_info(loader.DEVICE)[1]
        self._into: Replacements | None = None
        self._store: ExpertStore | None = None
        self._backend: Exl3Backend | None = None
        self._compiled = False
        self._peak: PeakSampler | None = None
        try:
            driver = Nvml()
            self._facts["vram_reserved_mib"] = driver.reserved() >> 20
            self._peak = PeakSampler(driver.used)
            self._peak.__enter__()
        except OSError as error:
            print(f"no peak of VRAM: {error}", flush=True)
        self._facts |= {
            "records": self._records,
            "slots": self._slots,
            "record_bytes": self._loaded.records.stride,
            "context_tokens": args.context,
            "context": "noise in the key-value cache, nobody's prompt; the recurrent state of a short one",
            "pin_s": round(self._loaded.records.pin_seconds, 2),
            "vram_after_load_gib": round(torch.cuda.memory_allocated() / 2**30, 2),
            "loaded_s": round(time.perf_counter() - began, 1),
        }

    def enter(self, mode: Mode | None) -> None:
        self._leave()
        assert mode is not None
        whole = mode.slots == "all"
        torch.cuda.set_per_process_memory_fraction(1.0 if whole else min(1.0, CARD_MIB * 2**20 / self._total))
        for_prefill = min(self._records, slice_cases.prefill_slots(self._loaded.records.num_layers, mode.options.get("stage_parts", 2)))
        count = {"all": self._records, "one": 1, "share": self._slots, "prefill": for_prefill}[mode.slots]
        after = self._args.admit_after
        policy = PagerPolicy(admit_after=after, link_derate=mode.link_derate)
        options = ExpertOptions(PlacementOptions(admit_after=after), pager=policy, **mode.options)
        self._into = Replacements()
        self._store = loader.make_store(self._loaded, count, routing_trace.TOP_K, options, self._into)
        if "link_gb_s" not in self._facts and count > 1:
            self._facts |= self._rates(self._store)
        self._store.place(loader.spread(count, self._records) if count > 1 else ())
        self._backend = Exl3Backend(self._loaded.model, self._loaded.cache, self._store, self._loaded.records, Replacements(), self._info)
        if not self._compiled:
            began = time.perf_counter()
            decode(self._backend, self._routing, 1, 0, 30, self._deadline)
            self._compiled = True
            self._facts["first_steps_s"] = round(time.perf_counter() - began, 1)

    def _leave(self) -> None:
        if self._store is not None:
            torch.cuda.synchronize()
            self._store.close()
        if self._into is not None:
            self._into.undo()
        self._store = self._into = self._backend = None
        torch.cuda.empty_cache()

    def _rates(self, store: ExpertStore) -> Row:
        threads = max(1, (os.cpu_count() or 2) - 2)
        return {
            "link_gb_s": round(slice_rates.link_rate(store, self._loaded) / 1e9, 2),
            "link_half_gb_s": round(slice_rates.link_rate(store, self._loaded, derate=2) / 1e9, 2),
            "gather_gb_s": round(gathered / 1e9, 2) if (gathered := slice_rates.gather_rate(store, self._loaded)) is not None else None,
            "dram_gb_s": round(slice_rates.read_rate(self._loaded, threads) / 1e9, 2),
            "dram_threads": threads,
            "vram_copy_gb_s": round(slice_rates.copy_rate() / 1e9, 1),
        }

    def measure(self, case: Case) -> Row:
        assert self._backend is not None
        args = self._args
        if case.kind == "prefill":
            return prefill(self._backend, args.context if case.long else args.prefill, self._records)
        if case.kind == "modules":
            return self._modules(self._backend, case.streams)
        if case.kind == "alternate":
            return self._alternate(self._backend)
        if case.kind == "trace":
            return self._on_trace(self._backend, case.what)
        warm, steps = max(1, args.warm // case.share), max(1, args.steps // case.share)
        return decode(self._backend, self._routing, case.streams, warm, steps, self._deadline, context=args.context if case.long else 0)

    def _on_trace(self, backend: Exl3Backend, what: str) -> Row:
        """One stream on a trace of its own, heat and slots as a fresh start has them: every policy gets the same warm-up."""
        args, before = self._args, {}
        store, cold = self._store_of(), np.zeros(self._records, np.float32)
        store.start_with(cold, cold)
        store.place(loader.spread(self._slots, self._records))
        if what == "drift":
            self._routing.use(slice_traces.drifting(args.seed, args.warm + args.steps, depths_of(args.layers)))
        else:
            before = {slice_traces.middle(args.warm, args.warm + args.steps): lambda: self._one_prompt(backend)}
        try:
            return decode(backend, self._routing, 1, args.warm, args.steps, self._deadline, before=before)
        finally:
            self._routing.use(self._trace)

    def _store_of(self) -> ExpertStore:
        assert self._store is not None
        return self._store

    def _one_prompt(self, backend: Exl3Backend) -> None:
        stream = backend.open_stream()
        try:
            backend.prefill(stream, np.random.default_rng(6).integers(10, 2000, self._args.prefill).tolist(), all_logits=False)
        finally:
            backend.close_stream(stream)

    def _alternate(self, backend: Exl3Backend) -> Row:
        """The same long prompt and the same steps again and again, while the cache goes on: every round must have the first one's bits."""

        def force(step: int) -> None:
            self._routing.step = step

        return alternate(backend, self._args.context, self._deadline, force)

    def _modules(self, backend: Exl3Backend, count: int) -> Row:
        """A step of so many streams, module by module."""
        streams = [backend.open_stream() for _ in range(count)]
        try:
            for stream in streams:
                backend.prefill(stream, list(range(10, 10 + PROMPT)), all_logits=False)

            def step() -> None:
                self._routing.step += 1
                backend.decode(streams, [10] * count)

            return slice_modules.table(self._loaded.model, step)
        finally:
            for stream in streams:
                backend.close_stream(stream)
            self._routing.step = -1

    def after(self) -> Row:
        row: Row = {"ram_extra_gib": ram_extra_gib(self._loaded.records.arena.total_bytes, [self._arena_path])}
        return row | (vram_of(self._peak) if self._peak is not None else {})

    def facts(self) -> Row:
        return self._facts

    def close(self) -> None:
        self._leave()
        if self._peak is not None:
            self._peak.__exit__(None, None, None)
        self._loaded.replacements.undo()
        self._loaded.model.unload()
        self._loaded.records.close()
        self._loaded.records.arena.close()
