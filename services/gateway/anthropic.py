"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.gateway.accept import read_body, ready_for, services_of
from services.gateway.anthropic_answer import MessagesAnswer
from services.gateway.anthropic_schema import CHAT_NAMES, CHAT_WORDS, CountBody, MessagesBody, chat_fields, check
from services.gateway.beside import by_size, prepared
from services.gateway.chat import plan_chat, render
from services.gateway.idempotency import once
from services.gateway.refusals import refuse_unsupported
from services.gateway.run import respond
from services.gateway.schemas import ChatRequest, our_names, parse, renaming
from services.gateway.services import Job
from services.gateway.settings import GatewaySettings

router = APIRouter()

CountBodyT = TypeVar("CountBodyT", bound=CountBody)


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """An answer to a conversation, in Anthropic's shape."""
    raw = await read_body(request)

    async def answer() -> Response:
        body = await by_size(_checked, MessagesBody, raw)
        ready = await ready_for(request, body.model)
        settings = services_of(request).settings
        chat = await by_size(_as_chat, body, settings)
        with renaming(*_names(body)):
            plan = await prepared(plan_chat, chat, ready.info, ready.language, settings, request.state.request_id)
        made = MessagesAnswer(f"msg_{request.state.request_id}", ready.info.model_name, plan.parsers[0], plan.prompt_tokens)
        return await respond(request, services_of(request), Job(plan.requests, made, plan.params), stream=bool(body.stream))

    return await once(request, raw, answer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message request has."""
    body = await by_size(_checked, CountBody, await read_body(request))
    ready = await ready_for(request, body.model)
    settings = services_of(request).settings
    chat = await by_size(_as_chat, body, settings)
    with renaming(*_names(body)):
        prompt = await prepared(render, chat, ready.language, settings)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


def _checked(schema: type[CountBodyT], raw: dict[str, Any]) -> CountBodyT:
    body = parse(schema, raw)
    check(body)
    return body


def _as_chat(body: CountBody, settings: GatewaySettings) -> ChatRequest:
    """The chat request that means the same."""
    with renaming(*_names(body)):
        chat = parse(ChatRequest, chat_fields(body, may_turn_off=settings.thinking_off_policy != "reject"))
    refuse_unsupported(chat)
    return chat


def _names(body: CountBody) -> tuple[dict[str, str], dict[str, str]]:
    """Our names → the client's, for errors: fields, and words."""
    return our_names(CHAT_NAMES, body), our_names(CHAT_WORDS, body)
