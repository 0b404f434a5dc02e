"""Request bodies: bounded bytes → one JSON object."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Receive

from services.common.errors import Cancelled
from services.gateway.beside import SMALL_BYTES, by_size, size_var
from services.gateway.errors import InvalidJson, RequestTimeout, RequestTooLarge, UnsupportedEncoding
from services.gateway.http_head import header_of
from services.gateway.json_text import encodable, is_deep
from services.gateway.numbers import finite, place_of_infinity, refuse_constant, whole

# Larger bodies are read by a faster parser, if they have so few parts that even that one, which nothing interrupts, is done within some
# 40 ms. A list costs it what four numbers do, a key with its value what six do.
_MAX_PARTS = 800_000
# pydantic writes no value that is deeper.
_MAX_LEVELS = 250
_TOO_DEEP = f"The body is nested too deeply; this server takes {_MAX_LEVELS} levels."
_PARTS = {b",": 1, b"{": 1, b"[": 4, b":": 5}


async def read_json_object(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as a JSON object, with text that can be encoded.

    Raises:
        UnsupportedEncoding: it is compressed.
        RequestTooLarge: more than `max_bytes`.
        RequestTimeout: it was not there after `timeout_s` seconds.
        InvalidJson: another content type, no body, no JSON, no object.
    """
    coding = (header_of(request.scope, b"content-encoding") or "identity").strip().lower()
    if coding not in ("", "identity"):
        raise UnsupportedEncoding(f"Content-Encoding is {coding[:80]!r}; send the body uncompressed.")
    given = header_of(request.scope, b"content-type")
    content_type = "application/json" if given is None else given.split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidJson(f"Content-Type is {content_type[:80]!r}; send application/json.")
    data = await _read(request, max_bytes, timeout_s)
    if not data.strip():
        raise InvalidJson("The body is empty; send a JSON object.")
    size_var.set(len(data))
    value = await by_size(_value_of, data)
    if not isinstance(value, dict):
        raise InvalidJson("The body must be a JSON object.")
    return value


def _value_of(data: bytes) -> Any:
    """The value that a body is.

    Raises:
        RequestTooLarge: it has more parts than are looked at one by one.
        InvalidJson: it is no JSON.
    """
    if len(data) > SMALL_BYTES:
        parts = sum(weight * data.count(sign) for sign, weight in _PARTS.items())
        if parts > _MAX_PARTS:
            raise RequestTooLarge(
                f"The body has too many parts: {parts}, where this server takes {_MAX_PARTS} in one request. A comma or a brace counts 1, "
                "a bracket 4, a colon 5."
            )
        # Several times as fast. What it cannot read, the standard library's may: it has the last word.
        with contextlib.suppress(orjson.JSONDecodeError):
            return _shallow(orjson.loads(data), data)
    whole = True
    try:
        encoding = json.detect_encoding(data)
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            whole, text = False, data.decode(encoding, "surrogatepass")
        value = _DECODER.decode(text)
    except RecursionError:
        raise InvalidJson(_TOO_DEEP) from None
    except ValueError as error:
        _refuse_unlike_numbers(data)
        raise InvalidJson(f"The body is not valid JSON: {error}") from None
    value = _shallow(value, data)
    # Half of a surrogate pair, as clients send that cut text inside an emoji, has no encoding: what cannot be shown is replaced.
    return encodable(value) if not whole or b"\\ud" in data or b"\\uD" in data else value


def _shallow(value: Any, data: bytes) -> Any:
    """The value of a body, if it is one that can be walked through by recursion."""
    if data.count(b"[") + data.count(b"{") > _MAX_LEVELS and is_deep(value, _MAX_LEVELS):
        fields = value.items() if isinstance(value, dict) else ()
        raise InvalidJson(_TOO_DEEP, param=next((name for name, inner in fields if is_deep(inner, _MAX_LEVELS - 1)), None))
    return value


async def _read(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    declared = header_of(request.scope, b"content-length") or ""
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    is_pending = request.scope["state"].get("body_is_pending")
    if is_pending is not None and not is_pending():
        # All of it is here.
        return await _received(request.receive, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _received(request.receive, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {timeout_s:g} s (GLM53_BODY_TIMEOUT_S).") from None


async def _received(receive: Receive, max_bytes: int) -> bytes:
    parts = []
    left = max_bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away while it sent the request")
        part = message.get("body", b"")
        left -= len(part)
        if left < 0:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than {max_bytes} bytes (GLM53_MAX_BODY_BYTES).")


def _refuse_unlike_numbers(data: bytes) -> None:
    """Names the number that a double does not hold, where that is what is wrong with a body."""
    try:
        place = place_of_infinity(json.loads(data, parse_int=whole))
    except (ValueError, RecursionError):
        return
    if place is not None:
        path, value = place
        raise InvalidJson(f"{path} is {value}, which is no number that JSON has or that a double holds.", param=path)


# Made once: json.loads with options makes a decoder for every call.
_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite)
