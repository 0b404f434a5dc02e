"""W3C trace context on its way from the client through gateway and worker. Passing it on needs no package and no collector."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Iterable

# Header of HTTP and key of gRPC's metadata.
TRACEPARENT = "traceparent"
# Version 00: trace id, parent's span id, flags. Ids of zeros are invalid.
_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")

# Of the request that the current task works for; empty where there is none.
traceparent_var: contextvars.ContextVar[str] = contextvars.ContextVar("traceparent", default="")


def checked(text: str) -> str:
    """A traceparent as it came, or nothing where it is none: it goes into logs and on to other services."""
    return text if _FORM.match(text) else ""


def trace_id_of(traceparent: str) -> str:
    """The id that all parts of a trace share, 32 hex digits; empty for no trace."""
    return traceparent[3:35]


def outgoing() -> tuple[tuple[str, str], ...] | None:
    """Metadata of a gRPC call that belongs to the current trace."""
    traceparent = traceparent_var.get()
    return ((TRACEPARENT, traceparent),) if traceparent else None


def incoming(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The traceparent in the metadata of a gRPC call; empty where there is none."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str):
            return checked(value)
    return ""
