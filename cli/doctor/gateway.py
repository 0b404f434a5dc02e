"""Checks of the gateway."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path

from cli.doctor import hardware, network, traces
from cli.doctor.findings import Finding, fail, ok, warn
from cli.doctor.machine import Machine
from services.common.command import COMMAND
from services.common.errors import ConfigError
from services.common.shm_room import size_in_words
from services.gateway.access.keys import read_keys
from services.gateway.access.ledger import check_place
from services.gateway.fleet.members import addresses_of
from services.gateway.settings import GatewaySettings
from services.gateway.shared.link import problem_of

USAGE_BYTES = 16 << 20
OWN = 96 << 20  # measured: what it takes before its first request


def check(env: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    """Settings, keys, addresses."""
    yield from hardware.memory_limit(machine, OWN, "GATEWAY_MEMORY in compose's .env, limits.memory of gateway on Kubernetes")
    try:
        settings = GatewaySettings.load(env)
        addresses = addresses_of(settings.worker_address)
    except ConfigError as error:
        yield fail("settings", error.message)
        return
    yield ok("settings", f"worker at {', '.join(addresses)}")
    yield from traces.check(settings.otlp_endpoint)
    if settings.port:
        yield from network.listen("PORT", settings.host, settings.port, network.gateway)
    if settings.api_keys_file:
        try:
            count = len(read_keys(Path(settings.api_keys_file)).keys)
        except ConfigError as error:
            yield fail("API keys", error.message, _keys_fix(Path(settings.api_keys_file)))
        else:
            yield ok("API keys", f"{count} in {settings.api_keys_file}")
    if settings.usage_file:
        yield from _usage_file(Path(settings.usage_file), Path(settings.api_keys_file) if settings.api_keys_file else None)
    if url := settings.redis_url.get_secret_value():
        yield from _redis(url)


def _keys_fix(file: Path) -> str:
    if file.is_dir():
        made = "A container engine makes a folder where the file was missing: remove it on the host, make the file"
        return f"{made} (compose: see its README.md), and make the container anew: docker compose up --force-recreate gateway."
    return f"Make the file with `{COMMAND} keys create` (compose: see its README.md), and let this user read it."


def _usage_file(file: Path, keys: Path | None) -> Iterator[Finding]:
    try:
        check_place(file, keys)
    except ConfigError as error:
        yield fail("usage file", error.message)
        return
    if not _can_append(file):
        yield fail(
            "usage file", f"GLM53_USAGE_FILE={file} cannot be written", "Name a file in a folder that this user may write, or unset it."
        )
    elif (free := shutil.disk_usage(file.resolve().parent).free) < USAGE_BYTES:
        text = (
            f"GLM53_USAGE_FILE={file}: {size_in_words(free)} are free there;"
            " lines wait in memory, and the oldest are lost when there are too many"
        )
        yield warn("usage file", text, "Free space there, or name another place.")


def _can_append(file: Path) -> bool:
    """Tried as the gateway does it, for root may do what a file system does not; a file that is not there yet is not made."""
    try:
        if file.exists():
            file.open("a").close()
        else:
            tempfile.TemporaryFile(dir=file.resolve().parent).close()
    except OSError:
        return False
    return True


def _redis(url: str) -> Iterator[Finding]:
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
    except ValueError:
        parts, host, port = None, None, 0
    if parts is None or parts.scheme not in ("redis", "rediss", "unix") or (parts.scheme != "unix" and not host):
        yield fail("Redis", "GLM53_REDIS_URL is no redis:// URL", "Use redis://[:password@]host:6379/0.")
    else:
        where = f"{host}:{port}" if host else parts.path
        # One that can be reached may still refuse. It may be away for a while without harm.
        try:
            problem = asyncio.run(problem_of(url, network.CONNECT_S))
        except ValueError as error:
            yield fail("Redis", f"GLM53_REDIS_URL: {error}", "Use redis://[:password@]host:6379/0.")
            return
        if problem:
            fix = "Start it, see its network policy, or put what it asks for into GLM53_REDIS_URL"
            yield warn(
                "Redis", f"{where} does not answer as it should: {problem}", f"{fix}; until then each gateway counts limits by itself."
            )
        else:
            yield ok("Redis", f"{where} answers")
