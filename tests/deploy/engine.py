"""A container engine of the tests' own: podman with its storage, networks and settings in folders that belong to the tests.

It runs as root on a machine without systemd and without the right to raise limits, as CI is. What such a machine lacks is added here,
outside the files under test: `runc_clamp.py` lowers the limits that it may not set, and a ticker runs the health checks that systemd
would.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.common import setting_names
from tests.deploy.runc_clamp import RUNC

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "build" / "deploy"
NEEDED = {"podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap", "netavark": "netavark", "aardvark-dns": "aardvark-dns"}
# Where Debian keeps programs that are on nobody's PATH.
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/lib/podman"])
TICK_S = 1.0
_CERTIFICATES = Path("/etc/ssl/certs")
_CARRIED_CERTIFICATES = Path("/run/build-certificates")
_PIP_SETTINGS = Path("/etc/pip.conf")


def require() -> None:
    """Fails, never skips: that the files of deploy/ run is a claim of the product."""
    missing = sorted(package for package, program in NEEDED.items() if shutil.which(program, path=_SEARCH) is None)
    if missing:
        pytest.fail(f"the container tests need {', '.join(missing)}: run tools/debian_packages.sh deploy as root", pytrace=False)
    if os.geteuid() != 0:
        pytest.fail("the container tests need root: they make a Debian base image and networks of their own", pytrace=False)


@dataclass
class Engine:
    """podman, its API for docker-compose, and the ticker.

    Attributes:
        run_dir: sockets and state that do not outlive the machine; short, because socket paths are.
        env: environment of every podman and docker-compose call.
        ticking: False while no health checks are to be run.
    """

    run_dir: Path
    env: dict[str, str] = field(default_factory=dict)
    ticking: bool = True
    _service: subprocess.Popen[bytes] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _ticker: threading.Thread | None = None
    _held: Any = None

    @property
    def socket(self) -> Path:
        """Where the API listens."""
        return self.run_dir / "podman.sock"

    def start(self) -> None:
        """Writes the settings, starts the API and the ticker."""
        require()
        LAB.mkdir(parents=True, exist_ok=True)
        # One engine at a time over one storage: a second test run waits here.
        self._held = (LAB / "lock").open("w")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        unmount_below(LAB)  # what a killed test run left
        self._configure()
        with (self.run_dir / "service.log").open("wb") as out:
            self._service = subprocess.Popen(
                ["podman", "system", "service", "--time=0", f"unix://{self.socket}"], env=self.env, stdout=out, stderr=out
            )
        _until(self.socket.exists, "podman's API listens", 30)
        self._ticker = threading.Thread(target=self._tick, name="health-ticker", daemon=True)
        self._ticker.start()

    def close(self) -> None:
        """Stops everything that `start` started; images and build caches stay for the next run."""
        self._stop.set()
        if self._ticker is not None:
            self._ticker.join(30)
        if self._service is not None:
            self._service.terminate()
            self._service.wait(30)
        end_monitors()
        unmount_below(LAB, self.run_dir)
        if self._held is not None:
            self._held.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def podman(self, *args: str | Path, timeout_s: float = 120, check: bool = True, text: str | None = None) -> str:
        """Runs podman; its standard output. On failure the test fails with everything that podman said."""
        return run(["podman", *map(str, args)], self.env, timeout_s=timeout_s, check=check, text=text)

    def inspect(self, name: str) -> dict[str, Any]:
        """The state of a container."""
        result: dict[str, Any] = json.loads(self.podman("container", "inspect", name))[0]
        return result

    def _configure(self) -> None:
        shim = LAB / "runc"
        # Most calls only ask for a container's state: they need no Python.
        shim.write_text(
            '#!/bin/sh\ncase " $* " in *" create "* | *" run "* | *" exec "*) '
            f'exec {sys.executable} -I {ROOT}/tests/deploy/runc_clamp.py "$@" ;; esac\nexec {RUNC} "$@"\n'
        )
        shim.chmod(0o755)
        (LAB / "containers.conf").write_text(
            "[containers]\n"
            'default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
            "[engine]\n"
            'runtime = "runc"\n'
            'cgroup_manager = "cgroupfs"\n'
            'events_logger = "file"\n'
            f'tmp_dir = "{self.run_dir}/libpod"\n'
            "[engine.runtimes]\n"
            f'runc = ["{shim}"]\n'
            "[network]\n"
            'network_backend = "netavark"\n'
            f'network_config_dir = "{LAB}/networks"\n'
        )
        (LAB / "storage.conf").write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{LAB}/storage"\nrunroot = "{self.run_dir}/s"\n')
        (LAB / "tmp").mkdir(exist_ok=True)
        self.env = {
            # Compose would put settings of the person who runs the tests into the containers.
            **{name: value for name, value in os.environ.items() if name not in setting_names.ALL and not name.startswith("COMPOSE_")},
            "TMPDIR": str(LAB / "tmp"),  # where builds keep their caches too
            "CONTAINERS_CONF": str(LAB / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(LAB / "storage.conf"),
            "DOCKER_HOST": f"unix://{self.socket}",
            "RUNC_CLAMP_LOG": str(LAB / "runc_clamp.log"),
        }

    def _tick(self) -> None:
        """Runs every container's health check in turn; podman itself keeps count and honours start periods."""
        while not self._stop.wait(TICK_S):
            if not self.ticking:
                continue
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                for container in self._get("/v4.0.0/libpod/containers/json"):
                    if self._stop.is_set():
                        return
                    self._get(f"/v4.0.0/libpod/containers/{container['Id']}/healthcheck")

    def _get(self, path: str) -> Any:
        connection = _UnixConnection(self.socket)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def run(
    command: Sequence[str], env: Mapping[str, str], *, timeout_s: float, cwd: Path = ROOT, check: bool = True, text: str | None = None
) -> str:
    """Runs a command to its end; fails the test with its output when it fails or takes too long."""
    try:
        done = subprocess.run(
            command, env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False, input=text, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        said = b"".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes)).decode(errors="replace")
        pytest.fail(f"{' '.join(command)} did not end within {timeout_s:g} s:\n{said[-6000:]}", pytrace=False)
    if check and done.returncode != 0:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
    return done.stdout


