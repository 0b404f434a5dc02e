"""Whether a kept state changes a bit: `python -m bench.gpu_kept`. Needs an NVIDIA GPU with exllamav3 1.5.1.

The worker's backend against itself: a stream that continues a kept state, and one that computed the same prompt in the same passes. Logits
of every step are compared; in between other streams fill the pages that were given back. Then the engine: a prompt that is asked again, and
requests that outgrow the cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.gpu_exact_script import compare
from services.gpu_worker.backends.base import Backend, Stream, chunk_end
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.loop import EngineLimits, EngineLoop
from services.gpu_worker.metrics import EngineMetrics
from services.gpu_worker.patches import triton_tuners, upstream
from services.gpu_worker.request import Event, Finished, OutToken, Request, RequestSpec, SamplingParams, Tokens
from services.gpu_worker.settings import GpuWorkerSettings

CHUNK = 512
NEW_TOKENS = 12
PAGES = 24
CROWD, CROWD_TOKENS = 3, 300
STEPS = 5000  # no script of ours takes more
Row = dict[str, Any]


def prompt_of(length: int, seed: int, vocab_size: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, vocab_size, (length,), generator=draw)]


def read(backend: Backend, stream: Stream, prompt: Sequence[int], first_cut: int = 0) -> torch.Tensor:
    """The rest of a prompt; the logits after its last token.

    Args:
        first_cut: a pass ends there: where the other side continues a kept state.
    """
    logits = None
    while stream.length < len(prompt):
        end = chunk_end(stream.length, len(prompt), CHUNK, PAGE_TOKENS)
        if stream.length < first_cut < end:
            end = first_cut
        logits = backend.prefill(stream, prompt[stream.length : end], all_logits=False)
    assert logits is not None
    return torch.from_numpy(logits.copy())


def decode(backend: Backend, streams: Sequence[Stream], first: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of greedy steps of a batch."""
    rows = torch.cat(list(first))
    out = [rows]
    for _ in range(NEW_TOKENS):
        rows = torch.from_numpy(backend.decode(streams, [int(row.argmax()) for row in rows]).copy())
        out.append(rows)
    return out


