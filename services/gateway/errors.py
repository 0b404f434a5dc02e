"""The single table between our errors and HTTP, and the errors that only HTTP knows.

Every error leaves the gateway as ``{"error": {"message", "type", "param", "code"}}``: as the body of a status, or as one event
of a stream that has already begun.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from services.common import errors
from services.gateway.json_response import JsonResponse


class InvalidJson(errors.InvalidRequest):
    """The body is not one JSON object."""

    code = "invalid_json"


class InvalidType(errors.InvalidRequest):
    """A field has the wrong JSON type."""

    code = "invalid_type"


class MissingParameter(errors.InvalidRequest):
    """A required field is absent."""

    code = "missing_required_parameter"


class EmptyArray(errors.InvalidRequest):
    """A list that needs an entry has none."""

    code = "empty_array"


class UnsupportedContent(errors.InvalidRequest):
    """A content part that is not text."""

    code = "unsupported_content_type"


class RequestTooLarge(errors.InvalidRequest):
    """The body is larger than the configured limit."""

    code = "request_too_large"


class UnknownRoute(errors.InvalidRequest):
    """No such URL."""

    code = "not_found"


class UnknownRequest(errors.InvalidRequest):
    """No such request runs, or it is another key's."""

    code = "request_not_found"


class MethodNotAllowed(errors.InvalidRequest):
    """The URL exists, but not for this method."""

    code = "method_not_allowed"


class UnknownResponse(errors.InvalidRequest):
    """No such response is kept, or not for this key."""

    code = "response_not_found"


class IdempotencyConflict(errors.InvalidRequest):
    """The idempotency key belongs to another request, or to one that still runs."""

    code = "idempotency_conflict"


class ShuttingDown(errors.NotReady):
    """This gateway finishes what runs and takes nothing new."""

    code = "shutting_down"


class AuthenticationFailed(errors.InvalidRequest):
    """No API key, or one that this server does not know."""

    code = "invalid_api_key"


class PermissionDenied(errors.InvalidRequest):
    """The key is known and may not do this."""

    code = "permission_denied"


class ModelNotAllowed(PermissionDenied):
    """The key may not use this model."""

    code = "model_not_allowed"


class HeadersTooLarge(errors.InvalidRequest):
    """The request's headers are larger than the configured limit."""

    code = "headers_too_large"


class UrlTooLong(errors.InvalidRequest):
    """The URL is longer than any of ours."""

    code = "url_too_long"


class InvalidHttp(errors.InvalidRequest):
    """What was sent is no HTTP/1.1 request."""

    code = "invalid_http"


class UnsupportedHttp(errors.InvalidRequest):
    """HTTP that this server does not speak."""

    code = "unsupported_http"


class UnsupportedEncoding(errors.InvalidRequest):
    """The body is compressed."""

    code = "unsupported_content_encoding"


class RequestTimeout(errors.InvalidRequest):
    """The request itself did not arrive in time."""

    code = "request_timeout"


class TooManyConnections(errors.NotReady):
    """No more connections are taken now."""

    code = "too_many_connections"


class RateLimited(errors.Glm53Error):
    """The key has used up one of its limits; `retry_after_s` None means that the request is larger than the limit itself.

    Attributes:
        standing: headers that say where the limit stands, where nothing else does.
    """

    code = "rate_limit_exceeded"
    standing: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class HttpError:
    """How one class of errors looks over HTTP."""

    status: int
    type: str
    # What the official SDKs obey; None leaves the decision to their own rule (they retry 408, 409, 429 and 5xx).
    should_retry: bool | None = None


INVALID = "invalid_request_error"
SERVER = "server_error"

HTTP_BY_ERROR: dict[type[errors.Glm53Error], HttpError] = {
    errors.UnknownModel: HttpError(404, INVALID),
    UnknownRoute: HttpError(404, INVALID),
    UnknownRequest: HttpError(404, INVALID),
    MethodNotAllowed: HttpError(405, INVALID),
    AuthenticationFailed: HttpError(401, "authentication_error"),
    PermissionDenied: HttpError(403, "permission_error"),
    HeadersTooLarge: HttpError(431, INVALID, should_retry=False),
    UrlTooLong: HttpError(414, INVALID, should_retry=False),
    UnsupportedHttp: HttpError(501, INVALID, should_retry=False),
    UnsupportedEncoding: HttpError(415, INVALID, should_retry=False),
    RequestTimeout: HttpError(408, INVALID),
    RateLimited: HttpError(429, "rate_limit_error"),
    UnknownResponse: HttpError(404, INVALID),
    IdempotencyConflict: HttpError(409, INVALID, should_retry=False),
    RequestTooLarge: HttpError(413, INVALID),
    errors.InvalidRequest: HttpError(400, INVALID),
    errors.Cancelled: HttpError(499, INVALID, should_retry=False),
    errors.QueueFull: HttpError(503, SERVER),
    errors.NotReady: HttpError(503, SERVER),
    errors.QueueTimeout: HttpError(503, SERVER),
    errors.DeadlineExceeded: HttpError(504, SERVER, should_retry=False),
    errors.Glm53Error: HttpError(500, SERVER),
}

# Statuses of which HTTP clients know that waiting helps.
_DEFAULT_RETRY_AFTER_S = {503: 1.0}
_RETRIED = frozenset({429, 503})


def http_of(error: errors.Glm53Error) -> HttpError:
    """The row of an error: the first entry in its class order."""
    for cls in type(error).__mro__:
        if cls in HTTP_BY_ERROR:
            return HTTP_BY_ERROR[cls]
    return HTTP_BY_ERROR[errors.Glm53Error]


def body_of(error: errors.Glm53Error) -> dict[str, Any]:
    """The error as OpenAI's clients expect it."""
    return {"error": {"message": error.message, "type": http_of(error).type, "param": error.param, "code": error.code}}


def response_of(error: errors.Glm53Error) -> JsonResponse:
    """The error as a whole response."""
    return JsonResponse(body_of(error), http_of(error).status, headers=headers_of(error))


def headers_of(error: errors.Glm53Error) -> dict[str, str]:
    """`Retry-After` and its relatives, where trying again makes sense."""
    row = http_of(error)
    headers = {}
    wait_s = error.retry_after_s if error.retry_after_s is not None else _DEFAULT_RETRY_AFTER_S.get(row.status)
    if row.status in _RETRIED and wait_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(wait_s * 1000)))
    if isinstance(error, RateLimited):
        headers |= error.standing
    should_retry = False if row.status == 429 and wait_s is None else row.should_retry
    if should_retry is not None:
        headers["x-should-retry"] = str(should_retry).lower()
    return headers
