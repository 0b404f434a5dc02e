"""Records the weights that a GPU decodes, for the accuracy test: run on a machine with an NVIDIA GPU and exllamav3.

    python -m bench.record_gpu_weights tests/kernels/golden/gpu_weights_v1.npz

The file holds, for MUL1 at 3 bits, the trellis of one 128 x 128 block and the fp16 weights of exllamav3's `ext.reconstruct` for it, and the
fp16 weight of each of the 65,536 states. It shares no code with the kernel, which is its point. The test reads it when it is there.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

BITS = 3


def tile_with_states(states: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """8-bit tiles whose stream is given: a state is the 16 bits before position (t + 1) * 8, so pairs of bytes are states."""
    stream = states.astype(">u2").tobytes()
    words = np.frombuffer(stream, ">u4").astype("<u4")
    return np.asarray(words.view("<u2"))


def reconstruct(trellis: npt.NDArray[np.uint16], bits: int) -> npt.NDArray[np.float16]:
    """exllamav3's decoder on the GPU: uint16 [in/16, out/16, 16 * bits] -> fp16 [in, out]."""
    import torch  # only here: the rest of bench/ runs without it
    from exllamav3.ext import exllamav3_ext as ext

    device: Any = torch.device("cuda:0")
    packed = torch.from_numpy(trellis.view(np.int16).copy()).to(device)
    out = torch.empty((trellis.shape[0] * 16, trellis.shape[1] * 16), dtype=torch.half, device=device)
    ext.reconstruct(out, packed, bits, False, True)  # mcg = False, mul1 = True
    return np.asarray(out.cpu().numpy())


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=pathlib.Path)
    args = parser.parse_args()
    generator = np.random.default_rng(2026)
    trellis = generator.integers(0, 1 << 16, (8, 8, 16 * BITS), dtype=np.uint16)
    # Every state appears: 65,536 of them as the even bytes' states of 8-bit tiles, 128 a tile.
    tiles = np.stack([tile_with_states(part) for part in np.arange(65536, dtype=np.uint32).astype(np.uint16).reshape(512, 128)])
    state_tiles = np.ascontiguousarray(tiles.reshape(32, 16, 128))
    np.savez_compressed(
        args.target,
        bits=BITS,
        trellis=trellis,
        weights=reconstruct(trellis, BITS),
        state_trellis=state_tiles,
        state_weights=reconstruct(state_tiles, 8),
    )
    print(f"written to {args.target}")


if __name__ == "__main__":
    main()
