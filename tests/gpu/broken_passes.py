"""Prefills that are broken off, and what is computed behind them: prints a row for each comparison, and as its last line all of them.

Started by test_broken_passes.py, in a process of its own: it keeps VRAM. `every_case` runs over a stand-in too
(tests/unit/test_exl3_joined.py).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from bench.gpu_exact_script import compare
from services.gpu_worker.backends.base import PassBrokenOff
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from tests.gpu.joined_passes import Row, decode, every_placement, flat, prompt_of, read

LENGTHS = (513, 1000)  # a chunk alone, and one with its tail
BESIDE = 300  # tokens of the prompt of a stream that goes on meanwhile


class Asked:
    """Counts how often a prefill asks whether it is wanted, and says no from the `last`-th time on; 0: never."""

    def __init__(self, backend: Exl3Backend, last: int = 0) -> None:
        self.count, self.since, self._last = 0, 0.0, last
        backend.break_off_when(self._ask)

    def _ask(self) -> bool:
        self.count += 1
        if self.count != self._last:
            return False
        self.since = time.perf_counter()
        return True


def answer(backend: Exl3Backend, prompt: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(logits of the prompt and of the steps behind it, states) of a stream of its own."""
    stream = backend.open_stream()
    try:
        logits, kept = read(backend, stream, prompt, join=True)
        states = flat(stream.state.stash())
        rows = decode(backend, stream, logits)
    finally:
        backend.close_stream(stream)
    if kept is not None:
        states += flat(kept.state)
        kept.release()
    return rows, states


def break_off(backend: Exl3Backend, prompt: Sequence[int], last: int) -> float:
    """A prefill that is broken off when it asks for the `last`-th time; seconds until its stream is closed.

    Raises:
        RuntimeError: it was not broken off.
    """
    asked, stream = Asked(backend, last), backend.open_stream()
    try:
        read(backend, stream, prompt, join=True)
    except PassBrokenOff:
        pass
    else:
        raise RuntimeError(f"a prefill went on although nobody wanted it any more before its layer {last}")
    finally:
        backend.close_stream(stream)
        backend.break_off_when(lambda: False)
    return time.perf_counter() - asked.since


def every_case(backend: Exl3Backend, name: str, lengths: Sequence[int] = LENGTHS) -> Iterator[Row]:
    """Prefills that end before their first, second, middle and last layer; behind each a step of another stream, then the whole prompt."""
    for length in lengths:
        prompt, other = (prompt_of(n, backend.info.vocab_size) for n in (length, BESIDE))
        answer(backend, prompt)  # kernels are compiled and chosen, and the cache is as it will be
        asked = Asked(backend)
        want, want_states = answer(backend, prompt)
        layers, (want_beside, _) = asked.count, answer(backend, other)
        running = backend.open_stream()
        logits, kept = read(backend, running, other, join=True)
        beside = [logits]
        for last in sorted({1, 2, layers // 2, layers}):
            took = break_off(backend, prompt, last)
            beside.append(torch.from_numpy(backend.decode([running], [int(beside[-1].argmax())]).copy()))
            got, got_states = answer(backend, prompt)
            row = {"name": f"{name}, {length} tokens, before layer {last} of {layers}", **compare(want, got), "took_s": took}
            states = compare(want_states, got_states)["equal"]
            yield row | {"states_equal": states, "beside_equal": compare(want_beside[: len(beside)], beside)["equal"]}
        backend.close_stream(running)
        if kept is not None:
            kept.release()
        backend.check_idle()


def main() -> None:
    json.dump({"rows": every_placement("broken", every_case)[1]}, sys.stdout)


if __name__ == "__main__":
    main()
