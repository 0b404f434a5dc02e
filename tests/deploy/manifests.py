"""The rendered manifests of deploy/k8s."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ("cpu", "gpu", "scale-out", "scale-out-keda")
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

Manifest = dict[str, Any]


def tool(*command: str | Path, cwd: Path = ROOT, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Runs a program of the virtual environment."""
    words = [str(BIN / command[0]), *map(str, command[1:])]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout_s)


@functools.cache
def rendered_text(overlay: str) -> str:
    """What `kubectl apply -k` would send; "" is deploy/k8s itself."""
    done = tool("kubectl", "kustomize", K8S / "overlays" / overlay if overlay else K8S)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def render(overlay: str) -> list[Manifest]:
    """The manifests of an overlay."""
    return [manifest for manifest in yaml.safe_load_all(rendered_text(overlay)) if manifest]


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of this kind and name."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind and manifest["metadata"]["name"] == name]
    return found


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    """Everything that makes pods."""
    return [manifest for manifest in manifests if manifest["kind"] in ("Deployment", "StatefulSet")]


def worker(manifests: list[Manifest]) -> Manifest:
    """The pod of gpu-worker and cpu-expert."""
    (found,) = [manifest for manifest in workloads(manifests) if manifest["metadata"]["name"] == "gpu-worker"]
    return found


def pod_of(workload: Manifest) -> Manifest:
    """Its pod's spec."""
    return dict(workload["spec"]["template"]["spec"])


def container(pod: Manifest, name: str) -> Manifest:
    """One container of a pod."""
    (found,) = [box for box in pod["containers"] if box["name"] == name]
    return found


def environment(manifests: list[Manifest], box: Manifest) -> dict[str, str]:
    """What a container's process will find: its ConfigMaps, then its own variables."""
    env: dict[str, str] = {}
    for source in box.get("envFrom", []):
        env |= find(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    return env | {entry["name"]: entry["value"] for entry in box.get("env", [])}


def in_bytes(quantity: str) -> int:
    """Bytes of "128Mi"."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]
