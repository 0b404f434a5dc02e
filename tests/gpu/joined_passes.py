"""Prompts whose last chunk and tail are one pass, and the same in two: prints a row for each comparison, and as its last line all of them.

Started by test_joined.py, in a process of its own: it keeps VRAM. `every_case` runs over a stand-in too (tests/unit/test_exl3_joined.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.backend_info import gpu_info
from bench.gpu_exact_script import compare
from services.gpu_worker.backends.base import chunk_end, tail_end
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS

LENGTHS = (257, 300, 511, 513, 1000, 4096 + 100)
CHUNK = 2048
STEPS = 16
CACHE_TOKENS = 16_384
Row = dict[str, Any]


def prompt_of(length: int, vocab_size: int) -> list[int]:
    draw = torch.Generator().manual_seed(length)
    return [int(token) for token in torch.randint(0, vocab_size, (length,), generator=draw)]


def flat(state: Any) -> list[torch.Tensor]:
    """All numbers of a copied state, in the order of its keys."""
    if isinstance(state, dict):
        return [part for key in sorted(state, key=str) for part in flat(state[key])]
    if isinstance(state, tuple):
        return [part for value in state for part in flat(value)]
    return [state.contiguous() if isinstance(state, torch.Tensor) else torch.tensor([state])]


def read(backend: Exl3Backend, stream: Any, prompt: Sequence[int], *, join: bool) -> tuple[torch.Tensor, Any]:
    """The rest of a prompt as the engine cuts it; the logits after its last token, and the state kept at the last full page's end."""
    logits, kept = torch.empty(0), None
    info = backend.info if join else replace(backend.info, joined_tail_from=0)
    while stream.length < len(prompt):
        start = stream.length
        end = chunk_end(start, len(prompt), CHUNK, PAGE_TOKENS)
        until = tail_end(end, len(prompt), CHUNK, info)
        if until > end:
            rows, kept = backend.prefill_joined(stream, prompt[start:end], prompt[end:until], keep=True)
        else:
            rows = backend.prefill(stream, prompt[start:end], all_logits=False)
            if end == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS:
                kept = backend.snapshot(stream)
        logits = torch.from_numpy(rows.copy())
    return logits, kept


def decode(backend: Exl3Backend, stream: Any, logits: torch.Tensor) -> list[torch.Tensor]:
    """Greedy steps."""
    rows = [logits]
    for _ in range(STEPS):
        rows.append(torch.from_numpy(backend.decode([stream], [int(rows[-1].argmax())]).copy()))
    return rows


def one_side(backend: Exl3Backend, prompt: Sequence[int], *, join: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """(logits of the prompt, of steps, and of steps behind the kept state; states; bytes that prefill staged before those steps)."""
    before = int(backend.stats()["bytes_staged"])
    stream = backend.open_stream()
    try:
        logits, kept = read(backend, stream, prompt, join=join)
        staged = int(backend.stats()["bytes_staged"]) - before
        states = flat(stream.state.stash())
        rows = decode(backend, stream, logits)
    finally:
        backend.close_stream(stream)
    if kept is not None:
        states += flat(kept.state)
        again = backend.open_stream(kept)
        try:
            rows += decode(backend, again, read(backend, again, prompt, join=join)[0])
        finally:
            backend.close_stream(again)
            kept.release()
    backend.check_idle()
    return rows, states, staged


def every_case(backend: Exl3Backend, name: str, lengths: Sequence[int] = LENGTHS) -> Iterator[Row]:
    """Every length in two passes, and joined."""
    for length in lengths:
        prompt = prompt_of(length, backend.info.vocab_size)
        one_side(backend, prompt, join=False)  # kernels are compiled and chosen, and the cache is as it will be
        (want, want_states, apart), (got, got_states, joined) = (one_side(backend, prompt, join=join) for join in (False, True))
        states = compare(want_states, got_states)["equal"]
        row = {"name": f"{name}, {length} tokens", "length": length, **compare(want, got), "states_equal": states}
        yield row | {"staged_apart": apart, "staged_joined": joined}


def every_placement(test: str, cases: Callable[[Exl3Backend, str], Iterator[Row]]) -> tuple[int, list[Row]]:
    """Runs cases over the shipped model with few slots and with all, in both admissions, and prints their rows as they come.

    Args:
        test: names the arena's folder.
        cases: rows for a backend and what its placement is called.

    Returns:
        (tokens from which on a tail is joined, rows).
    """
    # Late: the cases themselves need no GPU.
    from services.gpu_worker.backends.exl3 import loader
    from services.gpu_worker.backends.exl3.experts import ExpertOptions
    from services.gpu_worker.backends.exl3.placement import PlacementOptions
    from tests.gpu.shipped_model import backend_of, shipped

    rows: list[Row] = []
    with shipped(test, cache_tokens=CACHE_TOKENS, max_streams=2, chunk=CHUNK) as model:
        count, joined_from = model.num_records, loader.joined_tail_from(model.loaded.model)
        info = replace(gpu_info(model.checkpoint.config.vocab_size, CACHE_TOKENS, 2, CHUNK), joined_tail_from=joined_from)
        for on_demand in (False, True):
            for num_slots in (count // 6, count):
                options = ExpertOptions(PlacementOptions(admit_after=1), on_demand=on_demand)
                # With all of them resident nothing is staged.
                with backend_of(model, num_slots, options, info) as backend:
                    name = f"{'in_step' if on_demand else 'between_steps'}, {num_slots} of {count} slots"
                    for row in cases(backend, name):
                        sys.stdout.write(json.dumps(row) + "\n")
                        sys.stdout.flush()
                        rows.append(row)
    return joined_from, rows


def main() -> None:
    joined_from, rows = every_placement("joined", every_case)
    json.dump({"joined_tail_from": joined_from, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main()
