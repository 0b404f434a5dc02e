"""The decoders against the weights that a real GPU decoded (bench/record_gpu_weights.py); skipped while the recording is not there."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from kernels.python import exl3, reference
from kernels.python.exl3 import Codebook

RECORDING = pathlib.Path(__file__).parent / "golden" / "gpu_weights_v1.npz"


@pytest.mark.skipif(not RECORDING.exists(), reason="no recording of a GPU's weights")
@pytest.mark.parametrize(("trellis_name", "weights_name"), [("trellis", "weights"), ("state_trellis", "state_weights")])
def test_weights_equal_those_of_a_gpu(trellis_name: str, weights_name: str) -> None:
    """C++ and numpy decode a recorded trellis to the very fp16 numbers that the GPU gave."""
    with np.load(RECORDING) as recording:
        trellis, weights = recording[trellis_name], recording[weights_name]
    expected = weights.astype(np.float32)
    np.testing.assert_array_equal(exl3.decode(trellis, Codebook.MUL1), expected)
    np.testing.assert_array_equal(reference.decode(trellis, Codebook.MUL1), expected)


def test_the_recordings_tiles_hold_every_state() -> None:
    """The 8-bit tiles of the recording script spell out all 65,536 states."""
    from bench.record_gpu_weights import tile_with_states

    tiles = np.stack([tile_with_states(part) for part in np.arange(65536, dtype=np.uint32).astype(np.uint16).reshape(512, 128)])
    states = reference.tile_states(tiles.reshape(32, 16, 128))
    assert len(np.unique(states)) == 65536
