"""/v1/responses: answers that can be kept, looked up and gone on from."""

from __future__ import annotations

import json
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.gateway.accept import read_body, ready_for, services_of
from services.gateway.access.keys import ApiKey
from services.gateway.answers import Head
from services.gateway.beside import by_size, prepared
from services.gateway.chat import plan_chat
from services.gateway.errors import UnknownResponse
from services.gateway.idempotency import once
from services.gateway.refusals import refuse_unsupported
from services.gateway.responses_answer import ResponsesAnswer
from services.gateway.responses_schema import CHAT_NAMES, CHAT_WORDS, ResponsesBody, chat_fields, check, echoed, messages_of
from services.gateway.run import respond
from services.gateway.schemas import ChatRequest, our_names, parse, renaming
from services.gateway.services import Job
from services.gateway.stores import stores_of

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """An answer to input items, streamed as events or whole."""
    raw = await read_body(request)

    async def answer() -> Response:
        body = await by_size(_checked, raw)
        ready = await ready_for(request, body.model)
        earlier = await _earlier(request, body.previous_response_id)
        messages, chat = await by_size(_as_chat, body, earlier)
        with renaming(*_names(body)):
            plan = await prepared(plan_chat, chat, ready.info, ready.language, services_of(request).settings, request.state.request_id)
        identity = Head(f"resp_{request.state.request_id}", ready.info.model_name, "")
        made = ResponsesAnswer(identity, plan.parsers[0], plan.prompt_tokens, await by_size(echoed, body), logprobs=bool(chat.logprobs))
        params = {name: CHAT_NAMES.get(param, param) for name, param in plan.params.items()}

        async def keep() -> None:
            if body.store is not False:
                await _keep(request, made, messages, raw["input"])

        return await respond(request, services_of(request), Job(plan.requests, made, params), stream=bool(body.stream), finishing=keep)

    return await once(request, raw, answer)


def _checked(raw: dict[str, Any]) -> ResponsesBody:
    body = parse(ResponsesBody, raw)
    check(body)
    return body


def _as_chat(body: ResponsesBody, earlier: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], ChatRequest]:
    """The conversation without instructions, and the chat request that means the same as the body."""
    messages = earlier + messages_of(body.input, earlier)
    # Instructions are of this response alone: the next one may bring others.
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    with renaming(*_names(body)):
        chat = parse(ChatRequest, chat_fields(body, system + messages))
    refuse_unsupported(chat)
    return messages, chat


def _names(body: ResponsesBody) -> tuple[dict[str, str], dict[str, str]]:
    """Our names → the client's, for errors: fields, and words."""
    return our_names(CHAT_NAMES, body), our_names(CHAT_WORDS, body)


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """A kept response."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise UnsupportedParameter("stream: a kept response is whole; leave it out.", param="stream")
    return JSONResponse((await _kept(request, response_id, "response_id"))["response"])


@router.get("/v1/responses/{response_id}/input_items")
async def get_input_items(request: Request, response_id: str) -> Response:
    """What a kept response was given, newest first unless `order` says asc; a page of it with `limit` and `after`."""
    limit, newest_first = _page(request)
    given = (await _kept(request, response_id, "response_id"))["input"]
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    listed = []
    for index, item in enumerate(items):
        entry = {"id": f"item_{index}_{response_id.removeprefix('resp_')}", "type": "message", **item}
        if isinstance(entry.get("content"), str):
            entry["content"] = [{"type": "output_text" if entry.get("role") == "assistant" else "input_text", "text": entry["content"]}]
        listed.append(entry)
    if newest_first:
        listed.reverse()
    after = request.query_params.get("after")
    if after is not None:
        start = next((index for index, entry in enumerate(listed, 1) if entry["id"] == after), None)
        if start is None:
            raise InvalidRequest(f"after is {after[:60]!r}, which is the id of no item of this response.", param="after")
        listed = listed[start:]
    page = listed[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(listed) > limit})


def _page(request: Request) -> tuple[int, bool]:
    """How many items are asked for, and whether the newest comes first."""
    limit, order = request.query_params.get("limit", "20"), request.query_params.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise InvalidRequest(f"limit must be 1 to 100 (got {limit[:60]!r}).", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc' (got {order[:60]!r}).", param="order")
    return int(limit), order == "desc"


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a kept response."""
    if not await stores_of(request).responses.delete(_name(request, response_id)):
        raise _unknown(response_id, "response_id")
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is being made; its own request gets what there is."""
    services = services_of(request)
    key: ApiKey = request.state.key
    if await services.canceller.cancel(response_id, key):
        model = (await services.watch.named()).model_name
        now = int(time.time())
        return JSONResponse(
            {"id": response_id, "object": "response", "created_at": now, "status": "cancelled", "model": model, "output": []}
        )
    await _kept(request, response_id, "response_id")
    raise InvalidRequest(f"The response {response_id[:200]!r} is complete; only a running one can be cancelled.", param="response_id")


async def _earlier(request: Request, response_id: str | None) -> list[dict[str, Any]]:
    """The conversation up to an earlier response."""
    if response_id is None:
        return []
    return list((await _kept(request, response_id, "previous_response_id"))["messages"])


async def _keep(request: Request, answer: ResponsesAnswer, messages: list[dict[str, Any]], given: Any) -> None:
    """Stores a response with its conversation, under the name of its key."""
    reasoning, content = answer.parsed.texts
    own: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    calls = answer.parsed.message.tool_calls
    if calls:
        own["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    told = bool(calls or content or reasoning)
    entry = {"response": answer.response(), "messages": [*messages, own] if told else messages, "input": given}
    seconds = services_of(request).settings.response_ttl_s
    encoded = await by_size(lambda: json.dumps(entry).encode())
    await stores_of(request).responses.put(_name(request, answer.head.id), encoded, seconds)


async def _kept(request: Request, response_id: str, param: str) -> dict[str, Any]:
    value = await stores_of(request).responses.get(_name(request, response_id))
    if value is None:
        raise _unknown(response_id, param)
    return dict(json.loads(value))


def _name(request: Request, response_id: str) -> str:
    key: ApiKey = request.state.key
    return f"{key.id}:{response_id[:200]}"


def _unknown(response_id: str, param: str) -> UnknownResponse:
    return UnknownResponse(f"There is no response {response_id[:200]!r}: it was not stored, was deleted, or its time is over.", param=param)
