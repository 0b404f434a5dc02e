"""Settings of the gateway."""

from __future__ import annotations

import ipaddress
from typing import ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from services.common.accepted import shown
from services.common.command import COMMAND
from services.common.otel import OptionalEndpoint
from services.common.settings import ServiceSettings
from services.gateway.origins import allowed_origins

Effort = Literal["low", "high", "max"]
ThinkingOffPolicy = Literal["empty_think", "low", "reject"]


class GatewaySettings(ServiceSettings):
    """What the HTTP side of the product can be told."""

    service: ClassVar[str] = "gateway"

    host: str = Field("127.0.0.1", validation_alias="HOST", description="Address the HTTP server listens on.")
    port: int = Field(
        30000,
        validation_alias="PORT",
        ge=0,
        le=65535,
        description="Port the HTTP server listens on; 0 picks a free one where the gateway runs alone, `glm53 serve` refuses it.",
    )
    worker_address: str = Field(
        "127.0.0.1:30051",
        validation_alias="GLM53_WORKER_ADDRESS",
        min_length=1,
        description="gRPC address of the worker: host:port or unix:/path. Several workers: a comma list, or dns:///name:port.",
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
    header_timeout_s: float = Field(
        20.0,
        validation_alias="GLM53_HEADER_TIMEOUT_S",
        gt=0,
        le=3600,
        description="A connection whose request's headers are not complete after so many seconds gets 408 and is closed.",
    )
    body_timeout_s: float = Field(
        60.0,
        validation_alias="GLM53_BODY_TIMEOUT_S",
        gt=0,
        le=86_400,
        description="A request whose body is not complete after so many seconds gets 408.",
    )
    slow_client_s: float = Field(
        30.0,
        validation_alias="GLM53_SLOW_CLIENT_S",
        gt=0,
        le=3600,
        description="A client that takes nothing of its answer for so many seconds is cut off, and its job ends.",
    )
    max_connections: int = Field(
        4096,
        validation_alias="GLM53_MAX_CONNECTIONS",
        ge=16,
        le=1_000_000,
        description="Most open connections; then idle ones are closed, and where all are busy new ones get 503.",
    )
    max_messages: int = Field(
        8192, validation_alias="GLM53_MAX_MESSAGES", ge=1, le=1_000_000, description="Most messages in one chat request."
    )
    max_tools: int = Field(
        1024,
        validation_alias="GLM53_MAX_TOOLS",
        ge=1,
        le=100_000,
        description="Most tools that one request may declare, and most calls that one of its messages may have.",
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
        description="Reasoning effort of requests that ask for none.",
    )
    thinking_off_policy: ThinkingOffPolicy = Field(
        "empty_think",
        validation_alias="GLM53_THINKING_OFF_POLICY",
        description="What turning thinking off does: empty_think (the prompt ends <think></think>), low (least effort) or reject.",
    )
    reasoning_fields: Literal["reasoning_content", "reasoning", "both"] = Field(
        "reasoning_content",
        validation_alias="GLM53_REASONING_FIELDS",
        description="Under which name chat answers show reasoning: reasoning_content, reasoning (newer vLLM, OpenRouter) or both.",
    )
    response_ttl_s: float = Field(
        86_400.0,
        validation_alias="GLM53_RESPONSE_TTL_S",
        gt=0,
        le=365 * 86_400,
        description="How long /v1/responses keeps a response, in seconds; the oldest leave earlier when memory is short.",
    )
    api_keys_file: str = Field(
        "",
        validation_alias="GLM53_API_KEYS_FILE",
        description="File of hashed API keys with their limits (see `glm53 keys`); re-read when it changes. Empty: no keys are asked for.",
    )
    allow_public_without_keys: bool = Field(
        False,
        validation_alias="GLM53_ALLOW_PUBLIC_WITHOUT_KEYS",
        description="1 lets the gateway listen on an address that other machines reach although it asks for no keys.",
    )
    max_header_bytes: int = Field(
        1280 * 1024,
        validation_alias="GLM53_MAX_HEADER_BYTES",
        ge=4096,
        le=16 * 1024 * 1024,
        description="Most bytes of a request's headers; larger ones are refused with 431.",
    )
    cors_origins: str = Field(
        "",
        validation_alias="GLM53_CORS_ORIGINS",
        description="Web pages that may call the API: a comma list such as https://chat.example.com, or *. Empty: none.",
    )
    redis_url: SecretStr = Field(
        SecretStr(""),
        validation_alias="GLM53_REDIS_URL",
        description="redis://… of what several gateways share: limits, cancels, idempotency, stored responses. Empty: each for itself.",
    )
    redis_timeout_ms: int = Field(
        50, validation_alias="GLM53_REDIS_TIMEOUT_MS", ge=1, le=10_000, description="A Redis call that takes longer counts as failed."
    )
    otlp_endpoint: OptionalEndpoint = Field(
        "",
        validation_alias="GLM53_OTLP_ENDPOINT",
        description="Where OpenTelemetry spans go (OTLP over HTTP), e.g. http://collector:4318/v1/traces; needs `make setup-otel`.",
    )
    usage_file: str = Field(
        "",
        validation_alias="GLM53_USAGE_FILE",
        description="File that gets a JSON line for every request: key id, time and tokens, never text. Empty: none is written.",
    )
    worker_metrics: bool = Field(
        True,
        validation_alias="GLM53_WORKER_METRICS",
        description="Whether /metrics passes on the worker's counters; 0 for all but one of several gateways, or they count twice.",
    )
    replicas: int = Field(
        1,
        validation_alias="GLM53_REPLICAS",
        ge=1,
        le=1000,
        description="How many gateways share the keys' limits; without Redis each allows its part.",
    )

    @field_validator("cors_origins")
    @classmethod
    def _sent_by_browsers(cls, value: str) -> str:
        allowed_origins(value)
        return value

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if not self.api_keys_file and not self.allow_public_without_keys and not _is_loopback(self.host):
            raise ValueError(
                f"HOST is {shown(self.host)}, which other machines may reach, but no API keys are asked for: name a key file in "
                f"GLM53_API_KEYS_FILE (`{COMMAND} keys create --file FILE --id NAME` makes one), or set "
                "GLM53_ALLOW_PUBLIC_WITHOUT_KEYS=1 behind something that does"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
