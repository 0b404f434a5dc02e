"""The scalar building blocks: emulated fma, exp_, activations, transform and quantisation."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python import expert, reference
from kernels.python.expert import Activation, Variant
from tests.kernels import exp_polynomial
from tests.kernels.native_trace import signatures

FloatArray = npt.NDArray[np.float32]
_ENDS_OF_EXP = (88.72, 88.73, 89.0, 90.0, 1e4, -87.3, -87.4, -103.9, -104.0, -105.0, -1e4)
EXTREMES = np.float32([0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, *_ENDS_OF_EXP])


def libm_fmaf(a: FloatArray, b: FloatArray, c: FloatArray) -> FloatArray:
    """The C library's fmaf, one number at a time."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.argtypes = [ctypes.c_float] * 3
    library.fmaf.restype = ctypes.c_float
    return np.array([library.fmaf(*numbers) for numbers in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], np.float32)


def native_exp(x: FloatArray) -> FloatArray:
    y = np.empty_like(x)
    signatures().moe_exp(x.ctypes.data, y.ctypes.data, x.size)
    return y


def native_activate(variant: str, activation: Activation, limit: float, g: FloatArray | None, u: FloatArray) -> FloatArray:
    a = np.empty_like(u)
    gate = None if g is None else g.ctypes.data
    code = signatures().moe_activate(int(Variant[variant.upper()]), int(activation), limit, gate, u.ctypes.data, a.ctypes.data, u.size)
    assert code == 0
    return a


def wide_values(count: int, seed: int, exponents: tuple[int, int]) -> FloatArray:
    """Random signs and mantissas with exponents drawn evenly."""
    generator = np.random.default_rng(seed)
    mantissa = generator.uniform(1.0, 2.0, count) * generator.choice([-1.0, 1.0], count)
    return (mantissa * 2.0 ** generator.integers(*exponents, count)).astype(np.float32)


def assert_same_bits(found: FloatArray, expected: FloatArray) -> None:
    """Equal bit for bit, where any NaN equals any other."""
    both_nan = np.isnan(found) & np.isnan(expected)
    np.testing.assert_array_equal(np.where(both_nan, 0, found.view(np.uint32)), np.where(both_nan, 0, expected.view(np.uint32)))


def test_fma_equals_the_c_library_on_random_numbers() -> None:
    """Exponents near each other, so that cancellation and every rounding case occur."""
    a, b = wide_values(20_000, 1, (-12, 12)), wide_values(20_000, 2, (-12, 12))
    c = wide_values(20_000, 3, (-40, 24))
    assert_same_bits(reference.fma(a, b, c), libm_fmaf(a, b, c))


def test_fma_rounds_once_near_midpoints() -> None:
    """A tiny addend next to a product that lies on an fp32 midpoint decides the rounding: rounding to fp64 first would lose it."""
    half_ulp = np.float32(1 + 2.0**-12)  # its square is 1 + 2^-11 + 2^-24: exactly between two fp32 numbers
    a = np.full(400, half_ulp, np.float32) * np.repeat(np.float32([1, -1]), 200)
    b = np.full(400, half_ulp, np.float32)
    c = np.tile((2.0 ** -np.arange(25, 125).astype(np.float64)).astype(np.float32), 4) * np.tile(np.repeat(np.float32([1, -1]), 100), 2)
    exact = libm_fmaf(a, b, c)
    assert_same_bits(reference.fma(a, b, c), exact)
    twice_rounded = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    assert (twice_rounded != exact).any()  # the case is one that a plain fp64 sum gets wrong


def test_fma_handles_subnormals_and_the_ends() -> None:
    """Subnormal results, overflow, infinities, NaN and signed zeros."""
    a = np.float32([1e-20, 1e-22, 3e38, np.inf, np.nan, 0.0, -0.0, 1e-30, 2.0**-75, -(2.0**-75)])
    b = np.float32([1e-20, 1e-23, 3e38, 0.0, 1.0, -1.0, 1.0, 1e-30, 2.0**-75, 2.0**-75])
    c = np.float32([1e-45, 1e-44, 1.0, 1.0, 1.0, 0.0, -0.0, -1e-45, 2.0**-149, 2.0**-149])
    assert_same_bits(reference.fma(a, b, c), libm_fmaf(a, b, c))


def test_exp_of_numpy_and_cpp_are_equal() -> None:
    """Bit for bit over the whole range and its ends."""
    x = np.concatenate([np.linspace(-105, 90, 200_001).astype(np.float32), wide_values(20_000, 4, (-140, 8)), EXTREMES])
    assert_same_bits(native_exp(x), reference.exp_(x))


def test_exp_is_accurate_and_almost_monotone() -> None:
    """The error stays below one unit in the last place; neighbours never fall by more than one."""
    x = np.linspace(-87, 88.7, 400_001).astype(np.float32)
    y = native_exp(x)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) / np.spacing(exact.astype(np.float32))).max() < 1.0
    falls = np.diff(y[np.argsort(x, kind="stable")])
    assert (falls >= -np.spacing(y[:-1])).all()


