"""`glm53 serve`: supervises gateway, gpu_worker and cpu_expert on one machine.

Start: worker and cpu_expert first, then the gateway, which answers /health with the progress while the model loads.
A service that crashes is restarted with back-off, which starts anew once it has run for a minute; one that cannot boot (exit 3 or 78) stops
everything with the same code. A gateway or worker that served and then stops answering is killed and restarted (cli.liveness).
Stop: gateway (finishes its streams), worker, cpu_expert; then the shared memory goes.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.instance import Instance
from cli.liveness import Liveness
from cli.process import Service, describe_exit
from cli.settings import ServeSettings
from services.common.errors import ConfigError
from services.common.lifecycle import BOOT_FAILURES, ExitCode, Signals

log = logging.getLogger("glm53")
POLL_S = 0.2
HEALTH_TIMEOUT_S = 2.0
# After a second signal: time for open streams to be told, and for the services to leave.
HURRY_S = 10.0
# The way to our own gateway never leads through the proxy that http_proxy may name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def default_commands() -> dict[str, list[str]]:
    """The three services in start order."""
    return {name: [sys.executable, "-m", f"services.{name}"] for name in ("gpu_worker", "cpu_expert", "gateway")}


class Supervisor:
    """Runs the three services until a signal or a failure that respawning cannot help.

    Args:
        settings: the supervisor's own settings.
        env: environment handed to every service; `settings` has been applied to it.
        commands: service name → argv, in start order.
    """

    def __init__(self, settings: ServeSettings, env: Mapping[str, str], commands: Mapping[str, Sequence[str]] | None = None) -> None:
        self._settings = settings
        self._instance = Instance(settings.instance_name, Path(settings.shm_dir), settings.state_path, own_folder=not settings.state_dir)
        self._worker_address = settings.worker_listens_on
        child_env = settings.for_services(env)
        self._services = [Service(service, argv, child_env) for service, argv in (commands or default_commands()).items()]
        self._liveness = self._watched(child_env)
        self._began = time.monotonic()
        self._moved = self._began  # when loading last got on
        self._last_health: tuple[object, object] = (None, None)
        self._announced = False
        self._last_step = ""
        self._why = ""

    def run(self) -> int:
        """Starts, watches and stops the services; returns the exit code of `glm53 serve`."""
        signals = Signals()
        self._instance.acquire()
        try:
            self._check_port()
            code = self._watch(signals)
        finally:
            if self._liveness is not None:
                self._liveness.close()
            self._stop(signals)
            self._instance.release()
        if self._why:
            # Again, below what the others said while they were stopped: whoever looks for a reason looks at the end.
            log.error("stopped: %s", self._why)
        return code

    def _give_up(self, why: str) -> None:
        self._why = why
        log.error("%s", why)

    def _watched(self, env: Mapping[str, str]) -> Liveness | None:
        known = {"gateway": f"{self._own_url()}/health/live", "gpu_worker": self._worker_address}
        addresses = {service.name: known[service.name] for service in self._services if service.name in known}
        checks, period_s = self._settings.liveness_checks, self._settings.liveness_period_s
        return Liveness(addresses, period_s, checks, env) if checks else None

    def _check_port(self) -> None:
        """Another program on our port would answer our own health checks: that must come out before anything is loaded.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        host, port = self._settings.host, self._settings.port
        try:
            family, kind, number, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}. Stop what listens there, or choose another PORT or HOST.", param="PORT"
            ) from None

    def _watch(self, signals: Signals) -> int:
        for service in self._services:
            service.start()
        self._record()
        while True:
            if (number := signals.wait(POLL_S)) is not None:
                log.info("%s: stopping (running requests get %g s)", number.name, self._settings.drain_timeout_s)
                return ExitCode.OK
            for service in self._services:
                if (code := service.reap()) is not None and (verdict := self._ended(service, code)) is not None:
                    return verdict
                if not service.running and time.monotonic() >= service.next_start:
                    service.restarts += 1
                    log.info("starting %s again (restart %d)", service.name, service.restarts)
                    service.start()
                    self._record()
            if self._announced:
                self._restart_wedged()
            elif (verdict := self._check_boot()) is not None:
                return verdict

    def _restart_wedged(self) -> None:
        """Kills what runs but does not answer; the loop above then starts it again."""
        if self._liveness is None:
            return
        running = {s.name: s for s in self._services if s.process is not None}
        pids = {name: service.process.pid for name, service in running.items() if service.process is not None}
        for name, missed in self._liveness.wedged(pids):
            period_s = self._settings.liveness_period_s
            log.error("%s left %d questions in a row unanswered (one every %g s): killing it", name, missed, period_s)
            running[name].kill()

    def _ended(self, service: Service, code: int) -> int | None:
        if service.hopeless:
            self._give_up(f"{service.name} could not start ({describe_exit(code)}): see its last ERROR or traceback above")
            return code if code in BOOT_FAILURES else ExitCode.BOOT
        wait_s = max(0.0, service.next_start - time.monotonic())
        how = "was killed, since it did not answer" if service.killed else describe_exit(code)
        log.warning("%s %s; starting it again in %.1f s", service.name, how, wait_s)
        return None

    def _record(self) -> None:
        self._instance.record_children({s.name: s.process.pid for s in self._services if s.process is not None})

    def _check_boot(self) -> int | None:
        health = self._health() or {}
        if health.get("status") == "ok":
            self._announce(health)
            return None
        if health.get("broken"):
            self._give_up(f"cannot serve this checkpoint: {health.get('reason')}")
            return ExitCode.BOOT
        step, seen = loading_step(health), (health.get("progress"), health.get("step"))
        if seen != self._last_health:
            self._last_health, self._moved = seen, time.monotonic()
        if step and step != self._last_step:
            self._last_step = step
            log.info("loading: %s", step)
        if time.monotonic() - self._moved > self._settings.boot_timeout_s:
            last = step or health.get("reason") or "unknown"
            self._give_up(f"not ready, and no progress for {self._settings.boot_timeout_s:g} s (GLM53_BOOT_TIMEOUT_S); last step: {last}")
            return ExitCode.BOOT
        return None

    def _own_url(self) -> str:
        """Where our gateway is reached from this machine."""
        host = "127.0.0.1" if self._settings.host in ("0.0.0.0", "") else "[::1]" if self._settings.host == "::" else self._settings.host
        return f"http://{host}:{self._settings.port}"

    def _health(self) -> dict[str, Any] | None:
        try:
            with _DIRECT.open(f"{self._own_url()}/health", timeout=HEALTH_TIMEOUT_S) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            try:
                return dict(json.load(error))
            except (OSError, ValueError, http.client.HTTPException):
                return None
        except (OSError, ValueError, http.client.HTTPException):
            return None

    def _announce(self, health: Mapping[str, Any]) -> None:
        self._announced = True
        for service in self._services:
            service.was_ready = True
        url = f"http://{self._settings.host}:{self._settings.port}/v1"
        model = health.get("model", "")
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
        log.info("loaded in %.1f s", time.monotonic() - self._began)
        log.info("serving %s on %s", model, url)
        reason = health.get("mode_reason")
        log.info("mode %s%s", health.get("mode", "?"), f": {reason}" if reason else "")
        tell(f"\nTry:\n  curl -s {url}/chat/completions -H 'content-type: application/json' -d '{body}'\n")

    def _stop(self, signals: Signals) -> None:
        """Gateway first: no request arrives any more, and its streams end while the engine runs. Then the engine, then its CPU lane."""
        patience = self._settings.drain_timeout_s + 5
        for service in sorted(self._services, key=lambda service: service.name != "gateway"):
            if not service.running:
                continue
            service.signal(signal.SIGTERM)
            deadline = time.monotonic() + patience
            while not service.wait(0.1):
                if signals.wait(0.01) is not None:
                    if patience > HURRY_S:
                        log.warning("second signal: running requests end now, with an error (a third one kills the services)")
                        patience = HURRY_S
                        # The gateway's second one, too: its streams get their last words.
                        service.signal(signal.SIGTERM)
                    else:
                        patience = 0.0
                    deadline = min(deadline, time.monotonic() + patience)
                if time.monotonic() > deadline:
                    log.warning("%s did not stop in time: killing it", service.name)
                    break
            service.kill()


def loading_step(health: Mapping[str, Any]) -> str:
    """What a worker that is not ready is doing, in words; "" when /health does not say."""
    step = str(health.get("step") or "")
    return f"{health.get('progress', 0):.0%} {step}" if step else ""


def tell(text: str) -> None:
    """Prints for people. Whoever read our output may be gone (`glm53 serve | head`): no reason to stop serving."""
    try:
        print(text, flush=True)
    except OSError:
        # What is left in the buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_settings(settings: ServeSettings) -> None:
    """One line per setting with its source."""
    log.info("settings: %s", ", ".join(f"{name}={value or '-'} ({source})" for name, value, source in settings.describe()))
