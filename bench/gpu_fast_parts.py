"""The GPU's parts of `bench.gpu_fast`: the shipped checkpoint for fidelity, the full-shape slice for speed."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import fast_figures, gpu_exact_slice, round_trip, routing_trace, slice_checkpoint, slice_hidden, slice_ours, slice_rates
from bench.fast_fidelity import Setting
from bench.gpu_fast import GROUPS, RMS, TINY, Results, fidelity
from bench.gpu_fast_rig import ERROR_SETTINGS, GpuRig, LaneProcess, prompts
from bench.slice_machine import Nvml, PeakSampler, ram_extra_gib, vram_of
from kernels.python import segments
from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape
from kernels.python.fast_pager import Forced
from services.gpu_worker.backends import arena_fill, cpu_arena
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.checkpoint import Checkpoint

SHM = "/dev/shm"
SLICE = Path(SHM) / "glm53-slice"  # its arena has the name of the instance `slice`
IDLE_S = 5.0
HIDDEN_STEPS, HIDDEN_S = 24, 15.0
TRIPS_S = 5.0
# The first pass of a shape compiles, the second one captures, the third one replays.
FIRST_STREAMS, FIRST_STEPS = (1, 2, 4), 4
FEW_TOKENS = 9  # the shortest prompt that runs as a prefill: a longer one brings most experts of every layer, once for each stream
NOTHING_WAITS = Setting(
    "first steps",
    fast=False,
    slots=routing_trace.SLOT_SHARE,
    placed=routing_trace.SLOT_SHARE,
    lane=False,
    on_demand=False,
    admit=False,
)
EXPECTED_MS = {1: 16, 2: 28, 4: 52, 8: 80}  # a step


def prepare(results: Results) -> None:
    """Checks and imports exllamav3, as the slice's own bench does."""
    chosen = argparse.Namespace(tune=False)
    gpu_exact_slice.prepare_exllamav3(chosen)
    results.kept.note(gpu=torch.cuda.get_device_name(0), triton_tuners=chosen.tuners)


def fidelity_on_gpu(args: argparse.Namespace, results: Results, deadline: float) -> None:
    """The shipped checkpoint: placements, stock's error, the noise floor, the idle server."""
    with shipped(args, results, deadline) as rig:
        fidelity(rig, Setting, prompts(TINY, sum(GROUPS), seed=1), results)
        if not results.done(part="idle", name="idle"):
            idle(rig, results)


def stock_error_on_gpu(args: argparse.Namespace, results: Results, deadline: float) -> None:
    """Stock's error alone, with records in every place: a few seconds. What is behind the step must come out wrong."""
    with shipped(args, results, deadline) as rig:
        every = prompts(TINY, sum(GROUPS), seed=1)
        for how in ERROR_SETTINGS:
            with results.trying({"part": "diagnosis", "name": f"stock's error, {how}"}):
                row = rig.stock_error(every[2:4], how=how)
                refused = row.pop("error", None)  # what the last one is there to show: no broken row
                results.add(part="diagnosis", name=f"stock's error, {how}", **row, refused=refused)


@contextlib.contextmanager
def shipped(args: argparse.Namespace, results: Results, deadline: float) -> Iterator[GpuRig]:
    """A rig over the shipped checkpoint."""
    prepare(results)
    checkpoint = Checkpoint(TINY)
    config = checkpoint.config
    shapes = [cpu_arena.expert_shape(checkpoint, layer) for layer in config.moe_layers]
    arena = Arena.attach_or_create(segments.arena_path(SHM, "gpu-fast"), shapes, config.n_routed_experts, checkpoint.hash)
    lane = LaneProcess("gpu-fast", SHM, max(1, min(4, args.threads)))
    try:
        if not arena.reattached:
            arena_fill.fill(checkpoint, shapes, arena, lambda _fraction, _what: None)
            arena.seal()
        loaded = loader.load_model(checkpoint, arena, shapes, cache_tokens=32_768, max_streams=8, chunk=2048)
        yield GpuRig(loaded, config.num_experts_per_tok, config.vocab_size, "gpu-fast", lane, deadline, SHM)
    finally:
        lane.close()
        arena.unlink()


