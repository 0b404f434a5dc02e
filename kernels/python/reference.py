"""The numpy reference of docs/arithmetic.md: every step as the text has it, slow, and the same bits as every kernel.

Nothing here uses numpy's transcendental functions or matrix products in fp32: their results depend on the machine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python.exl3 import Codebook, trellis_dims
from kernels.python.expert import Activation, ExpertShape

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]

BLOCK = 128
INV_SQRT_128 = np.float32(float.fromhex("0x1.6a09e6p-4"))
QUANT_MAX = np.float32(32639)
SMALLEST = np.float32(2.0**-80)

_EXP_LOW, _EXP_HIGH = np.float32(-104), np.float32(89)
_LOG2_E = np.float32(float.fromhex("0x1.715476p+0"))
_LN2_HIGH = np.float32(float.fromhex("0x1.62e43p-1"))
_LN2_LOW = np.float32(float.fromhex("-0x1.05c61p-29"))
EXP_COEFFICIENTS = tuple(
    np.float32(float.fromhex(text))
    for text in ("0x1.6a2318p-10", "0x1.123a8ep-7", "0x1.5558f6p-5", "0x1.555490p-3", "0x1.fffffcp-2", "1.0", "1.0")
)
"""From the highest power, r^6, down to the constant."""

_GELU_CUBIC = np.float32(0.044715)
_GELU_SLOPE = np.float32(1.5957691216057308)
_OAI_SLOPE = np.float32(1.702)
_ONE = np.float32(1)


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> FloatArray:
    """a * b + c in fp32 with one rounding.

    The product of two fp32 numbers is exact in fp64. The fp64 sum is rounded to odd (when it is inexact its last bit is set,
    so that it still tells on which side of a midpoint it lies) and then once to fp32.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64))
        addend = np.asarray(c, np.float32).astype(np.float64)
        total = np.asarray(product + addend)
        # The rounding error of the sum, exactly (Knuth's two-sum); NaN when anything is infinite.
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        inexact = np.isfinite(error) & (error != 0)
        even = (total.view(np.uint64) & np.uint64(1)) == 0
        towards = np.where(error > 0, np.inf, -np.inf)
        odd = np.where(inexact & even, np.nextafter(total, towards), total)
        return np.asarray(odd.astype(np.float32))


def exp_(x: npt.ArrayLike) -> FloatArray:
    """Our exponential function (fp32): an error below one unit in the last place, defined everywhere, 0 and infinity at the ends."""
    with np.errstate(all="ignore"):
        given = np.asarray(x, np.float32)
        clamped = np.where(given < _EXP_LOW, _EXP_LOW, given)
        clamped = np.where(clamped > _EXP_HIGH, _EXP_HIGH, clamped)
        n = np.rint(clamped * _LOG2_E)
        r = fma(-n, _LN2_LOW, fma(-n, _LN2_HIGH, clamped))
        p = np.broadcast_to(EXP_COEFFICIENTS[0], r.shape)
        for coefficient in EXP_COEFFICIENTS[1:]:
            p = fma(p, r, coefficient)
        whole = np.where(np.isnan(n), 0, n).astype(np.int32)
        first = whole >> 1
        return np.asarray((p * _power_of_two(first)) * _power_of_two(whole - first))


def _power_of_two(n: npt.NDArray[np.int32]) -> FloatArray:
    return np.asarray(((n + 127).astype(np.uint32) << np.uint32(23)).view(np.float32))


def sigmoid(x: npt.ArrayLike) -> FloatArray:
    """1 / (1 + exp_(-x)) in fp32."""
    with np.errstate(all="ignore"):
        return np.asarray(_ONE / (_ONE + exp_(-np.asarray(x, np.float32))))


def activate(activation: Activation, limit: float, g: FloatArray | None, u: FloatArray) -> FloatArray:
    """Step 7: what the down matrix gets, from gate and up (g is None for an expert without a gate matrix). Same shape as u."""
    bound = np.float32(limit)
    with np.errstate(all="ignore"):
        if g is None:
            return _activated(activation, bound, u)
        up = u
        if bound != 0:
            up = np.where(up > bound, bound, up)
            up = np.where(up < -bound, -bound, up)
        if activation is Activation.SWIGLU_OAI:
            up = up + _ONE
        return np.asarray(_activated(activation, bound, g) * up)


def _activated(activation: Activation, bound: np.float32, g: FloatArray) -> FloatArray:
    if activation is Activation.SWIGLU_OAI:
        gate = np.where(g > bound, bound, g) if bound != 0 else g
        return np.asarray(gate * sigmoid(gate * _OAI_SLOPE))
    if activation is Activation.SILU:
        value = g * sigmoid(g)
    elif activation is Activation.GELU:
        value = g * sigmoid((g * _GELU_SLOPE) * fma(g * g, _GELU_CUBIC, _ONE))
    else:
        positive = np.where(g < 0, np.float32(0), g)
        value = positive * positive
    return np.asarray(np.where(value > bound, bound, value) if bound != 0 else value)


