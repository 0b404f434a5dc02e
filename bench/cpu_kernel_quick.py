"""Time of one whole routed expert on the CPU, per variant and number of rows: `python -m bench.cpu_kernel_quick [--json FILE]`.

Two shapes: the shipped tiny model's and GLM-5.3-Flash's. Experts are visited in turn, so that the large shape's weights come from
memory. Trellis bits are random, scales of a real checkpoint's size. GB/s counts trellis bytes. One thread; the best and the median
of the repeats.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import report
from kernels.python import expert
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask

SHAPES = {"tiny 256 x 128": (256, 128, 64), "GLM 4096 x 2048": (4096, 2048, 24)}


def make_records(shape: ExpertShape, count: int) -> npt.NDArray[np.uint8]:
    """Records of random experts."""
    generator = np.random.default_rng(7)
    records = shape.empty_records(count)
    for record in records:
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, part in shape.parts().items():
            if name.endswith("trellis"):
                tensors[name] = generator.integers(0, 1 << 16, part.shape, dtype=np.uint16)
            else:
                signs = generator.choice([-1.0, 1.0], part.shape)
                size = 1.0 / np.sqrt(shape.hidden) if name.endswith("svh") else 1.0
                tensors[name] = (signs * generator.uniform(0.7, 1.3, part.shape) * size).astype(np.float16)
        shape.write_record(record, tensors)
    return records


def measure(pool: ExpertPool, shape: ExpertShape, records: npt.NDArray[np.uint8], rows: int, seconds: float) -> dict[str, float]:
    """Microseconds of one expert: best, median, number of runs."""
    x = np.random.default_rng(rows).standard_normal((rows, shape.hidden)).astype(np.float16)
    out = np.empty((rows, shape.hidden), np.float32)
    calls = [pool.prepare([ExpertTask(shape, record, x, out)]) for record in records]
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < deadline:
        for call in calls:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    return {"best_us": min(times), "median_us": statistics.median(times), "runs": len(times)}


def main() -> None:
    """Prints a table, and writes the result file when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each row of the table")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--variants", nargs="*", default=expert.variants())
    parser.add_argument("--json", type=pathlib.Path, help="also write the result file here")
    args = parser.parse_args()
    started = report.start("bench.cpu_kernel_quick")
    table: list[dict[str, Any]] = []
    for name, (hidden, inter, count) in SHAPES.items():
        shape = ExpertShape.create(hidden, inter, 3, act_limit=10.0)
        records = make_records(shape, count)
        trellis_bytes = 3 * hidden * inter * 3 // 8
        for variant in args.variants:
            with ExpertPool(variant) as pool:
                for rows in args.rows:
                    timing = measure(pool, shape, records, rows, args.seconds)
                    row = {"shape": name, "variant": variant, "rows": rows, **timing, "best_gb_s": trellis_bytes / timing["best_us"] / 1e3}
                    table.append(row)
                    print(
                        f"{name:16} {variant:7} {rows} rows {row['best_us']:10.1f} us best {row['median_us']:10.1f} median "
                        f"{row['best_gb_s']:6.2f} GB/s",
                        flush=True,
                    )
    if args.json is not None:
        best = {f"{r['shape']} {r['variant']} {r['rows']}": round(r["best_us"], 1) for r in table}
        report.write_result(args.json, started, table, best)


if __name__ == "__main__":
    main()