def idle(rig: GpuRig, results: Results) -> None:
    """Processor time of a worker that has nothing to do, and of its cpu_expert."""
    with rig.backend(Setting("idle")) as backend:
        stream = backend.open_stream()
        backend.prefill(stream, list(range(10, 30)), all_logits=False)
        backend.decode([stream], [10])
        backend.close_stream(stream)
        time.sleep(1.0)
        worker, lane = time.process_time(), rig.lane.cpu_seconds()
        time.sleep(IDLE_S)
        worker_pct = 100 * (time.process_time() - worker) / IDLE_S
        lane_pct = 100 * (rig.lane.cpu_seconds() - lane) / IDLE_S
    results.add(part="idle", name="idle", worker_core_pct=round(worker_pct, 2), cpu_expert_core_pct=round(lane_pct, 2))


@dataclass(frozen=True)
class Measured:
    """A setting with the streams that it is measured at, in this order."""

    setting: Setting
    streams: tuple[int, ...]
    steps: int = 0  # 0 for as many as all have


def settings_of_speed(threads: int, *, first: bool = False) -> list[Measured]:
    """What is measured on the slice, the most valuable first, so that a run that is cut off has the ratios.

    Args:
        threads: of cpu_expert.
        first: only what every session must have.
    """
    share = routing_trace.SLOT_SHARE
    common: dict[str, Any] = {"slots": share, "placed": share}
    half: dict[str, Any] = {**common, "link_derate": 2}
    alone: dict[str, Any] = {"forced": Forced.NEVER_LANE, "lane": False}
    facts = {"threads": threads}
    must = [
        Measured(Setting(fast_figures.FAST, **common, facts=facts), (1, 4, 2)),
        Measured(Setting("exact in step", fast=False, **common), (1, 4, 2)),
        Measured(Setting(fast_figures.FAST, **half, facts=facts), (1,)),
        Measured(Setting("exact in step", fast=False, **half), (1,)),
        Measured(Setting(fast_figures.MANY_STEPS, **common, facts=facts), (1,), fast_figures.ENOUGH_STEPS),
        Measured(Setting(fast_figures.TWO_THREADS, **common, facts={"threads": 2}), (1,)),
    ]
    rest = [
        Measured(Setting("exact between steps", fast=False, on_demand=False, **common), (1, 4)),
        Measured(Setting("fast without the lane", **alone, **common), (1, 4, 2)),
        Measured(Setting("fast without the lane", **alone, **half), (1,)),
        Measured(Setting(fast_figures.FAST, **common, facts=facts), (8,)),
        Measured(Setting("exact in step", fast=False, **common), (8,)),
    ]
    return must if first else must + rest


def expected_s(setting: Setting, streams: int, steps: int) -> float:
    """Seconds that a measurement should take: as those of `exact`, which were measured before."""
    return 2.0 + steps * EXPECTED_MS[streams] * setting.link_derate / 1000


def speed_on_gpu(args: argparse.Namespace, results: Results, deadline: float) -> None:
    """The full-shape slice with its routing forced from a trace."""
    settings = [] if args.only == "hidden" else settings_of_speed(args.threads, first=args.first)
    every = [key_of(one.setting, n) for one in settings for n in one.streams]
    more = [hidden_key(one) for one in hidden_settings(results)] + (
        [{"part": "speed", "name": fast_figures.ROUND_TRIP}] if settings else []
    )
    if all(results.done(**names) for names in (*every, *more)):
        print("speed: everything is measured", flush=True)
        return
    prepare(results)
    loaded, checkpoint = load_slice(args.layers)
    trace = routing_trace.make(0, args.warm + args.steps, streams=8, depths=slice_ours.depths_of(args.layers))
    routing = slice_ours.ForcedRouting(loaded, trace)
    lanes_of = {threads: LaneProcess("slice", SHM, threads) for threads in (args.threads, 2)}
    rig = GpuRig(loaded, routing_trace.TOP_K, checkpoint.config.vocab_size, "slice", lanes_of[args.threads], deadline, SHM)
    results.kept.note(record_bytes=loaded.records.stride, layers=args.layers)
    try:
        with contextlib.ExitStack() as inside:
            watch = Watch(rig, inside)
            print(f"first steps: {first_steps(rig, routing):.1f} s", flush=True)
            if not settings:
                measure_hidden(rig, results, routing)
                return
            resident = measure_resident(rig, results, routing, args, watch)
            for one in sorted(settings, key=lambda one: any(results.failed(**key_of(one.setting, n)) for n in one.streams)):
                with results.trying(*(key_of(one.setting, n) for n in one.streams)):
                    measure_setting(rig, results, routing, one, args, resident, lanes_of, watch)
            measure_trips(rig, results)
            measure_hidden(rig, results, routing)
    finally:
        for lane in lanes_of.values():
            lane.close()


