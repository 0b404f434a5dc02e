"""Fixtures that every ring of tests shares."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the person who runs the tests leaks into them."""
    import os

    for name in list(os.environ):
        if name.startswith("GLM53_") or name in {"HOST", "PORT", "SERVED_NAME"}:
            monkeypatch.delenv(name)