def both_ways(backend: Backend, kept: Any, prompts: Sequence[Sequence[int]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(whole, continued): logits of the prompts' last tokens and of a common decode."""
    sides = []
    for snapshot in (None, kept):
        # Pages that the last side gave back are written to by somebody else first.
        other = backend.open_stream()
        read(backend, other, prompt_of(3 * CHUNK, 99, backend.info.vocab_size))
        backend.close_stream(other)
        streams = [backend.open_stream(snapshot) for _ in prompts]
        first = [read(backend, stream, prompt, kept.length) for stream, prompt in zip(streams, prompts, strict=True)]
        sides.append(decode(backend, streams, first))
        for stream in streams:
            backend.close_stream(stream)
    return sides[0], sides[1]


def compare_streams(backend: Backend) -> Iterator[Row]:
    """The backend's kept states."""
    vocab = backend.info.vocab_size
    for pages in (1, 2, 5):
        base = prompt_of(pages * PAGE_TOKENS, pages, vocab)
        stream = backend.open_stream()
        # As a prompt is read that goes on behind the state: its last token is none of the state's.
        for start in range(0, len(base), CHUNK):
            backend.prefill(stream, base[start : start + CHUNK], all_logits=False)
        kept = backend.snapshot(stream)
        assert kept is not None
        backend.close_stream(stream)
        for name, more in (("one token more", 1), ("188 more", 188), ("700 more", 700), ("two streams", 300)):
            prompts = [base + prompt_of(more, 7, vocab), base + prompt_of(more + 40, 8, vocab)][: 2 if name == "two streams" else 1]
            want, got = both_ways(backend, kept, prompts)
            yield {"name": f"{pages} kept pages, {name}", **compare(want, got)}
        kept.release()
        backend.check_idle()


class Reader:
    """Takes a request's events."""

    full = False

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)

    def stalled_s(self, now: float) -> float:
        del now
        return 0.0

    @property
    def tokens(self) -> list[OutToken]:
        return [token for event in self.events if isinstance(event, Tokens) for token in event.tokens]

    @property
    def end(self) -> Finished:
        """Raises RuntimeError when the request did not end as it should."""
        if not self.events or not isinstance(self.events[-1], Finished):
            raise RuntimeError(f"a request came to {self.events[-1:]}")
        return self.events[-1]


def run(loop: EngineLoop, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Reader]:
    """All of them at the same time."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=5)
    readers = [Reader() for _ in prompts]
    for number, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
        loop.submit(Request(RequestSpec(f"request {number}", tuple(prompt), sampling), reader))
    for _ in range(STEPS):
        if not loop.step():
            break
    return readers


def compare_engine(backend: Backend, without: EngineLoop, keeping: EngineLoop) -> Iterator[Row]:
    """A prompt that is asked again, with kept states and without."""
    for length in (255, 256, 257, 700, 1300):
        prompt = prompt_of(length, length, backend.info.vocab_size)
        (want,) = run(without, [prompt], NEW_TOKENS)
        for turn, cached in (("first", 0), ("again", (length - 1) // PAGE_TOKENS * PAGE_TOKENS)):
            (got,) = run(keeping, [prompt], NEW_TOKENS)
            told = got.end.cached_tokens
            equal = got.tokens == want.tokens and told == cached
            yield {"name": f"engine, {length} tokens, {turn}", "equal": equal, "steps": len(got.tokens), "cached": told}


def outgrow(backend: Backend, loop: EngineLoop) -> Row:
    """Requests that the cache has room for when they come, and not when they are done: all of them end, with every token once.

    States that were kept before give way first. What is computed again after a put-back rounds differently on a device, so tokens are
    counted here and not compared.
    """
    length = PAGES // CROWD * PAGE_TOKENS - 100
    readers = run(loop, [prompt_of(length, seed, backend.info.vocab_size) for seed in range(CROWD)], CROWD_TOKENS)
    counts = [(len(reader.tokens), reader.end.completion_tokens) for reader in readers]
    put_back = int(loop.metrics.to_json()["requests_put_back"])
    backend.check_idle()
    return {"name": "engine, outgrown", "equal": counts == [(CROWD_TOKENS, CROWD_TOKENS)] * CROWD and put_back > 0, "put_back": put_back}


def engine(backend: Backend, tokens: TokenTable, prefix_cache_bytes: int) -> EngineLoop:
    """Of the engines of a backend only one may keep states: another one cannot make it give them up."""
    limits = EngineLimits(chunk_size=CHUNK, busy_chunk_size=PAGE_TOKENS, prefix_cache_bytes=prefix_cache_bytes, max_rq_tokens=1)
    return EngineLoop(backend, tokens, frozenset(), limits, EngineMetrics())


def every_case(backend: Backend, tokens: TokenTable) -> Iterator[Row]:
    """All comparisons; the cache has PAGES pages."""
    yield from compare_streams(backend)
    without, keeping = engine(backend, tokens, 0), engine(backend, tokens, 1 << 30)
    yield from compare_engine(backend, without, keeping)
    yield outgrow(backend, keeping)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--admission", default="auto", choices=("auto", "in_step", "between_steps"))
    parser.add_argument("--out", type=Path, default=report.ROOT / "docs" / "results" / "gpu_kept.json")
    args = parser.parse_args()
    # Late: they need torch's and exllamav3's GPU builds.
    from triton.runtime.autotuner import Autotuner

    from services.gpu_worker.backends.exl3 import loader

    # Timing configurations takes a minute; which of them runs does not matter, both sides run the same.
    importlib.import_module(upstream.TUNED)
    tuned = triton_tuners.use_first_configurations(triton_tuners.find(Autotuner))
    started = report.start("bench.gpu_kept") | {"triton_tuners_pinned": tuned}
    started["machine"]["gpu"] = torch.cuda.get_device_name(0)
    checkpoint = Checkpoint(report.ROOT / "models" / "tiny" / "checkpoint")
    rows: list[Row] = []

    def save(whole: bool) -> bool:
        # A command that is cut off leaves what it found, and says that it is not all.
        equal = bool(rows) and all(row["equal"] for row in rows)
        summary = {"bit_exact": equal, "cases": len(rows), "whole": whole, "admission": args.admission}
        report.write_result(args.out, started, rows, summary)
        return equal

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="glm53-gpu-kept-") as shm_dir:
        settings = GpuWorkerSettings.load(
            {},
            mode="exact",
            shm_dir=shm_dir,
            warm_up=False,
            ec_max_slots=24,
            ec_admission=args.admission,
            cache_tokens=PAGES * PAGE_TOKENS,
            context_tokens=4096,
            chunk_size=CHUNK,
        )
        backend = loader.load(settings, checkpoint, lambda _fraction, _what: None, "bench")
        try:
            tokens = TokenTable.from_file(checkpoint.path / "tokenizer.json", backend.info.vocab_size)
            for row in every_case(backend, tokens):
                print(json.dumps(row), flush=True)
                rows.append(row)
                save(whole=False)
        finally:
            backend.close()
    if not save(whole=True):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
