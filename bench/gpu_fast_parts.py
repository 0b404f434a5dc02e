"""The GPU's parts of `bench.gpu_fast`: the shipped checkpoint for fidelity, the full-shape slice for speed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import gpu_exact_slice, routing_trace, slice_rates
from bench.fast_fidelity import Setting
from bench.gpu_fast import GROUPS, ROUND_TRIP, TINY, Results, fidelity
from bench.gpu_fast_rig import GpuRig, LaneProcess, prompts
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


def prepare(results: Results) -> None:
    """Checks and imports exllamav3, as the slice's own bench does."""
    chosen = argparse.Namespace(tune=False)
    gpu_exact_slice.prepare_exllamav3(chosen)
    results.summary |= {"gpu": torch.cuda.get_device_name(0), "triton_tuners": chosen.tuners}


def fidelity_on_gpu(args: argparse.Namespace, results: Results, deadline: float) -> None:
    """The shipped checkpoint."""
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
        rig = GpuRig(loaded, config.num_experts_per_tok, config.vocab_size, "gpu-fast", lane, deadline, SHM)
        fidelity(rig, Setting, prompts(TINY, sum(GROUPS), seed=1), results)
        idle(rig, results)
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
    results.add(part="idle", worker_core_pct=round(worker_pct, 2), cpu_expert_core_pct=round(lane_pct, 2))
    results.summary["idle_core_pct"] = round(worker_pct + lane_pct, 2)


def settings_of_speed(threads: int) -> list[Setting]:
    """What is measured on the slice, best known first, so that a run that is cut off has the ratios."""
    share = routing_trace.SLOT_SHARE
    settings = []
    for derate in (1, 2):
        common: dict[str, Any] = {"slots": share, "placed": share, "link_derate": derate}
        settings += [
            Setting("exact in step", fast=False, **common),
            Setting("fast", **common, facts={"threads": threads}),
            Setting("fast without the lane", forced=Forced.NEVER_LANE, lane=False, **common),
        ]
        if derate == 1:
            settings.append(Setting("exact between steps", fast=False, on_demand=False, **common))
    return settings


def speed_on_gpu(args: argparse.Namespace, results: Results, deadline: float) -> None:
    """The full-shape slice with its routing forced from a trace."""
    prepare(results)
    loaded, checkpoint = load_slice(args.layers)
    trace = routing_trace.make(0, args.warm + args.steps, streams=8, depths=gpu_exact_slice.depths_of(args.layers))
    routing = gpu_exact_slice.ForcedRouting(loaded, trace)
    lane = LaneProcess("slice", SHM, args.threads)
    rig = GpuRig(loaded, routing_trace.TOP_K, checkpoint.config.vocab_size, "slice", lane, deadline, SHM)
    resident: dict[int, float] = {}
    try:
        everything = Setting("every expert in VRAM, exact", fast=False, slots=1.0, placed=1.0, on_demand=False, admit=False)
        link = dram = 0.0
        with rig.backend(everything) as backend:
            link, dram = slice_rates.link_rate(backend.experts, loaded), slice_rates.read_rate(loaded, args.threads)
            results.summary |= {"link_gb_s": round(link / 1e9, 2), "dram_gb_s": round(dram / 1e9, 2)}
            gpu_exact_slice.decode(backend, routing, 1, 0, 30, deadline)  # compiles
            measure(results, backend, routing, everything, args, deadline, {})
        everything = Setting("every expert in VRAM, fast", slots=1.0, placed=1.0, forced=Forced.NEVER_LANE, lane=False)
        with rig.backend(everything) as backend:
            resident |= measure(results, backend, routing, everything, args, deadline, {})
            results.add(part="speed", name=ROUND_TRIP, **time_of_a_round_trip(backend))
        for setting in settings_of_speed(args.threads):
            if not rig.time_left():
                results.add(part="speed", name=setting.name, link_derate=setting.link_derate, left_out=True)
                continue
            with rig.backend(setting) as backend:
                bound = {"resident": resident, "link": link / setting.link_derate, "dram": dram, "stride": loaded.records.stride}
                measure(results, backend, routing, setting, args, deadline, bound)
        if rig.time_left():
            two = LaneProcess("slice", SHM, 2)
            lane.close()
            rig.lane = two
            setting = Setting("fast, two threads", slots=routing_trace.SLOT_SHARE, placed=routing_trace.SLOT_SHARE)
            with rig.backend(setting) as backend:
                measure(results, backend, routing, setting, args, deadline, {}, streams_measured=(1,))
            two.close()
    finally:
        lane.close()