def end_monitors() -> None:
    """Ends the monitors of commands that were run in containers: podman keeps each for five minutes after its command."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().split(b"\0")
            if words[0].endswith(b"/conmon") and any(word.startswith(str(LAB).encode() + b"/") for word in words):
                os.kill(int(file.parent.name), signal.SIGKILL)


def unmount_below(*folders: Path) -> None:
    """Takes away mounts that podman left, a killed one above all: with them nobody could remove the folder."""
    points = [line.split()[1].replace("\\040", " ") for line in Path("/proc/mounts").read_text().splitlines()]
    for point in reversed(points):
        if any(Path(point).is_relative_to(folder) for folder in folders):
            subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)


def _until(condition: Any, what: str, timeout_s: float, pause_s: float = 0.1) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(pause_s)


until = _until


def carried() -> list[str]:
    """How this machine reaches its package indexes, handed to builds and kept out of images: certificates, pip's settings."""
    # Not over the image's own folder: a package that a build installs may bring certificates and write them there.
    args = ["--network=host", "--volume", f"{_CERTIFICATES}:{_CARRIED_CERTIFICATES}:ro"]
    if _PIP_SETTINGS.exists():
        args += ["--volume", f"{_PIP_SETTINGS}:{_PIP_SETTINGS}:ro"]
    bundle = _CERTIFICATES / "ca-certificates.crt"
    if bundle.exists():
        args += ["--build-arg", f"PIP_CERT={_CARRIED_CERTIFICATES / bundle.name}"]
    return args


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """A running engine."""
    require()
    made = Engine(Path(tempfile.mkdtemp(prefix="g53-")))
    try:
        made.start()
        yield made
    finally:
        made.close()
