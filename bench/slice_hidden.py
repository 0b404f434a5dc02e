"""Hidden states behind every layer of a few decode steps, and how far two runs of the same steps are apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.kernel_accuracy import relative_rms

States = list[NDArray[np.float32]]  # one for each layer: [steps, ...]


@contextlib.contextmanager
def watching(model: Any) -> Iterator[list[list[torch.Tensor]]]:
    """What each block with an MLP returns while inside, by block.

    Args:
        model: exllamav3's, with `fwd_modules`.
    """
    blocks = [entry[0] for entry in model.fwd_modules if getattr(entry[0], "mlp", None) is not None]
    seen: list[list[torch.Tensor]] = [[] for _ in blocks]
    before = [vars(block).get("forward") for block in blocks]
    for block, kept in zip(blocks, seen, strict=True):
        block.forward = _keeping(block.forward, kept)
    try:
        yield seen
    finally:
        for block, own in zip(blocks, before, strict=True):
            if own is None:
                del block.forward
            else:
                block.forward = own


def _keeping(stock: Any, kept: list[torch.Tensor]) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        kept.append(out.clone())  # the next block adds to it in place
        return out

    return forward


def arrays(seen: list[list[torch.Tensor]]) -> States:
    """On the host."""
    return [torch.stack(kept).float().cpu().numpy() for kept in seen]


def distances(want: States, got: States) -> list[float]:
    """Relative RMS, layer by layer."""
    return [float(f"{relative_rms(b, a.astype(np.float64)):.3e}") for a, b in zip(want, got, strict=True)]
