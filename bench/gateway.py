"""What the gateway costs, next to a bare relay in the same run: `python -m bench.gateway` → docs/results/gateway.json.

A worker without a model (bench/null_worker.py) sends stamped tokens at 50 a second and stream; gateway and relay take turns, each in
a process of its own, and the best of the rounds counts, because anything else on the machine only adds.
- cpu_us_per_token: CPU time of the gateway's process per streamed token at 8 streams, parser and detokeniser included; also at 1 stream
  and for the relay;
- added_ms_p99_8_streams: 99th percentile of the time from the worker's stamp to the client, less that of a gRPC client without gateway;
- open_streams_200_mb: resident memory of the gateway with 200 open streams;
- admission_rejects_per_s: short requests that are read, checked and refused (400) per second while 8 streams run, of 2,500 offered,
  and what these streams notice of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from bench import report
from bench.null_worker import MODEL
from bench.server import free_port
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc

OUT = report.ROOT / "docs" / "results" / "gateway.json"
RATE = 50
MESSAGES = [{"role": "user", "content": "Hello"}]
_CONNECTIONS = 16
# Refusals are asked for at this pace, all connections together: more than must be reached, and not a flood of its own.
_OFFERED_PER_S = 2500


@dataclass
class Load:
    """What clients saw."""

    tokens: int = 0
    delays_ms: list[float] = field(default_factory=list)

    def p99(self) -> float:
        """99th percentile of the delays in milliseconds."""
        return statistics.quantiles(self.delays_ms, n=100)[98]


def request_bytes(body: dict[str, Any]) -> bytes:
    """A keep-alive POST of a chat request."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def read_stream(port: int, tokens: int, load: Load, opened: asyncio.Event | None = None) -> None:
    """One streamed request from a raw socket; the client must not cost more than what it measures."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": tokens, "stream": True}
    writer.write(request_bytes(body))
    rest, done = b"", False
    try:
        while not done:
            data = await reader.read(65536)
            now_us = time.monotonic_ns() // 1000
            if not data:
                raise SystemExit(f"the stream broke off: {rest[-300:]!r}")
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                done = done or b"data: [DONE]" in event
                _note(event, now_us, load)
            if opened is not None and load.tokens:
                opened.set()
    finally:
        writer.close()


def _note(event: bytes, now_us: int, load: Load) -> None:
    """Counts the stamps of one event."""
    if b'"error"' in event:
        raise SystemExit(event.decode())
    for name in (b'"content":"', b'"content": "', b'"reasoning_content":"'):
        start = event.find(name)
        if start >= 0:
            stamps = event[start + len(name) : event.index(b'"', start + len(name))].split()
            load.delays_ms += [(now_us - int(value)) / 1000 for value in stamps]
            load.tokens += len(stamps)


async def read_grpc(worker: str, tokens: int, load: Load) -> None:
    """The same without anything in between."""
    async with grpc.aio.insecure_channel(worker) as channel:
        request = pb.GenerateRequest(request_id=os.urandom(8).hex(), prompt_token_ids=[300], sampling=pb.SamplingParams(max_tokens=tokens))
        async for event in pb_grpc.WorkerStub(channel).Generate(request):
            now_us = time.monotonic_ns() // 1000
            for token in event.tokens.tokens:
                load.delays_ms.append((now_us - int(token.piece)) / 1000)
                load.tokens += 1


async def streams(port: int, number: int, seconds: float) -> Load:
    """`number` streams side by side, their starts spread over one token's time."""
    load = Load()

    async def one(i: int) -> None:
        await asyncio.sleep(i / number / RATE)
        await read_stream(port, round(seconds * RATE), load)

    await asyncio.gather(*(one(i) for i in range(number)))
    return load


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process until now."""
    times = process.cpu_times()
    return times.user + times.system


async def cost(port: int, process: psutil.Process, number: int, seconds: float) -> dict[str, float]:
    """CPU per token and delays of one server under `number` streams."""
    before = cpu_s(process)
    load = await streams(port, number, seconds)
    return {
        "streams": number,
        "cpu_us_per_token": (cpu_s(process) - before) / load.tokens * 1e6,
        "delay_p99_ms": load.p99(),
        "tokens": load.tokens,
    }


async def rejects(port: int, seconds: float) -> dict[str, float]:
    """Refusals per second while 8 streams run."""
    body = {"model": MODEL, "messages": MESSAGES, "temperature": -1}
    refused = 0
    until = time.monotonic() + seconds

    async def hammer() -> None:
        nonlocal refused
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = request_bytes(body)
        due = time.monotonic()
        while due < until and time.monotonic() < until:
            due += _CONNECTIONS / _OFFERED_PER_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 400"):
                raise SystemExit(head.decode())
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            refused += 1
        writer.close()

    running = asyncio.create_task(streams(port, 8, seconds))
    await asyncio.gather(*(hammer() for _ in range(_CONNECTIONS)))
    load = await running
    return {"rejects_per_s": refused / seconds, "stream_tokens": load.tokens, "stream_delay_p99_ms": load.p99()}


async def memory_mb(port: int, process: psutil.Process, number: int) -> float:
    """Resident memory with `number` open streams that all have had a token."""
    opened = [asyncio.Event() for _ in range(number)]
    tasks = [asyncio.create_task(read_stream(port, 1000, Load(), event)) for event in opened]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in opened))
    await asyncio.sleep(2)
    used = process.memory_info().rss / 2**20
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return used


@contextlib.contextmanager
def null_worker(rate: float) -> Iterator[str]:
    """The worker's address."""
    command = [sys.executable, "-m", "bench.null_worker", "--rate", str(rate)]
    process = subprocess.Popen(command, cwd=report.ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def server(kind: str, worker: str) -> Iterator[tuple[int, psutil.Process]]:
    """Port and process of a gateway or a relay that is ready."""
    port = free_port()
    if kind == "gateway":
        command, env = [sys.executable, "-m", "services.gateway"], {"PORT": str(port), "GLM53_WORKER_ADDRESS": worker}
    else:
        command, env = [sys.executable, "-m", "bench.bare_relay", worker, str(port)], {}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GLM53_")}
    process = subprocess.Popen(command, cwd=report.ROOT, env={**clean, **env, "GLM53_LOG_LEVEL": "warning"})
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"the {kind} did not start")
            time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        # The relay has no orderly end.
        process.kill()
        process.wait(60)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


