"""Numbers that JSON has and numbers that it has not."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from services.gateway.schema_places import written

_MOST_DIGITS = 309  # of the largest double


def refuse_constant(name: str) -> NoReturn:
    """For `json.loads(parse_constant=...)`: NaN and the infinities, which Python reads, are no JSON.

    Raises:
        ValueError: names it.
    """
    raise ValueError(f"{name} is not a JSON value")


def finite(text: str) -> float:
    """For `json.loads(parse_float=...)`: a number as a double.

    Raises:
        ValueError: it is too large for one; it would become an infinity.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is larger than a double can hold")
    return value


class _Long(float):
    """An infinity in place of a number that was written with so many digits."""

    digits = 0


def whole(text: str) -> int | float:
    """For `json.loads(parse_int=...)` where a wrong number is looked for: one with too many digits for a double is infinite."""
    if len(text) <= _MOST_DIGITS:
        return int(text)
    found = _Long(math.inf)
    found.digits = len(text.removeprefix("-"))
    return found


def place_of_infinity(value: Any) -> tuple[str, str] | None:
    """Where a JSON value holds a number that is not finite, and what it is; None when all are."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, inner = waiting.pop()
        if isinstance(inner, _Long):
            return path.removeprefix("."), f"a number of {inner.digits} digits"
        if isinstance(inner, float) and not math.isfinite(inner):
            return path.removeprefix("."), {math.inf: "Infinity", -math.inf: "-Infinity"}.get(inner, "NaN")
        if isinstance(inner, dict):
            waiting += [(written(path, name), child) for name, child in inner.items()]
        elif isinstance(inner, list):
            waiting += [(written(path, index), child) for index, child in enumerate(inner)]
    return None
