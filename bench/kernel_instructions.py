"""Instructions that one expert costs, counted by valgrind, free of noise: `python -m bench.kernel_instructions`.

A count is the difference between a run with two evaluations and one with one, of an expert of 1024 x 512 at 3 bits. Needs valgrind and the
native test programs (tools/build_kernels.py --test). valgrind has no AVX-512 and no AVX-VNNI, so AVX2 is counted.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
from typing import Any

from bench import report
from kernels.python import expert
from kernels.python.expert import Variant

WEIGHTS = 3 * 1024 * 512
LAYOUTS = {"native": 0, "planar": 1}
TIMEOUT_S = 300


def count(program: pathlib.Path, variant: str, layout: str, rows: int, times: int) -> int:
    """Instructions of a whole run."""
    arguments = [str(int(Variant[variant.upper()])), str(LAYOUTS[layout]), str(rows), str(times)]
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(program), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise ValueError(f"no count in valgrind's output: {done.stderr[-300:]}")
    return int(found[1])


def main() -> None:
    """Counts and writes docs/results/cpu_kernel_instructions.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", type=pathlib.Path, default=report.ROOT / "build" / "kernels" / "expert_once")
    parser.add_argument("--json", type=pathlib.Path, default=report.ROOT / "docs" / "results" / "cpu_kernel_instructions.json")
    args = parser.parse_args()
    started = report.start("bench.kernel_instructions")
    rows: list[dict[str, Any]] = []
    for variant in [name for name in expert.variants() if name in ("avx2",)]:
        for layout in LAYOUTS:
            for num_rows in (1, 2, 4, 8):
                one, two = (count(args.program, variant, layout, num_rows, times) for times in (1, 2))
                per_64 = round((two - one) / WEIGHTS * 64, 2)
                rows.append({"variant": variant, "layout": layout, "rows": num_rows, "instructions": two - one, "per_64_weights": per_64})
                print(rows[-1], flush=True)
    summary = {f"{r['variant']}_{r['layout']}_m{r['rows']}_per_64_weights": r["per_64_weights"] for r in rows}
    report.write_result(args.json, started, rows, summary)


if __name__ == "__main__":
    main()
