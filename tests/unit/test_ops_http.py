"""The endpoint for probes and scrapers, and the probe that containers run."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.common.ops_http import MAX_CONNECTIONS, OpsAnswers, OpsServer, Verdict, split_address
from services.common.probe import probe
from services.cpu_expert.metrics import STUCK_S, ExpertMetrics

ROOT = Path(__file__).resolve().parents[2]


class Service:
    """Answers that a test can change."""

    def __init__(self) -> None:
        self.ready = False

    def answers(self) -> OpsAnswers:
        return OpsAnswers(
            live=lambda: Verdict(True, {"status": "ok"}),
            ready=lambda: Verdict(self.ready, {"status": "ready" if self.ready else "loading", "progress": 0.5}),
            metrics=lambda: b"some_metric 1\n",
        )


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def ops(service: Service) -> Iterator[OpsServer]:
    server = OpsServer("127.0.0.1:0", service.answers(), "GLM53_TEST_HTTP")
    yield server
    server.close()


def get(port: int, path: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_head_is_get_without_a_body(ops: OpsServer, service: Service) -> None:
    """Probes may ask for the head alone."""
    service.ready = True
    for path, expected in (("/metrics", 200), ("/health", 200), ("/nothing", 404)):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", ops.port, timeout=5)) as connection:
            connection.request("HEAD", path)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (expected, b"")
            assert int(answer.headers["Content-Length"]) > 0


def test_readiness_follows_the_service_and_liveness_does_not(ops: OpsServer, service: Service) -> None:
    """A service that loads is alive and not ready; the answer says how far it is."""
    status, body = get(ops.port, "/health/ready")
    assert (status, json.loads(body)) == (503, {"status": "loading", "progress": 0.5})
    assert get(ops.port, "/health/live")[0] == 200
    service.ready = True
    assert get(ops.port, "/health/ready")[0] == get(ops.port, "/health")[0] == 200


def test_metrics_are_text_and_unknown_paths_404(ops: OpsServer) -> None:
    """The scrape gets the text as it is; what is not there names what is."""
    assert get(ops.port, "/metrics?x=1") == (200, b"some_metric 1\n")
    status, body = get(ops.port, "/")
    assert status == 404
    assert b"/health/ready" in body


def test_idle_connections_cannot_use_the_endpoint_up(ops: OpsServer) -> None:
    """More connections than there are places: the surplus is closed at once, and the places come back."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", ops.port), timeout=5)) for _ in range(MAX_CONNECTIONS + 4)]
        assert all(_is_closed(connection) for connection in held[MAX_CONNECTIONS:])
        assert not _is_closed(held[0])
    assert _answers_within(ops.port, 5.0)


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.5)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def _answers_within(port: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(port, "/health/live")[0] == 200:
                return True
        time.sleep(0.05)
    return False


def test_a_taken_port_is_a_config_error_that_names_the_setting(ops: OpsServer, service: Service) -> None:
    """Two services on one address: the second says which setting to change."""
    with pytest.raises(ConfigError, match=f"GLM53_OTHER_HTTP=127.0.0.1:{ops.port}") as caught:
        OpsServer(f"127.0.0.1:{ops.port}", service.answers(), "GLM53_OTHER_HTTP")
    assert caught.value.param == "GLM53_OTHER_HTTP"


@pytest.mark.parametrize(("text", "parts"), [("0.0.0.0:9401", ("0.0.0.0", 9401)), ("[::1]:0", ("::1", 0))])
def test_addresses_are_split(text: str, parts: tuple[str, int]) -> None:
    """Host and port, IPv6 too."""
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["9401", ":9401", "host:", "host:http", "host:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """The error says what an address looks like."""
    with pytest.raises(ValueError, match="host:port"):
        split_address(text)


def test_the_probe_agrees_with_the_endpoint(ops: OpsServer, service: Service) -> None:
    """Unhealthy with the reason, healthy, and unreachable."""
    healthy, said = probe(f"http://127.0.0.1:{ops.port}/health/ready")
    assert not healthy
    assert "loading" in said
    service.ready = True
    assert probe(f"http://127.0.0.1:{ops.port}/health/ready")[0]
    port = ops.port
    ops.close()
    healthy, said = probe(f"http://127.0.0.1:{port}/health/ready", timeout_s=1)
    assert not healthy
    assert str(port) in said


@pytest.mark.parametrize("url", ["https://127.0.0.1/", "127.0.0.1:80", "http:///x"])
def test_the_probe_takes_http_addresses_only(url: str) -> None:
    """Anything else is unhealthy, with the address shown."""
    healthy, said = probe(url)
    assert not healthy
    assert url in said


def test_the_probe_as_a_command_has_exit_codes(ops: OpsServer, service: Service) -> None:
    """0 healthy, 1 unhealthy, 2 used wrongly; importing it costs no package but the standard library."""

    def run(*args: str) -> int:
        return subprocess.run([sys.executable, "-I", "-c", _MAIN, *args], cwd=ROOT, timeout=20, check=False).returncode

    url = f"http://127.0.0.1:{ops.port}/health"
    assert run(url) == 1
    service.ready = True
    assert run(url) == 0
    assert run() == 2


_MAIN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from services.common import probe
assert not {{"pydantic", "grpc", "numpy"}} & set(sys.modules)
sys.exit(probe.main(sys.argv[1:]))
"""


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_cpu_expert_is_healthy_while_it_waits_and_not_when_it_is_stuck() -> None:
    """Waiting for a gpu_worker is fine and says so; a loop that does not come round is not."""
    clock = Clock()
    metrics = ExpertMetrics(clock)
    metrics.waiting("no arena yet")
    assert metrics.verdict() == Verdict(True, {"status": "waiting", "reason": "no arena yet"})
    metrics.attached(3)
    assert metrics.verdict() == Verdict(True, {"status": "serving"})
    clock.now += STUCK_S + 1
    assert not metrics.verdict().ok
    metrics.beat()
    assert metrics.verdict().ok


def test_cpu_expert_counts_on_over_attachments() -> None:
    """A new attachment starts its own counters at zero; what is exported never falls."""
    metrics = ExpertMetrics()
    metrics.attached(1)
    metrics.served({"jobs": 5, "picks": 9})
    metrics.served({"jobs": 7, "picks": 9})
    metrics.attached(1)
    metrics.served({"jobs": 2, "picks": 1})
    text = metrics.answers().metrics().decode()
    assert "glm53_cpu_expert_jobs_total 9.0" in text
    assert "glm53_cpu_expert_picks_total 10.0" in text
    assert "glm53_cpu_expert_attachments_total 2.0" in text
