"""Asks services again and again whether they live: a child of `glm53 serve`, which reads its lines.

    python -m cli.probe PERIOD_S NAME=ADDRESS ...

One line per question: NAME and "serving" (ready), "alive" (answered, not ready) or "silent" (no answer within the period). A process of its
own, because gRPC's threads and a supervisor that forks do not go together. ADDRESS: the gRPC address of a worker, or an http:// URL that a
gateway answers while it lives.
"""

from __future__ import annotations

import http.client
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

SERVING, ALIVE, SILENT = "serving", "alive", "silent"
# The way to our own gateway never leads through the proxy that http_proxy may name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask_gateway(url: str, timeout_s: float) -> str:
    """What a gateway says: any HTTP answer is a sign of life."""
    try:
        with _DIRECT.open(url, timeout=timeout_s):
            return SERVING
    except urllib.error.HTTPError:
        return ALIVE
    except (OSError, ValueError, http.client.HTTPException):
        return SILENT


def worker_question(address: str) -> Callable[[float], str]:
    """A function that asks a worker's grpc.health.v1 service; its argument is the timeout in seconds."""
    import grpc  # not needed where only a gateway is asked
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    # A restarted worker is met at once, not after gRPC's own back-off.
    options = (("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_http_proxy", 0))
    stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(address, options=options))

    def ask(timeout_s: float) -> str:
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s)
        except grpc.RpcError:
            return SILENT
        return SERVING if reply.status == health_pb2.HealthCheckResponse.SERVING else ALIVE

    return ask


def question(address: str) -> Callable[[float], str]:
    """How a service at this address is asked."""
    return (lambda timeout_s: ask_gateway(address, timeout_s)) if address.startswith("http://") else worker_question(address)


def ask_forever(name: str, ask: Callable[[float], str], period_s: float) -> None:
    """Prints a line per question; ends the process when nobody reads them any more."""
    while True:
        began = time.monotonic()
        try:
            os.write(sys.stdout.fileno(), f"{name} {ask(period_s)}\n".encode())
        except OSError:
            os._exit(0)
        time.sleep(max(0.0, period_s - (time.monotonic() - began)))


def main(argv: list[str]) -> None:
    """Asks every service in a thread of its own, until the process is ended."""
    period_s = float(argv[0])
    threads = []
    for name, _, address in (target.partition("=") for target in argv[1:]):
        threads.append(threading.Thread(target=ask_forever, args=(name, question(address), period_s)))
        threads[-1].start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
