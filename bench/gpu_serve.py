"""The whole stack on a GPU machine: `python -m bench.gpu_serve`. `glm53 serve` in each mode, answers, kills, restarts.

For each mode: a first start, which tunes kernels and saves their choices; questions whose answers are checked; one stream alone, four
together; cpu_expert killed in mid-stream, which may change no token; gpu_worker killed in mid-stream, which ends the stream with an error,
and the next worker re-attaches the arena; then a second start with what the first one saved. Exit 0 when everything was as it must be.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report, server
from bench.server import Server

MODEL = "glm-5.3-tiny"
QUESTION = "What is the capital of France?"
COUNT = "Count from 1 to 60."
TOKENS = 160
ROUNDS = 3  # the first one still meets shapes of passes for the first time
AT_EVENT = 10  # what is killed in mid-stream is killed here
BACK_S = 90.0  # how long a service may take to be back
# Of /stats, after the rates: where picks were computed and what the planner believes.
TOLD = ("slots", "picks", "hit_ratio", "lane", "ct_a_us", "ct_b_us", "ct_tzc_us", "planner_error_pct", "plan_us", "lane_us", "overrun_us")
GPU_ENV = {"GLM53_CACHE_TOKENS": "32768", "GLM53_CONTEXT_TOKENS": "4096"}


@dataclass
class Stream:
    """What a stream brought."""

    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    done: bool = False
    tokens: int = 0
    first_s: float = 0.0
    seconds: float = 0.0
    pieces: list[str] = field(default_factory=list)


def ask(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, **fields}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return dict(json.load(reply))


def stream(url: str, at_event: Callable[[], None] | None = None, **fields: Any) -> Stream:
    """One stream to its end; `at_event` is called once when its tenth piece is here."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **fields}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    got, began = Stream(), time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as reply:
        for line in reply:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                got.done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                got.error = str(event["error"].get("message"))
                continue
            if event.get("usage"):
                got.tokens = int(event["usage"]["completion_tokens"])
            for choice in event.get("choices", ()):
                piece = (choice["delta"].get("reasoning_content") or "") + (choice["delta"].get("content") or "")
                got.finish_reason = choice.get("finish_reason") or got.finish_reason
                if piece:
                    got.first_s = got.first_s or time.monotonic() - began
                    got.pieces.append(piece)
                    if len(got.pieces) == AT_EVENT and at_event is not None:
                        at_event()
    got.text, got.seconds = "".join(got.pieces), time.monotonic() - began
    return got


def answers(url: str) -> dict[str, Any]:
    """Answers of every kind, and whether they are right."""
    plain = ask(url, temperature=0)
    content = plain["choices"][0]["message"]["content"]
    seeded = [ask(url, temperature=1.0, seed=7)["choices"][0]["message"]["content"] for _ in range(2)]
    scored = ask(url, temperature=0, logprobs=True, top_logprobs=3, max_tokens=4)["choices"][0]["logprobs"]["content"]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    formed = json.loads(ask(url, temperature=0, response_format=wanted, max_tokens=96)["choices"][0]["message"]["content"])
    streamed = stream(url)
    return {
        "answer": content,
        "right": "Paris" in content,
        "streamed_equals_plain": streamed.text.endswith(content),
        "first_text_s": round(streamed.first_s, 3),
        "same_seed_same_answer": seeded[0] == seeded[1],
        "json_schema_holds": list(formed) == ["city"] and isinstance(formed["city"], str),
        "logprobs_are_ranked": all(t["top_logprobs"][0]["logprob"] >= t["logprob"] for t in scored),
    }


def counting(running: Server, at_event: Callable[[], None] | None = None) -> Stream:
    return stream(running.url, at_event, messages=[{"role": "user", "content": COUNT}], max_tokens=TOKENS)


def rates(running: Server) -> dict[str, Any]:
    """Tokens a second through the API, medians of ROUNDS: one stream, four together."""
    alone, together, whole = [], [], True
    for _ in range(ROUNDS):
        one = counting(running)
        alone.append(one.tokens / one.seconds)
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            streams = list(pool.map(lambda _: counting(running), range(4)))
        together.append(sum(s.tokens for s in streams) / (time.monotonic() - began))
        whole = whole and all(s.done and s.finish_reason and s.error is None for s in streams)
    return {
        "tokens": one.tokens,
        "c1_tok_s": round(statistics.median(alone), 1),
        "c4_tok_s": round(statistics.median(together), 1),
        "c1_rounds": [round(rate, 1) for rate in alone],
        "c4_rounds": [round(rate, 1) for rate in together],
        "four_together_are_whole": whole,
    }


