"""Settings of the gateway."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from services.common.settings import ServiceSettings

Effort = Literal["low", "high", "max"]
ThinkingOffPolicy = Literal["empty_think", "low", "reject"]


class GatewaySettings(ServiceSettings):
    """What the HTTP side of the product can be told."""

    service: ClassVar[str] = "gateway"

    host: str = Field("127.0.0.1", validation_alias="HOST", description="Address the HTTP server listens on.")
    port: int = Field(30000, validation_alias="PORT", ge=0, le=65535, description="Port the HTTP server listens on; 0 picks a free one.")
    worker_address: str = Field(
        "127.0.0.1:30051",
        validation_alias="GLM53_WORKER_ADDRESS",
        min_length=1,
        description="gRPC address of the worker: host:port or unix:/path.",
    )
    connect_timeout_s: float = Field(
        5.0,
        validation_alias="GLM53_CONNECT_TIMEOUT_S",
        gt=0,
        le=600,
        description="How long a question to the worker that is not a generation may take, in seconds.",
    )
    request_timeout_s: float = Field(
        3600.0,
        validation_alias="GLM53_REQUEST_TIMEOUT_S",
        gt=0,
        le=604_800,
        description="How long one generation may take from arrival to its last token, in seconds.",
    )
    drain_timeout_s: float = Field(
        30.0,
        validation_alias="GLM53_DRAIN_TIMEOUT_S",
        ge=0,
        le=86_400,
        description="How long running requests may go on after SIGTERM, in seconds.",
    )
    max_body_bytes: int = Field(
        16 * 1024 * 1024,
        validation_alias="GLM53_MAX_BODY_BYTES",
        ge=1024,
        le=1024**3,
        description="Largest request body in bytes; larger ones are refused with 413.",
    )
    max_messages: int = Field(
        8192, validation_alias="GLM53_MAX_MESSAGES", ge=1, le=1_000_000, description="Most messages in one chat request."
    )
    keepalive_s: float = Field(
        10.0,
        validation_alias="GLM53_KEEPALIVE_S",
        gt=0,
        le=600,
        description="A stream that is silent for so many seconds gets an SSE comment, so that proxies keep it open.",
    )
    default_reasoning_effort: Effort = Field(
        "max",
        validation_alias="GLM53_DEFAULT_REASONING_EFFORT",
        description="Reasoning effort of requests that ask for none: low, high or max.",
    )
    thinking_off_policy: ThinkingOffPolicy = Field(
        "empty_think",
        validation_alias="GLM53_THINKING_OFF_POLICY",
        description="What turning thinking off does: empty_think (the prompt ends <think></think>), low (least effort) or reject.",
    )
