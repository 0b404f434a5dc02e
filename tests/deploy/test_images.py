"""The built images: who they run as, what is in them, and that the same input gives the same image."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from services.common.lifecycle import ExitCode
from tests.deploy import images
from tests.deploy.engine import Engine, until
from tests.deploy.test_files import requirements

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]
# Beyond the Debian that it is built on; Python alone is 35 MB of it.
LARGEST_MB = {"gateway": 180, "gpu-worker-cpu": 225, "cpu-expert": 150, "cli": 280}


def inspect(engine: Engine, target: str) -> dict[str, Any]:
    """What the engine knows of an image."""
    return dict(json.loads(engine.podman("image", "inspect", images.image(target)))[0])


def python(engine: Engine, target: str, code: str) -> str:
    """Runs Python code in an image as it is meant to be run: read-only, without network and rights."""
    hardening = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none")
    return engine.podman("run", "--rm", *hardening, "--entrypoint", "python", images.image(target), "-c", code)


@pytest.mark.parametrize("target", images.TARGETS)
def test_an_image_says_what_it_is(engine: Engine, built: dict[str, str], target: str) -> None:
    """OCI labels with title, version, revision and licence."""
    labels = inspect(engine, target)["Labels"]
    found = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
    assert (found["version"], found["revision"], found["licenses"]) == (images.VERSION, images.REVISION, "MIT")
    assert found["title"].startswith("glm53-offload")


@pytest.mark.parametrize("target", images.TARGETS)
def test_an_image_runs_as_nobody_special_and_checks_its_health_without_a_shell(engine: Engine, built: dict[str, str], target: str) -> None:
    """User 10001; entry point and health check are programs with arguments."""
    config = inspect(engine, target)["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"][0] == "python"
    check = inspect(engine, target).get("Healthcheck") or {"Test": ["NONE"]}
    assert check["Test"][0] == ("NONE" if target == "cli" else "CMD")


@pytest.mark.parametrize("target", images.TARGETS)
def test_an_image_has_its_packages_and_no_tools(engine: Engine, built: dict[str, str], target: str) -> None:
    """Exactly the pinned packages; no pip, no compiler; compiled ahead; no file of ours that its user could change."""
    code = (
        "import importlib.metadata as m, json, os, pathlib, shutil;"
        "files = [p for p in pathlib.Path('/app').rglob('*') if p.is_file()];"
        "print(json.dumps({'packages': sorted(d.metadata['Name'].lower().replace('_', '-').replace('.', '-') for d in m.distributions()),"
        "'tools': [t for t in ('gcc', 'g++', 'cc', 'pip', 'pip3', 'cmake', 'git', 'curl') if shutil.which(t)],"
        "'writable': [str(p) for p in files if os.access(p, os.W_OK)],"
        "'uncompiled': [str(p) for p in files if p.suffix == '.py' and not list((p.parent / '__pycache__').glob(p.stem + '.*.pyc'))]}))"
    )
    found = json.loads(python(engine, target, code))
    assert found == {"packages": sorted(requirements(target)), "tools": [], "writable": [], "uncompiled": []}


@pytest.mark.parametrize("target", images.TARGETS)
def test_the_bill_of_materials_is_what_is_there(engine: Engine, built: dict[str, str], target: str) -> None:
    """CycloneDX, with every Python package and every Debian package that the image has."""
    code = (
        "import json, subprocess;"
        "bom = json.load(open('/usr/share/glm53/sbom.cdx.json'));"
        "debian = subprocess.run(['dpkg-query', '-W', '-f=${Package}\\n'], capture_output=True, text=True, check=True).stdout.split();"
        "print(json.dumps([bom, debian]))"
    )
    bom, debian = json.loads(python(engine, target, code))
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    kinds: dict[str, list[str]] = {"deb": [], "pypi": []}
    for component in bom["components"]:
        kinds[component["purl"].removeprefix("pkg:").partition("/")[0]].append(component["name"])
    assert sorted(kinds["deb"]) == sorted(debian)
    assert sorted(name.lower().replace("_", "-").replace(".", "-") for name in kinds["pypi"]) == sorted(requirements(target))
    versions = {component["name"].lower().replace("_", "-"): component["version"] for component in bom["components"]}
    assert versions["pydantic"] == requirements(target)["pydantic"]


def test_each_image_has_only_its_own_code(engine: Engine, built: dict[str, str]) -> None:
    """The gateway has no kernels, cpu_expert no gRPC, and nobody torch."""
    code = "import importlib.util as u; print([n for n in ('torch', 'kernels', 'grpc', 'cli.serve', 'services.{}') if u.find_spec(n)])"
    assert python(engine, "gateway", code.format("gpu_worker")).strip() == "['grpc']"
    assert python(engine, "cpu-expert", code.format("gateway")).strip() == "['kernels']"
    assert python(engine, "gpu-worker-cpu", code.format("gateway")).strip() == "['kernels', 'grpc']"


@pytest.mark.parametrize("target", images.TARGETS)
def test_images_stay_small(engine: Engine, built: dict[str, str], target: str) -> None:
    """A package that doubles an image does not come in unnoticed."""
    base = json.loads(engine.podman("image", "inspect", images.BASE))[0]["Size"]
    assert (inspect(engine, target)["Size"] - base) / 1e6 < LARGEST_MB[target]


def test_the_command_line_image_runs(engine: Engine, built: dict[str, str]) -> None:
    """`glm53` answers, and makes the hash of a key."""
    assert "serve" in engine.podman("run", "--rm", "--read-only", "--network=none", images.image("cli"))
    key = "sk-" + "x" * 40
    said = engine.podman("run", "--rm", "--interactive", "--network=none", images.image("cli"), "keys", "hash", text=key + "\n")
    assert len(said.strip()) == 64


def test_the_command_line_image_checks_what_it_runs_on(engine: Engine, built: dict[str, str]) -> None:
    """`docker run IMAGE doctor` looks at the container, at all three services, and finds nothing that cannot work."""
    said = engine.podman("run", "--rm", "--read-only", "--network=none", images.image("cli"), "doctor")
    assert "the expert records" in said
    assert said.splitlines()[-1].startswith("0 failed")


def test_the_command_line_image_serves(engine: Engine, built: dict[str, str]) -> None:
    """`docker run IMAGE serve` is the whole stack in one container with a read-only root; stopping it drains and ends with code 0."""
    name = "glm53-test-serve"
    engine.podman("run", "--detach", "--name", name, "--read-only", "--tmpfs=/tmp", "--network=none", images.image("cli"), "serve")
    try:
        probe = ["podman", "exec", name, "python", "-m", "services.common.probe", "http://127.0.0.1:30000/health/ready"]
        until(lambda: subprocess.run(probe, env=engine.env, capture_output=True, check=False).returncode == 0, "it serves", 120, 0.5)
        engine.podman("stop", "--time", "60", name, timeout_s=120)
        assert engine.inspect(name)["State"]["ExitCode"] == 0, engine.podman("logs", name)
    finally:
        engine.podman("rm", "--force", "--ignore", name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_command_line_image(engine: Engine, built: dict[str, str], number: signal.Signals) -> None:
    """Ctrl-C and `docker stop` reach a command that is a container's first process, which the kernel shields from signals by default."""
    name = f"glm53-test-{number.name.lower()}"
    engine.podman("run", "--detach", "--interactive", "--name", name, "--read-only", "--network=none", images.image("cli"), "keys", "hash")
    try:
        caught = "import re; print(re.search(r'SigCgt:\\s*(\\w+)', open('/proc/1/status').read())[1])"
        mask = 1 << (number - 1)
        until(lambda: int(engine.podman("exec", name, "python", "-c", caught), 16) & mask, "the command has begun", 30, 0.3)
        engine.podman("kill", "--signal", number.name, name)
        assert engine.podman("wait", name, timeout_s=60).strip() == str(128 + number)
    finally:
        engine.podman("rm", "--force", "--ignore", name)


def test_a_wrong_setting_ends_a_container_with_its_name(engine: Engine, built: dict[str, str]) -> None:
    """Exit code 78 and the name of the closest setting, before anything is loaded."""
    command = ["podman", "run", "--rm", "--read-only", "--network=none", "--env", "GLM53_MODEL_DIRS=/x", images.image("gpu-worker-cpu")]
    done = subprocess.run(command, env=engine.env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.CONFIG
    assert "GLM53_MODEL_DIRS: did you mean GLM53_MODEL_DIR" in done.stdout + done.stderr


def test_the_same_input_gives_the_same_image(engine: Engine, built: dict[str, str]) -> None:
    """Packages, generated stubs, bytecode and bill of materials of the gateway, made twice, are equal to the last bit."""
    first = inspect(engine, "gateway")
    again = images.build(engine, "gateway", "--no-cache", tag="localhost/glm53/gateway:again")
    second = json.loads(engine.podman("image", "inspect", again))[0]
    assert second["RootFS"]["Layers"] == first["RootFS"]["Layers"]
    assert second["Config"] == first["Config"]
