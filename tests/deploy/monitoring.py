"""What the deployment's monitoring files name, for tests that hold them against the code and against each other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
_OWN_NAME = re.compile(r"(?<![\w:])((?:glm53|vllm)[:_][a-zA-Z0-9_:]+)")


def program(name: str, package: str) -> str:
    """The path of a program. Its absence fails the test: these checks are never skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is not installed: install {package} (tools/debian_packages.sh test)")
    return path


def rules() -> list[dict[str, object]]:
    """Every recording and alerting rule."""
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def recorded() -> set[str]:
    """Names that the recording rules make."""
    return {str(rule["record"]) for rule in rules() if "record" in rule}


def own_names(expression: str) -> set[str]:
    """The series of ours, exported or recorded, that an expression reads."""
    return set(_OWN_NAME.findall(expression))
