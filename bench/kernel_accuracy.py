"""Relative RMS error of whole experts against fp64, at GLM-5.3-Flash's size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cpu_kernel_quick import make_records
from kernels.python import exl3, reference
from kernels.python.exl3 import Codebook
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask

ROWS = 8
Wide = npt.NDArray[np.float64]


def relative_rms(found: npt.NDArray[Any], exact: Wide) -> float:
    """sqrt(mean((found - exact)^2) / mean(exact^2))."""
    return float(np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean()))


class Exact:
    """One silu expert in fp64 with dense weights.

    affine: MUL1's weights as the integer kernels have them, else the fp16 weights of a GPU.
    """

    def __init__(self, shape: ExpertShape, record: npt.NDArray[np.uint8], affine: bool = True) -> None:
        """shape: MUL1, gated, silu, without biases."""
        self._limit = shape.act_limit
        self._gate, self._up, self._down = (dense(shape, record, name, affine) for name in ("gate", "up", "down"))

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


def dense(shape: ExpertShape, record: npt.NDArray[np.uint8], name: str, affine: bool) -> Wide:
    """diag(suh) H W H diag(svh) of a matrix, [in, out]."""
    trellis, suh, svh = (shape.view(record, f"{name}_{kind}") for kind in ("trellis", "suh", "svh"))
    if affine:
        inner = (887 * (reference.mul1_byte_sums(reference.matrix_states(trellis)) - 510) - 238) * 2.0**-17
    else:
        inner = exl3.decode(trellis, Codebook(shape.codebook)).astype(np.float64)
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)
    rows, columns = inner.shape
    blocks = (signs @ inner.reshape(rows // 128, 128, columns)).reshape(rows, columns // 128, 128) @ signs
    return np.asarray(suh.astype(np.float64)[:, None] * blocks.reshape(rows, columns) * svh.astype(np.float64))


def inputs(kind: str) -> npt.NDArray[np.float16]:
    """Gaussian rows [ROWS, 4096]; "outlier": every 97th channel 100 times as large."""
    x = np.random.default_rng(11).standard_normal((ROWS, 4096))
    if kind == "outlier":
        x[:, 5::97] *= 100.0
    return x.astype(np.float16)


def errors() -> dict[str, float]:
    """rms_gauss and rms_outlier against the affine weights, the same against the fp16 weights of exl3_decode.

    The fp16 weights are decoded by this repository's own decoder, which the tests compare with its numpy twin;
    bench/record_gpu_weights.py records those of a real GPU.
    """
    shape = ExpertShape.create(4096, 2048, 3, act_limit=10.0)
    record = make_records(shape, 1)[0]
    result: dict[str, float] = {}
    with ExpertPool() as pool:
        for affine in (True, False):
            exact = Exact(shape, record, affine)
            for kind in ("gauss", "outlier"):
                x = inputs(kind)
                out = np.empty((ROWS, 4096), np.float32)
                pool.run([ExpertTask(shape, record, x, out)])
                result[f"rms_{kind}" + ("" if affine else "_vs_fp16_weights")] = float(f"{relative_rms(out, exact(x)):.3e}")
    return result