def key_of(setting: Setting, streams: int) -> dict[str, Any]:
    """A row's names."""
    return {"part": "speed", "name": setting.name, "streams": streams, "link_derate": setting.link_derate}


class Watch:
    """Memory of each row: VRAM by the driver ten times a second, host memory of worker and cpu_expert beside the records.

    Args:
        rig: whose records they are.
        inside: ends the readings.
        shares: as `own_bytes` has it.
    """

    def __init__(self, rig: GpuRig, inside: contextlib.ExitStack, *, shares: bool = True) -> None:
        self._rig, self._shares = rig, shares
        self._peak: PeakSampler | None = None
        try:
            self._peak = inside.enter_context(PeakSampler(Nvml().used))
        except OSError as error:
            print(f"no peak of VRAM: {error}", flush=True)

    def take(self, setting: Setting) -> dict[str, Any]:
        """Since the last call."""
        arena = self._rig.loaded.records.arena
        pids = [os.getpid(), *([self._rig.lane.pid] if setting.lane and setting.fast and self._rig.lane.pid else [])]
        paths = [Path(segments.arena_path(SHM, "slice")), Path(segments.ctl_path(SHM, "slice"))]
        row: dict[str, Any] = {"ram_extra_gib": ram_extra_gib(arena.total_bytes, paths, pids, shares=self._shares)}
        return row | (vram_of(self._peak) if self._peak is not None else {})


def first_steps(rig: GpuRig, routing: slice_ours.ForcedRouting, told: Callable[[float], None] | None = None) -> float:
    """Compiles and captures decode steps, and a prompt, where nothing waits for the host: seconds. What is in no slot is read in place."""
    began = time.perf_counter()
    with rig.backend(NOTHING_WAITS) as backend:
        for streams in FIRST_STREAMS:
            prompt = slice_ours.PROMPT if streams == 1 else FEW_TOKENS
            slice_ours.decode(backend, routing, streams, 0, FIRST_STEPS, rig.deadline, prompt=prompt, told=told)
    del backend
    give_slots_back()
    return time.perf_counter() - began


def measure_resident(
    rig: GpuRig, results: Results, routing: slice_ours.ForcedRouting, args: argparse.Namespace, watch: Watch
) -> dict[int, float]:
    """Every expert in VRAM: what the bound begins with, rates. Streams -> milliseconds a step."""
    exact = Setting(f"{fast_figures.RESIDENT}, exact", fast=False, slots=1.0, placed=1.0, on_demand=False, admit=False)
    ours = Setting(f"{fast_figures.RESIDENT}, fast", slots=1.0, placed=1.0, forced=Forced.NEVER_LANE, lane=False)
    streams = (1, 2, 4)
    if not results.done(**key_of(exact, 1)) or "dram_gb_s" not in results.kept.facts:
        with rig.backend(exact) as backend:
            rates = {
                "link_gb_s": slice_rates.link_rate(backend.experts, rig.loaded),
                "link_half_gb_s": slice_rates.link_rate(backend.experts, rig.loaded, derate=2),
                "dram_gb_s": slice_rates.read_rate(rig.loaded, args.threads),
            }
            results.kept.note(**{name: round(value / 1e9, 2) for name, value in rates.items()})
            slice_ours.decode(backend, routing, 1, 0, 30, rig.deadline)  # compiles
            measure(results, backend, routing, exact, args, rig.deadline, {}, (1,), watch=watch)
        del backend
        give_slots_back()
    if not all(results.done(**key_of(ours, n)) for n in streams):
        with rig.backend(ours) as backend:
            measure(results, backend, routing, ours, args, rig.deadline, {}, streams, watch=watch)
        del backend
    # What follows is of a card of 24 GB: the many slots go back to the driver, and so much again is refused.
    give_slots_back()
    total = torch.cuda.mem_get_info(loader.DEVICE)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, slice_ours.CARD_MIB * 2**20 / total))
    watch.take(exact)
    return {n: results.row(**key_of(ours, n))["ms"] for n in streams if results.done(**key_of(ours, n))}


