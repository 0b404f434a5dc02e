"""Checks of what `glm53 serve` itself keeps: its lock, its list of processes and its socket."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from cli.doctor import network
from cli.doctor.findings import Finding, fail, ok
from cli.instance import MAX_SOCKET_PATH_BYTES, Instance
from cli.settings import ServeSettings
from services.common.errors import ConfigError


def check(settings: ServeSettings, env: Mapping[str, str]) -> Iterator[Finding]:
    """The state folder can be made and written, no other server holds it, and a socket that was asked for elsewhere can be made."""
    folder = settings.state_path
    try:
        Instance(settings.instance_name, Path(settings.shm_dir), folder).check()
    except ConfigError as error:
        if error.param == "GLM53_INSTANCE" and (own := network.running(settings.for_services(env))) is not None:
            yield ok("state folder", f"{folder} is held by the server that runs here ({own})")
        else:
            yield fail("state folder", error.message)
    else:
        yield ok("state folder", f"{folder} can be used")
    if settings.worker_address.startswith("unix:"):
        yield from _socket(Path(settings.worker_address.removeprefix("unix:")))


def _socket(path: Path) -> Iterator[Finding]:
    if not os.access(path.parent, os.W_OK | os.X_OK):
        problem = f"{path.parent} is no folder that this user can write to"
    elif (size := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
        problem = f"the path has {size} bytes, a socket's at most {MAX_SOCKET_PATH_BYTES}"
    else:
        return
    yield fail("address", f"GLM53_WORKER_ADDRESS: cannot make the socket {path}: {problem}", "Name another place, or unset it.")