def hadamard128(values: FloatArray) -> FloatArray:
    """Step 2 on the last axis, a multiple of 128."""
    blocks = values.reshape(-1, BLOCK).copy()
    with np.errstate(all="ignore"):
        for level in range(7):
            pairs = blocks.reshape(len(blocks), -1, 2, 1 << level)
            a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
            pairs[:, :, 0], pairs[:, :, 1] = a + b, a - b
        return np.asarray((blocks * INV_SQRT_128).reshape(values.shape))


def quantise(h: FloatArray) -> tuple[npt.NDArray[np.int16], FloatArray]:
    """Step 3: h [rows, n] -> q int16 [rows, n], scale fp32 [rows, n / 128]."""
    blocks = h.reshape(h.shape[0], -1, BLOCK)
    with np.errstate(all="ignore"):
        magnitude = np.abs(blocks)
        finite = np.isfinite(magnitude).all(-1)
        m = np.where(finite, magnitude.max(-1), _ONE)
        tiny = m < SMALLEST
        safe = np.where(tiny, _ONE, m)
        rounded = np.rint(blocks * (QUANT_MAX / safe)[..., None])
        clamped = np.clip(rounded, -QUANT_MAX, QUANT_MAX)
        q = np.where((finite & ~tiny)[..., None], clamped, np.float32(0)).astype(np.int16)
        scale = np.where(tiny, np.float32(0), safe / QUANT_MAX)
        scale = np.where(finite, scale, np.float32(np.nan))
    return q.reshape(h.shape), np.asarray(scale)


