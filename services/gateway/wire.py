"""How one answer's events look on the wire: each API has its own way."""

from __future__ import annotations

from typing import Any

from services.common.errors import Glm53Error
from services.gateway import errors
from services.gateway.json_response import json_bytes


def data_event(payload: dict[str, Any]) -> bytes:
    """One event without a name."""
    return b"data: " + json_bytes(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """One event that is named by its `type`."""
    return b"event: " + str(payload["type"]).encode() + b"\n" + data_event(payload)


class Wire:
    """OpenAI's way: events without names, an error as an event, ``[DONE]`` at the end."""

    end = b"data: [DONE]\n\n"

    def event(self, payload: dict[str, Any]) -> bytes:
        """One event."""
        return data_event(payload)

    def error(self, error: Glm53Error) -> bytes:
        """What goes wrong after the headers."""
        return data_event(errors.body_of(error))


OPENAI = Wire()
