"""The ASGI application: routes, what runs beside them, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.common.errors import Glm53Error, InvalidRequest
from services.gateway import errors, routes
from services.gateway.drain import Traffic
from services.gateway.metrics import GatewayMetrics
from services.gateway.middleware import RequestScope
from services.gateway.services import Services
from services.gateway.settings import GatewaySettings
from services.gateway.worker_client import WorkerClient
from services.gateway.worker_watch import WorkerWatch, stop

log = logging.getLogger(__name__)


def create_app(settings: GatewaySettings, worker: WorkerClient) -> FastAPI:
    """The gateway.

    Args:
        settings: the gateway's settings.
        worker: the worker; closed with the app.
    """
    services = Services(settings, worker, WorkerWatch(worker), Traffic(), GatewayMetrics())

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(services.watch.run())
        try:
            yield
        finally:
            await stop(watching)
            await worker.close()

    app = FastAPI(title="glm53-offload", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    app.include_router(routes.router)
    app.add_middleware(RequestScope, traffic=services.traffic, metrics=services.metrics)
    app.add_exception_handler(Glm53Error, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    return app


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Glm53Error)
    if errors.http_of(error).status >= 500:
        log.warning("%s: %s", type(error).__name__, error.message)
    return errors.response_of(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown URLs and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = errors.response_of(errors.MethodNotAllowed(f"{request.method} is not allowed for {request.url.path}."))
        response.headers.update(error.headers or {})
        return response
    if error.status_code == 404:
        return errors.response_of(errors.UnknownRoute(f"There is no {request.method} {request.url.path}."))
    return errors.response_of(InvalidRequest(str(error.detail)))


async def _on_invalid(_request: Request, error: Exception) -> Response:
    return errors.response_of(InvalidRequest(f"The request is not valid: {type(error).__name__}"))
