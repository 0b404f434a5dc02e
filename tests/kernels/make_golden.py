"""Writes tests/kernels/golden/arithmetic_v1.json from the numpy reference: `python -m tests.kernels.make_golden`.

The file changes only with the arithmetic's version. The tests compare every implementation with it.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python import reference
from tests.kernels.cases import Case, all_cases, build

ARITHMETIC_VERSION = 1
GOLDEN_PATH = pathlib.Path(__file__).parent / "golden" / f"arithmetic_v{ARITHMETIC_VERSION}.json"


def digest(array: npt.NDArray[Any]) -> str:
    """SHA-256 of the array's little-endian bytes in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def step_digests(steps: reference.ExpertSteps) -> dict[str, str]:
    """The digest of every intermediate, by name: "gate.v", ..., "a", "down.z", "y"."""
    digests: dict[str, str] = {}
    for matrix in ("gate", "up", "down"):
        linear = getattr(steps, matrix)
        if linear is None:
            continue
        for step in ("v", "h", "scale", "q", "z"):
            digests[f"{matrix}.{step}"] = digest(getattr(linear, step))
    if steps.gate is not None:
        digests["g"] = digest(steps.gate.out)
    digests["u"] = digest(steps.up.out)
    digests["a"] = digest(steps.a)
    digests["y"] = digest(steps.down.out)
    return digests


def golden_case(case: Case) -> dict[str, Any]:
    """One entry of the golden file."""
    shape, record, x = build(case)
    steps = reference.expert(shape, record, x)
    return {
        "name": case.name,
        "seed": case.seed,
        "hidden": case.hidden,
        "inter": case.inter,
        "bits": list(case.bits),
        "codebook": case.codebook.name.lower(),
        "activation": case.activation.name.lower(),
        "act_limit": case.act_limit,
        "gateless": case.gateless,
        "has_bias": case.has_bias,
        "rows": case.rows,
        "x_dtype": case.x_dtype,
        "x_kind": case.x_kind,
        "record_kind": case.record_kind,
        "sha256": {"record": digest(record), "x": digest(x), **step_digests(steps)},
    }


def main() -> None:
    """Writes the file."""
    document = {"arithmetic_version": ARITHMETIC_VERSION, "cases": [golden_case(case) for case in all_cases()]}
    GOLDEN_PATH.parent.mkdir(exist_ok=True)
    GOLDEN_PATH.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(f"{len(document['cases'])} cases -> {GOLDEN_PATH}\n")


if __name__ == "__main__":
    main()
