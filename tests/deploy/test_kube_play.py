"""The worker's pod as rendered for Kubernetes, run by podman: both containers share the records and answer.

podman 4 gives each container a disk folder for an emptyDir of medium Memory, so the tests hand in a tmpfs of the same size instead. Nothing
else of the manifests is changed, and that is asserted.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.server import free_port
from tests.deploy import manifests as k8s
from tests.deploy.engine import ROOT, Engine, run, until
from tests.deploy.manifests import Manifest, container, in_bytes, pod_of

READY_S = 120
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

pytestmark = pytest.mark.timeout(3600)


def playable(manifests: list[Manifest], shm: Path) -> list[Manifest]:
    """The worker's Deployment and its settings, with the shared memory from a folder of the host."""
    worker = copy.deepcopy(k8s.worker(manifests))
    for volume in worker["spec"]["template"]["spec"]["volumes"]:
        if volume["name"] == "shm":
            del volume["emptyDir"]
            volume["hostPath"] = {"path": str(shm), "type": "Directory"}
    settings = [
        manifest for manifest in manifests if manifest["kind"] == "ConfigMap" and manifest["metadata"]["name"].startswith("worker-")
    ]
    return [*settings, worker]


def differences(before: Any, after: Any, where: str = "") -> set[str]:
    """Paths at which two documents differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = set(before) | set(after)
        return set().union(*(differences(before.get(name), after.get(name), f"{where}/{name}") for name in names))
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return set().union(*(differences(one, other, f"{where}/{index}") for index, (one, other) in pairs))
    return set() if before == after else {where}


def test_only_the_shared_memory_is_changed(tmp_path: Path) -> None:
    """What runs below is what `kubectl apply` would send, but for the one volume."""
    manifests = k8s.render("cpu")
    settings, worker = playable(manifests, tmp_path)
    (at,) = [number for number, volume in enumerate(pod_of(worker)["volumes"]) if volume["name"] == "shm"]
    volume = f"/spec/template/spec/volumes/{at}"
    assert differences(k8s.worker(manifests), worker) == {f"{volume}/emptyDir", f"{volume}/hostPath"}
    assert settings in manifests


# ---- run ---------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Pod:
    """The running pod.

    Attributes:
        pod: podman's name of it: versions number a Deployment's pods differently.
        address: of the pod on podman's network.
        manifest: what was played.
    """

    engine: Engine
    pod: str
    address: str
    manifest: Manifest
    gateway: str = ""

    def name(self, box: str) -> str:
        """podman's name of a container."""
        return f"{self.pod}-{box}"

    def logs(self, box: str) -> str:
        """What a container has written, to both streams."""
        done = subprocess.run(
            ["podman", "logs", self.name(box)], env=self.engine.env, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout + done.stderr

    def get(self, port: int, path: str) -> tuple[int, str]:
        """An HTTP answer of the pod: status and text; 0 when nothing answers."""
        return get(f"http://{self.address}:{port}{path}")


def get(url: str, body: Any = None) -> tuple[int, str]:
    """Status and text of an HTTP answer; 0 when nothing answers."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with _DIRECT.open(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


@contextlib.contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path]:
    """A mounted tmpfs that every user can write to."""
    folder.mkdir()
    run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777,nosuid,nodev,noexec", "tmpfs", str(folder)], os.environ, timeout_s=30)
    try:
        yield folder
    finally:
        run(["umount", "--lazy", str(folder)], os.environ, timeout_s=30)


@contextlib.contextmanager
def gateway(address: str) -> Iterator[str]:
    """A gateway of this machine in front of the pod; its URL."""
    port = free_port()
    env = {**os.environ, "PORT": str(port), "GLM53_WORKER_ADDRESS": f"{address}:30051", "no_proxy": address}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.gateway"], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def pod(engine: Engine, built: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """The pod of overlays/cpu, played and ready, and a gateway in front of it."""
    folder = tmp_path_factory.mktemp("pod")
    manifests = k8s.render("cpu")
    boxes = pod_of(k8s.worker(manifests))["containers"]
    for box in boxes:
        # The names that the manifests have, for the images that were built here.
        engine.podman("tag", built[box["image"].removeprefix("glm53/").partition(":")[0]], f"localhost/{box['image']}")
    (limit,) = [volume["emptyDir"]["sizeLimit"] for volume in pod_of(k8s.worker(manifests))["volumes"] if volume["name"] == "shm"]
    file = folder / "pod.yaml"
    # podman asks liveness with curl, which the images do not have; Kubernetes asks from outside, as the test below does.
    engine.ticking = False
    with tmpfs(folder / "shm", in_bytes(limit)) as shm, contextlib.ExitStack() as stack:
        stack.callback(setattr, engine, "ticking", True)
        played = playable(manifests, shm)
        file.write_text(yaml.safe_dump_all(played))
        stack.callback(engine.podman, "kube", "play", "--down", file, timeout_s=180)
        engine.podman("kube", "play", "--network", "podman", file, timeout_s=180)
        (name,) = [found["Name"] for found in json.loads(engine.podman("pod", "ps", "--format", "json")) if "gpu-worker" in found["Name"]]
        infra = engine.inspect(json.loads(engine.podman("pod", "inspect", name))["InfraContainerID"])
        made = Pod(engine, name, infra["NetworkSettings"]["Networks"]["podman"]["IPAddress"], played[-1])
        try:
            until(lambda: made.get(30061, "/health/ready")[0] == 200, "the worker is ready", READY_S, 0.3)
            made.gateway = stack.enter_context(gateway(made.address))
            until(lambda: get(f"{made.gateway}/health/ready")[0] == 200, "the gateway is ready", READY_S, 0.3)
        except BaseException:
            sys.stderr.write("".join(made.logs(box["name"]) for box in boxes))
            raise
        yield made


def chat(pod: Pod) -> str:
    """The greedy answer to one question."""
    question = {"model": "glm-5.3-tiny", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "max_tokens": 200}
    status, text = get(f"{pod.gateway}/v1/chat/completions", question)
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["message"]["content"])


@pytest.mark.containers
def test_both_containers_share_the_records_and_answer(pod: Pod) -> None:
    """cpu_expert computes picks of the request from the records that gpu_worker put into /dev/shm."""
    assert chat(pod)
    stats = json.loads(get(f"{pod.gateway}/stats")[1])
    assert stats["cpu_tier"]["state"] == "UP"
    assert stats["cpu_tier"]["jobs"] > 0
    expert = pod.get(30062, "/metrics")[1]
    assert "glm53_cpu_expert_attached 1.0" in expert
    listed = [
        set(pod.engine.podman("exec", pod.name(box), "python", "-c", "import os; print(*os.listdir('/dev/shm'))").split()) for box in BOXES
    ]
    assert listed[0] == listed[1] == {"glm53-default-arena", "glm53-default-ctl"}


BOXES = ("gpu-worker", "cpu-expert")


@pytest.mark.containers
def test_probes_find_what_they_ask_for(pod: Pod) -> None:
    """Every probe of both containers gets 200 from the running pod, at the port and path that the manifest names."""
    asked = 0
    for name in BOXES:
        box = container(pod_of(pod.manifest), name)
        ports = {port["name"]: port["containerPort"] for port in box["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            wanted = box[probe]["httpGet"]
            assert pod.get(ports[wanted["port"]], wanted["path"])[0] == 200, (name, probe)
            asked += 1
    assert asked == 6


@pytest.mark.containers
def test_containers_are_confined_as_the_manifest_says(pod: Pod) -> None:
    """User, read-only root, no capabilities and the memory limit are what the running processes have."""
    for name in BOXES:
        box = container(pod_of(pod.manifest), name)
        code = (
            "import os, pathlib; status = pathlib.Path('/proc/self/status').read_text();"
            "print(os.getuid(), [l.split()[1] for l in status.splitlines() if l.startswith('CapEff')][0], os.access('/app', os.W_OK))"
        )
        assert pod.engine.podman("exec", pod.name(name), "python", "-c", code).split() == ["10001", "0000000000000000", "False"]
        state = pod.engine.inspect(pod.name(name))["HostConfig"]
        assert state["ReadonlyRootfs"] is True
        assert state["Memory"] == in_bytes(box["resources"]["limits"]["memory"])


@pytest.mark.containers
def test_a_crashed_worker_takes_the_records_over(pod: Pod) -> None:
    """Its container dies and is started again: the records are still in the pod's memory, the answer is the same."""
    before = chat(pod)
    pid = int(pod.engine.inspect(pod.name("gpu-worker"))["State"]["Pid"])
    os.kill(pid, signal.SIGKILL)
    until(lambda: int(pod.engine.inspect(pod.name("gpu-worker"))["State"]["Pid"]) not in (0, pid), "it is started again", READY_S, 0.3)
    until(lambda: get(f"{pod.gateway}/health/ready")[0] == 200, "the gateway is ready again", READY_S, 0.3)
    assert "re-attached" in pod.logs("gpu-worker")
    assert chat(pod) == before
    until(lambda: "glm53_cpu_expert_attached 1.0" in pod.get(30062, "/metrics")[1], "cpu_expert is attached again", READY_S, 0.3)


@pytest.mark.containers
def test_cpu_expert_leaves_after_the_worker(pod: Pod) -> None:
    """The preStop hook waits as long as the worker serves, and no longer: drained requests keep their CPU lane."""
    hook = container(pod_of(pod.manifest), "cpu-expert")["lifecycle"]["preStop"]["exec"]["command"]
    waiting = threading.Thread(target=pod.engine.podman, args=("exec", pod.name("cpu-expert"), *hook), daemon=True)
    waiting.start()
    time.sleep(4)
    assert waiting.is_alive()
    pod.engine.podman("stop", "--time", "45", pod.name("gpu-worker"), timeout_s=90)
    waiting.join(15)
    assert not waiting.is_alive()
    assert "draining" in pod.logs("gpu-worker")
