"""Writes docs/third-party-licences.md: the licence of every installed package, from its own metadata."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "third-party-licences.md"
HEAD = """# Licences of what is installed

Nothing of these packages is part of this repository; `make serve` and `make test` install them from their own distributions.
Written by `tools/licences.py` from the packages' own metadata.

| package | version | licence |
|---|---|---|
"""


def licence_of(package: metadata.Distribution) -> str:
    """The SPDX expression, else the licence classifiers, else the first line of the licence field."""
    meta = package.metadata
    if expression := meta.get("License-Expression"):
        return str(expression)
    classifiers = [c.split(" :: ")[-1] for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    if classifiers:
        return ", ".join(sorted(set(classifiers)))
    text = str(meta.get("License") or "not stated").strip()
    return text.splitlines()[0][:80]


def table() -> str:
    """The whole document."""
    names = [line.split("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line and ";" not in line]
    rows = []
    for name in sorted(names, key=str.lower):
        package = metadata.distribution(name)
        rows.append(f"| {name} | {package.version.split('+')[0]} | {licence_of(package)} |")
    rows.append("| checkov (in an environment of its own, see tools/checkov.lock) | 3.3.30 | Apache License 2.0 |")
    rows.append("| async-timeout (below Python 3.11.3 only) | 5.0.1 | Apache 2 |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    OUT.write_text(table())
