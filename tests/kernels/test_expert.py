"""The expert kernel as its callers see it: the same bits however the work is cut, accuracy, and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python import exl3, expert, reference
from kernels.python.exl3 import Codebook
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask
from tests.kernels.cases import Bits, Case, build

FloatArray = npt.NDArray[np.float32]
VARIANTS = expert.variants()


def rows_of(*numbers: int) -> npt.NDArray[np.uint32]:
    return np.array(numbers, np.uint32)


def evaluate(pool: ExpertPool, shape: ExpertShape, record: npt.NDArray[np.uint8], x: npt.NDArray[Any]) -> FloatArray:
    out = np.full((x.shape[0], shape.hidden), np.nan, np.float32)
    pool.run([ExpertTask(shape, record, x, out)])
    return out


def assert_same_bits(found: FloatArray, expected: FloatArray) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.fixture(scope="module")
def experts() -> list[tuple[ExpertShape, npt.NDArray[np.uint8]]]:
    """Twelve experts of one size: all codebooks, different K, some with biases or without a gate."""
    cases = [
        Case("", 500 + i, bits=(1 + i % 8, 3, 1 + (i + 4) % 8), codebook=Codebook(i % 3), has_bias=i % 4 == 1, gateless=i % 5 == 4)
        for i in range(12)
    ]
    return [build(case)[:2] for case in cases]


@pytest.fixture(scope="module")
def every_row(experts: list[tuple[ExpertShape, npt.NDArray[np.uint8]]]) -> tuple[FloatArray, FloatArray]:
    """24 rows, and what the reference makes of them, float32 [expert, row, hidden]."""
    x = Bits(77).bell((24, 256)).astype(np.float32)
    return x, np.stack([reference.expert(shape, record, x).down.out for shape, record in experts])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_bits_do_not_depend_on_threads_order_or_grouping(
    experts: list[tuple[ExpertShape, npt.NDArray[np.uint8]]], every_row: tuple[FloatArray, FloatArray], variant: str, threads: int
) -> None:
    """Random experts, rows, splits into tasks and orders give the rows that a single row alone gives."""
    generator = np.random.default_rng(threads)
    x, expected = every_row
    with ExpertPool(variant, threads) as pool:
        for _ in range(20):
            picks = [(e, row) for e in range(len(experts)) for row in generator.permutation(24)[: generator.integers(0, 20)]]
            out = np.full((max(1, len(picks)), 256), np.nan, np.float32)
            places = generator.permutation(len(picks)).astype(np.uint32)
            tasks = []
            for e, group in itertools.groupby(range(len(picks)), key=lambda i: picks[i][0]):
                left = list(group)
                while left:  # cut an expert's rows at random places
                    size = int(generator.integers(1, len(left) + 1))
                    chunk, left = left[:size], left[size:]
                    tasks.append(ExpertTask(*experts[e], x, out, rows_of(*(picks[i][1] for i in chunk)), places[chunk]))
            generator.shuffle(tasks)  # type: ignore[arg-type]
            pool.run(tasks)
            if picks:
                assert_same_bits(out[places], expected[tuple(np.array(picks).T)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_eight_rows_equal_five_and_three(variant: str) -> None:
    """A group of rows gives the bits of its parts, for every codebook."""
    for codebook in Codebook:
        shape, record, x = build(Case("", 61, codebook=codebook, rows=8))
        with ExpertPool(variant) as pool:
            whole = evaluate(pool, shape, record, x)
            parts = [evaluate(pool, shape, record, np.ascontiguousarray(x[rows])) for rows in (slice(0, 5), slice(5, 8))]
        assert_same_bits(whole, np.concatenate(parts))


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp16_and_fp32_inputs_of_equal_value_give_equal_bits(variant: str) -> None:
    """The input's type does not matter, only its value."""
    shape, record, x = build(Case("", 62, rows=5, x_kind="outlier channels"))
    assert x.dtype == np.float16
    with ExpertPool(variant) as pool:
        assert_same_bits(evaluate(pool, shape, record, x), evaluate(pool, shape, record, x.astype(np.float32)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_than_eight_rows_in_one_task(variant: str) -> None:
    """A long task is cut into groups of eight; every row is written once."""
    shape, record, x = build(Case("", 63, rows=37))
    with ExpertPool(variant, 2) as pool:
        out = evaluate(pool, shape, record, x)
        for row in (0, 7, 8, 36):
            assert_same_bits(out[row : row + 1], evaluate(pool, shape, record, x[row : row + 1]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_wide_experts_use_all_blocks_and_groups(variant: str) -> None:
    """Eleven input blocks and three bands, compared with the reference (groups of 3, 3, 3 and 2 blocks)."""
    shape, record, x = build(Case("", 64, hidden=1408, inter=384, bits=(3, 2, 4), rows=6))
    with ExpertPool(variant) as pool:
        assert_same_bits(evaluate(pool, shape, record, x), reference.expert(shape, record, x).down.out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_pool_serves_experts_of_different_sizes(variant: str) -> None:
    """Scratch memory grows and is shared: small, large and small again give the reference's bits in one call."""
    sizes = ((128, 256), (640, 128), (256, 512), (128, 128))
    built = [build(Case("", 65 + i, hidden=hidden, inter=inter, rows=3)) for i, (hidden, inter) in enumerate(sizes)]
    outs = [np.full((3, shape.hidden), np.nan, np.float32) for shape, _, _ in built]
    with ExpertPool(variant, 2) as pool:
        pool.run([ExpertTask(shape, record, x, out) for (shape, record, x), out in zip(built, outs, strict=True)])
    for (shape, record, x), out in zip(built, outs, strict=True):
        assert_same_bits(out, reference.expert(shape, record, x).down.out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_part_of_a_record_matters(variant: str) -> None:
    """Flipping one bit anywhere in a part, or in the input, changes the output."""
    shape, record, x = build(Case("", 70, rows=2, has_bias=True))
    with ExpertPool(variant) as pool:
        before = evaluate(pool, shape, record, x)
        for name, part in shape.parts().items():
            for place in (0, part.nbytes // 2, part.nbytes - 1):
                changed = shape.empty_records()[0]
                changed[:] = record
                changed[part.offset + place] ^= 0x04
                assert (evaluate(pool, shape, changed, x) != before).any(), (name, place)
        other = x.copy()
        other.view(np.uint16)[1, 255] ^= 0x0200
        after = evaluate(pool, shape, record, other)
        assert_same_bits(after[0], before[0])
        assert (after[1] != before[1]).any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_row_becomes_nan_and_stays_alone(variant: str, bad: float) -> None:
    """A row with one NaN or infinity comes out as NaN throughout; its neighbours keep their bits."""
    for codebook in Codebook:
        shape, record, x = build(Case("", 71, rows=4, x_dtype="float32", codebook=codebook))
        with ExpertPool(variant) as pool:
            before = evaluate(pool, shape, record, x)
            x[2, 100] = bad
            after = evaluate(pool, shape, record, x)
        assert np.isnan(after[2]).all()
        assert_same_bits(after[[0, 1, 3]], before[[0, 1, 3]])


def relative_rms(found: npt.NDArray[Any], exact: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean()))


def dense_linear(shape: ExpertShape, record: npt.NDArray[np.uint8], name: str, affine: bool) -> npt.NDArray[np.float64]:
    """The dense fp64 weight of a matrix, from the GPU's fp16 weights or from MUL1's affine form."""
    trellis, suh, svh = (shape.view(record, f"{name}_{kind}") for kind in ("trellis", "suh", "svh"))
    if affine:
        inner = (887 * (reference.mul1_byte_sums(reference.matrix_states(trellis)) - 510) - 238) * 2.0**-17
    else:
        inner = exl3.decode(trellis, Codebook(shape.codebook)).astype(np.float64)
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)
    rows, columns = inner.shape
    blocks = signs @ (inner.reshape(rows // 128, 128, columns) @ np.kron(np.eye(columns // 128), signs))
    return suh.astype(np.float64)[:, None] * blocks.reshape(rows, columns) * svh.astype(np.float64)


def exact_expert(shape: ExpertShape, record: npt.NDArray[np.uint8], x: npt.NDArray[Any], affine: bool) -> npt.NDArray[np.float64]:
    gate, up, down = (dense_linear(shape, record, name, affine) for name in ("gate", "up", "down"))
    wide = x.astype(np.float64)
    g, u = wide @ gate, np.clip(wide @ up, -shape.act_limit, shape.act_limit)
    return np.asarray(np.minimum(g / (1 + np.exp(-g)), shape.act_limit) * u @ down)


# (codebook, weights of the exact evaluation, whole expert, one matrix). Against MUL1's affine weights what remains is the 16-bit input
# (3e-5 a matrix). The GPU rounds each weight to fp16, a relative 2.1e-4 of the matrix; three matrices in a row add up to 4e-4.
ACCURACY = [
    (Codebook.MUL1, True, 1e-4, 5e-5),
    (Codebook.MUL1, False, 5e-4, 3e-4),
    (Codebook.MCG, False, 1e-4, 5e-5),
    (Codebook.INST3, False, 1e-4, 5e-5),
]


@pytest.mark.parametrize(("codebook", "affine", "whole_bound", "matrix_bound"), ACCURACY)
@pytest.mark.parametrize("variant", VARIANTS)
def test_error_against_fp64(codebook: Codebook, affine: bool, whole_bound: float, matrix_bound: float, variant: str) -> None:
    """The relative RMS error of a whole expert and of its first matrix stays within the table's bounds."""
    shape, record, x = build(Case("", 72, hidden=512, inter=256, rows=8, codebook=codebook))
    with ExpertPool(variant) as pool:
        y = evaluate(pool, shape, record, x)
    assert relative_rms(y, exact_expert(shape, record, x, affine)) <= whole_bound
    u = reference.expert(shape, record, x).up.out
    assert relative_rms(u, x.astype(np.float64) @ dense_linear(shape, record, "up", affine)) <= matrix_bound


def test_record_layout_of_the_real_model() -> None:
    """GLM-5.3-Flash's expert: trellis parts first, then scales, 9,474,048 bytes, a multiple of the page."""
    shape = ExpertShape.create(4096, 2048, 3)
    parts = shape.parts()
    assert shape.record_bytes == 9_474_048
    starts = [parts[name].offset for name in ("gate_trellis", "up_trellis", "down_trellis", "gate_suh")]
    assert starts == [0, 3_145_728, 6_291_456, 9_437_184]
    assert parts["down_trellis"].shape == (128, 256, 48)


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        ((100, 128), {}, "hidden = 100"),
        ((128, 0), {}, "inter = 0"),
        ((128, 128, 0), {}, "k_gate = 0"),
        ((128, 128, (3, 9, 3)), {}, "k_up = 9"),
        ((128, 128, (3, 3, 300)), {}, "300"),
        ((128, 128, 2.5), {}, r"k_gate = 2\.5 bits per weight: half-integer K is not supported"),
        ((128, 128, (3, 3, 1.5)), {}, r"k_down = 1\.5 bits per weight: half-integer"),
        ((128, 128, (3, 2.75, 3)), {}, r"k_up = 2\.75 bits per weight is not supported"),
        ((128, 128), {"codebook": 3}, "codebook 3"),
        ((128, 128), {"activation": 4}, "activation 4"),
        ((128, 128), {"act_limit": -1.0}, "act_limit"),
        ((128, 128), {"act_limit": float("nan")}, "act_limit"),
        ((128, 128), {"gateless": True, "activation": expert.Activation.SWIGLU_OAI}, "swiglu_oai needs a gate"),
        ((1 << 20, 1 << 20), {}, "does not fit a record"),
        ((-128, 128), {}, "hidden = -128"),
    ],
)
def test_a_shape_that_is_not_supported_is_refused(arguments: tuple[Any, ...], fields: dict[str, Any], message: str) -> None:
    """The error names the field and its value."""
    with pytest.raises(ValueError, match=message):
        ExpertShape.create(*arguments, **fields)


def test_a_record_takes_exactly_its_tensors() -> None:
    """A missing, unknown, misshapen or mistyped tensor is refused by name, and the record stays as it was."""
    shape, record, _ = build(Case("", 73))
    tensors = {name: shape.view(record, name).copy() for name in shape.parts()}
    target = shape.empty_records()[0]
    target[:] = 7
    wrong = [
        ({name: tensor for name, tensor in tensors.items() if name != "up_svh"}, "up_svh: missing"),
        ({**tensors, "up_bias": tensors["up_svh"]}, "up_bias: the record has no such part"),
        ({**tensors, "gate_suh": tensors["gate_svh"]}, r"gate_suh: expected float16 \[256\], got float16 \[128\]"),
        ({**tensors, "down_svh": tensors["down_svh"].astype(np.float32)}, "down_svh: expected float16"),
        ({**tensors, "up_trellis": np.zeros((16, 8, 56), np.uint16)}, r"up_trellis = 3\.5 bits per weight: half-integer K"),
    ]
    for bad, message in wrong:
        with pytest.raises(ValueError, match=message):
            shape.write_record(target, bad)
        assert (target == 7).all()
    shape.write_record(target, {**tensors, "up_trellis": tensors["up_trellis"].view(np.int16)})
    np.testing.assert_array_equal(target, record)


def test_a_malformed_task_is_refused() -> None:
    """Each array of a task is checked before the kernel sees it; nothing is written."""
    shape, record, x = build(Case("", 74))
    out = np.full((2, 256), 7, np.float32)
    good = {"shape": shape, "record": record, "x": x, "out": out}
    wide = np.zeros(record.size + 64, np.uint8)
    offset = (-wide.ctypes.data) % 64 + 16
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"record": record[:100]}, "record: expected uint8"),
        ({"record": wide[offset : offset + record.size - 16]}, "record"),
        ({"record": np.repeat(record, 2)[::2]}, "record: expected contiguous"),
        ({"record": np.broadcast_to(record[:1], record.shape)}, "record: expected contiguous"),
        ({"x": x.astype(np.float64)}, "x: expected float32 or float16"),
        ({"x": x[:, :128]}, "x: expected contiguous"),
        ({"out": out.astype(np.float64)}, "out: expected float32"),
        ({"out": out[:, ::2]}, "out: expected contiguous"),
        ({"x_rows": rows_of(2)}, "x_rows: row 2 of 2"),
        ({"out_rows": rows_of(0, 5)}, "out_rows: row 5 of 2"),
        ({"x_rows": rows_of(0), "out_rows": rows_of(0, 1)}, "1 and 2 rows"),
        ({"x_rows": np.array([0])}, "x_rows: expected uint32"),
    ]
    with ExpertPool() as pool:
        for change, message in wrong:
            with pytest.raises(ValueError, match=message):
                pool.run([ExpertTask(**{**good, **change})])
        broken = ExpertShape.from_buffer_copy(shape)
        broken.down_svh = shape.record_bytes - 64
        with pytest.raises(ValueError, match="down: 512 bytes at offset"):
            pool.run([ExpertTask(**{**good, "shape": broken})])
        assert (out == 7).all()
        pool.run([])
        pool.run([ExpertTask(**good, x_rows=rows_of(), out_rows=rows_of())])
        assert (out == 7).all()
        pool.run([ExpertTask(**good)])
        assert (out != 7).any()