def give_slots_back() -> None:
    """The slots of every backend that nobody names any more go back to the driver: cycles hold them, and torch keeps what it has."""
    gc.collect()
    torch.cuda.empty_cache()


def measure_setting(
    rig: GpuRig,
    results: Results,
    routing: slice_ours.ForcedRouting,
    one: Measured,
    args: argparse.Namespace,
    resident: dict[int, float],
    lanes_of: dict[int, LaneProcess],
    watch: Watch,
) -> None:
    """What time allows of one setting, and is not there yet."""
    setting, steps = one.setting, one.steps or args.steps
    todo = tuple(n for n in one.streams if not results.done(**key_of(setting, n)))
    fits = tuple(n for n in todo if rig.fits(expected_s(setting, n, args.warm + steps)))
    for streams in (n for n in todo if n not in fits):
        results.leave_out(fast_figures.key_of(key_of(setting, streams)))
    if not fits:
        return
    lane = lanes_of[setting.facts.get("threads", args.threads)]
    if lane is not rig.lane:
        rig.lane.close()
        rig.lane = lane
    facts = results.kept.facts
    bound = {
        "resident": resident,
        "link": facts["link_gb_s" if setting.link_derate == 1 else "link_half_gb_s"] * 1e9,
        "dram": facts["dram_gb_s"] * 1e9,
        "stride": rig.loaded.records.stride,
    }
    chosen = argparse.Namespace(warm=args.warm, steps=steps)
    give_slots_back()
    with rig.backend(setting) as backend:
        measure(results, backend, routing, setting, chosen, rig.deadline, bound, fits, watch=watch)


def measure_trips(rig: GpuRig, results: Results) -> None:
    """The way to the host and back, behind everything that needs the device whole: it makes the device wait for words."""
    trip = {"part": "speed", "name": fast_figures.ROUND_TRIP}
    if results.done(**trip):
        return
    if not rig.fits(TRIPS_S):
        results.leave_out(fast_figures.ROUND_TRIP)
        return
    with results.trying(trip):
        results.add(**trip, **round_trip.on_gpu())


def hidden_settings(results: Results) -> list[Setting]:
    """Whose hidden states are compared with those of `exact`: `fast`, and once stock's error is known noise of its size in `exact`."""
    noise = results.row(**RMS)["stock"] if results.done(**RMS) else None
    common: dict[str, Any] = {"slots": routing_trace.SLOT_SHARE, "placed": routing_trace.SLOT_SHARE}
    settings = [Setting(fast_figures.FAST, **common)]
    return settings + ([Setting("exact, noise", fast=False, noise=noise, **common)] if noise else [])


def measure_hidden(rig: GpuRig, results: Results, routing: slice_ours.ForcedRouting) -> None:
    """How far hidden states are from those of `exact`, layer by layer."""
    todo = [one for one in hidden_settings(results) if not results.done(**hidden_key(one))]
    common: dict[str, Any] = {"slots": routing_trace.SLOT_SHARE, "placed": routing_trace.SLOT_SHARE}
    if not todo:
        return
    if not rig.fits(HIDDEN_S):
        results.leave_out("hidden states")
        return
    with results.trying(*(hidden_key(one) for one in todo)):
        want = hidden_states(rig, Setting("exact", fast=False, **common), routing)
        for one in todo:
            results.add(**hidden_key(one), relative_rms=slice_hidden.distances(want, hidden_states(rig, one, routing)))


def hidden_key(setting: Setting) -> dict[str, Any]:
    """A row's names."""
    return {"part": "hidden", "name": f"hidden states: {setting.name}"}


def hidden_states(rig: GpuRig, setting: Setting, routing: slice_ours.ForcedRouting) -> slice_hidden.States:
    """Of a few steps of one stream, the same tokens and picks for every setting."""
    with rig.backend(setting) as backend:
        stream = backend.open_stream()
        try:
            routing.step = -1
            backend.prefill(stream, list(range(10, 10 + slice_ours.PROMPT)), all_logits=False)
            with slice_hidden.watching(rig.loaded.model) as seen:
                for step in range(HIDDEN_STEPS):
                    routing.step = step
                    backend.decode([stream], [10 + step])
        finally:
            routing.step = -1
            backend.close_stream(stream)
        return slice_hidden.arrays(seen)


