"""GET /openapi.json: what the gateway takes and answers, made from the same classes that check the bodies."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

from services.gateway.accept import services_of
from services.gateway.anthropic_schema import CountBody, MessagesBody
from services.gateway.formats import Body
from services.gateway.native_schemas import DetokenizeBody, GenerateBody, TokenizeBody
from services.gateway.responses_schema import ResponsesBody
from services.gateway.schemas import ChatRequest, CompletionRequest

router = APIRouter()

_REFS = "#/components/schemas/{model}"
_OBJECT = {"type": "object"}
# Every error of a request that reached the gateway, with what it means.
_ERRORS = {
    400: "The request is not valid; `param` names the field.",
    401: "No API key, or an unknown one.",
    403: "The key may not do this.",
    404: "No such model, response or request.",
    409: "The idempotency key belongs to another request.",
    413: "The body is too large.",
    429: "The key's limit is used up; see Retry-After.",
    431: "The headers are too large.",
    499: "The request was cancelled.",
    500: "The server failed.",
    503: "Loading, draining, overloaded or without a worker; see Retry-After.",
    504: "The request waited or ran too long.",
}


@dataclass(frozen=True)
class _Operation:
    """One method of one URL.

    Attributes:
        summary: one sentence.
        answer: schema of a 200.
        body: class of the request's body.
        streams: may answer with an event stream.
        media: content type of a 200.
        also: other statuses with the same body as a 200.
        query: schemas of what may stand behind the URL's question mark.
    """

    path: str
    method: str
    summary: str
    answer: dict[str, Any]
    body: type[Body] | None = None
    streams: bool = False
    media: str = "application/json"
    also: tuple[int, ...] = ()
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def _answer(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_LIST = {"type": "array"}
_IDS = {"type": "array", "items": {"anyOf": [_COUNT, {"type": "array", "items": _COUNT}]}}
_USAGE = _answer(
    ("prompt_tokens", "completion_tokens", "total_tokens"), prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT
)


def _choices(kind: str) -> dict[str, Any]:
    names = ("id", "object", "created", "model", "choices", "usage")
    return _answer(names, id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices={**_LIST, "minItems": 1}, usage=_USAGE)


_MODEL = _answer(("id", "object", "created", "owned_by"), id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT)
_RESPONSE = _answer(("id", "object", "status", "output"), id=_TEXT, object={"const": "response"}, status=_TEXT, output=_LIST)
_MESSAGE = _answer(
    ("id", "type", "role", "content", "usage"), id=_TEXT, type={"const": "message"}, role=_TEXT, content=_LIST, usage=_OBJECT
)
_GENERATED = _answer(("text", "output_ids", "meta_info"), text=_TEXT, output_ids=_LIST, meta_info=_OBJECT)
_STATUS = _answer(("status",), status=_TEXT)
# One event of a stream, taken apart.
_EVENT = _answer(("data",), event=_TEXT, data=_TEXT)
_LISTED = _answer(("object", "data"), object={"const": "list"}, data=_LIST)
_TOKENS = _answer(("tokens", "count", "max_model_len"), tokens=_IDS, max_model_len=_COUNT)
_DETOKENIZED = _answer(("text",), text={"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]})
_CANCELLED = _answer(("id", "cancelled"), id=_TEXT, cancelled={"type": "boolean"})
_DELETED = _answer(("id", "deleted"), id=_TEXT, deleted={"const": True})
_PAGE: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": _TEXT,
}
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"

OPERATIONS: tuple[_Operation, ...] = (
    _Operation("/v1/chat/completions", "post", "An answer to a conversation.", _choices("chat.completion"), ChatRequest, streams=True),
    _Operation("/v1/completions", "post", "A continuation of a text.", _choices("text_completion"), CompletionRequest, streams=True),
    _Operation("/v1/responses", "post", "An answer that can be kept and gone on from.", _RESPONSE, ResponsesBody, streams=True),
    _Operation("/v1/responses/{response_id}", "get", "A kept response.", _RESPONSE),
    _Operation("/v1/responses/{response_id}", "delete", "Forgets a kept response.", _DELETED),
    _Operation("/v1/responses/{response_id}/input_items", "get", "What a kept response was given.", _LISTED, query=_PAGE),
    _Operation("/v1/responses/{response_id}/cancel", "post", "Ends a running response.", _RESPONSE),
    _Operation("/v1/requests/{answer_id}/cancel", "post", "Ends a running request.", _CANCELLED),
    _Operation("/v1/messages", "post", "An answer in Anthropic's shape.", _MESSAGE, MessagesBody, streams=True),
    _Operation("/v1/messages/count_tokens", "post", "Length of a prompt.", _answer(("input_tokens",), input_tokens=_COUNT), CountBody),
    _Operation("/v1/models", "get", "The served model.", _LISTED),
    _Operation("/v1/models/{name}", "get", "One model.", _MODEL),
    _Operation(
        "/generate",
        "post",
        "A continuation in SGLang's shape.",
        {"anyOf": [_GENERATED, {"type": "array", "items": _GENERATED}]},
        GenerateBody,
        streams=True,
    ),
    *(_Operation(f"{prefix}/tokenize", "post", "Token ids of a text or conversation.", _TOKENS, TokenizeBody) for prefix in ("", "/v1")),
    *(_Operation(f"{prefix}/detokenize", "post", "The text of token ids.", _DETOKENIZED, DetokenizeBody) for prefix in ("", "/v1")),
    *(_Operation(path, "get", "What is served.", _OBJECT) for path in ("/model_info", "/get_model_info")),
    *(_Operation(path, "get", "Settings and facts of the server.", _OBJECT) for path in ("/server_info", "/get_server_info")),
    *(_Operation(path, "get", "Whether requests are taken.", _STATUS, also=(503,)) for path in ("/health", "/health/ready")),
    _Operation("/health/live", "get", "Whether the process runs.", _STATUS),
    _Operation("/health_generate", "get", "Whether the model gives tokens.", _STATUS),
    _Operation("/stats", "get", "Counters of the engine and of the gateway.", _OBJECT),
    _Operation("/metrics", "get", "The same for Prometheus.", _TEXT, media=_PLAIN),
    _Operation("/openapi.json", "get", "This document.", _OBJECT),
)


@router.get("/openapi.json")
async def openapi_json(request: Request) -> Response:
    """The OpenAPI description."""
    services = services_of(request)
    info = services.watch.info
    return JSONResponse(document(info.model_name if info is not None else "", with_keys=services.keys is not None))


@functools.lru_cache(maxsize=4)
def document(model: str, *, with_keys: bool) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        model: the one that is served; empty while nobody knows.
        with_keys: the server asks for API keys.
    """
    bodies = list({operation.body: None for operation in OPERATIONS if operation.body is not None})
    _, definitions = models_json_schema([(body, "validation") for body in bodies], by_alias=True, ref_template=_REFS)
    for schema in definitions["$defs"].values():
        if model and schema.get("properties", {}).get("model", {}).get("type") == "string":
            schema["properties"]["model"]["enum"] = [model]
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    components: dict[str, Any] = {"schemas": {**definitions["$defs"], "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "glm53-offload", "version": "1", "description": "OpenAI's API, Anthropic's, and SGLang's native one."},
        "paths": paths,
        "components": components,
    }
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR = _answer(
    ("error",),
    error=_answer(("message", "type", "param", "code"), message=_TEXT, type=_TEXT, param=_NULLABLE_TEXT, code=_NULLABLE_TEXT),
)
_ANTHROPIC_ERROR = _answer(("type", "error"), type={"const": "error"}, error=_answer(("type", "message"), type=_TEXT, message=_TEXT))


def _described(operation: _Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": operation.answer}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in operation.also:
        responses[str(status)] = {"description": _ERRORS[status], "content": content}
    error = "AnthropicError" if operation.path.startswith("/v1/messages") else "Error"
    shape = {"$ref": f"#/components/schemas/{error}"}
    for status, words in _ERRORS.items():
        responses.setdefault(str(status), {"description": words, "content": {"application/json": {"schema": shape}}})
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        schema = {"$ref": _REFS.format(model=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names]
    parameters += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in operation.query.items()]
    if parameters:
        described["parameters"] = parameters
    return described
