"""Whole-stack benchmark on a machine without a GPU: `make bench` → docs/results/stack_cpu.json.

What it measures, all in one run on the shipped checkpoint with default settings:
- c1_tok_s, c4_tok_s: completion tokens over wall time (prefill, HTTP and SSE included) at 1 and 4 concurrent streams, greedy;
- stack_overhead_pct: how much longer the same C1 request takes through gateway + gRPC + shared memory (mode `fast`) than through the
  engine called directly in one process in the way that is fastest there (mode `exact`, experts in process); rounds alternate, medians are
  compared;
- path_overhead_pct: the same against the engine called directly as the server runs it (mode `fast` with a cpu_expert process): what the
  way of a request costs, without what its mode costs; direct_fast_tok_s is that engine's speed;
- cpu_us_per_token: CPU time of each process per token at C1, the client's too, which shares the machine;
- tokens_per_event: how many tokens one event of the stream brings at C1;
- restart_ready_s: a second `glm53 serve` from start to the first 200 of /health;
- heldout_exact_pct: the held-out set through the HTTP API, greedy.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import os
import statistics
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from bench import report, server
from bench.engine_direct import DirectEngine
from bench.heldout import score_over_http
from tests.e2e.asking import Stream, model_of

OUT = report.ROOT / "docs" / "results" / "stack_cpu.json"
TOKENS = 256
TIMEOUT_S = 120.0
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def timed_stream(url: str, model: str) -> tuple[float, Stream]:
    """Seconds and result of one greedy stream of exactly TOKENS tokens.

    The client is a plain one: it shares the machine's cores with what is measured.
    """
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "stream_options": {"include_usage": True}})
    got, rest = Stream(), b""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=TIMEOUT_S)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    while piece := response.read1(65536):
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                got.feed(event[6:].decode())
    took = time.monotonic() - began
    connection.close()
    if not got.done or got.error is not None or got.usage is None or got.usage["completion_tokens"] != TOKENS:
        raise SystemExit(f"expected {TOKENS} tokens: HTTP {response.status}, {got.usage}, {got.error}")
    return took, got


def concurrent_rate(url: str, model: str, streams: int) -> float:
    """Aggregate tokens per second of `streams` concurrent requests."""
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        list(pool.map(lambda _: timed_stream(url, model), range(streams)))
    return streams * TOKENS / (time.monotonic() - began)


def cpu_s(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """CPU time of each process until now, in seconds."""
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def measure_rates(running: server.Server, rounds: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Alternates direct and served requests, so that the machine's mood hits both alike."""
    url, model = running.url, model_of(running.url)
    processes = {name: psutil.Process(running.pid_of(name)) for name in ("gateway", "gpu_worker", "cpu_expert")}
    processes["client"] = psutil.Process(os.getpid())
    used: Counter[str] = Counter()
    with DirectEngine() as exact, DirectEngine(lane=True) as fast:
        timed_stream(url, model)
        for engine in (exact, fast):
            engine.generate(MESSAGES, TOKENS)
        for number in range(rounds):
            before = cpu_s(processes)
            took, got = timed_stream(url, model)
            used.update({name: seconds - before[name] for name, seconds in cpu_s(processes).items()})
            alone, alone_fast = exact.generate(MESSAGES, TOKENS), fast.generate(MESSAGES, TOKENS)
            if {alone.text, alone_fast.text} != {got.reasoning + got.content}:
                raise SystemExit("the engine called directly and the server gave different text: the comparison would be void")
            row = {"round": number, "served_s": took, "direct_s": alone.seconds, "direct_fast_s": alone_fast.seconds}
            rows.append(row | {"c1_tok_s": TOKENS / took, "c4_tok_s": concurrent_rate(url, model, 4), "events": got.events})
    return summary_of([row for row in rows if "round" in row], used)


def summary_of(rounds: list[dict[str, Any]], used: Counter[str]) -> dict[str, Any]:
    """The figures that are quoted elsewhere, from the medians of the rounds.

    Args:
        rounds: their rows.
        used: CPU seconds of each process over all C1 requests.
    """
    middle = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    served, exact, fast = middle["served_s"], middle["direct_s"], middle["direct_fast_s"]
    return {
        "c1_tok_s": round(TOKENS / served, 1),
        "c4_tok_s": round(middle["c4_tok_s"], 1),
        "direct_tok_s": round(TOKENS / exact, 1),
        "direct_fast_tok_s": round(TOKENS / fast, 1),
        "stack_overhead_pct": round(100 * (served / exact - 1), 1),
        "path_overhead_pct": round(100 * (served / fast - 1), 1),
        "cpu_us_per_token": {name: round(seconds / len(rounds) / TOKENS * 1e6) for name, seconds in used.items()},
        # The last two events bring no tokens: the finish reason and the usage.
        "tokens_per_event": round(TOKENS / (middle["events"] - 2), 2),
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
        summary = measure_rates(first, args.rounds, rows)
        score = score_over_http(first.url, limit=args.limit)
        rows.append({"heldout": score.by_kind})
        summary["heldout_exact_pct"] = score.exact_pct
        rows.append({"stats": first.get_json("/stats")})
    with server.running() as second:
        summary["restart_ready_s"] = round(second.ready_s, 2)
    report.write_result(args.out, started, rows, summary)


if __name__ == "__main__":
    main()
