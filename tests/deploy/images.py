"""The product's images and those of what they are run with, built here: no registry is needed, or asked."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.deploy.engine import LAB, ROOT, Engine, carried, run

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
BASE = "localhost/glm53-base:test"
TAG = "test"
# What CI can build: gpu-worker needs a CUDA toolkit image.
TARGETS = ("gateway", "gpu-worker-cpu", "cpu-expert", "cli")
# Of other projects, from Debian's packages instead of their images.
COMPANIONS = ("redis", "prometheus")
# What Docker's slim image tells apt and dpkg: no descriptions in other languages, no manuals, no waiting for the drive after each file.
_LEFT_OUT = ("man", "doc", "info", "locale", "groff", "lintian")
SLIM = (
    '--aptopt=Acquire::Languages "none"',
    "--dpkgopt=force-unsafe-io",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)
VERSION, REVISION = "0.1.0-test", "0123456789abcdef0123456789abcdef01234567"


def image(target: str) -> str:
    """Name of a built image."""
    return f"localhost/glm53/{target}:{TAG}"


def build_all(engine: Engine) -> dict[str, str]:
    """Builds what is not up to date (layers are cached); target → image name."""
    base(engine)
    # Downloads wait for the network most of the time: what does not need each other is made side by side. The command line's image needs
    # every stage but the others' packages, so those follow.
    with ThreadPoolExecutor(1 + len(TARGETS)) as pool:
        companions = [pool.submit(companion, engine, name) for name in COMPANIONS]
        pool.submit(build, engine, "cli", "--jobs", "3").result()
        for made in [*companions, *(pool.submit(build, engine, target) for target in TARGETS if target != "cli")]:
            made.result()
    return {name: image(name) for name in (*TARGETS, *COMPANIONS)}


def base(engine: Engine) -> str:
    """An empty Debian, made with mmdebstrap: what the slim Debian image is."""
    if BASE not in engine.podman("images", "--format", "{{.Repository}}:{{.Tag}}").split():
        archive = LAB / "base.tar"
        if not archive.exists():
            fresh = archive.with_suffix(".new")
            # /dev is empty in images that are published. A folder shm in it would give its rights to the volume mounted there.
            command = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", "--format=tar", "--skip=output/dev", *SLIM]
            command += ["bookworm", str(fresh)]
            run(command, {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}, timeout_s=1500)
            fresh.replace(archive)
        engine.podman("import", archive, BASE, timeout_s=300)
    return BASE


def build(engine: Engine, target: str, *options: str, tag: str | None = None) -> str:
    """Builds one target of the Dockerfile."""
    name = tag or image(target)
    arguments = {"BASE_IMAGE": BASE, "VERSION": VERSION, "REVISION": REVISION}
    engine.podman(
        *("build", "--quiet", "--format", "docker", "--layers", "--timestamp", "1700000000", "--file", DOCKERFILE, "--target", target),
        *carried(),
        *(part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")),
        *options,
        *("--tag", name, ROOT),
        timeout_s=2400,
    )
    return name


def companion(engine: Engine, name: str) -> str:
    """Redis or Prometheus from Debian's packages, with the entry point and the user of the real image."""
    folder = Path(__file__).parent / "companions"
    engine.podman(
        *("build", "--quiet", "--format", "docker", "--layers", "--build-arg", f"BASE_IMAGE={BASE}"),
        *("--network=host", "--file", folder / f"{name}.Dockerfile", "--tag", image(name), folder),
        timeout_s=1500,
    )
    return image(name)


def revision() -> str:
    """The commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
