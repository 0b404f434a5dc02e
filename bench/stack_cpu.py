"""Whole-stack benchmark on a machine without a GPU: `make bench` → docs/results/stack_cpu.json.

What it measures, all in one run on the shipped checkpoint with default settings:
- c1_tok_s, c4_tok_s: completion tokens over wall time (prefill, HTTP and SSE included) at 1 and 4 concurrent streams, greedy;
- stack_overhead_pct: how much longer the same C1 request takes through gateway + gRPC + shared memory (mode `fast`) than through the
  engine called directly in one process in the way that is fastest there (mode `exact`, experts in process); rounds alternate, medians are
  compared;
- restart_ready_s: a second `glm53 serve` from start to the first 200 of /health;
- heldout_exact_pct: the held-out set through the HTTP API, greedy.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import time
from pathlib import Path
from typing import Any

from bench import report, server
from bench.engine_direct import DirectEngine
from bench.heldout import score_over_http
from tests.e2e.asking import Stream, model_of, stream

OUT = report.ROOT / "docs" / "results" / "stack_cpu.json"
TOKENS = 256
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def timed_stream(url: str, model: str) -> tuple[float, Stream]:
    """Seconds and result of one greedy stream of exactly TOKENS tokens."""
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    began = time.monotonic()
    got = stream(url, body)
    took = time.monotonic() - began
    if got.usage is None or got.usage["completion_tokens"] != TOKENS:
        raise SystemExit(f"expected {TOKENS} tokens, got {got.usage}")
    return took, got


def concurrent_rate(url: str, model: str, streams: int) -> float:
    """Aggregate tokens per second of `streams` concurrent requests."""
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        list(pool.map(lambda _: timed_stream(url, model), range(streams)))
    return streams * TOKENS / (time.monotonic() - began)


def measure_rates(url: str, direct: DirectEngine, rounds: int, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Alternates direct and served requests, so that the machine's mood hits both alike."""
    model = model_of(url)
    timed_stream(url, model)
    direct.generate(MESSAGES, TOKENS)
    served_s, direct_s, c4 = [], [], []
    for number in range(rounds):
        took, got = timed_stream(url, model)
        served_s.append(took)
        alone = direct.generate(MESSAGES, TOKENS)
        direct_s.append(alone.seconds)
        if alone.text != got.reasoning + got.content:
            raise SystemExit("the engine called directly and the server gave different text: the comparison would be void")
        c4.append(concurrent_rate(url, model, 4))
        rows.append({"round": number, "served_s": took, "direct_s": alone.seconds, "c1_tok_s": TOKENS / took, "c4_tok_s": c4[-1]})
    served, alone_s = statistics.median(served_s), statistics.median(direct_s)
    return {
        "c1_tok_s": round(TOKENS / served, 1),
        "c4_tok_s": round(statistics.median(c4), 1),
        "direct_tok_s": round(TOKENS / alone_s, 1),
        "stack_overhead_pct": round(100 * (served / alone_s - 1), 1),
    }


def main() -> None:
    """Runs everything and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=int, default=0, help="score only the first N held-out items (0 = all)")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    started = report.start("bench.stack_cpu")
    rows: list[dict[str, Any]] = []
    with server.running() as first:
        rows.append({"first_ready_s": round(first.ready_s, 2)})
        with DirectEngine() as direct:
            summary: dict[str, Any] = dict(measure_rates(first.url, direct, args.rounds, rows))
        score = score_over_http(first.url, limit=args.limit)
        rows.append({"heldout": score.by_kind})
        summary["heldout_exact_pct"] = score.exact_pct
        rows.append({"stats": first.get_json("/stats")})
    with server.running() as second:
        summary["restart_ready_s"] = round(second.ready_s, 2)
    report.write_result(args.out, started, rows, summary)


if __name__ == "__main__":
    main()
