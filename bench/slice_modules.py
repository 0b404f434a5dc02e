"""Enqueue time against GPU busy time, module by module, of a decode step.

Enqueue: the host's clock around each module's call. Busy: events around it while the device is held back by a sleep that outlasts the
host's enqueueing, so that the kernels run one behind the other and no gap of the host's is counted. Each time is the module's own, without
the modules that it calls.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

CHILDREN = ("attn", "mlp")
STEPS = 12
PROFILED = 4  # steps whose single kernels are timed
KERNELS_TOLD = 24
GAPS_TOLD, GAP_US = 40, 200.0
COPY = "Memcpy"
HOLD_STEPS = 3.0  # the sleep, in steps
SLEEP_CYCLES = 10_000_000


class ModuleClock:
    """Times the calls of a model's modules.

    Args:
        model: exllamav3's, with `fwd_modules`.
    """

    def __init__(self, model: Any) -> None:
        top = [entry[0] for entry in model.fwd_modules]
        below = [child for module in top for name in CHILDREN if (child := getattr(module, name, None)) is not None]
        self._modules = [*top, *below]
        self._calls: list[tuple[str, Any, Any, int]] = []  # name, begin, end, depth
        self._depth = 0
        self._mark: Callable[[], Any] = time.perf_counter

    @contextlib.contextmanager
    def watching(self, mark: Callable[[], Any]) -> Iterator[list[tuple[str, Any, Any, int]]]:
        """Every call while inside, as (name, begin, end, depth) with what `mark` gives."""
        self._mark, self._calls, self._depth = mark, [], 0
        before = [(module, vars(module).get("forward")) for module in self._modules]
        for module, _ in before:
            module.forward = self._wrap(module)
        try:
            yield self._calls
        finally:
            for module, own in before:
                if own is None:
                    del module.forward
                else:
                    module.forward = own

    def _wrap(self, module: Any) -> Callable[..., Any]:
        stock, name = module.forward, type(module).__name__

        def timed(*args: Any, **kwargs: Any) -> Any:
            depth, self._depth = self._depth, self._depth + 1
            begin = self._mark()
            try:
                return stock(*args, **kwargs)
            finally:
                self._calls.append((name, begin, self._mark(), depth))
                self._depth = depth

        return timed


def own_times(calls: list[tuple[str, Any, Any, int]], span: Callable[[Any, Any], float]) -> dict[str, float]:
    """Time by module name, less that of the modules that it calls.

    Args:
        calls: in the order in which they ended: what is called stands before its caller.
        span: time between two marks.
    """
    total: dict[str, float] = defaultdict(float)
    inner: dict[int, float] = defaultdict(float)
    for name, begin, end, depth in calls:
        took = span(begin, end)
        total[name] += took - inner.pop(depth + 1, 0.0)
        inner[depth] += took
    return dict(total)


def event() -> Any:
    """A recorded event that has a time."""
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


def cycles_per_ms() -> float:
    """Of the device's sleep."""
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # the first launch loads it
    torch.cuda.synchronize()
    begin = event()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    end = event()
    torch.cuda.synchronize()
    return SLEEP_CYCLES / max(1e-3, float(begin.elapsed_time(end)))


def kernel_table(seen: list[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """What the device ran in so many steps: the kernels' own time, how long it was busy with any of them, the longest by name.

    Args:
        seen: (name, begin, end) of every kernel and copy, microseconds.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in seen:
        by_name[name].append(end - begin)
    covered = last = 0.0
    for _, begin, end in sorted(seen, key=lambda one: one[1:]):
        covered += max(0.0, end - max(begin, last))
        last = max(last, end)
    longest = sorted(by_name.items(), key=lambda one: -sum(one[1]))[:KERNELS_TOLD]
    return {
        "kernels_per_step": round(len(seen) / steps, 1),
        "kernels_ms": round(sum(map(sum, by_name.values())) / steps / 1000, 3),
        "device_busy_ms": round(covered / steps / 1000, 3),
        "kernels": [
            {"kernel": name[:120], "calls": round(len(times) / steps, 1), "us": round(sum(times) / steps, 1)} for name, times in longest
        ],
    }


def compute_gaps(seen: list[tuple[str, float, float]]) -> list[dict[str, float]]:
    """When no kernel ran for GAP_US or longer: a prompt waits for its records, or for the host. The GAPS_TOLD longest, in their order.

    Args:
        seen: (name, begin, end) of every kernel and copy, microseconds.
    """
    kernels = sorted((begin, end) for name, begin, end in seen if not name.startswith(COPY))
    if not kernels:
        return []
    zero = min(begin for _, begin, _ in seen)
    last, found = zero, []
    for begin, end in kernels:
        if begin - last >= GAP_US:
            found.append((last, begin))
        last = max(last, end)
    longest = sorted(sorted(found, key=lambda gap: gap[0] - gap[1])[:GAPS_TOLD])
    return [{"at_ms": round((begin - zero) / 1000, 2), "ms": round((end - begin) / 1000, 2)} for begin, end in longest]


def profiled(step: Callable[[], None], steps: int = PROFILED) -> dict[str, Any]:
    """`kernel_table` of some steps, by the driver's own clock for each kernel; of a single one with its `compute_gaps`."""
    if not torch.cuda.is_available():
        return {}  # tests run the table over stand-ins
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    seen = [(event.name, event.time_range.start, event.time_range.end) for event in on_device]
    return kernel_table(seen, steps) | ({"compute_gaps": compute_gaps(seen)} if steps == 1 else {})


def table(model: Any, step: Callable[[], None], steps: int = STEPS) -> dict[str, Any]:
    """The row: microseconds a step for each kind of module, medians over steps.

    Args:
        model: exllamav3's.
        step: one decode step, which waits for its result.
    """
    clock = ModuleClock(model)
    alone, enqueued, busy = [], [], []
    calls: dict[str, int] = {}
    for _ in range(steps):
        began = time.perf_counter()
        step()
        alone.append(time.perf_counter() - began)
    for _ in range(steps):
        with clock.watching(time.perf_counter) as seen:
            step()
        enqueued.append(own_times(seen, lambda begin, end: 1e6 * (end - begin)))
        calls = {name: sum(call[0] == name for call in seen) for name in enqueued[-1]}
    hold = int(cycles_per_ms() * 1000 * statistics.median(alone) * HOLD_STEPS)
    for _ in range(steps):
        with clock.watching(event) as seen:
            torch.cuda._sleep(hold)  # type: ignore[no-untyped-call]
            step()
        torch.cuda.synchronize()
        busy.append(own_times(seen, lambda begin, end: 1000 * float(begin.elapsed_time(end))))
    kernels = profiled(step)
    modules: list[dict[str, Any]] = [
        {
            "module": name,
            "calls": calls[name],
            "enqueue_us": round(statistics.median(one[name] for one in enqueued), 1),
            "busy_us": round(statistics.median(one[name] for one in busy), 1),
        }
        for name in calls
    ]
    modules.sort(key=lambda row: -max(row["enqueue_us"], row["busy_us"]))
    ms = 1000 * statistics.median(alone)
    in_modules = sum(row["enqueue_us"] for row in modules) / 1000
    return {
        "steps": steps,
        "ms": round(ms, 3),
        "enqueue_ms": round(in_modules, 3),
        "busy_ms": round(sum(row["busy_us"] for row in modules) / 1000, 3),
        "beside_the_modules_ms": round(ms - in_modules, 3),
        "modules": modules,
        **kernels,
    }
