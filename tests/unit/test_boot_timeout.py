"""How long `glm53 serve` waits for services that load: as long as they get on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli import serve
from cli.serve import Supervisor
from cli.settings import ServeSettings
from services.common.lifecycle import ExitCode


def test_a_load_that_gets_on_may_take_longer_than_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download of hours is no failure; the same progress for the whole timeout is one."""
    now = 0.0
    monkeypatch.setattr(serve.time, "monotonic", lambda: now)
    settings = ServeSettings.load({"GLM53_BOOT_TIMEOUT_S": "100", "GLM53_STATE_DIR": str(tmp_path), "GLM53_SHM_DIR": str(tmp_path)})
    supervisor = Supervisor(settings, {}, {"worker": ["true"]})
    health: dict[str, Any] = {}
    monkeypatch.setattr(supervisor, "_health", lambda: health)
    for minute in range(60):
        now = 60.0 * minute
        health = {"status": "loading", "progress": round(minute / 200, 3), "step": "fetching"}
        assert supervisor._check_boot() is None
    now += 99
    assert supervisor._check_boot() is None
    now += 2
    assert supervisor._check_boot() == ExitCode.BOOT
