"""The GPU's side of `bench.gpu_full_size`: one loaded model of 42 layers, whose slots change with the mode."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from bench import gpu_fast_parts, routing_trace, slice_checkpoint, slice_ours, slice_rates
from bench.backend_info import gpu_info
from bench.fast_fidelity import Setting
from bench.gpu_fast_rig import GpuRig, LaneProcess
from bench.gpu_full_size import EXACT, EXACT_RESIDENT, FAST, FAST_RESIDENT, INSTANCE, PREFILL
from bench.kept_rows import Row
from bench.slice_cases import Case, Mode
from bench.slice_machine import card_spare
from bench.watch import Watch, line_of
from kernels.python import segments
from kernels.python.expert import ExpertShape
from kernels.python.fast_pager import Forced
from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends.exl3 import lending, loader, resolve
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches.replace import Replacements
from services.gpu_worker.settings import GpuWorkerSettings

MAX_STREAMS = 8
COMPILE_STEPS = 30
SETTINGS = {
    FAST: Setting(FAST, slots=routing_trace.SLOT_SHARE, placed=routing_trace.SLOT_SHARE),
    EXACT: Setting(EXACT, fast=False, slots=routing_trace.SLOT_SHARE, placed=routing_trace.SLOT_SHARE),
    PREFILL: Setting(PREFILL, fast=False, slots=routing_trace.SLOT_SHARE, placed=routing_trace.SLOT_SHARE),
    FAST_RESIDENT: Setting(FAST_RESIDENT, slots=1.0, placed=1.0, forced=Forced.NEVER_LANE, lane=False),
    EXACT_RESIDENT: Setting(EXACT_RESIDENT, fast=False, slots=1.0, placed=1.0, on_demand=False, admit=False),
}


class FullSizeEngine:
    """The loaded model. `enter` gives it the slots of a mode.

    Args:
        args: of `bench.gpu_full_size`.
        trace: as its `trace_of` makes it.
        deadline: monotonic seconds; decode steps end there.
        told: of stages and steps; None for nobody.
    """

    def __init__(self, args: argparse.Namespace, trace: np.ndarray, deadline: float, told: Watch | None = None) -> None:
        self._args, self._deadline, self._told = args, deadline, told
        self._say("filling the arena")
        self._total = torch.cuda.mem_get_info(loader.DEVICE)[1]
        self._cap(whole=False)
        checkpoint = Checkpoint(args.folder)
        limit = checkpoint.config.swiglu_limit
        sizes = (slice_checkpoint.HIDDEN, slice_checkpoint.INTER, slice_checkpoint.BITS)
        shapes = [ExpertShape.create(*sizes, act_limit=limit) for _ in range(args.layers)]
        began = time.perf_counter()
        arena = slice_ours.open_arena(Path(segments.arena_path(slice_ours.SHM, INSTANCE)), shapes)
        filled = time.perf_counter() - began
        self._facts: Row = {"gpu": torch.cuda.get_device_name(loader.DEVICE), "arena_bytes": arena.total_bytes}
        if not arena.reattached:
            self._facts |= {"arena_s": round(filled, 1), "arena_gb_s": round(arena.total_bytes / 1e9 / filled, 2)}
        self._say(f"arena {'taken over' if arena.reattached else 'filled'} after {filled:.1f} s; pinning and loading")
        began = time.perf_counter()
        sizes_of = {"cache_tokens": args.cache_tokens, "max_streams": MAX_STREAMS, "chunk": slice_ours.CHUNK}
        self._loaded = loader.load_model(checkpoint, arena, shapes, **sizes_of)
        self._facts["load_s"] = round(time.perf_counter() - began, 1)
        self._say(f"loaded after {self._facts['load_s']} s")
        slice_ours.fill_cache(self._loaded.cache)
        self._routing = slice_ours.ForcedRouting(self._loaded, trace)
        self._lane = LaneProcess(INSTANCE, slice_ours.SHM, args.threads)
        self._vocab, self._max_context = checkpoint.config.vocab_size, min(args.cache_tokens, resolve.DEFAULT_CONTEXT)
        self._rig = GpuRig(self._loaded, routing_trace.TOP_K, self._vocab, INSTANCE, self._lane, deadline, slice_ours.SHM)
        self._outer, self._inside = contextlib.ExitStack(), contextlib.ExitStack()
        self._watch = gpu_fast_parts.Watch(self._rig, self._outer, shares=False)
        self._backend: Exl3Backend | None = None
        self._setting = SETTINGS[FAST]
        self._compiled: set[bool] = set()  # of fast
        records = self._loaded.records
        self._facts |= {
            "records": records.num_records,
            "slots": round(routing_trace.SLOT_SHARE * records.num_records),
            "record_bytes": records.stride,
            "pin_s": round(records.pin_seconds, 2),
            "vram_after_load_gib": round(torch.cuda.memory_allocated() / 2**30, 2),
            "cache_tokens": args.cache_tokens,
            "lane_threads": args.threads,
        }
        with self._steps("first steps, in which nothing waits") as stepped:
            self._facts["first_steps_s"] = round(gpu_fast_parts.first_steps(self._rig, self._routing, stepped), 1)
        self._say(f"first steps: {self._facts['first_steps_s']} s")

    def _say(self, text: str) -> None:
        if self._told is not None:
            self._told.stage(text)
        else:
            print(text, flush=True)

    def _steps(self, what: str) -> contextlib.AbstractContextManager[Callable[[float], None]]:
        return self._told.steps(what) if self._told is not None else contextlib.nullcontext(lambda _seconds: None)

    def _cap(self, *, whole: bool) -> None:
        """What torch may take: the device, or so much as a card of 24 GB has."""
        torch.cuda.set_per_process_memory_fraction(1.0 if whole else min(1.0, slice_ours.CARD_MIB * 2**20 / self._total))

    def enter(self, mode: Mode | None) -> None:
        assert mode is not None
        self._leave()
        self._cap(whole=mode.slots == "all")
        self._setting = SETTINGS[mode.name]
        began = time.perf_counter()
        self._say(f"{mode.name}: making slots")
        self._backend = backend = self._inside.enter_context(self._lending() if mode.name == PREFILL else self._rig.backend(self._setting))
        lane = ", the lane is up" if self._setting.fast and self._setting.lane else ""
        self._say(f"{mode.name}: slots placed{lane} after {time.perf_counter() - began:.1f} s")
        if self._told is not None:
            self._told.lane(self._lane.pid)
            pager = backend.experts._on_demand
            self._told.look(lambda: line_of(backend.stats(), pager.words() if pager is not None else None))
        if "link_gb_s" not in self._facts:
            rates = {
                "link_gb_s": slice_rates.link_rate(self._backend.experts, self._loaded),
                "dram_gb_s": slice_rates.read_rate(self._loaded, self._args.threads),
            }
            self._facts |= {name: round(rate / 1e9, 2) for name, rate in rates.items()}
            # The copies went over the slots' own records.
            self._backend.experts.place(loader.spread(self._facts["slots"], self._loaded.records.num_records))
            self._say(f"link {self._facts['link_gb_s']} GB/s, host memory {self._facts['dram_gb_s']} GB/s")
        if self._setting.fast not in self._compiled:
            began = time.perf_counter()
            with self._steps(f"{mode.name}: first steps") as stepped:
                slice_ours.decode(self._backend, self._routing, 1, 0, COMPILE_STEPS, self._deadline, told=stepped)
            self._compiled.add(self._setting.fast)
            self._facts[f"first_steps_of_{mode.name}_s"] = round(time.perf_counter() - began, 1)

    def _leave(self) -> None:
        if self._told is not None:
            self._told.look(None)
        self._backend = None
        self._inside.close()
        gpu_fast_parts.give_slots_back()

    @contextlib.contextmanager
    def _lending(self) -> Iterator[Exl3Backend]:
        """`exact` with slots that are lent to long prefills, as a worker on a card of 24 GB has them."""
        defaults = GpuWorkerSettings.load({})
        most, reserve = (int(size * 2**30) for size in (defaults.ec_elastic_gb, defaults.ec_reserve_gb))
        records, card = self._loaded.records, slice_ours.CARD_MIB * 2**20
        elastic = lending.make(self._facts["slots"], records.stride, loader.DEVICE, most=most, reserve=reserve)
        # The device has more than the card; what is lent is what the card would lack.
        elastic._spare = lambda: card_spare(card, loader.DEVICE)
        options = ExpertOptions(PlacementOptions(admit_after=1), on_demand=True, pager=PagerPolicy(admit_after=1))
        with Replacements() as into:
            store = loader.make_store(self._loaded, self._facts["slots"], routing_trace.TOP_K, options, into, elastic)
            try:
                need = lending.measure(self._loaded.model, self._loaded.cache, slice_ours.CHUNK, self._max_context, store.begin_prefill)
                elastic.need = need
                self._facts["prefill_activations_gib"] = {str(rows): round(size / 2**30, 2) for rows, size in need.known.items()}
                store.place(loader.spread(self._facts["slots"], records.num_records))
                info = gpu_info(self._vocab, self._max_context, MAX_STREAMS, slice_ours.CHUNK)
                yield Exl3Backend(self._loaded.model, self._loaded.cache, store, records, Replacements(), info)
            finally:
                torch.cuda.synchronize()
                store.close()

    def measure(self, case: Case) -> Row:
        backend, args = self._backend, self._args
        assert backend is not None
        if case.kind == "prefill":
            row = slice_ours.prefill(backend, args.prefill, self._loaded.records.num_records)
            return row | {"slots_lent": self._facts["slots"] - int(backend.stats()["slots_usable"])}
        before = backend.stats()
        with self._steps(case.name) as stepped:
            row = slice_ours.decode(backend, self._routing, case.streams, args.warm, args.steps, self._deadline, told=stepped)
        if not self._setting.fast:
            return row
        return row | {"cpu_lane": self._setting.lane, **gpu_fast_parts.lanes(before, backend.stats())}

    def after(self) -> Row:
        return self._watch.take(self._setting)

    def facts(self) -> Row:
        return self._facts

    def close(self) -> None:
        self._leave()
        self._lane.close()
        self._outer.close()
        self._loaded.replacements.undo()
        self._loaded.model.unload()
        self._loaded.records.close()
        self._loaded.records.arena.close()
