"""The files that images and the compose stack are made from, checked without running them."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common import setting_names
from tests.deploy.engine import ROOT, run
from tests.deploy.runc_clamp import clamp

BIN = Path(sys.executable).parent
COMPOSE = ROOT / "deploy" / "compose"
REQUIREMENTS = ROOT / "deploy" / "docker" / "requirements"
PROFILES = ("cpu", "gpu", "grafana", "tools")
# Distribution → module, where the names differ.
MODULES = {
    "huggingface-hub": "huggingface_hub",
    "jsonschema-rs": "jsonschema_rs",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "protobuf": "google",
    "prometheus-client": "prometheus_client",
    "pydantic-settings": "pydantic_settings",
}
# What each image's own code is.
CODE = {
    "gateway": ("services/common", "services/gateway", "cli/doctor"),
    "gpu-worker-cpu": ("services/common", "services/gpu_worker", "kernels/python", "cli/doctor"),
    "cpu-expert": ("services/common", "services/cpu_expert", "kernels/python", "cli/doctor"),
    "cli": ("services", "kernels/python", "cli"),
}
# Imported where a GPU backend is chosen, and nowhere else.
GPU_ONLY = {"torch", "exllamav3", "triton"}
# All of services/common is in every image; cpu_expert has no gRPC, by the import rules, no event loop and no requests to trace.
NOT_IMPORTED = {"cpu-expert": {"grpc", "uvloop", "opentelemetry"}}
# Imported by uvicorn, for us.
FOR_UVICORN = {"httptools"}
# Comes with something that is required.
COMES_ALONG = {"starlette": "fastapi", "pydantic_core": "pydantic"}


def tool(*command: str, timeout_s: float = 60) -> str:
    """Runs a program of the virtual environment."""
    return run([str(BIN / command[0]), *command[1:]], os.environ, timeout_s=timeout_s)


def config(**env: str) -> dict[str, Any]:
    """The compose file as Compose understands it, all profiles."""
    profiles = [part for name in PROFILES for part in ("--profile", name)]
    command = [str(BIN / "docker-compose"), *profiles, "config", "--format", "json"]
    return dict(json.loads(run(command, {**os.environ, **env}, timeout_s=60, cwd=COMPOSE)))


def requirements(image: str) -> dict[str, str]:
    """Package → version of an image's pinned list."""
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==(\S+)", (REQUIREMENTS / f"{image}.txt").read_text(), re.MULTILINE))


def wanted(image: str) -> set[str]:
    """What an image's short list names, lists that it includes too."""
    found = set()
    for line in (REQUIREMENTS / f"{image}.in").read_text().splitlines():
        if line.startswith("-r "):
            found |= wanted(line[3:].removesuffix(".in"))
        elif line and not line.startswith("#"):
            found.add(line.partition("==")[0])
    return found


def imported(*folders: str) -> set[str]:
    """Top-level modules of other projects that the code imports."""
    names: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py") if "/pb/" not in str(path)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"services", "kernels", "cli"}


def test_the_dockerfile_is_clean() -> None:
    """hadolint finds nothing."""
    assert tool("hadolint", "--config", "deploy/docker/.hadolint.yaml", "deploy/docker/Dockerfile") == ""


def test_the_compose_files_are_valid() -> None:
    """Against the compose specification, and as YAML that people read."""
    files = [str(path.relative_to(ROOT)) for path in COMPOSE.glob("*.yaml")]
    assert len(files) == 2
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    tool("yamllint", "--strict", "-d", "{extends: relaxed, rules: {line-length: {max: 150}}}", *files)


@pytest.mark.parametrize("image", [*CODE, "build", "gpu-worker"])
def test_every_package_of_an_image_is_pinned_with_hashes(image: str) -> None:
    """Each package has a version and at least one hash, and nothing is in the short list that is not in the long one."""
    text = (REQUIREMENTS / f"{image}.txt").read_text()
    blocks = re.split(r"\n(?=[a-z0-9])", text.partition("\n")[2])
    assert all("--hash=sha256:" in block for block in blocks)
    assert wanted(image) <= set(requirements(image))