def until(true: Callable[[], bool], what: str, seconds: float = BACK_S) -> float:
    """Waits; returns the seconds it took."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > seconds:
            raise RuntimeError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)
    return round(time.monotonic() - began, 2)


def lane(running: Server) -> str:
    return str(running.get_json("/stats").get("tiers", {}).get("lane", {}).get("state"))


def cpu_expert_killed(running: Server, undisturbed: Stream) -> dict[str, Any]:
    """SIGKILL of cpu_expert in mid-stream."""
    victim = running.pid_of("cpu_expert")
    got = counting(running, lambda: os.kill(victim, signal.SIGKILL))
    back_s = until(lambda: running.pid_of("cpu_expert") != victim and lane(running) == "UP", "the CPU lane is back")
    again = counting(running)
    return {"cpu_expert_killed_same_text": got.text == undisturbed.text == again.text and got.error is None, "lane_back_s": back_s}


def gpu_worker_killed(running: Server, undisturbed: Stream) -> dict[str, Any]:
    """SIGKILL of gpu_worker in mid-stream."""
    victim = running.pid_of("gpu_worker")
    got = counting(running, lambda: os.kill(victim, signal.SIGKILL))

    def ready() -> bool:
        return running.pid_of("gpu_worker") != victim and running.get_json("/health").get("status") == "ok"

    back_s = until(ready, "the worker is ready again")
    again = counting(running)
    return {
        "gpu_worker_killed_stream_ends_with_an_error": got.error is not None and got.done and got.finish_reason is None,
        "worker_back_s": back_s,
        "arena_reattached": str(running.get_json("/stats").get("arena", "")).startswith("re-attached"),
        "same_text_after_restart": again.text == undisturbed.text,
    }


def measure(mode: str, env: dict[str, str], work: Path, ready_timeout: float) -> dict[str, Any]:
    """One mode: a row."""
    row: dict[str, Any] = {"mode": mode}
    for number in ("first", "second"):
        began = time.monotonic()
        running = server.start(work, env={**env, "GLM53_MODE": mode}, wait=False)
        try:
            running.wait_ready(ready_timeout)
            row[f"{number}_start_s"] = round(time.monotonic() - began, 1)
            if number == "first":
                measure_first(running, row)
            else:
                row["second_start_answers"] = answers(running.url)["right"]
        except (OSError, RuntimeError, ValueError, KeyError, IndexError) as error:  # what was measured so far is kept
            row["error"] = f"{type(error).__name__}: {error}"
            print(running.tail(80), file=sys.stderr)
            break
        finally:
            running.stop()
    return row


def measure_first(running: Server, row: dict[str, Any]) -> None:
    """Everything but the second start, into the row as it comes."""
    stats = running.get_json("/stats")
    row |= {"device": stats.get("device"), "served_as": stats.get("mode"), **answers(running.url)}
    if row["mode"] == "fast":
        row["lane_up_s"] = until(lambda: lane(running) == "UP", "the CPU lane is up")
    undisturbed = counting(running)
    row |= rates(running)
    tiers = running.get_json("/stats").get("tiers", {})
    row["tiers"] = {name: tiers[name] for name in TOLD if name in tiers}
    if row["mode"] == "fast":
        row |= cpu_expert_killed(running, undisturbed)
    row |= gpu_worker_killed(running, undisturbed)


def good(row: dict[str, Any]) -> bool:
    """True when nothing in the row is wrong."""
    return "error" not in row and all(value is not False for value in row.values()) and row["served_as"] == row["mode"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--modes", default="exact,fast")
    parser.add_argument("--slots", default="24")
    parser.add_argument("--ready-timeout", type=float, default=300.0, help="seconds; a machine's first start compiles kernels")
    parser.add_argument("--out", type=Path, default=report.ROOT / "docs/results/gpu_serve.json")
    args = parser.parse_args()
    started = report.start("bench.gpu_serve")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="glm53-gpu-serve-") as work:
        env = {"GLM53_DEVICE": args.device, "GLM53_EC_MAX_SLOTS": args.slots, "GLM53_TRITON_PIN": str(Path(work) / "triton.json")}
        if args.device == "cuda":
            env |= GPU_ENV
        for mode in args.modes.split(","):
            rows.append(measure(mode, env, Path(work), args.ready_timeout))
            keys = ("first_start_s", "second_start_s", "worker_back_s", "lane_back_s", "c1_tok_s", "c4_tok_s")
            summary = {f"{row['mode'].replace('-', '_')}_{key}": row[key] for row in rows for key in keys if key in row}
            summary["all_as_it_must_be"] = all(map(good, rows))
            report.write_result(args.out, started, rows, summary)
    print(json.dumps(rows, indent=1))
    sys.exit(0 if summary["all_as_it_must_be"] else 1)


if __name__ == "__main__":
    main()