def test_exp_ends_in_zero_and_infinity() -> None:
    """Above the range infinity, below it zero, subnormals between, NaN stays NaN, and exp_(0) is 1."""
    y = native_exp(np.float32([0.0, -0.0, 89.0, 1e30, np.inf, -104.0, -1e30, -np.inf, np.nan, -100.0]))
    assert y[:2].tolist() == [1.0, 1.0]
    assert np.isposinf(y[2:5]).all()
    assert y[5:8].tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(y[8])
    assert 0 < y[9] < np.finfo(np.float32).tiny


def test_the_polynomial_is_what_its_derivation_gives() -> None:
    """The constants in the code are the minimax coefficients rounded to fp32."""
    coefficients, worst = exp_polynomial.fit()
    assert worst < 5e-9
    np.testing.assert_array_equal(coefficients.astype(np.float32), np.array(reference.EXP_COEFFICIENTS[4::-1], np.float32))


@pytest.mark.parametrize("limit", [0.0, 0.75, 10.0])
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("variant", expert.variants())
def test_activations_have_the_reference_bits(variant: str, activation: Activation, limit: float) -> None:
    """Ordinary, huge, tiny and non-finite arguments, with and without a gate."""
    tail = np.concatenate([EXTREMES, np.float32([np.inf, -np.inf, np.nan])])
    g = np.concatenate([wide_values(4096 - len(tail), 5, (-30, 9)), tail])
    u = np.concatenate([wide_values(4096, 6, (-30, 6))])
    assert_same_bits(native_activate(variant, activation, limit, g, u), reference.activate(activation, limit, g, u))
    if activation is not Activation.SWIGLU_OAI:
        assert_same_bits(native_activate(variant, activation, limit, None, g), reference.activate(activation, limit, None, g))


def test_activations_are_the_functions_they_claim_to_be() -> None:
    """Against fp64 formulas; except for the SwiGLU with slope 1.702 the clamp acts after the activation."""
    g = np.linspace(-20, 20, 4097).astype(np.float32)[:4096]
    u = np.linspace(3, -3, 4096).astype(np.float32)
    wide_g, wide_u = g.astype(np.float64), u.astype(np.float64)
    limit = 2.0
    clamped = np.clip(wide_u, -limit, limit)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (wide_g + 0.044715 * wide_g**3))
    low = np.minimum(wide_g, limit)
    expected = {
        Activation.SILU: np.minimum(wide_g / (1 + np.exp(-wide_g)), limit) * clamped,
        Activation.GELU: np.minimum(0.5 * wide_g * (1 + tanh), limit) * clamped,
        Activation.SWIGLU_OAI: low / (1 + np.exp(-1.702 * low)) * (clamped + 1),
        Activation.RELU2: np.minimum(np.maximum(wide_g, 0) ** 2, limit) * clamped,
    }
    for activation, values in expected.items():
        np.testing.assert_allclose(reference.activate(activation, limit, g, u), values, rtol=2e-6, atol=1e-6, err_msg=activation.name)


def test_hadamard_is_the_sylvester_matrix() -> None:
    """The butterflies equal the dense transform, and twice is the identity."""
    x = np.random.default_rng(8).standard_normal((3, 256)).astype(np.float32)
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)
    np.testing.assert_allclose(reference.hadamard128(x), (x.reshape(3, 2, 128) @ signs).reshape(3, 256), atol=1e-6)
    np.testing.assert_allclose(reference.hadamard128(reference.hadamard128(x)), x, atol=1e-6)


def test_quantisation_uses_its_whole_range() -> None:
    """The largest magnitude of a block becomes 32639, zero and tiny blocks become zero, a non-finite block is marked by its scale."""
    h = np.zeros((1, 640), np.float32)
    h[0, 3], h[0, 4] = -5.0, 2.5
    h[0, 128:256] = 2.0**-81
    h[0, 256:384] = 2.0**-80
    h[0, 384], h[0, 520] = np.inf, np.nan
    q, scale = reference.quantise(h)
    assert q[0, 3] == -32639
    assert q[0, 4] in (16319, 16320)
    assert scale[0, 0] == np.float32(5.0) / np.float32(32639)
    assert scale[0, 1] == 0
    assert not q[0, 128:256].any()
    assert (q[0, 256:384] == 32639).all()
    assert np.isnan(scale[0, 3:]).all()
    assert not q[0, 384:].any()


def test_combination_is_a_chain_of_fma_from_slot_zero() -> None:
    """Step 8 adds weighted rows in ascending slot order; another order gives other bits."""
    generator = np.random.default_rng(9)
    weights = generator.uniform(0.05, 0.5, 8).astype(np.float32)
    rows = generator.standard_normal((8, 512)).astype(np.float32)
    total = np.zeros(512, np.float32)
    for weight, row in zip(weights, rows, strict=True):
        total = libm_fmaf(np.full(512, weight, np.float32), row, total)
    assert_same_bits(reference.combine(weights, rows), total)
    assert (reference.combine(weights[::-1], rows[::-1]) != total).any()
