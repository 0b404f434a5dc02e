"""Drawing a token from one row of scores.

At the model's vocabulary of 154,880 tokens every pass over a row in double precision, and every new array of that size, costs up to a
millisecond for each stream of each step. So the row is read in single precision, in memory that is used again, and only the tokens that
may be drawn are looked at more closely; `bench.sampling` measures it.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.logprobs import largest
from services.gpu_worker.request import SamplingParams

Scores = NDArray[np.float32]
# How many of the most likely tokens are looked at first for top-p.
FIRST_CANDIDATES = 64
# Below this every temperature is the same: the best token. Dividing fp32 scores by it still gives finite numbers.
COLDEST = 1e-30
_BLOCK = 64  # tokens whose weights are added up first
_ONES = np.ones(_BLOCK, np.float32)
_local = threading.local()


def scratch(size: int, number: int = 0) -> Scores:
    """This thread's float32 [size] memory of that number, overwritten by the next user: a new array is paid for in page faults."""
    kept: dict[tuple[int, int], Scores] = _local.__dict__.setdefault("kept", {})
    found = kept.get((size, number))
    if found is None:
        found = kept[size, number] = np.empty(size, np.float32)
    return found


def draw(scores: Scores, params: SamplingParams, uniform: float) -> int:
    """The token that a number of [0, 1) stands for, after temperature, top-k, top-p and min-p in this order.

    Args:
        scores: [vocab_size], the largest finite, -inf for tokens that cannot come. Overwritten.
        params: a temperature above 0.
    """
    temperature = max(params.temperature, COLDEST)
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        weigh(scores, temperature, scores)
        return of_all(scores, uniform)
    top = float(scores.max())

    def exact(ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.exp((scores[ids].astype(np.float64) - top) / temperature)

    if params.top_k > 0:
        order = largest(scores, min(params.top_k, len(scores)))
        kept = exact(order)
        total = float(kept.sum())
    elif params.top_p < 1.0:
        # Of all tokens: the nucleus is a share of the whole. fp32 weights are good for the sum, their errors are some 1e-7 of it.
        total = float(weigh(scores, temperature, scratch(len(scores), 1)).sum(dtype=np.float64))
        wanted = min(FIRST_CANDIDATES, len(scores))
        order = largest(scores, wanted)
        kept = exact(order)
        while wanted < len(scores) and kept.sum() < params.top_p * total:
            wanted = min(wanted * 16, len(scores))
            order = largest(scores, wanted)
            kept = exact(order)
    else:
        # A little more than is kept, so that the rounding of the threshold leaves nothing out.
        threshold = top + temperature * np.log(params.min_p) - 1e-5 * max(1.0, abs(top), temperature)
        candidates = np.flatnonzero(scores >= np.float32(threshold))
        order = candidates[np.lexsort((candidates, -scores[candidates]))]
        kept = exact(order)
        total = float(kept.sum())
    if params.top_p < 1.0:
        # The nucleus is taken of what top-k left, as transformers' processors do one after the other.
        kept = kept[np.cumsum(kept) - kept < params.top_p * total]
    if params.min_p > 0.0:
        kept = kept[kept >= params.min_p * kept[0]]
    return int(order[of_few(np.cumsum(kept), uniform)])


def weigh(scores: Scores, temperature: float, out: Scores) -> Scores:
    """exp((scores - the largest) / temperature) in fp32, into `out`, which may be `scores`."""
    # The largest becomes 0 before the division: a tiny temperature would make it infinite.
    np.subtract(scores, scores.max(), out=out)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # to -inf: the weight is 0 either way
            np.divide(out, np.float32(temperature), out=out)
    return np.exp(out, out=out)


def of_all(weights: Scores, uniform: float) -> int:
    """Index drawn in proportion to weights [n], by inverting their running sum; never one of weight 0."""
    whole = len(weights) // _BLOCK * _BLOCK
    sums = weights[:whole].reshape(-1, _BLOCK) @ _ONES
    rest = weights[whole:]
    running = np.cumsum(np.append(sums, rest.sum(dtype=np.float32)), dtype=np.float64)
    block = of_few(running, uniform)
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    # The block's own sum differs from the one above by rounding: the share of it that is left decides.
    before = float(running[block - 1]) if block else 0.0
    share = (uniform * float(running[-1]) - before) / (float(running[block]) - before)
    return block * _BLOCK + of_few(inside, min(max(share, 0.0), 1.0))


def of_few(cumulative: NDArray[np.float64], uniform: float) -> int:
    """Index drawn by inverting a cumulative sum; never an index of zero weight."""
    total = cumulative[-1]
    # The product may round up to the whole sum; beyond the index that reaches it there are only zeros.
    return min(int(np.searchsorted(cumulative, uniform * total, side="right")), int(np.searchsorted(cumulative, total, side="left")))
