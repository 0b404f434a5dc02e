"""What a request's head may say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httptools
from starlette.types import Scope

from services.gateway.errors import InvalidHttp, MethodNotAllowed, UnsupportedHttp

# Headers of which two would mean two things: who asks, whom, and in what form.
_SINGLE = frozenset({b"host", b"authorization", b"x-api-key", b"content-type", b"content-encoding", b"content-length", b"idempotency-key"})
# What `OPTIONS *` is about, as a path.
EVERYTHING = "/*"


@dataclass(frozen=True)
class HeadRules:
    """Bounds of a request's head.

    Attributes:
        max_bytes: of all names and values together.
        max_headers: how many.
        max_url_bytes: of the URL.
    """

    max_bytes: int
    max_headers: int = 256
    max_url_bytes: int = 16 * 1024


def check_head(method: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuses what this server does not speak.

    Args:
        headers: with names in lower case.

    Raises:
        UnsupportedHttp: another version, or a body coded in a way that nobody decodes here.
        MethodNotAllowed: CONNECT.
        InvalidHttp: a header that has one value has two.
    """
    if version not in ("1.0", "1.1"):
        raise UnsupportedHttp(f"HTTP/{version} is not spoken here; use HTTP/1.1.")
    if method == b"CONNECT":
        raise MethodNotAllowed("CONNECT is not allowed: this server is no proxy.")
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _SINGLE:
            if seen.setdefault(name, value) != value:
                raise InvalidHttp(f"The header {name.decode('latin-1')} stands twice, with two values.")
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise UnsupportedHttp("Transfer-Encoding must be chunked.")


def header_of(scope: Scope, name: bytes) -> str | None:
    """The first header of a name, which is in lower case; None where there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def origin_form(url: bytes) -> bytes:
    """The request's target as path and query, whichever way the client writes it.

    Raises:
        InvalidHttp: it cannot be read.
    """
    if not url.isascii():
        raise InvalidHttp("The URL has characters that must be percent-encoded.")
    if url.startswith(b"//"):
        # uvicorn would take what follows for a host.
        return b"/" + url.lstrip(b"/")
    if url.startswith(b"/"):
        return url
    if url == b"*":
        return EVERYTHING.encode()
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserError:
        raise InvalidHttp("The URL cannot be read.") from None
    if parts.schema not in (b"http", b"https"):
        raise InvalidHttp("The URL must be a path, or begin with http:// or https://.")
    return (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
