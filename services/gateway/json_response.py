"""JSON on its way out."""

from __future__ import annotations

import json
from typing import Any

import orjson
from starlette.responses import JSONResponse


def json_bytes(payload: Any) -> bytes:
    """Compact JSON in UTF-8."""
    try:
        return orjson.dumps(payload)
    except TypeError:
        # Numbers beyond 64 bits: clients may send them and get them back.
        return json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class JsonResponse(JSONResponse):
    """A whole response."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json_bytes(content)
