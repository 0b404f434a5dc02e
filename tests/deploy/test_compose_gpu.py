"""The GPU profile, as far as a machine without a GPU can show it: the container gets the device that a CDI specification describes.

The image is the CPU one under the GPU one's name: what is tested is the compose file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import images
from tests.deploy.engine import ROOT, Engine
from tests.deploy.stack import Stack, settings

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]
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


def test_the_worker_of_the_gpu_profile_gets_its_device(engine: Engine, built: dict[str, str], gpu: None) -> None:
    """The device node is in the container, and so is the checkpoint, read-only."""
    engine.podman("tag", built["gpu-worker-cpu"], images.image("gpu-worker"))
    stack = Stack(engine, {**settings(), "COMPOSE_PROFILES": "gpu", "MODEL_DIR": str(ROOT / "models" / "tiny" / "checkpoint")})
    code = (
        "import json, os; print(json.dumps([os.path.exists('/dev/nvidia0'), os.path.exists('/model/config.json'),"
        "os.access('/model', os.W_OK), os.environ['GLM53_MODEL_DIR']]))"
    )
    try:
        said = stack.compose("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "python", "gpu-worker", "-c", code)
        assert json.loads(said) == [True, True, False, "/model"]
    finally:
        stack.down()
        engine.podman("untag", images.image("gpu-worker"))
