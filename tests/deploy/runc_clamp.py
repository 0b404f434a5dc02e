"""An OCI runtime in front of runc: lowers every resource limit of a container to what this machine may set, then becomes runc.

Without CAP_SYS_RESOURCE no limit can be raised, and runc gives up at the first one. What was lowered is written to RUNC_CLAMP_LOG: tests
look at the limits that the compose file asks for, not at those that a container got here.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

RUNC = "/usr/sbin/runc"
_CAP_SYS_RESOURCE = 24


def main(argv: list[str]) -> None:
    """Changes the bundle or process file that the command names, then runs runc with the same arguments."""
    file = _file_of(argv)
    if file is not None and file.exists() and not _may_raise():
        document = json.loads(file.read_text())
        lowered = clamp(document.get("process", document))
        if lowered:
            file.write_text(json.dumps(document))
            with Path(os.environ.get("RUNC_CLAMP_LOG", os.devnull)).open("a") as log:
                log.write("; ".join(lowered) + "\n")
    os.execv(RUNC, [RUNC, *argv])


def clamp(process: dict[str, Any]) -> list[str]:
    """Lowers the limits of an OCI process description in place; what was changed, in words."""
    changed = []
    for limit in process.get("rlimits") or []:
        number = getattr(resource, limit["type"], None)
        if number is None:
            continue
        highest = resource.getrlimit(number)[1]
        hard = limit["hard"] if highest == resource.RLIM_INFINITY else min(limit["hard"], highest)
        soft = min(limit["soft"], hard)
        if (soft, hard) != (limit["soft"], limit["hard"]):
            changed.append(f"{limit['type']} {limit['soft']}:{limit['hard']} -> {soft}:{hard}")
        limit["soft"], limit["hard"] = soft, hard
    return changed


def _file_of(argv: list[str]) -> Path | None:
    if "create" in argv or "run" in argv:
        return Path(_option(argv, "--bundle", "-b") or ".") / "config.json"
    if "exec" in argv and (name := _option(argv, "--process", "-p")):
        return Path(name)
    return None


def _option(argv: list[str], *names: str) -> str | None:
    for index, argument in enumerate(argv):
        for name in names:
            if argument == name and index + 1 < len(argv):
                return argv[index + 1]
            if argument.startswith(f"{name}="):
                return argument.split("=", 1)[1]
    return None


def _may_raise() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
