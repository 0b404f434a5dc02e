"""Checks of where traces go."""

from __future__ import annotations

from collections.abc import Iterator

from cli.doctor.findings import Finding, fail
from services.common import otel
from services.common.errors import ConfigError


def check(endpoint: str) -> Iterator[Finding]:
    """What sends spans can be made, as gateway and gpu_worker make it; nothing is sent. Silent when it can.

    Args:
        endpoint: GLM53_OTLP_ENDPOINT, "" when there is none.
    """
    if not endpoint:
        return
    try:
        otel.provider_for(endpoint, "doctor").shutdown()
    except ConfigError as error:
        yield fail("settings", error.message)
