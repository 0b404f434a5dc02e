"""Times variants of the GPU's integer expert kernel against each other and against stock exllamav3's decode kernels, in one run.

    python -m bench.int_kernel_tune [--seconds 24] [--variants 1,2]

A process of its own first compares every variant's bits with variant 0's, on random steps; one that differs or stops is named, not timed.
Then layer steps as in bench.gpu_int_kernel, from graphs, in turns: 1, 2, 4 and 8 tokens, and one token with half or none of its picks on
the GPU (the last is what launches alone cost). The table comes last. Needs an NVIDIA GPU and torch; stock's column needs exllamav3 1.5.1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import statistics
import subprocess
import sys

import numpy as np
import torch

from bench.gpu_int_kernel import MAX_ROWS, TOP_K, Batch, Layer, make_batch, make_graph, measure, our_call, stock_or_reason
from kernels.python.cuda_expert import CudaExperts
from kernels.python.expert import ExpertShape
from tests.gpu.int_expert_steps import Bytes, DeviceLayer, differing, make_records, random_step

VARIABLE = "INT_EXPERT_VARIANT"  # read by moe_cuda_create
VARIANTS = {
    0: "as it was",
    1: "lean loop, epilogue's scales fetched early",
    2: "1, and one launch for one token",
    3: "2, ring stages of 128 inputs",
    4: "2, inputs of gate and up spread in shared memory",
    5: "3 and 4",
}
ONE_TOKEN = (2, 3, 4, 5)  # with more tokens these are variant 1
CHECK_SHAPES = ((512, 512, 2), (512, 512, 3), (512, 512, 4), (1024, 1536, 3), (4096, 2048, 3), (384, 640, 3))
CHECK_STEPS = 48
CHECK_EXPERTS = 10
CHECK_LIMIT_S = 90


def make_experts(layer: Layer, variant: int) -> CudaExperts:
    """The kernels of a variant for a layer of full size."""
    os.environ[VARIABLE] = str(variant)
    return CudaExperts(layer.shape, MAX_ROWS * TOP_K, torch.cuda.current_device())


@functools.cache
def layer_records(hidden: int, inter: int, bits: int) -> tuple[ExpertShape, Bytes]:
    """Records of CHECK_EXPERTS experts."""
    shape = ExpertShape.create(hidden, inter, bits, act_limit=10.0)
    return shape, make_records(shape, CHECK_EXPERTS, seed=hidden + bits)


def check_shape(hidden: int, inter: int, bits: int, variants: list[int]) -> None:
    """Random steps of one shape. Raises AssertionError when a variant's bits are not those of variant 0."""
    shape, records = layer_records(hidden, inter, bits)
    layers = {}
    for variant in (0, *variants):
        os.environ[VARIABLE] = str(variant)
        layers[variant] = DeviceLayer(shape, records)
    generator = np.random.default_rng(hidden * 10 + bits)
    for i in range(CHECK_STEPS):
        rows = 1 if i % 3 else int(generator.integers(2, 9))
        top_k = int(generator.integers(1, CHECK_EXPERTS + 1)) if i % 4 == 3 else 8
        absent, odd = (0.4 if i % 2 else 0.0), (0.2 if i % 5 == 0 else 0.0)
        step = random_step(generator, hidden, CHECK_EXPERTS, rows, top_k, absent=1.0 if i % 16 == 7 else absent, odd=odd)
        if i % 11 == 5 and rows == 1:
            step.selected[0, -1] = step.selected[0, 0]  # the same expert twice
        found = {variant: layer.run(step, serial=i % 4 == 0, after_kernel=i % 4 == 1) for variant, layer in layers.items()}
        for variant in variants:
            for ours, expected in zip(found[variant], found[0], strict=True):
                wrong = differing(ours, expected)
                assert wrong == 0, (
                    f"variant {variant}: {hidden} x {inter}, K = {bits}, step {i}, {rows} rows: {wrong} of {expected.size} differ"
                )
    for layer in layers.values():
        layer.close()


def check(variants: list[int]) -> None:
    """Checks variants one after the other and says so: after an error of the device nothing more can be asked of this process."""
    for variant in variants:
        for hidden, inter, bits in CHECK_SHAPES:
            check_shape(hidden, inter, bits, [variant])
        print(f"variant {variant} ok", flush=True)


