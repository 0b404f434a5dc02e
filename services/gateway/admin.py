"""URLs about requests rather than of them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.gateway.access.keys import ApiKey
from services.gateway.errors import UnknownRequest
from services.gateway.services import Services

router = APIRouter()


@router.post("/v1/requests/{answer_id}/cancel")
async def cancel(request: Request, answer_id: str) -> Response:
    """Cancels a running request by the id of its answer (or its own): the key's own, anybody's with an admin key."""
    services: Services = request.app.state.services
    key: ApiKey = request.state.key
    if not await services.canceller.cancel(answer_id, key):
        raise UnknownRequest(f"No request {answer_id[:200]!r} of this key is running.", param="id")
    return JSONResponse({"id": answer_id, "object": "request.cancelled", "cancelled": True})
