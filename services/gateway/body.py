"""Request bodies: bounded bytes → one JSON object."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from services.common.errors import Cancelled, DeadlineExceeded
from services.gateway.errors import InvalidJson, RequestTooLarge

# A client that sends slower than this is not sending.
_BODY_TIMEOUT_S = 60.0

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object, with text that can be encoded.

    Raises:
        RequestTooLarge: more than `max_bytes`.
        InvalidJson: another content type, no body, no JSON, no object.
    """
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidJson(f"Content-Type is {content_type[:80]!r}; send application/json.")
    data = await _read(request, max_bytes)
    if not data.strip():
        raise InvalidJson("The body is empty; send a JSON object.")
    try:
        value = _DECODER.decode(data.decode(json.detect_encoding(data), "surrogatepass"))
    except RecursionError:
        raise InvalidJson("The body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidJson(f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJson("The body must be a JSON object.")
    # Half of a surrogate pair, as clients send that cut text inside an emoji, has no encoding: what cannot be shown is replaced.
    return dict(_encodable(value)) if _SURROGATE_ESCAPE.search(data) else value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = RequestTooLarge(f"The body is larger than {max_bytes} bytes (GLM53_MAX_BODY_BYTES).")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > max_bytes:
                    raise too_large
    except ClientDisconnect:
        raise Cancelled("the client went away while it sent the request") from None
    except TimeoutError:
        raise DeadlineExceeded(f"The body did not arrive within {_BODY_TIMEOUT_S:.0f} s.") from None
    return bytes(data)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


# Made once: json.loads with options makes a decoder for every call.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value
