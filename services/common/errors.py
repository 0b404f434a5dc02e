"""The exception tree of all services.

Glm53Error
├── ConfigError            a setting or a flag is wrong            exit 78
├── CheckpointError        a tensor or file is missing or wrong    exit 3
├── PeerError              the other side of shared memory is gone exit 4
├── InvalidRequest         the client's fault, names the field     400
│   ├── ContextLengthExceeded
│   ├── UnsupportedParameter
│   └── UnknownModel                                               404
├── QueueFull              bounded queue is full                   503 + Retry-After
├── NotReady               loading, draining, worker gone          503 + Retry-After
├── QueueTimeout           waited too long in the queue            503 + Retry-After
├── DeadlineExceeded       ran too long, or nobody read            504
├── Cancelled              the client or an operator cancelled     499
└── EngineFailed           our fault                               500

The gRPC side of this table is services/common/grpc_status.py, the HTTP side is services/gateway/errors.py: nowhere else.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from services.common import setting_names

_A_SETTING = re.compile(rf"\bGLM53_[A-Z]|\b({'|'.join(sorted(setting_names.UNPREFIXED))})\b")


class Glm53Error(Exception):
    """Base of every error we raise on purpose.

    Args:
        message: what is wrong and what to do about it.
        param: the request field or setting at fault, e.g. ``messages[2].content``.
        retry_after_s: when trying again makes sense, in seconds.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_json(self) -> str:
        """One JSON object that survives the way through gRPC metadata."""
        return json.dumps({"code": self.code, "message": self.message, "param": self.param, "retry_after_s": self.retry_after_s})


class ConfigError(Glm53Error):
    """A setting or a flag is wrong. A message that names no setting gets the one at fault (`param`) in front."""

    code = "config_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        if param in setting_names.ALL and not _A_SETTING.search(message):
            message = f"{param}: {message}"
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class CheckpointError(Glm53Error):
    """A checkpoint file or tensor is missing, truncated or of the wrong shape."""

    code = "checkpoint_error"


class PeerError(Glm53Error):
    """The other side of shared memory is gone or does not fit."""

    code = "peer_error"


class InvalidRequest(Glm53Error):
    """The client sent something that cannot be served; `param` names the field."""

    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """The prompt (plus the asked completion) does not fit the context."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A parameter that changes the meaning of the answer and that we cannot honour."""

    code = "unsupported_parameter"


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""

    code = "model_not_found"


class QueueFull(Glm53Error):
    """The bounded queue is full."""

    code = "queue_full"


class NotReady(Glm53Error):
    """The worker is loading, draining or gone."""

    code = "service_unavailable"


class QueueTimeout(Glm53Error):
    """The request's turn did not come in time: it never ran, so trying again is safe."""

    code = "queue_timeout"


class DeadlineExceeded(Glm53Error):
    """A request ran longer than allowed, or its reader stopped reading."""

    code = "timeout"


class Cancelled(Glm53Error):
    """The client or an operator cancelled the request."""

    code = "cancelled"


class EngineFailed(Glm53Error):
    """The engine failed while it worked on the request."""

    code = "internal_error"


ERROR_TYPES: dict[str, type[Glm53Error]] = {
    cls.code: cls
    for cls in (
        ConfigError,
        CheckpointError,
        PeerError,
        InvalidRequest,
        ContextLengthExceeded,
        UnsupportedParameter,
        UnknownModel,
        QueueFull,
        NotReady,
        QueueTimeout,
        DeadlineExceeded,
        Cancelled,
        EngineFailed,
    )
}


def from_json(text: str) -> Glm53Error:
    """The error that `Glm53Error.to_json` wrote; an unknown code becomes `EngineFailed`."""
    data: dict[str, Any] = json.loads(text)
    cls = ERROR_TYPES.get(data.get("code", ""), EngineFailed)
    return cls(data.get("message", ""), param=data.get("param"), retry_after_s=data.get("retry_after_s"))
