"""Where spans of OpenTelemetry go, with the optional extra `otel`."""

from __future__ import annotations

import asyncio
import urllib.parse
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from services.common.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_EXPORT_TIMEOUT_S = 5
_MAX_QUEUED_SPANS = 2048


def _checked(endpoint: str) -> str:
    if endpoint:
        url = urllib.parse.urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("need a URL, e.g. http://collector:4318/v1/traces")
    return endpoint


OptionalEndpoint = Annotated[str, AfterValidator(_checked)]


def provider_for(endpoint: str, service: str) -> TracerProvider:
    """Sends spans to an OTLP/HTTP endpoint in the background; what it cannot take is dropped.

    Args:
        endpoint: http://collector:4318/v1/traces.
        service: the name that the spans' sender has.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "GLM53_OTLP_ENDPOINT needs packages that are not installed: run `make setup-otel` in this installation's folder, or unset it",
            param="GLM53_OTLP_ENDPOINT",
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS))
    return provider


async def shut_down(provider: TracerProvider) -> None:
    """Sends what is left; takes at most as long as one export may."""
    await asyncio.to_thread(provider.shutdown)
