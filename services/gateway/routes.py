"""The URLs of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.common.errors import Glm53Error
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway import chat, completions
from services.gateway.accept import Ready, check_model, read_body, ready_for, services_of
from services.gateway.access.keys import ApiKey
from services.gateway.beside import by_size, prepared
from services.gateway.idempotency import once
from services.gateway.metrics import CONTENT_TYPE
from services.gateway.plain_route import PlainRoute
from services.gateway.refusals import refuse_unsupported
from services.gateway.run import respond
from services.gateway.schemas import ChatRequest, CompletionRequest, RequestT, parse
from services.gateway.services import Services

router = APIRouter()
# Prometheus waits four seconds for a scrape (deploy/prometheus).
_SCRAPE_S = 2.0


async def chat_completions(request: Request) -> Response:
    """An answer to a conversation."""
    raw = await read_body(request)

    async def answer() -> Response:
        body, ready = await _accepted(request, ChatRequest, raw)
        services = services_of(request)
        job = await prepared(chat.prepare, body, ready.info, ready.language, services.settings, request.state.request_id)
        return await respond(request, services, job, stream=bool(body.stream))

    return await once(request, raw, answer)


async def text_completions(request: Request) -> Response:
    """A continuation of a text."""
    raw = await read_body(request)

    async def answer() -> Response:
        body, ready = await _accepted(request, CompletionRequest, raw)
        job = await prepared(completions.prepare, body, ready.info, ready.language, request.state.request_id)
        return await respond(request, services_of(request), job, stream=bool(body.stream))

    return await once(request, raw, answer)


# What most requests ask for.
plain_routes = [
    PlainRoute("/v1/chat/completions", chat_completions, methods=["POST"]),
    PlainRoute("/v1/completions", text_completions, methods=["POST"]),
]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The model that is served."""
    info = await services_of(request).watch.named()
    key: ApiKey = request.state.key
    return JSONResponse({"object": "list", "data": [_model_json(info)] if key.may_use(info.model_name) else []})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """One model."""
    info = await services_of(request).watch.named()
    check_model(name, info)
    return JSONResponse(_model_json(info))


@router.get("/health")
@router.get("/health/ready")
async def health(request: Request) -> Response:
    """200 when a request would be taken; until then 503 with the progress of loading."""
    services = services_of(request)
    report = await services.watch.fresh_report()
    if services.traffic.draining:
        status = "draining"
    elif services.watch.is_ready:
        status = "ok"
    else:
        status = services.watch.state
    headers = {} if status == "ok" else {"Retry-After": "1"}
    if services.link is not None and not services.link.is_up:
        # Requests are answered all the same: each gateway goes on by itself.
        report["degraded"] = ["redis"]
    return JSONResponse({"status": status, **report}, status_code=200 if status == "ok" else 503, headers=headers)


@router.get("/health/live")
async def live() -> Response:
    """200 while the process runs."""
    return JSONResponse({"status": "ok"})


@router.get("/stats")
async def stats(request: Request) -> Response:
    """The engine's counters and the gateway's own."""
    services = services_of(request)
    engine = json.loads((await services.client.stats()).json or "{}")
    _set_gauges(services)
    return JSONResponse({**engine, "gateway": services.metrics.snapshot()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text: the gateway's counters, then the worker's."""
    services = services_of(request)
    _set_gauges(services)
    engine = b""
    # The scrape must not fail with the worker, nor wait for one that hangs: glm53_gateway_worker_up tells.
    with contextlib.suppress(Glm53Error, TimeoutError):
        if services.settings.worker_metrics:
            async with asyncio.timeout(_SCRAPE_S):
                engine = (await services.client.stats()).prometheus_text
    return Response(services.metrics.text() + engine, media_type=CONTENT_TYPE)


def _set_gauges(services: Services) -> None:
    """What is true now, as opposed to what has been counted."""
    services.metrics.worker_up.set(services.watch.is_ready)
    services.metrics.in_flight.set(services.traffic.in_flight)
    services.metrics.shared_up.set(services.link is None or services.link.is_up)


async def _accepted(request: Request, schema: type[RequestT], raw: dict[str, Any]) -> tuple[RequestT, Ready]:
    """Checks a request as far as that needs no prompt."""
    body = await by_size(parse, schema, raw)
    refuse_unsupported(body)
    return body, await ready_for(request, body.model)


def _model_json(info: pb.InfoResponse) -> dict[str, Any]:
    return {
        "id": info.model_name,
        "object": "model",
        "created": info.created_unix_s,
        "owned_by": "glm53-offload",
        "root": info.model_name,
        "parent": None,
        "max_model_len": info.max_context,
    }
