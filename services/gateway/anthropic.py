"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.gateway.accept import read_body, ready_for, services_of
from services.gateway.anthropic_answer import MessagesAnswer
from services.gateway.anthropic_schema import CHAT_NAMES, CHAT_WORDS, CountBody, MessagesBody, chat_fields, check
from services.gateway.chat import plan_chat, render
from services.gateway.idempotency import once
from services.gateway.refusals import refuse_unsupported
from services.gateway.run import respond
from services.gateway.schemas import ChatRequest, our_names, parse, renaming
from services.gateway.services import Job

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """An answer to a conversation, in Anthropic's shape."""
    raw = await read_body(request)

    async def answer() -> Response:
        body = parse(MessagesBody, raw)
        check(body)
        ready = await ready_for(request, body.model)
        settings = services_of(request).settings
        names = our_names(CHAT_NAMES, body), our_names(CHAT_WORDS, body)
        with renaming(*names):
            chat = parse(ChatRequest, chat_fields(body, may_turn_off=settings.thinking_off_policy != "reject"))
        refuse_unsupported(chat)
        with renaming(*names):
            plan = await plan_chat(chat, ready.info, ready.language, settings, request.state.request_id)
        made = MessagesAnswer(f"msg_{request.state.request_id}", ready.info.model_name, plan.parsers[0], plan.prompt_tokens)
        return await respond(request, services_of(request), Job(plan.requests, made, plan.params), stream=bool(body.stream))

    return await once(request, raw, answer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message request has."""
    body = parse(CountBody, await read_body(request))
    check(body)
    ready = await ready_for(request, body.model)
    settings = services_of(request).settings
    names = our_names(CHAT_NAMES, body), our_names(CHAT_WORDS, body)
    with renaming(*names):
        chat = parse(ChatRequest, chat_fields(body, may_turn_off=settings.thinking_off_policy != "reject"))
    refuse_unsupported(chat)
    with renaming(*names):
        prompt = await render(chat, ready.language, settings)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
