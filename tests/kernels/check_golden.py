"""Compares every variant that this host has with the golden file, without pytest: `python -m tests.kernels.check_golden`."""

from __future__ import annotations

import json
import sys

from kernels.python import expert
from tests.kernels.cases import all_cases, build
from tests.kernels.make_golden import GOLDEN_PATH, digest, step_digests
from tests.kernels.native_trace import expert_steps


def differences(variant: str) -> list[str]:
    """ "case: step" of every digest of a variant that is not the golden one."""
    golden = {entry["name"]: entry["sha256"] for entry in json.loads(GOLDEN_PATH.read_text())["cases"]}
    found: list[str] = []
    for case in all_cases():
        shape, record, x = build(case)
        digests = {"record": digest(record), "x": digest(x), **step_digests(expert_steps(variant, shape, record, x))}
        found += [f"{case.name}: {step}" for step, value in digests.items() if golden[case.name][step] != value]
    return found


def main() -> int:
    """Prints one line a variant; 1 when one differs."""
    wrong = 0
    for variant in expert.variants():
        found = differences(variant)
        wrong += bool(found)
        sys.stdout.write(f"{variant}: {'golden bits' if not found else 'DIFFERS at ' + ', '.join(found[:5])}\n")
    sys.stdout.write(f"auto: {expert.kernel_info()}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
