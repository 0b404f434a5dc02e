"""EXL3 decoding: golden values, the bit stream, and the C++ decoder against the numpy one."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python import exl3, reference
from kernels.python.exl3 import Codebook

GOLDEN_STATES = np.array([0, 1, 0x1234, 0xFFFF], np.uint16)
GOLDEN_WEIGHTS = {
    Codebook.MUL1: [-3.453125, 0.64111328125, -0.5771484375, -0.6513671875],
    Codebook.MCG: [1.84375, 0.134521484375, 1.5146484375, 0.85009765625],
    Codebook.INST3: [0.76806640625, -0.91943359375, -2.19921875, -0.158203125],
}
ALL = list(itertools.product(Codebook, range(1, 9)))


def random_trellis(tiles_in: int, tiles_out: int, k: int) -> npt.NDArray[np.uint16]:
    generator = np.random.default_rng(100 * k + tiles_in)
    return generator.integers(0, 1 << 16, (tiles_in, tiles_out, 16 * k), dtype=np.uint16)


def spelled_out_states(tile: npt.NDArray[np.uint16], k: int) -> list[int]:
    """The states of one tile, from a string of its bits: slow and with nothing in common with the decoders."""
    words = tile.view("<u4")
    bits = "".join(f"{word:032b}" for word in words)
    ring = bits[-16:] + bits
    return [int(ring[(t + 1) * k : (t + 1) * k + 16], 2) for t in range(256)]


@pytest.mark.parametrize("codebook", Codebook)
def test_codebooks_have_the_published_values(codebook: Codebook) -> None:
    """Four states decode to the values that the format defines, in both decoders."""
    assert reference.weights_of(GOLDEN_STATES, codebook).tolist() == GOLDEN_WEIGHTS[codebook]
    # At 8 bits the second weight's state is the tile's first 16 bits; it lies in row 1, column 0.
    trellis = np.zeros((4, 1, 64), "<u4")
    trellis[:, 0, 0] = GOLDEN_STATES.astype(np.uint32) << 16
    decoded = exl3.decode(trellis.view(np.uint16), codebook)
    assert decoded[1::16, 0].tolist() == GOLDEN_WEIGHTS[codebook]


@pytest.mark.parametrize(("codebook", "mean", "deviation"), [(0, 0.0002, 1.2437), (1, 0.0, 1.2441), (2, -0.0019, 1.0003)])
def test_codebooks_have_the_published_statistics(codebook: int, mean: float, deviation: float) -> None:
    """Mean and standard deviation over all 65,536 states."""
    weights = reference.weights_of(np.arange(1 << 16).astype(np.uint16), Codebook(codebook)).astype(np.float64)
    assert weights.mean() == pytest.approx(mean, abs=1e-4)
    assert weights.std() == pytest.approx(deviation, abs=1e-4)


@pytest.mark.parametrize(("codebook", "k"), ALL)
def test_cpp_decodes_like_numpy(codebook: Codebook, k: int) -> None:
    """Whole matrices are equal bit for bit, for every codebook and number of bits."""
    trellis = random_trellis(3, 5, k)
    np.testing.assert_array_equal(exl3.decode(trellis, codebook), reference.decode(trellis, codebook))


@pytest.mark.parametrize("k", range(1, 9))
def test_states_follow_the_bit_stream(k: int) -> None:
    """States equal those read from the spelled-out ring of bits, the first ones from the tile's end."""
    tile = random_trellis(1, 1, k)
    assert reference.tile_states(tile)[0, 0].tolist() == spelled_out_states(tile[0, 0], k)


