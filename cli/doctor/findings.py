"""What a check found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """FAIL: the service would not start, or would serve badly. WARN: it would serve, but worse than it could."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at, in two or three words.
        message: what is the case.
        fix: the exact step that ends it; empty when there is nothing to do.
    """

    check: str
    level: Level
    message: str
    fix: str = ""


def ok(check: str, message: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Level.OK, message)


def warn(check: str, message: str, fix: str) -> Finding:
    """It would be better otherwise."""
    return Finding(check, Level.WARN, message, fix)


def fail(check: str, message: str, fix: str = "") -> Finding:
    """It will not work."""
    return Finding(check, Level.FAIL, message, fix)