def load_slice(num_layers: int) -> tuple[loader.Loaded, Checkpoint]:
    """The slice as bench.gpu_exact_slice makes it; what an earlier run left is taken over."""
    if not (SLICE / "model-head.safetensors").exists():
        slice_ours.write_checkpoint(SLICE, num_layers)
    checkpoint = Checkpoint(SLICE)
    path = Path(segments.arena_path(SHM, "slice"))
    if any(SLICE.glob("*-experts.safetensors")):
        arena, shapes, _ = slice_ours.fill_arena(checkpoint, path)
    else:
        limit = checkpoint.config.swiglu_limit
        shapes = [
            ExpertShape.create(slice_checkpoint.HIDDEN, slice_checkpoint.INTER, slice_checkpoint.BITS, act_limit=limit)
            for _ in range(num_layers)
        ]
        arena = slice_ours.open_arena(path, shapes)
    return loader.load_model(checkpoint, arena, shapes, cache_tokens=16_384, max_streams=8, chunk=2048), checkpoint


def measure(
    results: Results,
    backend: Exl3Backend,
    routing: slice_ours.ForcedRouting,
    setting: Setting,
    args: argparse.Namespace,
    deadline: float,
    bound: dict[str, Any],
    streams_measured: tuple[int, ...] = (1, 2, 4),
    watch: Watch | None = None,
) -> None:
    """Rows for one setting."""
    for streams in streams_measured:
        before = backend.stats()
        row = slice_ours.decode(backend, routing, streams, args.warm, args.steps, deadline)
        stats = backend.stats()
        row |= {"link_derate": setting.link_derate, **setting.facts}
        if setting.fast:
            row |= {"cpu_lane": setting.lane, **lanes(before, stats)}
        if row.get("steps") and bound and streams in bound["resident"] and row.get("missed_mib_per_step") is not None:
            row |= over_bounds(row, bound["resident"][streams], bound["link"], bound["dram"], bound["stride"])
        if watch is not None:
            row |= watch.take(setting)
        if not row.get("steps"):
            row["error"] = "the time was over before the first measured step"
        results.add(part="speed", name=setting.name, streams=streams, **row)


def over_bounds(row: dict[str, Any], resident_ms: float, link: float, dram: float, stride: int) -> dict[str, Any]:
    """The step over its bounds: all-resident time plus the missing bytes at the link's rate, or at link and CPU lane together.

    `bound` lets both lanes together be no faster than cpu_expert's threads alone read host memory. That is what those threads
    reach and no law: with the link beside them more was moved, and steps come out below it. `lanes_bound` is without that.

    Args:
        row: of a setting; with `ct_b_us` the lane counts too.
        resident_ms: a step with every expert in VRAM.
        link, dram: bytes per second.
        stride: bytes of a record.
    """
    missed = row["missed_mib_per_step"] * 2**20
    bounds = {"link_bound": resident_ms + 1000 * missed / link}
    if row.get("ct_b_us"):
        lane = stride / (row["ct_b_us"] * 1e-6)
        bounds["bound"] = resident_ms + 1000 * missed / min(link + lane, dram)
        bounds["lanes_bound"] = resident_ms + 1000 * missed / (link + lane)
    result: dict[str, Any] = {f"{name}_ms": round(value, 3) for name, value in bounds.items()}
    return result | {f"step_over_{name}": round(row["ms"] / value, 3) for name, value in bounds.items()}


def lanes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Distinct experts by lane, and what was learned, over one measurement."""
    experts = {lane: after["experts"][lane] - before["experts"][lane] for lane in after["experts"]}
    steps = max(1, after["decode_steps"] - before["decode_steps"])
    learned = ("ct_a_us", "ct_b_us", "ct_tzc_us", "planner_error_pct", "planner_steps", "recomputed_picks", "aborts")
    return {
        "experts_by_lane": experts,
        "plan_us_per_layer": round((after["plan_us"] - before["plan_us"]) / steps, 2),
        "lane_overrun_us_per_layer": round((after["overrun_us"] - before["overrun_us"]) / steps, 2),
        **{name: after[name] for name in learned},
    }
