"""Properties of the expert kernel over random shapes, codebooks, row counts, layouts and cuts of the work."""

from __future__ import annotations

import functools
import pathlib
import subprocess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.python import expert, planar, reference
from kernels.python.exl3 import Codebook
from kernels.python.expert import Activation, ExpertPool, ExpertShape, ExpertTask
from tests.kernels.cases import Case, build
from tests.kernels.native_trace import force

VARIANTS = expert.variants()
VECTOR_VARIANTS = [name for name in VARIANTS if name != "scalar"]
EVERY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40, derandomize=True)


@st.composite
def cases(draw: st.DrawFn, codebooks: tuple[Codebook, ...] = tuple(Codebook)) -> Case:
    """A random expert with 1 to 6 blocks a side and 1 to 11 rows."""
    gateless = draw(st.booleans())
    activations = [a for a in Activation if not (gateless and a is Activation.SWIGLU_OAI)]
    return Case(
        "",
        seed=draw(st.integers(0, 1 << 32)),
        hidden=128 * draw(st.integers(1, 6)),
        inter=128 * draw(st.integers(1, 6)),
        bits=(draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 8))),
        codebook=draw(st.sampled_from(codebooks)),
        activation=draw(st.sampled_from(activations)),
        act_limit=draw(st.sampled_from([0.0, 0.5, 10.0])),
        gateless=gateless,
        has_bias=draw(st.booleans()),
        rows=draw(st.integers(1, 11)),
        x_dtype=draw(st.sampled_from(["float16", "float32"])),
        x_kind=draw(st.sampled_from(["normal", "zero block", "zero rows", "saturated", "outlier channels", "subnormals", "one spike"])),
    )


def run(pool: ExpertPool, shape: ExpertShape, record: npt.NDArray[np.uint8], x: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    out = np.full((x.shape[0], shape.hidden), np.nan, np.float32)
    pool.run([ExpertTask(shape, record, x, out)])
    return out.view(np.uint32)


@functools.lru_cache(maxsize=256)
def built_with_reference(case: Case) -> tuple[ExpertShape, npt.NDArray[np.uint8], npt.NDArray[Any], npt.NDArray[np.uint32]]:
    """(shape, record, x, the reference's output as uint32 [rows, hidden]), read-only: every variant has the same examples."""
    shape, record, x = build(case)
    expected = reference.expert(shape, record, x).down.out.view(np.uint32)
    for array in (record, x, expected):
        array.flags.writeable = False
    return shape, record, x, expected


@pytest.mark.parametrize("variant", VARIANTS)
@EVERY_TIME
@given(case=cases(), splits=st.sampled_from([1, 2, 4]), threads=st.integers(2, 4))
def test_bits_equal_the_reference_for_every_shape_and_cut(variant: str, case: Case, splits: int, threads: int) -> None:
    """Any expert, any number of rows, threads and parts of a band: the bits are those of the numpy reference."""
    shape, record, x, expected = built_with_reference(case)
    with ExpertPool(variant, threads) as pool:
        force(pool, splits, 0.0)
        np.testing.assert_array_equal(run(pool, shape, record, x), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@EVERY_TIME
@given(case=cases((Codebook.MUL1,)))
def test_the_planar_layout_gives_the_same_bits(variant: str, case: Case) -> None:
    """Rearranging a record changes nothing but its order, for every number of bits."""
    shape, record, x = build(case)
    packed = planar.repack(shape, record)
    with ExpertPool(variant) as pool:
        expected = run(pool, shape, record, x)
        np.testing.assert_array_equal(run(pool, planar.planar_shape(shape), packed, x), expected)
    parts = shape.parts()
    for name in parts:
        before, after = shape.view(record, name).ravel(), shape.view(packed, name).ravel()
        np.testing.assert_array_equal(np.sort(before.view(np.uint16)), np.sort(after.view(np.uint16)))


@functools.cache
def constant_trellis(fill: int, codebook: Codebook, bits: int) -> tuple[ExpertShape, npt.NDArray[np.uint8], npt.NDArray[Any], Any]:
    """As `built_with_reference`: trellises of one byte, inputs of one sign and full size."""
    shape, record, x = build(Case("", seed=fill, bits=(bits, bits, bits), codebook=codebook, rows=3, x_kind="saturated"))
    record[: shape.parts()["gate_suh"].offset] = fill
    x = np.abs(x)
    for name in ("gate_suh", "up_suh"):
        shape.view(record, name)[...] = 1.0
    return shape, record, x, reference.expert(shape, record, x).down.out.view(np.uint32)


@pytest.mark.parametrize("variant", VECTOR_VARIANTS)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x55, 0x01])
@pytest.mark.parametrize("codebook", list(Codebook))
def test_constant_trellis_bits(variant: str, fill: int, codebook: Codebook) -> None:
    """All-zero, all-one and regular bit patterns with saturated inputs of one sign: the largest sums, still the reference's bits."""
    for bits in range(1, 9):
        shape, record, x, expected = constant_trellis(fill, codebook, bits)
        with ExpertPool(variant) as pool:
            np.testing.assert_array_equal(run(pool, shape, record, x), expected)


def test_bands_for_two_tiles_in_a_vector() -> None:
    """The code of the AVX-512 variants, run on pairs of 256-bit vectors: the scalar kernel's bits for every K, layout, row count."""
    program = pathlib.Path(__file__).parents[2] / "build" / "kernels" / "wide_bands"
    if not program.exists():
        pytest.skip("the native test programs were not built here")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("128 of 128 matrices had the scalar kernel's bits", "this host has no AVX2")


def extreme_state() -> int:
    """The MUL1 state whose byte sum is farthest from 510."""
    sums = reference.mul1_byte_sums(np.arange(65536, dtype=np.uint32).astype(np.uint16))
    return int(np.abs(sums - 510).argmax())


@pytest.mark.parametrize("variant", VECTOR_VARIANTS)
def test_the_largest_sums_do_not_overflow(variant: str) -> None:
    """At 8 bits a tile can repeat two states; with inputs of full size everywhere the integer sums stay exact."""
    state = extreme_state()
    shape, record, x = build(Case("", seed=5, bits=(8, 8, 8), rows=2, x_dtype="float32"))
    for name in ("gate_trellis", "up_trellis", "down_trellis"):
        shape.view(record, name)[...] = state
    x[...] = 0.0
    x[:, ::128] = 1.0  # a spike becomes a flat block after the transform: every input is quantised to the largest number
    expected = reference.expert(shape, record, x)
    assert (np.abs(expected.up.q) >= 32638).all()
    with ExpertPool(variant) as pool:
        np.testing.assert_array_equal(run(pool, shape, record, x), expected.down.out.view(np.uint32))


def test_planar_records_are_refused_where_they_make_no_sense() -> None:
    """Another codebook, a record that is planar already, a short record and an unknown layout are named."""
    shape, record, _ = build(Case("", 1))
    with pytest.raises(ValueError, match="planar needs the codebook MUL1"):
        planar.planar_shape(build(Case("", 1, codebook=Codebook.MCG))[0])
    with pytest.raises(ValueError, match="layout 1 of the record is not native"):
        planar.repack(planar.planar_shape(shape), record)
    with pytest.raises(ValueError, match="record: expected uint8"):
        planar.repack(shape, record[:64])
    strange = ExpertShape.from_buffer_copy(shape)
    strange.layout = 7
    out = np.zeros((1, shape.hidden), np.float32)
    with ExpertPool() as pool, pytest.raises(ValueError, match="layout 7 is not known"):
        pool.run([ExpertTask(strange, record, np.zeros((1, shape.hidden), np.float32), out)])