def checked(variants: list[int]) -> tuple[list[int], str]:
    """The variants whose bits are right, and what the check said of the others."""
    good: list[int] = []
    told = ""
    left = list(variants)
    while left:
        command = [sys.executable, "-m", "bench.int_kernel_tune", "--check", "--variants", ",".join(map(str, left))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHECK_LIMIT_S)
            out, error = done.stdout, done.stderr
        except subprocess.TimeoutExpired as expired:
            out = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
            error = f"no answer in {CHECK_LIMIT_S} s"
        passed = [int(number) for number in re.findall(r"variant (\d+) ok", out)]
        good += passed
        left = [variant for variant in left if variant not in passed]
        if left:
            told += f"variant {left[0]} is out: {error.strip()[-400:]}\n"
            left = left[1:]
    return good, told


def with_picks(batch: Batch, here: int) -> Batch:
    """The batch with only the first `here` picks of each token; the others are no experts."""
    selected = [picks.clone() for picks in batch.selected]
    for picks in selected:
        picks[:, here:] = -1
    return dataclasses.replace(batch, selected=selected)


def time_case(layer: Layer, kernels: dict[int, CudaExperts], batch: Batch, stock: object, seconds: float) -> dict[str, float]:
    """Median microseconds of a step by variant. Raises AssertionError when graphs do not give variant 0's bits."""
    outs = {variant: torch.full((MAX_ROWS, layer.shape.hidden), float("nan"), device="cuda") for variant in kernels}
    calls = {str(v): our_call(layer, experts, batch, outs[v], False) for v, experts in kernels.items()}
    if stock is not None:
        calls["stock"] = stock.call(batch)  # type: ignore[attr-defined]
    graphs = {name: make_graph(call) for name, call in calls.items()}
    samples = measure(graphs, seconds)
    torch.cuda.synchronize()
    for variant, out in outs.items():
        wrong = differing(out[: batch.rows].cpu().numpy(), outs[0][: batch.rows].cpu().numpy())
        assert wrong == 0, f"variant {variant}: {wrong} numbers differ after replays of a graph of {batch.rows} rows"
    return {name: statistics.median(values) for name, values in samples.items()}


def table(rows: list[tuple[str, dict[str, float]]], variants: list[int]) -> str:
    """Microseconds, and in brackets the part of stock's."""
    columns = ["stock", *map(str, variants)]
    lines = [f"{'us a layer step':26}" + "".join(f"{name:>15}" for name in columns)]
    for name, times in rows:
        cells = []
        for column in columns:
            us = times.get(column)
            part = f" ({us / times['stock']:.3f})" if us is not None and "stock" in times and column != "stock" else ""
            cells.append("" if us is None else f"{us:.2f}{part}")
        lines.append(f"{name:26}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join([*lines, *(f"{v}: {VARIANTS[v]}" for v in variants)])


def main() -> None:
    """Checks, times, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=24.0, help="of timing, for all cases together")
    parser.add_argument("--variants", default="1,2,3,4,5", help="compared with variant 0")
    parser.add_argument("--check", action="store_true", help="compare the bits and end")
    args = parser.parse_args()
    asked = [int(number) for number in args.variants.split(",")]
    if args.check:
        check(asked)
        return
    good, told = checked(asked)
    print(told, end="", flush=True)
    layer = Layer()
    stock, reason = stock_or_reason(layer)
    if reason:
        print(f"no stock: {reason}")
    kernels = {variant: make_experts(layer, variant) for variant in (0, *good)}
    print(kernels[0].description)
    cases = [
        (f"{rows} tokens, {distinct} experts", make_batch(rows, distinct)) for rows, distinct in ((1, 8), (2, 16), (4, 28), (8, 48), (8, 8))
    ]
    cases += [(f"1 token, {here} picks here", with_picks(make_batch(1, TOP_K), here)) for here in (4, 0)]
    rows = []
    for name, batch in cases:
        timed = {v: experts for v, experts in kernels.items() if batch.rows == 1 or v not in ONE_TOKEN}
        whole = "here" not in name
        rows.append((name, time_case(layer, timed, batch, stock if whole else None, args.seconds / len(cases))))
        print(name, {key: round(value, 2) for key, value in rows[-1][1].items()}, flush=True)
    print(told + table(rows, list(kernels)))


if __name__ == "__main__":
    main()
