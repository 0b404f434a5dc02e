"""What every endpoint does before its own work: is the server open, is the model there, may the key use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request

from services.common.errors import InvalidRequest, UnknownModel
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.access.keys import ApiKey
from services.gateway.beside import receive_var
from services.gateway.body import read_json_object
from services.gateway.errors import ModelNotAllowed
from services.gateway.services import Services
from services.gateway.worker_client import Language


@dataclass(frozen=True)
class Ready:
    """The served model, and what speaks its language."""

    info: pb.InfoResponse
    language: Language


def services_of(request: Request) -> Services:
    """The objects that the app was made with."""
    return request.app.state.services  # type: ignore[no-any-return]


async def read_body(request: Request) -> dict[str, Any]:
    """The body of a request that this server would take now.

    Raises:
        ShuttingDown: it takes none.
        InvalidRequest: it is too large, too slow, no JSON object, or declares too many tools.
    """
    services = services_of(request)
    services.traffic.check_open()
    receive_var.set(request.receive)
    settings = services.settings
    body = await read_json_object(request, settings.max_body_bytes, settings.body_timeout_s)
    tools = body.get("tools")
    if isinstance(tools, list) and len(tools) > settings.max_tools:
        # Before each of them is looked at.
        raise InvalidRequest(f"tools has {len(tools)} tools; this server takes {settings.max_tools} (GLM53_MAX_TOOLS).", param="tools")
    return body


async def ready_for(request: Request, model: str | None) -> Ready:
    """The worker, ready, serving the model that was asked for.

    Args:
        request: whose key must be allowed to use it.
        model: as the client names it; None for APIs that name none.

    Raises:
        NotReady: it is loading, draining or gone.
        UnknownModel: it serves another one.
        ModelNotAllowed: not to this key.
    """
    info, language = await services_of(request).watch.ready()
    if model is not None:
        check_model(model, info)
    check_key(request, info)
    return Ready(info, language)


def check_model(name: str, info: pb.InfoResponse) -> None:
    """Raises `UnknownModel` for a model that is not served."""
    if name != info.model_name:
        raise UnknownModel(f"The model {name[:200]!r} does not exist; this server serves {info.model_name!r}.", param="model")


def check_key(request: Request, info: pb.InfoResponse) -> None:
    """Refuses a key that may not use the served model, before its prompt is read.

    Raises:
        ModelNotAllowed: names both.
    """
    key: ApiKey = request.state.key
    if not key.may_use(info.model_name):
        raise ModelNotAllowed(f"The key {key.id!r} may not use the model {info.model_name!r}.", param="model")