@pytest.mark.parametrize("image", [*CODE, "build"])
def test_images_have_the_versions_that_are_tested(image: str) -> None:
    """What an image installs is what requirements.lock pins, so what the tests ran with."""
    lock = {
        name.lower().replace("_", "-"): version
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    }
    # setuptools is what a virtual environment begins with: the lock has none.
    pinned = {name: version for name, version in requirements(image).items() if name != "setuptools"}
    different = {name: (version, lock.get(name)) for name, version in pinned.items() if lock.get(name) != version}
    assert different == {}, "run tools/image_requirements.sh"


@pytest.mark.parametrize("image", CODE)
def test_an_image_has_what_its_code_imports_and_no_more(image: str) -> None:
    """A new import needs a line in the image's list, and a line that nothing imports goes."""
    needed = imported(*CODE[image]) - GPU_ONLY - NOT_IMPORTED.get(image, set())
    provided = {MODULES.get(name, name) for name in wanted(image)}
    assert {COMES_ALONG.get(name, name) for name in needed} - provided == set()
    # The generated stubs import protobuf; they are not in the repository.
    assert provided - needed - {"google"} - FOR_UVICORN == set()


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each image has in /app, from this tree, by the script that the Dockerfile runs."""
    folder = tmp_path_factory.mktemp("trees")
    run(["sh", "deploy/docker/trees.sh", str(folder), *TREES], os.environ, timeout_s=120)
    return folder


# Image's tree → the services whose preflight it runs.
TREES = {"gateway": ["gateway"], "gpu-worker": ["gpu-worker"], "cpu-expert": ["cpu-expert"], "cli": ["gateway", "gpu-worker", "cpu-expert"]}


@pytest.mark.parametrize(("image", "service"), [(image, service) for image, services in TREES.items() for service in services])
def test_the_preflight_runs_with_what_an_image_has(trees: Path, tmp_path: Path, image: str, service: str) -> None:
    """The doctor of a service imports nothing that its image lacks: an image whose preflight fails serves nobody."""
    code = (
        "import runpy, sys; tree, root, service = sys.argv[1:];"
        "sys.path[:] = [tree, *(path for path in sys.path if path not in ('', root))];"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder)];"
        "sys.argv = ['doctor', '--for', service, '--', sys.executable, '-c', 'print(\"served\")'];"
        "runpy.run_module('cli.doctor', run_name='__main__')"
    )
    env = {"PATH": os.environ["PATH"], "PORT": "0", "GLM53_WORKER_ADDRESS": f"unix:{tmp_path}/worker", "GLM53_SHM_DIR": str(tmp_path)}
    env |= {"GLM53_DEVICE": "cpu"} if service == "gpu-worker" else {}
    said = run([sys.executable, "-c", code, str(trees / image), str(ROOT), service], env, timeout_s=60, cwd=trees / image)
    assert said.splitlines()[-1] == "served"
    assert (trees / image / "services" / "gateway").exists() == (image in ("gateway", "cli"))


def test_no_image_keeps_what_differs_from_build_to_build() -> None:
    """Lists, logs and caches of apt: every stage that an image is made from removes the same ones with what it installs."""
    stages = re.split(r"^FROM \S+ AS ", (ROOT / "deploy" / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    bodies = dict(stage.split("\n", 1) for stage in stages)
    removed = {
        name: set(re.findall(r"&& rm -rf (.*?)(?: \\)?$", bodies[name], re.MULTILINE)[0].split())
        for name in ("runtime", *TREES, "gpu-worker-cpu")
        if "apt-get install" in bodies[name]
    }
    assert set(removed) == {"runtime", "gpu-worker"}
    assert removed["runtime"] == removed["gpu-worker"]
    assert {"/var/lib/apt/lists/*", "/var/log/apt", "/var/log/*.log", "/var/cache/ldconfig/aux-cache"} <= removed["runtime"]


def test_health_checks_need_no_shell() -> None:
    """Every HEALTHCHECK is a list of words, and so is every compose health check and entry point."""
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    for line in re.findall(r"^(?: +CMD|ENTRYPOINT|CMD) (.*)$", dockerfile, re.MULTILINE):
        assert isinstance(json.loads(line), list)
    for name, service in config()["services"].items():
        if "healthcheck" in service:
            assert service["healthcheck"]["test"][0] == "CMD", name


def test_nothing_is_published_beyond_this_machine() -> None:
    """Every published port is on 127.0.0.1."""
    published = {name: port for name, service in config()["services"].items() for port in service.get("ports", [])}
    assert {"gateway", "prometheus", "grafana"} == set(published)
    assert all(port["host_ip"] == "127.0.0.1" for port in published.values())


def test_containers_are_hardened() -> None:
    """Read-only root, no capability, no new privileges, no root user, bounded memory without swap, bounded processes and logs."""
    for name, service in config()["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("user", "10001").split(":")[0] != "0", name
        assert service["pids_limit"] > 0, name
        assert service["logging"]["options"]["max-size"], name
        assert "privileged" not in service, name
        if name != "cli":
            assert service["mem_limit"] == service["memswap_limit"], name


def test_worker_and_cpu_expert_share_a_volume_and_may_lock_memory() -> None:
    """One tmpfs of the size in .env at /dev/shm of both, whichever worker runs; no limit of locked memory."""
    whole = config(SHM_SIZE="77m")
    for name in ("gpu-worker", "gpu-worker-cpu", "cpu-expert"):
        service = whole["services"][name]
        assert [volume["source"] for volume in service["volumes"] if volume["target"] == "/dev/shm"] == ["shm"], name
        assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}, name
        assert "ipc" not in service, name
    assert whole["volumes"]["shm"]["driver_opts"]["type"] == "tmpfs"
    assert "size=77m" in whole["volumes"]["shm"]["driver_opts"]["o"]


def test_what_the_container_tests_change_is_one_spelling() -> None:
    """The override for podman 4 says the same size in other words, and nothing else."""
    shipped, tested = config(SHM_SIZE="128m"), config(COMPOSE_FILE=f"compose.yaml:{Path(__file__).parent / 'podman4.yaml'}")
    options = [whole["volumes"]["shm"]["driver_opts"].pop("o").split(",") for whole in (shipped, tested)]
    assert shipped == tested
    assert options[0][1:] == options[1][1:]
    pages = int(options[1][0].removeprefix("nr_blocks=").removesuffix("k")) * 1024
    assert (options[0][0], pages * os.sysconf("SC_PAGE_SIZE")) == ("size=128m", 128 << 20)


def test_sizes_and_cpus_come_from_the_env_file() -> None:
    """Memory and CPU sets are set where .env says, for the containers that it says."""
    services = config(WORKER_MEMORY="3g", EXPERT_MEMORY="2g", WORKER_CPUS="0-1", EXPERT_CPUS="2-3")["services"]
    for name in ("gpu-worker", "gpu-worker-cpu"):
        assert (int(services[name]["mem_limit"]), services[name]["cpuset"]) == (3 << 30, "0-1")
    assert (int(services["cpu-expert"]["mem_limit"]), services["cpu-expert"]["cpuset"]) == (2 << 30, "2-3")


def test_every_setting_that_compose_passes_exists() -> None:
    """An environment name of our services that the product does not know would refuse to start."""
    for name, service in config()["services"].items():
        given = {key for key in service.get("environment", {}) if key.startswith("GLM53_")}
        assert given <= setting_names.ALL, name


def test_every_variable_is_explained_in_the_env_file() -> None:
    """What compose.yaml reads is in .env, and what is in .env is read."""
    text = "".join(path.read_text() for path in COMPOSE.glob("*.yaml"))
    read = set(re.findall(r"\$\{([A-Z0-9_]+)", text))
    listed = set(re.findall(r"^([A-Z0-9_]+)=", (COMPOSE / ".env").read_text(), re.MULTILINE))
    assert listed - {"COMPOSE_PROFILES", "COMPOSE_FILE"} == read - {"COMPOSE_PROJECT_NAME"}


def test_a_variable_that_is_empty_is_named() -> None:
    """One that has no default, and is missing in a .env of an older version or was emptied, is an error with its name, not a blank."""
    needed = set(re.findall(r"\$\{([A-Z0-9_]+):\?", (COMPOSE / "compose.yaml").read_text()))
    assert {"API_PORT", "SHM_SIZE", "WORKER_MEMORY", "IMAGE_TAG"} <= needed
    for name in needed:
        command = [str(BIN / "docker-compose"), "config", "--quiet"]
        done = subprocess.run(command, env={**os.environ, name: ""}, cwd=COMPOSE, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode != 0, name
        assert f"required variable {name} is missing a value: see .env" in done.stderr
    # Every other one has a default.
    assert set(re.findall(r"\$\{([A-Z0-9_]+)\}", (COMPOSE / "compose.yaml").read_text())) == {"COMPOSE_PROJECT_NAME"}


def test_another_size_of_shared_memory_is_another_volume() -> None:
    """Engines keep a volume's options as they were when it was made: a new size of the same name would be ignored."""
    stacks = [{"SHM_SIZE": size, "COMPOSE_PROJECT_NAME": project} for size in ("1g", "2g") for project in ("a", "b")]
    assert len({config(**one)["volumes"]["shm"]["name"] for one in stacks}) == 4
    assert config()["volumes"]["shm"]["name"].startswith("glm53-shm-")