async def measure(rounds: int, seconds: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows and the summary."""
    rows: list[dict[str, Any]] = []
    with null_worker(RATE) as worker, contextlib.ExitStack() as servers:
        running = {kind: servers.enter_context(server(kind, worker)) for kind in ("gateway", "relay")}
        for kind, (port, _) in running.items():
            await streams(port, 2, 1)
            rows.append({"what": "warm-up", "kind": kind})
        for number in range(rounds):
            for count in (8, 1):
                for kind, (port, process) in running.items():
                    rows.append({"what": "cost", "kind": kind, "round": number, **await cost(port, process, count, seconds)})
            load = Load()
            await asyncio.gather(*(read_grpc(worker, round(seconds * RATE), load) for _ in range(8)))
            rows.append({"what": "direct", "round": number, "delay_p99_ms": load.p99()})
            for kind, (port, _) in running.items():
                rows.append({"what": "rejects", "kind": kind, "round": number, **await rejects(port, seconds)})
    rows += [row async for row in _memory()]
    return rows, summary_of(rows)


async def _memory() -> AsyncIterator[dict[str, Any]]:
    """Memory is told by fresh processes, and at a pace that does not drown the machine."""
    with null_worker(2) as worker:
        for kind in ("gateway", "relay"):
            with server(kind, worker) as (port, process):
                yield {"what": "memory", "kind": kind, "streams": 200, "mb": await memory_mb(port, process, 200)}


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted elsewhere: the best of the rounds."""

    def best(what: str, name: str, take: Any = min, **wanted: Any) -> float:
        found = [row[name] for row in rows if row["what"] == what and all(row.get(key) == value for key, value in wanted.items())]
        return float(take(found))

    gateway, relay = {"kind": "gateway"}, {"kind": "relay"}
    direct = best("direct", "delay_p99_ms")
    at_8 = best("cost", "cpu_us_per_token", streams=8, **gateway)
    relay_at_8 = best("cost", "cpu_us_per_token", streams=8, **relay)
    return {
        "cpu_us_per_token": round(at_8, 1),
        "cpu_us_per_token_relay": round(relay_at_8, 1),
        "cpu_ratio_to_relay": round(at_8 / relay_at_8, 2),
        "cpu_us_per_token_1_stream": round(best("cost", "cpu_us_per_token", streams=1, **gateway), 1),
        "cpu_us_per_token_1_stream_relay": round(best("cost", "cpu_us_per_token", streams=1, **relay), 1),
        "added_ms_p99_8_streams": round(best("cost", "delay_p99_ms", streams=8, **gateway) - direct, 2),
        "added_ms_p99_8_streams_relay": round(best("cost", "delay_p99_ms", streams=8, **relay) - direct, 2),
        "direct_ms_p99_8_streams": round(direct, 2),
        "open_streams_200_mb": round(best("memory", "mb", **gateway), 1),
        "open_streams_200_mb_relay": round(best("memory", "mb", **relay), 1),
        "admission_rejects_per_s": round(best("rejects", "rejects_per_s", max, **gateway)),
        "admission_rejects_per_s_relay": round(best("rejects", "rejects_per_s", max, **relay)),
        "stream_delay_p99_ms_during_rejects": round(best("rejects", "stream_delay_p99_ms", **gateway), 2),
        "stream_delay_p99_ms_during_rejects_relay": round(best("rejects", "stream_delay_p99_ms", **relay), 2),
    }


def main() -> None:
    """Runs everything and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    started = report.start("bench.gateway")
    rows, summary = asyncio.run(measure(args.rounds, args.seconds))
    report.write_result(args.out, started, rows, summary)


if __name__ == "__main__":
    main()
