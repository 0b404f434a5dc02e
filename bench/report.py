"""The one shape of every benchmark result: `machine`, `commit`, `command`, `rows`, `summary`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCHIVED = Path(__file__).with_name("archive_commit.txt")  # `git archive` writes the commit into it


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure: CPU, cores, memory, kernel, Python."""
    cpu: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if ":" in line:
            key, value = (part.strip() for part in line.split(":", 1))
            cpu.setdefault(key, value)
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_vbmi", "avx_vnni", "amx_tile")
    flags = set(cpu.get("flags", "").split())
    memory_kib = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cpu_family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "logical_cpus": os.cpu_count(),
        "isa": [flag for flag in wanted if flag in flags],
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
    }


def commit() -> str:
    """The commit that was measured, with `+changes` when the tree differed from it."""
    archived = ARCHIVED.read_text().strip()
    if not archived.startswith("$"):
        return archived  # an archive has no repository of its own, and may lie in another one
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return (head or "unknown") + ("+changes" if changed else "")


def write_result(path: Path, started: dict[str, Any], rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Writes one result file and prints its summary.

    Args:
        path: normally under docs/results/.
        started: `start()`'s value, taken before the first measurement.
        rows: every single measurement.
        summary: the figures that are quoted elsewhere.
    """
    body = {**started, "rows": rows, "summary": summary}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    os.replace(part, path)  # whoever copies it while a run goes on gets a whole file
    for key, value in summary.items():
        print(f"{key:28} {value}")
    print(f"written to {path}")


def without_folders(argument: str) -> str:
    """A command's argument as a reader elsewhere can use it: of a path outside of the project only the name."""
    name, separator, path = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    if not path.startswith("/"):
        return argument
    inside = Path(path).is_relative_to(ROOT)
    return name + separator + (str(Path(path).relative_to(ROOT)) if inside else Path(path).name)


def start(module: str) -> dict[str, Any]:
    """Machine, commit and command of this run; call it before measuring."""
    return {
        "machine": machine(),
        "commit": commit(),
        "command": " ".join(["python -m", module, *map(without_folders, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
