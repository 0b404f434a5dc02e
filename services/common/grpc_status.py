"""The single table between our errors and gRPC statuses, in both directions."""

from __future__ import annotations

from typing import Any

import grpc

from services.common import errors

# The whole error travels as JSON under this trailing-metadata key; the status code is what other clients see.
ERROR_METADATA_KEY = "glm53-error-bin"

STATUS_BY_ERROR: dict[type[errors.Glm53Error], grpc.StatusCode] = {
    errors.ContextLengthExceeded: grpc.StatusCode.OUT_OF_RANGE,
    errors.UnsupportedParameter: grpc.StatusCode.UNIMPLEMENTED,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.QueueTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Glm53Error: grpc.StatusCode.INTERNAL,
}


def status_of(error: errors.Glm53Error) -> grpc.StatusCode:
    """The gRPC status of an error: the first entry in its class order."""
    for cls in type(error).__mro__:
        if cls in STATUS_BY_ERROR:
            return STATUS_BY_ERROR[cls]
    return grpc.StatusCode.INTERNAL


def has_error(rpc_error: Any) -> bool:
    """True when the worker itself raised it: then the whole error is in the metadata."""
    metadata = rpc_error.trailing_metadata() if hasattr(rpc_error, "trailing_metadata") else None
    return any(key == ERROR_METADATA_KEY for key, _ in metadata or ())


def error_of(rpc_error: Any) -> errors.Glm53Error:
    """The error that a worker raised, or the best match when the worker could not tell (it died, it was unreachable).

    What gRPC says of a worker that is not reachable has its address, which is no client's: it is a note of the error, for logs.

    Args:
        rpc_error: a `grpc.RpcError` of the synchronous or of the asyncio API.
    """
    metadata = rpc_error.trailing_metadata() if hasattr(rpc_error, "trailing_metadata") else None
    for key, value in metadata or ():
        if key == ERROR_METADATA_KEY:
            return errors.from_json(value.decode() if isinstance(value, bytes) else value)
    code = rpc_error.code() if hasattr(rpc_error, "code") else grpc.StatusCode.UNKNOWN
    details = rpc_error.details() if hasattr(rpc_error, "details") else str(rpc_error)
    if code == grpc.StatusCode.UNAVAILABLE:
        error = errors.NotReady("the worker is not reachable", retry_after_s=5.0)
        error.add_note(str(details))
        return error
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"the worker did not answer in time: {details}")
    if code == grpc.StatusCode.CANCELLED:
        return errors.Cancelled("the request was cancelled")
    return errors.EngineFailed(f"the worker failed: {details}")
