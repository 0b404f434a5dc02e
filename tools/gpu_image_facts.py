"""Runs inside a gpu-worker image, from standard input, and prints what it finds as one line of JSON; tools/check_gpu_image.py judges it.

A fact that cannot be found out is the error in words: the others are still told.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from typing import Any


def named(name: str) -> str:
    """A distribution's name as pins spell it."""
    return name.lower().replace("_", "-").replace(".", "-")


def packages() -> dict[str, str]:
    """Distribution → version."""
    return {named(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()}


def tools() -> list[str]:
    """Programs that build things, of those that could be there."""
    return [name for name in ("gcc", "g++", "pip", "nvcc", "cmake", "git", "curl") if shutil.which(name)]


def writable() -> list[str]:
    """Files of ours that this user could change."""
    files = [path for top in ("/app", "/opt/venv") for path in pathlib.Path(top).rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if os.access(path, os.W_OK)]


def uncompiled() -> list[str]:
    """Modules of ours without bytecode of this Python."""
    tag = sys.implementation.cache_tag
    files = pathlib.Path("/app").rglob("*.py")
    return [str(path) for path in files if not (path.parent / "__pycache__" / f"{path.stem}.{tag}.pyc").exists()]


def architectures() -> list[str]:
    """What our GPU kernels hold machine code for."""
    found: list[str] = importlib.import_module("kernels.python.cuda_expert").architectures()
    return found


def torch() -> list[str]:
    """Version of torch, and of the CUDA that it was built for."""
    module = importlib.import_module("torch")
    return [str(module.__version__), str(module.version.cuda)]


def extension() -> str:
    """File name of exllamav3's compiled extension, which needs torch's libraries."""
    importlib.import_module("torch")
    return pathlib.Path(str(importlib.import_module("exllamav3_ext").__file__)).name


def extension_for() -> list[str]:
    """What that extension holds machine code for, which the doctor compares with the card's."""
    return (pathlib.Path(sysconfig.get_path("platlib")) / "exllamav3_ext.archs").read_text().replace(";", " ").split()


def exllamav3() -> str:
    """Its version, once it has been imported."""
    importlib.import_module("exllamav3")
    return importlib.metadata.version("exllamav3")


def launcher() -> str:
    """Whether what Triton does at run time works: a C file with Python's header, compiled and linked in /tmp."""
    source = pathlib.Path("/tmp/launcher.c")
    source.write_text("#include <Python.h>\nint answer(void) { return 42; }\n")
    command = ["gcc", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(source), "-o", "/tmp/launcher.so"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr or "compiled"


def listed() -> list[str]:
    """Python packages of the bill of materials."""
    components = json.loads(pathlib.Path("/usr/share/glm53/sbom.cdx.json").read_text())["components"]
    return sorted(named(component["name"]) for component in components if component["purl"].startswith("pkg:pypi/"))


FACTS: dict[str, Callable[[], Any]] = {
    "uid": os.getuid,
    "python": lambda: ".".join(map(str, sys.version_info[:2])),
    "packages": packages,
    "tools": tools,
    "writable": writable,
    "uncompiled": uncompiled,
    "architectures": architectures,
    "torch": torch,
    "extension": extension,
    "extension_for": extension_for,
    "exllamav3": exllamav3,
    "launcher": launcher,
    "listed": listed,
}


def found() -> dict[str, Any]:
    """Every fact, or the error that stood in its way."""
    facts = {}
    for name, function in FACTS.items():
        try:
            facts[name] = function()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other facts are still told
            facts[name] = f"{type(error).__name__}: {error}"
    return facts


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found()) + "\n")
