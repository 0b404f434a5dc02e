"""The ASGI application: routes, what runs beside them, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from services.common import otel
from services.common.errors import ConfigError, Glm53Error, InvalidRequest
from services.gateway import admin, anthropic, errors, native, openapi, responses, routes, tracing
from services.gateway.access.admission import AccessPolicy
from services.gateway.access.cancels import Canceller
from services.gateway.access.control import AccessControl, KeyFinder
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import ApiKey
from services.gateway.access.ledger import UsageLedger
from services.gateway.access.limits import Counters, LocalCounters
from services.gateway.access.metered import MeteredClient
from services.gateway.drain import Traffic
from services.gateway.error_shapes import response_for
from services.gateway.http_head import EVERYTHING
from services.gateway.methods import ANY, allowed, nearest
from services.gateway.metrics import GatewayMetrics
from services.gateway.middleware import RequestScope
from services.gateway.origins import allowed_origins
from services.gateway.plain_route import ShortWay
from services.gateway.services import Services
from services.gateway.settings import GatewaySettings
from services.gateway.shared.bus import Bus
from services.gateway.shared.counters import FallbackCounters, RedisCounters
from services.gateway.shared.key_share import KeyShare
from services.gateway.shared.link import RedisLink
from services.gateway.stores import Stores
from services.gateway.worker_client import WorkerClient
from services.gateway.worker_watch import WorkerWatch, stop

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

# tracing.py has what this server tells about its requests.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
_LIMIT_HEADERS = [f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")]


def create_app(
    settings: GatewaySettings, worker: WorkerClient, link: RedisLink | None = None, traces: TracerProvider | None = None
) -> FastAPI:
    """The gateway.

    Args:
        settings: the gateway's settings.
        worker: the worker; closed with the app.
        link: the way to Redis; made from the settings when None. Closed with the app.
        traces: takes spans; made from the settings when None. Shut down with the app.

    Raises:
        ConfigError: the key file, the file for usage, the Redis URL or the endpoint for traces cannot be used.
    """
    services = _services(settings, worker, link or _link(settings))
    traces = traces or (tracing.provider_for(settings.otlp_endpoint) if settings.otlp_endpoint else None)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        running = [asyncio.create_task(work) for work in _background(services)]
        try:
            yield
        finally:
            for task in running:
                await stop(task)
            await services.access.settled()
            if services.ledger is not None:
                await services.ledger.flush()
            await worker.close()
            if services.link is not None:
                await services.link.close()
            if traces is not None:
                await otel.shut_down(traces)

    app = FastAPI(
        title="glm53-offload",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
    )
    app.state.services = services
    app.state.stores = Stores.of(services.link)
    app.router.routes.extend(routes.plain_routes)
    paths = [route.path for route in routes.plain_routes]
    for module in (routes, native, responses, anthropic, openapi, admin):
        app.include_router(module.router)
        paths += [route.path for route in module.router.routes if isinstance(route, Route)]
    services.metrics.serves(paths)
    app.state.paths = tuple(path for path in paths if "{" not in path)
    # The last one added is the first one asked.
    app.add_middleware(ShortWay, routes=routes.plain_routes, on_error=_on_error)
    app.add_middleware(
        AccessControl,
        keys=_finder(services),
        policy=services.access,
        metrics=services.metrics,
        ledger=services.ledger,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "retry-after-ms", *_LIMIT_HEADERS],
            max_age=600,
        )
    if traces is not None:
        app.add_middleware(tracing.TraceRequests, provider=traces)
    app.add_middleware(RequestScope, traffic=services.traffic, metrics=services.metrics)
    app.add_exception_handler(Glm53Error, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    return app


def _link(settings: GatewaySettings) -> RedisLink | None:
    url = settings.redis_url.get_secret_value()
    if not url:
        return None
    try:
        return RedisLink.connect(url, settings.redis_timeout_ms / 1000)
    except ValueError as error:
        raise ConfigError(f"GLM53_REDIS_URL: {error}", param="GLM53_REDIS_URL") from None


def _services(settings: GatewaySettings, worker: WorkerClient, link: RedisLink | None) -> Services:
    keys_file = Path(settings.api_keys_file) if settings.api_keys_file else None
    metrics = GatewayMetrics()
    # Before the keys: where both are one file, that is told, and not what its keys look like.
    ledger = UsageLedger(Path(settings.usage_file), metrics.usage_lost, keys_file) if settings.usage_file else None
    keys = KeyRing(keys_file) if keys_file is not None else None
    client = MeteredClient(worker)
    counters: Counters = LocalCounters()
    bus = share = None
    if link is not None:
        counters = FallbackCounters(RedisCounters(link), LocalCounters(1 / settings.replicas))
        bus = Bus(link)
        share = KeyShare(keys, link, bus) if keys is not None else None
    return Services(
        settings,
        client,
        WorkerWatch(client),
        Traffic(),
        metrics,
        access=AccessPolicy(counters, link),
        keys=keys,
        link=link,
        bus=bus,
        key_share=share,
        canceller=Canceller(client.live, client, bus),
        ledger=ledger,
    )


def _finder(services: Services) -> KeyFinder | None:
    """What finds a key's entry: our file, then what other gateways have."""
    ring, share = services.keys, services.key_share
    if ring is None:
        return None

    async def find(key: str) -> ApiKey | None:
        found = ring.find(key)
        return found if found is not None or share is None else await share.find(key)

    return find


def _background(services: Services) -> list[Coroutine[Any, Any, None]]:
    """What runs as long as the app."""
    work = [services.watch.run()]
    if services.keys is not None:
        work.append(services.keys.run())
    if services.ledger is not None:
        work.append(services.ledger.run())
    if services.link is not None:
        work.append(services.link.watch())
    if services.bus is not None:
        work.append(services.bus.run())
    if services.key_share is not None:
        work.append(services.key_share.run())
    if isinstance(services.access.counters, FallbackCounters):
        work.append(services.access.counters.run())
    return work


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, Glm53Error)
    if isinstance(error, errors.RateLimited | errors.PermissionDenied):
        request.app.state.services.metrics.refusals.labels(error.code).inc()
    if errors.http_of(error).status >= 500:
        log.warning("%s: %s", type(error).__name__, error.message)
    return response_for(request.scope["path"], error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown URLs and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code in (404, 405):
        methods = sorted(ANY) if path == EVERYTHING else allowed(request.app, request.scope)
        if request.method == "OPTIONS" and methods:
            return Response(status_code=204, headers={"Allow": ", ".join(methods)})
        if error.status_code == 405:
            response = response_for(path, errors.MethodNotAllowed(f"{request.method} is not allowed for {path}."))
            response.headers["Allow"] = ", ".join(methods)
            return response
        return response_for(path, errors.UnknownRoute(f"There is no {request.method} {path[:200]}{nearest(request.app.state.paths, path)}"))
    return response_for(path, InvalidRequest(str(error.detail)))


async def _on_invalid(request: Request, error: Exception) -> Response:
    return response_for(request.url.path, InvalidRequest(f"The request is not valid: {type(error).__name__}"))
