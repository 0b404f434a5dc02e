"""Packages that are not installed, for a test."""

from __future__ import annotations

import builtins
from typing import Any

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Imports of the package, and of what is in it, fail from now on."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == package or name.startswith(f"{package}."):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
