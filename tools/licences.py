"""Writes docs/third-party-licences.md: the licence of every installed package, from its own metadata."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "third-party-licences.md"


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
    names = [line.split("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
    rows = []
    for name in sorted(names, key=str.lower):
        package = metadata.distribution(name)
        rows.append(f"| {name} | {package.version.split('+')[0]} | {licence_of(package)} |")
    head = (
        "# Licences of what is installed\n\nNothing of these packages is part of this repository; `make serve` and `make test` install them "
        "from their own distributions.\nWritten by `tools/licences.py` from the packages' own metadata.\n\n| package | version | licence |\n|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = table()
    if "--check" in sys.argv:
        sys.exit(0 if OUT.read_text() == text else f"{OUT.name} is out of date: run python tools/licences.py")
    OUT.write_text(text)
