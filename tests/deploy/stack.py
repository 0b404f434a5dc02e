"""The compose stack as a user starts it: the shipped compose file, the real Docker Compose, images built here, ports of the tests' own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.deploy import images
from tests.deploy.engine import ROOT, Engine, run, until

COMPOSE = ROOT / "deploy" / "compose"
# Below the range from which connections get their own ports: none of those can be in the way.
API_PORT, PROMETHEUS_PORT, GRAFANA_PORT = 14400, 14401, 14402
PROJECT = "glm53-test"
# Of the profile `cpu`. Grafana has no package to make an image from here: its dashboards' queries are tested against Prometheus.
SERVICES = ("gateway", "gpu-worker-cpu", "cpu-expert", "redis", "prometheus")
START_S = 240
RECOVER_S = 90
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Stack:
    """A running stack.

    Attributes:
        engine: what runs it.
        up_s: seconds that `up --wait` took.
        folder: where the compose file lies.
    """

    engine: Engine
    env: dict[str, str] = field(default_factory=dict)
    up_s: float = 0.0
    folder: Path = COMPOSE

    @property
    def api(self) -> str:
        """The published address of the API."""
        return f"http://127.0.0.1:{API_PORT}"

    def compose(self, *args: str, timeout_s: float = 120, check: bool = True) -> str:
        """Runs docker-compose on the shipped file."""
        command = [str(Path(sys.executable).parent / "docker-compose"), "--project-name", PROJECT, *args]
        return run(command, {**self.engine.env, **self.env}, timeout_s=timeout_s, cwd=self.folder, check=check)

    def up(self) -> None:
        """Starts everything and waits until every service is healthy."""
        began = time.monotonic()
        args = ("up", "--detach", "--wait", "--wait-timeout", str(START_S), "--pull", "never", "--no-build", "--quiet-pull")
        try:
            self.compose(*args, timeout_s=START_S + 60)
        except BaseException:
            sys.stderr.write(self.compose("logs", "--no-color", "--tail", "60", check=False))
            raise
        self.up_s = time.monotonic() - began

    def down(self) -> None:
        """Stops everything and removes what belongs to it."""
        self.compose("down", "--volumes", "--timeout", "10", timeout_s=180)

    def container(self, service: str) -> str:
        """Id of a service's container."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def health(self, service: str) -> str:
        """What the engine says about a service: starting, healthy or unhealthy; the state when it does not run."""
        state = self.engine.inspect(self.container(service))["State"]
        if state["Status"] != "running":
            return str(state["Status"])
        return str((state.get("Healthcheck") or state.get("Health") or {}).get("Status", "none"))

    def pid(self, service: str) -> int:
        """The main process of a service, 0 when it does not run."""
        return int(self.engine.inspect(self.container(service))["State"]["Pid"])

    def restarts(self, service: str) -> int:
        """How often the engine has restarted a service."""
        return int(self.engine.inspect(self.container(service))["RestartCount"])

    def crash(self, service: str) -> None:
        """Kills a service's main process, as a fault or the kernel does; `docker kill` would count as stopped on purpose."""
        os.kill(self.pid(service), signal.SIGKILL)

    def wait_recovered(self, service: str, restarts: int) -> float:
        """Waits until the service was restarted and is healthy; the seconds that it took."""
        began = time.monotonic()
        until(lambda: self.restarts(service) > restarts, f"{service} is restarted", RECOVER_S, 0.3)
        until(lambda: self.health(service) == "healthy", f"{service} is healthy again", RECOVER_S, 0.3)
        until(self.ready, "the gateway is ready", RECOVER_S, 0.3)
        return time.monotonic() - began

    def logs(self, service: str) -> str:
        """Everything that a service has logged."""
        return self.compose("logs", "--no-color", "--no-log-prefix", service)

    def ready(self) -> bool:
        """Does the gateway say that it can serve?"""
        return get(f"{self.api}/health/ready")[0] == 200

    def client(self) -> openai.OpenAI:
        """The official client, which does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.api}/v1", api_key="none", timeout=60, max_retries=0)

    def targets(self) -> dict[str, str]:
        """Prometheus's scrape targets: job → health."""
        status, body = get(f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/targets?state=active")
        if status != 200:
            return {}
        return {target["labels"]["job"]: target["health"] for target in json.loads(body)["data"]["activeTargets"]}

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        url = f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        status, body = get(url)
        return list(json.loads(body)["data"]["result"]) if status == 200 else []

    def value(self, expression: str) -> float:
        """The one number of an instant query, 0 when there is none."""
        result = self.query(expression)
        return float(result[0]["value"][1]) if result else 0.0


def get(url: str, timeout_s: float = 5) -> tuple[int, bytes]:
    """Status and body; (0, b"") when nobody answers."""
    try:
        with _DIRECT.open(url, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def settings() -> dict[str, str]:
    """What the tests set in place of the shipped .env."""
    return {
        "COMPOSE_PROFILES": "cpu",
        "IMAGE_PREFIX": "localhost/glm53",
        "IMAGE_TAG": images.TAG,
        "REDIS_IMAGE": images.image("redis"),
        "PROMETHEUS_IMAGE": images.image("prometheus"),
        "API_PORT": str(API_PORT),
        "PROMETHEUS_PORT": str(PROMETHEUS_PORT),
        "GRAFANA_PORT": str(GRAFANA_PORT),
        "COMPOSE_FILE": f"compose.yaml:{Path(__file__).parent / 'podman4.yaml'}",
        # To see that CPU sets arrive.
        "EXPERT_CPUS": "1" if (os.cpu_count() or 1) > 1 else "0",
    }


def ip_forwarding() -> str:
    """The kernel's switch that container networks turn on."""
    return Path("/proc/sys/net/ipv4/ip_forward").read_text().strip()


@contextlib.contextmanager
def stack(engine: Engine, services: Sequence[str] = SERVICES) -> Iterator[Stack]:
    """The stack, up and healthy; taken down afterwards whatever happened."""
    made = Stack(engine, settings())
    forwarding = ip_forwarding()
    made.down()
    try:
        made.up()
        assert sorted(made.compose("ps", "--services").split()) == sorted(services)
        yield made
    finally:
        made.down()
        if forwarding != ip_forwarding():
            subprocess.run(["sysctl", "-qw", f"net.ipv4.ip_forward={forwarding}"], check=False)
