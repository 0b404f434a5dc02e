"""The seeded experts behind the golden file: what docs/arithmetic.md calls a case, and how its bytes are made.

Bytes come from splitmix64 and exact arithmetic only, so that any language can make the same ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python.exl3 import Codebook
from kernels.python.expert import Activation, ExpertShape


@dataclasses.dataclass(frozen=True)
class Case:
    """One seeded expert and its input rows."""

    name: str
    seed: int
    hidden: int = 256
    inter: int = 128
    bits: tuple[int, int, int] = (3, 3, 3)
    codebook: Codebook = Codebook.MUL1
    activation: Activation = Activation.SILU
    act_limit: float = 10.0
    gateless: bool = False
    has_bias: bool = False
    rows: int = 2
    x_dtype: str = "float16"
    x_kind: str = "normal"
    record_kind: str = "normal"

    def shape(self) -> ExpertShape:
        """The case's record layout."""
        return ExpertShape.create(
            self.hidden,
            self.inter,
            self.bits,
            codebook=self.codebook,
            activation=self.activation,
            act_limit=self.act_limit,
            gateless=self.gateless,
            has_bias=self.has_bias,
        )


class Bits:
    """splitmix64, upper 32 bits of each output, as an endless stream."""

    def __init__(self, seed: int) -> None:
        self._state = seed & 0xFFFFFFFFFFFFFFFF

    def take(self, count: int) -> npt.NDArray[np.uint32]:
        """The next `count` numbers."""
        with np.errstate(over="ignore"):
            step = np.uint64(0x9E3779B97F4A7C15)
            states = np.uint64(self._state) + step * np.arange(1, count + 1, dtype=np.uint64)
            self._state = (self._state + 0x9E3779B97F4A7C15 * count) & 0xFFFFFFFFFFFFFFFF
            z = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)

    def uniform(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Multiples of 2^-31 in [-1, 1)."""
        count = int(np.prod(shape))
        return (self.take(count).view(np.int32) * 2.0**-31).reshape(shape)

    def bell(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Sums of three uniform numbers: variance 1, near enough to a normal distribution."""
        return self.uniform(shape) + self.uniform(shape) + self.uniform(shape)


def build(case: Case) -> tuple[ExpertShape, npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """(shape, record uint8 [record_bytes], x [rows, hidden])."""
    shape = case.shape()
    bits = Bits(case.seed)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, part in shape.parts().items():
        if name.endswith("trellis"):
            tensors[name] = (bits.take(int(np.prod(part.shape))) >> np.uint32(16)).astype(np.uint16).reshape(part.shape)
        else:
            tensors[name] = _scales(case, name, bits, part.shape)
    record = shape.empty_records()[0]
    shape.write_record(record, tensors)
    return shape, record, _inputs(case, bits)


def _scales(case: Case, name: str, bits: Bits, dims: tuple[int, ...]) -> npt.NDArray[np.float16]:
    """suh about +-1, svh about +-0.1 (so that gate and up come out near 1), biases about +-0.25."""
    values = bits.uniform(dims)
    signs = np.where(values < 0, -1.0, 1.0)
    if name.endswith("bias"):
        return (values * 0.25).astype(np.float16)
    scales = signs * (0.75 + 0.5 * np.abs(values)) * (0.1 if name.endswith("svh") else 1.0)
    if case.record_kind == "large gate" and name == "gate_svh":
        scales = scales * 1000.0
    if case.record_kind == "outlier channels" and name.endswith("suh"):
        scales[3::61] *= 500.0
    if case.record_kind == "subnormal scales" and name in ("gate_suh", "down_svh"):
        scales = scales * 2.0**-20
    return scales.astype(np.float16)


def _inputs(case: Case, bits: Bits) -> npt.NDArray[Any]:
    x = bits.bell((case.rows, case.hidden))
    if case.x_kind == "zero block":
        x[:, :128] = 0.0
    elif case.x_kind == "zero rows":
        x[::2] = 0.0
    elif case.x_kind == "saturated":
        x = np.where(x < 0, -65504.0, 65504.0)
    elif case.x_kind == "outlier channels":
        x[:, 5::97] *= 1000.0
    elif case.x_kind == "subnormals":
        x = x * 2.0**-22
    elif case.x_kind == "below the smallest block":
        x[:, :128] *= 2.0**-90
    elif case.x_kind == "fp32 subnormals":
        x = x * 2.0**-140
    elif case.x_kind == "large fp32":
        x = x * 2.0**40
    elif case.x_kind == "one spike":
        x[:, :] = 0.0
        x[:, 77] = 3.0
    return x.astype(case.x_dtype)


def all_cases() -> list[Case]:
    """Every case of the golden file, in its order."""
    cases: list[Case] = []

    def add(name: str, **fields: Any) -> None:
        cases.append(Case(name, seed=1000 + len(cases), **fields))

    for codebook in Codebook:
        for k in range(1, 9):
            add(f"{codebook.name.lower()} k={k}", codebook=codebook, bits=(k, k, k), rows=1 + (k + 3 * codebook) % 8)
    for rows in range(1, 9):
        add(f"{rows} rows", rows=rows)
    for hidden, inter in ((128, 128), (384, 256), (640, 128), (768, 384), (1280, 256), (128, 1152)):
        for codebook in (Codebook.MUL1, Codebook.MCG):
            add(f"{codebook.name.lower()} {hidden} x {inter}", codebook=codebook, hidden=hidden, inter=inter, rows=3)
    for x_kind in ("zero block", "zero rows", "saturated", "outlier channels", "subnormals", "one spike"):
        add(f"{x_kind}", x_kind=x_kind)
        add(f"{x_kind}, 3inst", x_kind=x_kind, codebook=Codebook.INST3)
    for x_kind in ("below the smallest block", "fp32 subnormals", "large fp32", "normal"):
        add(f"fp32 input: {x_kind}", x_kind=x_kind, x_dtype="float32")
    for record_kind in ("large gate", "outlier channels", "subnormal scales"):
        add(f"record with {record_kind}", record_kind=record_kind)
    for activation in Activation:
        for limit in (0.0, 0.5):
            add(f"{activation.name.lower()} limit={limit}", activation=activation, act_limit=limit, has_bias=True)
    for activation in (Activation.SILU, Activation.GELU, Activation.RELU2):
        add(f"gateless {activation.name.lower()}", activation=activation, gateless=True, act_limit=0.5, has_bias=True)
    add("bits 2, 3, 4", bits=(2, 3, 4), rows=5)
    add("bits 6, 5, 8", bits=(6, 5, 8), rows=5)
    return cases