def test_every_build_argument_of_the_gpu_image_can_be_set_in_the_env_file() -> None:
    """But those of whoever builds for others: how to reach an index, and which commit it is."""
    arguments = set(re.findall(r"^ARG (\w+)", (ROOT / "deploy" / "docker" / "Dockerfile").read_text(), re.MULTILINE))
    given = config()["services"]["gpu-worker"]["build"]["args"]
    assert set(given) == arguments - {"PIP_CERT", "PIP_INDEX_URL", "REVISION"}


@pytest.mark.parametrize(
    ("architectures", "accepted"),
    [
        ("8.6", True),
        ("8.6;8.9;9.0;12.0", True),
        ("", False),
        ("86", False),
        ("8.6 8.9", False),
        ("8.6,8.9", False),
        ("8.6;", False),
        ("9.0+PTX", False),
        ("Hopper", False),
    ],
)
def test_a_slip_in_the_architectures_is_told_before_anything_is_compiled(architectures: str, accepted: bool) -> None:
    """The first thing that the stage does; torch would accept some of these, and CMake refuse them an hour later."""
    stage = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().split(" AS cuda\n")[1]
    (first,) = re.findall(r"^RUN ((?:.*\\\n)*.*)\n", stage, re.MULTILINE)[:1]
    command = ["bash", "-o", "pipefail", "-c", first.replace("\\\n", "")]
    done = subprocess.run(
        command, env={"PATH": os.environ["PATH"], "CUDA_ARCHS": architectures}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == accepted, done.stderr
    assert accepted or f"CUDA_ARCHS={architectures}: " in done.stderr


@pytest.mark.parametrize("page", ["docs/install.md", "deploy/compose/README.md"])
def test_a_page_names_every_size_that_the_real_model_needs(page: str) -> None:
    """What .env says beside `GLM-5.3-Flash:`; a size that is left out stays that of the small checkpoint."""
    sizes = re.findall(r"GLM-5\.3-Flash: (.+)\.\n((?:[A-Z_]+=.*\n)+)", (COMPOSE / ".env").read_text())
    named = [(re.findall(r"^(\w+)=", lines, re.MULTILINE), values.split(" and ")) for values, lines in sizes]
    wanted = {f"{name}={size}" for names, values in named for name, size in zip(names, values, strict=False)}
    assert len(wanted) == 3
    assert wanted <= set(re.findall(r"`(\w+=\d+g)`", (ROOT / page).read_text()))


def test_secrets_are_files_and_change_who_may_come_in() -> None:
    """With compose.secrets.yaml keys are asked for; the values are nowhere in the configuration."""
    services = config(COMPOSE_FILE="compose.yaml:compose.secrets.yaml")["services"]
    environment = services["gateway"]["environment"]
    assert environment["GLM53_ALLOW_PUBLIC_WITHOUT_KEYS"] == "0"
    assert environment["GLM53_API_KEYS_FILE"] == "/run/keys/api_keys.json"
    (mounted,) = services["gateway"]["volumes"]
    assert (mounted["target"], mounted["read_only"]) == ("/run/keys", True)
    assert mounted["source"] == str(COMPOSE / "secrets" / "keys")
    assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_admin_password"


def test_the_gpu_profile_asks_for_one_gpu_by_its_cdi_name() -> None:
    """And a missing checkpoint folder is an error, not an empty folder made by the engine."""
    service = config(GPU="1", MODEL_DIR="/nonexistent")["services"]["gpu-worker"]
    assert [device["source"] for device in service["devices"]] == ["nvidia.com/gpu=1"]
    assert service["environment"]["GLM53_DEVICE"] == "cuda"
    model = next(volume for volume in service["volumes"] if volume["target"] == "/model")
    assert model["read_only"]
    assert not model["bind"].get("create_host_path", False)


def test_monitoring_finds_its_files() -> None:
    """What Prometheus and Grafana are given exists, and lies where their own files look for it."""
    services = config()["services"]
    mounts = {volume["target"]: Path(volume["source"]) for name in ("prometheus", "grafana") for volume in services[name]["volumes"]}
    assert (mounts["/etc/prometheus"] / "prometheus.yml").is_file()
    providers = yaml.safe_load((mounts["/etc/grafana/provisioning"] / "dashboards" / "glm53.yml").read_text())["providers"]
    assert all(list(mounts[provider["options"]["path"]].glob("*.json")) for provider in providers)
    sources = yaml.safe_load((mounts["/etc/grafana/provisioning"] / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert [source["url"] for source in sources] == ["http://prometheus:9090"]


def test_the_build_context_is_a_list_of_what_goes_in() -> None:
    """Nothing reaches the builder that .dockerignore does not name, so no secret and no local build can."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert not any(line.startswith("!deploy/compose") for line in lines)
    copied = re.findall(r"^COPY (?!--from)(\S+)", (ROOT / "deploy" / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    allowed = [line[1:] for line in lines if line.startswith("!")]
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(path == name or path.startswith(f"{name}/") or name.startswith(f"{path}/") for name in allowed), path


def test_yaml_anchors_keep_lists_whole() -> None:
    """A merge replaces lists: a service with its own tmpfs or volumes still has everything that it needs."""
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    assert all(any(entry.startswith("/tmp:") for entry in services[name]["tmpfs"]) for name in ("gateway", "gpu-worker", "cpu-expert"))
    assert "exec" in services["gpu-worker"]["tmpfs"][0].split(":")[1].split(",")


def test_limits_are_lowered_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime shim of these tests touches what the machine cannot set, and nothing else."""
    monkeypatch.setattr(resource, "getrlimit", lambda number: (1024, 4096) if number == resource.RLIMIT_NOFILE else (-1, -1))
    process = {
        "rlimits": [
            {"type": "RLIMIT_NOFILE", "soft": 65536, "hard": 65536},
            {"type": "RLIMIT_MEMLOCK", "soft": 100, "hard": 200},
        ]
    }
    assert clamp(process) == ["RLIMIT_NOFILE 65536:65536 -> 4096:4096"]
    assert process["rlimits"][1] == {"type": "RLIMIT_MEMLOCK", "soft": 100, "hard": 200}
