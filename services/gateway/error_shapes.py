"""Which shape an error has: that of the API that the client speaks, wherever in the gateway it was refused."""

from __future__ import annotations

from typing import Any

from services.common.errors import Glm53Error
from services.gateway import errors
from services.gateway.json_response import JsonResponse

# Anthropic's clients take the kind of an error from this shape; in OpenAI's they find none.
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def response_for(path: str, error: Glm53Error) -> JsonResponse:
    """The error as a whole response to a request of `path`."""
    if not (path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")):
        return errors.response_of(error)
    return JsonResponse(anthropic_body(error), errors.http_of(error).status, headers=errors.headers_of(error))


def anthropic_body(error: Glm53Error) -> dict[str, Any]:
    """The error as Anthropic's clients expect it."""
    status = errors.http_of(error).status
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, "param": error.param, "code": error.code}}