def load_slice(num_layers: int) -> tuple[loader.Loaded, Checkpoint]:
    """The slice as bench.gpu_exact_slice makes it; what an earlier run left is taken over."""
    if not (SLICE / "model-head.safetensors").exists():
        gpu_exact_slice.write_checkpoint(SLICE, num_layers)
    checkpoint = Checkpoint(SLICE)
    limit = checkpoint.config.swiglu_limit
    shapes = [
        ExpertShape.create(gpu_exact_slice.HIDDEN, gpu_exact_slice.INTER, gpu_exact_slice.BITS, act_limit=limit) for _ in range(num_layers)
    ]
    arena = gpu_exact_slice.open_arena(Path(segments.arena_path(SHM, "slice")), shapes)
    return loader.load_model(checkpoint, arena, shapes, cache_tokens=16_384, max_streams=8, chunk=2048), checkpoint


def measure(
    results: Results,
    backend: Exl3Backend,
    routing: gpu_exact_slice.ForcedRouting,
    setting: Setting,
    args: argparse.Namespace,
    deadline: float,
    bound: dict[str, Any],
    streams_measured: tuple[int, ...] = (1, 2, 4),
) -> dict[int, float]:
    """Rows for one setting: streams -> milliseconds a step."""
    times: dict[int, float] = {}
    for streams in streams_measured:
        before = backend.stats()
        row = gpu_exact_slice.decode(backend, routing, streams, args.warm, args.steps, deadline)
        stats = backend.stats()
        row |= {"link_derate": setting.link_derate, **setting.facts}
        if setting.fast:
            row |= lanes(before, stats)
        if row.get("steps"):
            times[streams] = row["ms"]
            if bound and streams in bound["resident"] and row.get("missed_mib_per_step") is not None:
                row |= over_bounds(row, bound["resident"][streams], bound["link"], bound["dram"], bound["stride"])
        results.add(part="speed", name=setting.name, streams=streams, **row)
    return times


def over_bounds(row: dict[str, Any], resident_ms: float, link: float, dram: float, stride: int) -> dict[str, Any]:
    """The step over its bounds: all-resident time plus the missing bytes at the link's rate, or at link and CPU lane together.

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


def time_of_a_round_trip(backend: Exl3Backend, rounds: int = 200) -> dict[str, float]:
    """From before the publication of picks that are all in slots to after the wait for the reply, on the device's clock: microseconds.

    The difference to the same step's kernels alone; of it the host's planning is reported beside.
    """
    steps = backend.experts._fast
    if steps is None:
        return {}
    device = torch.device("cuda")
    selected = torch.arange(routing_trace.TOP_K, device=device)[None].contiguous()
    x = torch.zeros((1, gpu_exact_slice.HIDDEN), dtype=torch.float16, device=device)
    weights = torch.zeros((1, routing_trace.TOP_K), dtype=torch.float16, device=device)
    out, shape = torch.zeros((1, gpu_exact_slice.HIDDEN), device=device), backend.experts._records.shapes[0]
    planned = backend.stats()["plan_us"]
    whole, alone = [], []
    for _ in range(rounds):
        a, b, c, d = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        a.record()
        steps.begin(0, x, selected)
        steps.end(0, weights, out)
        b.record()
        torch.cuda.synchronize()
        c.record()
        steps.run_alone(0, shape, x, selected, weights)
        d.record()
        torch.cuda.synchronize()
        whole.append(1000 * a.elapsed_time(b))
        alone.append(1000 * c.elapsed_time(d))
    plan = (backend.stats()["plan_us"] - planned) / rounds
    return {
        "publish_to_reply_us": round(float(np.median(whole) - np.median(alone)), 2),
        "publish_to_reply_p99_us": round(float(np.percentile(whole, 99) - np.median(alone)), 2),
        "of_it_plan_us": round(plan, 2),
    }