def tile_states(trellis: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """The 16-bit states of every tile in stream order: [in/16, out/16, 256]."""
    _, _, bits = trellis_dims(trellis)
    tiles = np.ascontiguousarray(trellis).reshape(-1, 8 * bits, 2)
    # A little-endian 32-bit word, read from its most significant bit: the second halfword comes first.
    stream = tiles[:, :, ::-1].reshape(len(tiles), -1).astype(">u2").view(np.uint8)
    ring = np.unpackbits(stream, axis=1)
    ends = (np.arange(256) + 1) * bits
    window = (ends[:, None] - 16 + np.arange(16)) % ring.shape[1]
    states = np.packbits(ring[:, window], axis=-1).view(">u2")[..., 0].astype(np.uint16)
    return np.asarray(states.reshape(*trellis.shape[:2], 256))


def tile_order() -> npt.NDArray[np.intp]:
    """Stream position of the weight in row r and column c of a tile: [16, 16]."""
    r, c = np.arange(16)[:, None], np.arange(16)[None, :]
    return np.asarray(8 * (4 * (c % 8) + (r % 8) // 2) + 4 * (c // 8) + 2 * (r // 8) + r % 2)


def matrix_states(trellis: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """The states in matrix order: [in, out]."""
    in_features, out_features, _ = trellis_dims(trellis)
    tiles = tile_states(trellis)[:, :, tile_order()]
    return np.asarray(tiles.transpose(0, 2, 1, 3).reshape(in_features, out_features))


def mul1_byte_sums(states: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """B of the MUL1 codebook, 0..1020."""
    hashed = np.ascontiguousarray(states.astype(np.uint32) * np.uint32(0x83DCD12D))
    return np.asarray(hashed.view(np.uint8).reshape(*states.shape, 4).sum(-1, dtype=np.int64))


def weights_of(states: npt.NDArray[np.uint16], codebook: Codebook) -> npt.NDArray[np.float16]:
    """The fp16 weights that a GPU decodes from states. Same shape."""
    if codebook is Codebook.MUL1:
        return np.asarray(((887 * (mul1_byte_sums(states) - 510) - 238) * 2.0**-17).astype(np.float16))
    wide = states.astype(np.uint32)
    hashed = wide * np.uint32(0xCBAC1FED) if codebook is Codebook.MCG else wide * np.uint32(89226354) + np.uint32(64248484)
    halves = np.ascontiguousarray((hashed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60))
    pairs = halves.view(np.float16).reshape(*states.shape, 2).astype(np.float32)
    return np.asarray((pairs[..., 0] + pairs[..., 1]).astype(np.float16))


def decode(trellis: npt.NDArray[np.uint16], codebook: Codebook) -> FloatArray:
    """The decoded weights as fp32 [in, out]; the C++ twin is kernels.python.exl3.decode."""
    return np.asarray(weights_of(matrix_states(trellis), codebook).astype(np.float32))


def dequantize(
    trellis: npt.NDArray[np.uint16], suh: npt.NDArray[np.float16], svh: npt.NDArray[np.float16], codebook: Codebook
) -> FloatArray:
    """diag(suh) H W H diag(svh) as fp32 [in, out]; the C++ twin is kernels.python.exl3.dequantize."""
    weights = decode(trellis, codebook)
    inputs_done = hadamard128(np.ascontiguousarray(weights.T)).T * suh.astype(np.float32)[:, None]
    return np.asarray(hadamard128(np.ascontiguousarray(inputs_done)) * svh.astype(np.float32))


@dataclasses.dataclass(frozen=True)
class LinearSteps:
    """Intermediates of one matrix."""

    v: FloatArray  # [rows, in]
    h: FloatArray  # [rows, in]
    scale: FloatArray  # [rows, in / 128]
    q: npt.NDArray[np.int16]  # [rows, in]
    z: FloatArray  # [rows, out]
    out: FloatArray  # [rows, out]


@dataclasses.dataclass(frozen=True)
class ExpertSteps:
    """Intermediates of one expert; gate is None when it has no gate matrix. The result is down.out."""

    gate: LinearSteps | None
    up: LinearSteps
    a: FloatArray  # [rows, inter]
    down: LinearSteps


def linear(
    x: npt.NDArray[Any],
    trellis: npt.NDArray[np.uint16],
    suh: npt.NDArray[np.float16],
    svh: npt.NDArray[np.float16],
    bias: npt.NDArray[np.float16] | None,
    codebook: Codebook,
) -> LinearSteps:
    """Steps 1-6: x fp32 or fp16 [rows, in] times one EXL3 matrix."""
    with np.errstate(all="ignore"):
        v = np.asarray(x.astype(np.float32) * suh.astype(np.float32))
        h = hadamard128(v)
        q, scale = quantise(h)
        z = _sums(q, scale, matrix_states(trellis), codebook)
        out = hadamard128(z) * svh.astype(np.float32)
        if bias is not None:
            out = out + bias.astype(np.float32)
    return LinearSteps(v, h, scale, q, z, np.asarray(out))


def _sums(q: npt.NDArray[np.int16], scale: FloatArray, states: npt.NDArray[np.uint16], codebook: Codebook) -> FloatArray:
    """Steps 4 and 5."""
    rows, num_blocks = scale.shape
    length = -(-num_blocks // 4)
    groups = np.zeros((4, rows, states.shape[1]), np.float32)
    for b in range(num_blocks):
        inputs = slice(b * BLOCK, (b + 1) * BLOCK)
        z = groups[b // length]
        if codebook is Codebook.MUL1:
            z[...] = _add_mul1(z, q[:, inputs], scale[:, b], states[inputs])
        else:
            z[...] = _add_float(z, q[:, inputs], scale[:, b], weights_of(states[inputs], codebook))
    return np.asarray((groups[0] + groups[1]) + (groups[2] + groups[3]))


def _add_mul1(z: FloatArray, q: npt.NDArray[np.int16], scale: FloatArray, states: npt.NDArray[np.uint16]) -> FloatArray:
    # Integers below 2^53: the fp64 product is exact in whatever order it is summed.
    products = q.astype(np.float64) @ (mul1_byte_sums(states) - 510).astype(np.float64)
    sums = q.sum(-1, dtype=np.int64).astype(np.float32)
    constant = np.float32(-238) * sums
    t = fma(np.float32(887), products.astype(np.float32), constant[:, None])
    return fma(t, (scale * np.float32(2.0**-17))[:, None], z)


def _add_float(z: FloatArray, q: npt.NDArray[np.int16], scale: FloatArray, weights: npt.NDArray[np.float16]) -> FloatArray:
    total = np.zeros_like(z)
    for i in range(BLOCK):
        total = fma(weights[i].astype(np.float32), q[:, i, None].astype(np.float32), total)
    return fma(total, scale[:, None], z)


def expert(shape: ExpertShape, record: npt.NDArray[np.uint8], x: npt.NDArray[Any]) -> ExpertSteps:
    """One expert for every row of x, fp32 or fp16 [rows, hidden]."""
    codebook, activation = Codebook(shape.codebook), Activation(shape.activation)
    parts = shape.parts()

    def matrix(name: str, values: npt.NDArray[Any]) -> LinearSteps:
        bias = shape.view(record, f"{name}_bias") if f"{name}_bias" in parts else None
        trellis, suh, svh = (shape.view(record, f"{name}_{kind}") for kind in ("trellis", "suh", "svh"))
        return linear(values, trellis, suh, svh, bias, codebook)

    gate = matrix("gate", x) if "gate_trellis" in parts else None
    up = matrix("up", x)
    a = activate(activation, shape.act_limit, None if gate is None else gate.out, up.out)
    return ExpertSteps(gate, up, a, matrix("down", a))


def combine(weights: FloatArray, rows: FloatArray) -> FloatArray:
    """Step 8: fp32 [k] router weights and fp32 [k, hidden] expert rows in ascending slot order -> fp32 [hidden]."""
    total = np.zeros(rows.shape[1], np.float32)
    for weight, row in zip(weights, rows, strict=True):
        total = fma(weight, row, total)
    return total
