"""Relative RMS error of whole experts against fp64, at GLM-5.3-Flash's size."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import report
from bench.cpu_kernel_quick import make_records
from kernels.python import reference
from kernels.python.exl3 import Codebook
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask

ROWS = 8
RECORDING = report.ROOT / "tests" / "kernels" / "golden" / "gpu_weights_v1.npz"
Wide = npt.NDArray[np.float64]


def relative_rms(found: npt.NDArray[Any], exact: Wide) -> float:
    """sqrt(mean((found - exact)^2) / mean(exact^2))."""
    return float(np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean()))


class Exact:
    """One silu expert in fp64 with dense weights.

    table: the weight of every state, fp64 [65536]; None: MUL1's affine weights, as the integer kernels have them.
    """

    def __init__(self, shape: ExpertShape, record: npt.NDArray[np.uint8], table: Wide | None = None) -> None:
        """shape: MUL1, gated, silu, without biases."""
        self._limit = shape.act_limit
        self._gate, self._up, self._down = (dense(shape, record, name, table) for name in ("gate", "up", "down"))

    def __call__(self, x: npt.NDArray[Any]) -> Wide:
        """x [rows, hidden] -> [rows, hidden]."""
        wide = x.astype(np.float64)
        g, u = wide @ self._gate, wide @ self._up
        if self._limit:
            u = np.clip(u, -self._limit, self._limit)
        a = g / (1 + np.exp(-g))
        if self._limit:
            a = np.minimum(a, self._limit)
        return np.asarray((a * u) @ self._down)


@functools.cache
def hadamard() -> Wide:
    """H of 128, orthonormal."""
    return np.asarray(np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128))


def dense(shape: ExpertShape, record: npt.NDArray[np.uint8], name: str, table: Wide | None) -> Wide:
    """diag(suh) H W H diag(svh) of a matrix, [in, out]."""
    trellis, suh, svh = (shape.view(record, f"{name}_{kind}") for kind in ("trellis", "suh", "svh"))
    states = reference.matrix_states(trellis)
    inner = (887 * (reference.mul1_byte_sums(states) - 510) - 238) * 2.0**-17 if table is None else table[states]
    signs = hadamard()
    rows, columns = inner.shape
    blocks = (signs @ inner.reshape(rows // 128, 128, columns)).reshape(rows, columns // 128, 128) @ signs
    return np.asarray(suh.astype(np.float64)[:, None] * blocks.reshape(rows, columns) * svh.astype(np.float64))


def inputs(kind: str) -> npt.NDArray[np.float16]:
    """Gaussian rows [ROWS, 4096]; "outlier": every 97th channel 100 times as large."""
    x = np.random.default_rng(11).standard_normal((ROWS, 4096))
    if kind == "outlier":
        x[:, 5::97] *= 100.0
    return x.astype(np.float16)


def fp16_table() -> Wide:
    """The fp16 weights of this repository's numpy decoder, by state."""
    states = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    return reference.weights_of(states, Codebook.MUL1).astype(np.float64)


def gpu_table() -> Wide | None:
    """The weights that a GPU decoded, by state (bench/record_gpu_weights.py); None while nobody has recorded them."""
    if not RECORDING.exists():
        return None
    table = np.full(65536, np.nan)
    with np.load(RECORDING) as recording:
        table[reference.matrix_states(recording["state_trellis"]).ravel()] = recording["state_weights"].ravel()
    return table


def errors() -> dict[str, float]:
    """rms_gauss and rms_outlier against the affine weights, the same against fp16 weights, and rms_vs_gpu_weights where they were recorded.

    rms_vs_gpu_weights is the larger one of Gaussian and outlier inputs.
    """
    shape = ExpertShape.create(4096, 2048, 3, act_limit=10.0)
    record = make_records(shape, 1)[0]
    outs: dict[str, npt.NDArray[np.float32]] = {}
    with ExpertPool() as pool:
        for kind in ("gauss", "outlier"):
            outs[kind] = np.empty((ROWS, 4096), np.float32)
            pool.run([ExpertTask(shape, record, inputs(kind), outs[kind])])

    def against(table: Wide | None) -> dict[str, float]:
        exact = Exact(shape, record, table)
        return {kind: float(f"{relative_rms(out, exact(inputs(kind))):.3e}") for kind, out in outs.items()}

    result = {f"rms_{kind}": value for kind, value in against(None).items()}
    result |= {f"rms_{kind}_vs_fp16_weights": value for kind, value in against(fp16_table()).items()}
    recorded = gpu_table()
    if recorded is not None:
        result["rms_vs_gpu_weights"] = max(against(recorded).values())
    return result
