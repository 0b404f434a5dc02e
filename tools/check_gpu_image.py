"""Checks a built gpu-worker image, as far as a machine without a GPU can: `python -m tools.check_gpu_image IMAGE`.

CI does not build this image: compiling exllamav3 takes over an hour of CPU time. Whoever builds it runs this before
publishing it. The image runs without network, rights and a writable root, as in production. Exit code 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HARDENING = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none", "--tmpfs=/tmp:size=256m,mode=1777,exec")
CONFIG_ERROR = 78


def run(engine: str, image: str, *options: str, arguments: tuple[str, ...] = (), text: str = "") -> subprocess.CompletedProcess[str]:
    """A container's end, with what it printed."""
    command = [engine, "run", "--rm", "--interactive", *HARDENING, *options, image, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, input=text)


def pins() -> dict[str, str]:
    """Package → version that the image must have."""
    text = (ROOT / "deploy/docker/requirements/gpu-worker.txt").read_text()
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==(\S+)", text, re.MULTILINE))


def faults(facts: dict[str, Any], code: int, said: str, architectures: list[str]) -> list[str]:
    """What is not as it should be, in words.

    Args:
        facts: what tools/gpu_image_facts.py printed.
        code: how the image ended when it was started as it is, without a GPU.
        said: what it printed then.
        architectures: compute capabilities that it was built for, such as "8.6".
    """
    wanted, end = pins(), said[-600:]
    numbers = [name.replace(".", "") for name in architectures]
    right = {
        f"it runs as user {facts['uid']}, not 10001": facts["uid"] == 10001,
        f"packages differ from requirements/gpu-worker.txt: {difference(facts['packages'], wanted)}": facts["packages"] == wanted,
        f"programs: {facts['tools']}; Triton needs gcc, and nothing else belongs there": facts["tools"] == ["gcc"],
        f"its user may write {facts['writable']}": facts["writable"] == [],
        f"no bytecode of Python {facts['python']} for {facts['uncompiled']}": facts["uncompiled"] == [],
        f"our GPU kernels are for {facts['architectures']}, not {numbers}": facts["architectures"] == numbers,
        f"torch and its CUDA: {facts['torch']}": str(facts["torch"][0]).split("+")[0] == wanted["torch"] and facts["torch"][1][:3] == "13.",
        f"exllamav3's extension: {facts['extension']}": facts["extension"] == "exllamav3_ext.so",
        f"exllamav3's extension is for {facts['extension_for']}, not {architectures}": facts["extension_for"] == architectures,
        f"import exllamav3: {facts['exllamav3']}": facts["exllamav3"] == wanted["exllamav3"],
        f"what Triton does at run time: {facts['launcher']}": facts["launcher"] == "compiled",
        f"the bill of materials lists {facts['listed']}": facts["listed"] == sorted(wanted),
        f"without a GPU it ends with {code}, not {CONFIG_ERROR}: {end}": code == CONFIG_ERROR,
        f"without a GPU it does not say what to do: {end}": "no NVIDIA GPU is visible" in said and "devices: nvidia.com/gpu=0" in said,
    }
    return [text for text, holds in right.items() if not holds]


def difference(found: Any, wanted: dict[str, str]) -> str:
    """Packages of which one side has another version, or none."""
    if not isinstance(found, dict):
        return str(found)
    names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    return ", ".join(f"{name} {found.get(name, 'missing')} (pinned: {wanted.get(name, 'no')})" for name in names)


def main() -> int:
    """Prints every fault; 1 when there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("--engine", default="docker", help="docker or podman")
    parser.add_argument("--archs", default="8.6;8.9;9.0;12.0", help="the CUDA_ARCHS that it was built with")
    args = parser.parse_args()
    source = (ROOT / "tools/gpu_image_facts.py").read_text()
    asked = run(args.engine, args.image, "--entrypoint=python", arguments=("-",), text=source)
    if asked.returncode != 0:
        print(f"{args.image} does not run: {asked.stderr[-2000:]}", file=sys.stderr)
        return 1
    facts = json.loads(asked.stdout.splitlines()[-1])
    preflight = run(args.engine, args.image, "--env=GLM53_DEVICE=cuda")
    found = faults(facts, preflight.returncode, preflight.stdout + preflight.stderr, args.archs.split(";"))
    for text in found:
        print(f"FAIL  {text}")
    print(f"{args.image}: Python {facts['python']}, torch {facts['torch']}, our kernels for {facts['architectures']}; {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