@pytest.mark.parametrize("k", range(1, 9))
def test_a_tile_bites_its_tail(k: int) -> None:
    """Flipping the last bit of a tile changes exactly the weights whose 16 bits hold it, wrap-around included."""
    trellis = random_trellis(1, 1, k)
    flipped = trellis.copy()
    flipped[0, 0, -2] ^= 1  # the lowest bit of the last 32-bit word
    changed = np.flatnonzero(reference.tile_states(trellis)[0, 0] != reference.tile_states(flipped)[0, 0])
    ends = (np.arange(256) + 1) * k
    expected = [t for t in range(256) if (256 * k - 1) in [bit % (256 * k) for bit in range(ends[t] - 16, ends[t])]]
    assert changed.tolist() == expected
    assert (0 in expected) == (k < 16)
    before, after = exl3.decode(trellis, Codebook.MUL1), exl3.decode(flipped, Codebook.MUL1)
    order = reference.tile_order()
    assert set(order[before != after]) <= set(expected)


def test_every_place_of_a_tile_has_its_own_position() -> None:
    """The order of a tile is a permutation, and run T holds rows 2q, 2q+1, 2q+8, 2q+9 of columns c and c + 8."""
    order = reference.tile_order()
    assert sorted(order.ravel().tolist()) == list(range(256))
    for run, j in itertools.product(range(32), range(8)):
        row = 2 * (run % 4) + (j & 1) + 8 * (j >> 1 & 1)
        column = run // 4 + 8 * (j >> 2)
        assert order[row, column] == 8 * run + j


@pytest.mark.parametrize("codebook", Codebook)
def test_dequantize_equals_the_dense_formula(codebook: Codebook) -> None:
    """C++ and numpy agree bit for bit, and both with diag(suh) H W H diag(svh) in fp64."""
    trellis = random_trellis(16, 8, 3)
    generator = np.random.default_rng(5)
    suh, svh = (generator.standard_normal(n).astype(np.float16) for n in (256, 128))
    dense = exl3.dequantize(trellis, suh, svh, codebook)
    np.testing.assert_array_equal(dense, reference.dequantize(trellis, suh, svh, codebook))
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)
    inner = np.kron(np.eye(2), signs) @ exl3.decode(trellis, codebook).astype(np.float64) @ signs
    exact = suh[:, None].astype(np.float64) * inner * svh.astype(np.float64)
    np.testing.assert_allclose(dense, exact, rtol=0, atol=3e-6 * np.abs(inner).max())


def test_decode_takes_signed_halfwords() -> None:
    """Checkpoints store a trellis as int16: the bits count."""
    trellis = random_trellis(1, 2, 3)
    np.testing.assert_array_equal(exl3.decode(trellis.view(np.int16), Codebook.MUL1), exl3.decode(trellis, Codebook.MUL1))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 4), "expected"),
        ((1, 1, 42), "last dimension 42"),
        ((1, 1, 40), "2.5 bits per weight: half-integer"),
        ((1, 1, 0), "last dimension 0"),
        ((1, 1, 144), "last dimension 144"),
    ],
)
def test_decode_refuses_a_wrong_trellis(shape: tuple[int, ...], message: str) -> None:
    """A rank or a last dimension that is no 16 * K with K = 1..8 is refused with the shape in the message."""
    with pytest.raises(ValueError, match=message):
        exl3.decode(np.zeros(shape, np.uint16), Codebook.MUL1)


def test_dequantize_refuses_what_does_not_fit() -> None:
    """Wrong dtypes, lengths and dimensions are refused with the name of the tensor."""
    trellis = random_trellis(8, 8, 3)
    scales = np.ones(128, np.float16)
    with pytest.raises(ValueError, match="suh: expected float16"):
        exl3.dequantize(trellis, scales.astype(np.float32), scales, Codebook.MUL1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="svh: expected float16"):
        exl3.dequantize(trellis, scales, scales[:64], Codebook.MUL1)
    with pytest.raises(ValueError, match="trellis: expected uint16"):
        exl3.dequantize(trellis.astype(np.int32), scales, scales, Codebook.MUL1)
    with pytest.raises(ValueError, match="out_features = 64 is not a multiple of 128"):
        exl3.dequantize(trellis[:, :4], scales, scales[:64], Codebook.MUL1)
