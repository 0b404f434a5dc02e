"""The GPU profile, as far as a machine without a GPU can show it.

Compose asks the engine for the device by its CDI name: what it asks is recorded on its way, because podman 4 does not pass that part of the
API on. And a container that gets a device by that name, from the same engine's own command line, has what the CDI specification describes.
The image is the CPU one under the GPU one's name.
"""

from __future__ import annotations

import contextlib
import json
import re
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from socket import AF_UNIX, SHUT_WR, SOCK_STREAM, socket
from typing import Any

import pytest

from tests.deploy import images
from tests.deploy.engine import ROOT, Engine, until
from tests.deploy.stack import Stack, settings

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]
CDI = Path("/var/run/cdi")
# A device that is there on every machine, under the name of the first GPU's.
SPECIFICATION = {
    "cdiVersion": "0.3.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {
            "name": "0",
            "containerEdits": {
                "env": ["CDI_GAVE=nvidia.com/gpu=0"],
                "deviceNodes": [{"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3, "permissions": "rw"}],
            },
        }
    ],
}


@pytest.fixture
def gpu() -> Iterator[None]:
    """A specification of one GPU; on a machine with a real one, that."""
    if any("nvidia.com/gpu" in path.read_text() for folder in (CDI, Path("/etc/cdi")) if folder.is_dir() for path in folder.iterdir()):
        yield
        return
    made = not CDI.exists()
    CDI.mkdir(parents=True, exist_ok=True)
    file = CDI / "glm53-test.json"
    file.write_text(json.dumps(SPECIFICATION))
    yield
    file.unlink()
    if made:
        CDI.rmdir()


class Recorder(socketserver.ThreadingUnixStreamServer):
    """A socket in front of the engine's that remembers what clients sent."""

    daemon_threads = True

    def __init__(self, path: Path, engine: Path) -> None:
        self.engine = engine
        self.requests: list[bytes] = []
        super().__init__(str(path), _Relay)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """JSON bodies of the POST requests to a path."""
        head = re.compile(rb"POST \S*" + path.encode() + rb"[^\r]*\r\n.*?\r\n\r\n", re.DOTALL)
        return [_first_json(request[match.end() :]) for request in self.requests for match in head.finditer(request)]


def _first_json(body: bytes) -> dict[str, Any]:
    # In front of a chunked body stands its length.
    return dict(json.JSONDecoder().raw_decode(body[body.index(b"{") :].decode(errors="replace"))[0])


class _Relay(socketserver.BaseRequestHandler):
    server: Recorder

    def handle(self) -> None:
        with socket(AF_UNIX, SOCK_STREAM) as engine:
            engine.connect(str(self.server.engine))
            back = threading.Thread(target=_copy, args=(engine, self.request, []), daemon=True)
            back.start()
            sent: list[bytes] = []
            _copy(self.request, engine, sent)
            self.server.requests.append(b"".join(sent))
            back.join(60)


def _copy(source: socket, target: socket, seen: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            seen.append(data)
            target.sendall(data)
        target.shutdown(SHUT_WR)


@pytest.fixture
def worker(engine: Engine, built: dict[str, str]) -> Iterator[str]:
    """An image under the GPU worker's name."""
    name = images.image("gpu-worker")
    engine.podman("tag", built["gpu-worker-cpu"], name)
    yield name
    engine.podman("untag", built["gpu-worker-cpu"], name)


def test_compose_asks_for_the_gpu_and_mounts_the_checkpoint(engine: Engine, worker: str, tmp_path: Path) -> None:
    """One device by its CDI name; the checkpoint is there, read-only; and nothing else of the host is."""
    model = ROOT / "models" / "tiny" / "checkpoint"
    stack = Stack(engine, {**settings(), "COMPOSE_PROFILES": "gpu", "MODEL_DIR": str(model), "GPU": "0"})
    code = "import os; print(os.path.exists('/model/config.json'), os.access('/model', os.W_OK), os.environ['GLM53_MODEL_DIR'])"
    with Recorder(engine.run_dir / "recorder.sock", engine.socket) as recorder:
        thread = threading.Thread(target=recorder.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        stack.env["DOCKER_HOST"] = f"unix://{engine.run_dir}/recorder.sock"
        try:
            said = stack.compose("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "python", "gpu-worker", "-c", code)
            until(lambda: recorder.bodies("/containers/create"), "the connections of docker-compose are closed", 10)
        finally:
            stack.down()
            recorder.shutdown()
            thread.join(10)
    assert said.split() == ["True", "False", "/model"]
    (asked,) = recorder.bodies("/containers/create")
    host = asked["HostConfig"]
    named = [device["PathOnHost"] for device in host.get("Devices") or []]
    named += [name for request in host.get("DeviceRequests") or [] if request["Driver"] == "cdi" for name in request["DeviceIDs"]]
    assert named == ["nvidia.com/gpu=0"]


def test_a_cdi_name_gives_the_device(engine: Engine, worker: str, gpu: None) -> None:
    """The device node of the specification is in a hardened container of the worker's image."""
    code = "import os; print(os.path.exists('/dev/nvidia0'))"
    hardening = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none")
    said = engine.podman("run", "--rm", *hardening, "--device", "nvidia.com/gpu=0", "--entrypoint", "python", worker, "-c", code)
    assert said.strip() == "True"
