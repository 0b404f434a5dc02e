"""A rented GPU machine lacks the gateway's packages: what runs there must not need them.

It has what is built here (kernels/python/lib), exllamav3 with torch, and small packages; no generated gRPC stubs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Refuses what such a machine lacks, then imports every module that it is given; says all that fail.
SCRIPT = """
import importlib, sys

class Refuse:
    lacking = {"opentelemetry", "httpx", "orjson", "jsonschema_rs", "openai", "anthropic", "hypothesis", "transformers"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.lacking or name.endswith(("_pb2", "_pb2_grpc")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
broken = []
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        broken.append(f"{module}: {error}")
    except BaseException as error:
        if type(error).__name__ != "Skipped":
            raise
print("\\n".join(broken))
sys.exit(bool(broken))
"""
# Each is begun there by `python -m`. gpu_serve is not: it starts the gateway, whose packages come with it.
BENCHES = (
    "arena_fill",
    "full_size_engine",
    "gpu_check",
    "gpu_exact",
    "gpu_exact_slice",
    "gpu_fast",
    "gpu_fast_parts",
    "gpu_figures",
    "gpu_full_size",
    "gpu_int_kernel",
    "gpu_kept",
    "slice_stock",
)


def missing_in(modules: list[str]) -> str:
    """What of these cannot be imported there, a line each."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *modules], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    assert done.stderr == "" or done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_gpu_tests_and_benches_need_no_package_of_the_gateway() -> None:
    """Every file of tests/gpu and every bench of a session can be imported without them."""
    tests = sorted(f"tests.gpu.{path.stem}" for path in (ROOT / "tests" / "gpu").glob("*.py") if path.stem != "__init__")
    assert "tests.gpu.test_arena_check" in tests
    assert missing_in([*tests, *(f"bench.{name}" for name in BENCHES)]) == ""


def test_the_check_sees_what_is_missing() -> None:
    """A module that imports one of them is named."""
    assert missing_in(["tests.worker.harness"]) == "tests.worker.harness: No module named 'opentelemetry'"
