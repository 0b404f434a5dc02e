"""The body of POST /v1/responses, and what it means as a chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import Field

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.gateway.errors import EmptyArray, InvalidType, MissingParameter, UnsupportedContent
from services.gateway.formats import FIRST, Body, Int
from services.gateway.json_text import read_json
from services.gateway.refusals import OF_RESPONSES, refuse_chat_only, refuse_fields, refuse_other_names, refuse_unknown
from services.gateway.schemas import Number, Parameters, Reasoning, with_sampling


class ResponseTool(Body):
    """One entry of `tools`: a function, flat."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class NamedChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


# What clients ask for beyond the answer. This server has log-probabilities; what belongs to tools and content that it does not have is
# never there to be included.
LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: Annotated[str, Field(min_length=1)]
    input: str | list[Any]
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], FIRST] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[Int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Include], FIRST] | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


_REFUSED = ("conversation", "prompt", "max_tool_calls")


def check(body: ResponsesBody) -> None:
    """Refuses what cannot be honoured.

    Raises:
        UnsupportedParameter: names the field.
    """
    if body.background:
        raise UnsupportedParameter("background: this server answers while the client waits; leave it out or stream.", param="background")
    if body.truncation == "auto":
        raise UnsupportedParameter("truncation auto is not supported; shorten the input.", param="truncation")
    for name in _REFUSED:
        if (body.model_extra or {}).get(name) not in (None, 0):
            raise UnsupportedParameter(f"{name} is not supported by this server; leave it out.", param=name)
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f'top_logprobs needs include: ["{LOGPROBS}"].', param="top_logprobs")
    refuse_fields(body.model_extra)
    refuse_chat_only(body.model_extra)
    refuse_other_names(body.model_extra, OF_RESPONSES)
    refuse_unknown(body.reasoning, "reasoning")
    for index, tool in enumerate(body.tools or []):
        if tool.type != "function":
            raise UnsupportedParameter(f"tools[{index}] has type {tool.type!r}; this server takes functions only.", param=f"tools[{index}]")
        if not tool.name:
            raise MissingParameter(f"tools[{index}].name is missing.", param=f"tools[{index}].name")


def chat_fields(body: ResponsesBody, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat request that means the same; absent fields stay absent."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
    }
    if LOGPROBS in (body.include or ()):
        fields["logprobs"], fields["top_logprobs"] = True, body.top_logprobs
    if body.tools:
        fields["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in body.tools]
    choice = body.tool_choice
    fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedChoice) else choice
    wanted = body.text.format if body.text is not None else None
    if wanted is not None:
        form: dict[str, Any] = {"type": wanted.type}
        if wanted.type == "json_schema":
            if wanted.schema_ is None:
                raise MissingParameter("text.format.schema is missing.", param="text")
            form["json_schema"] = {"name": wanted.name or "answer", "schema": wanted.schema_}
        fields["response_format"] = form
    return with_sampling(fields, body)


# Fields of the chat request → fields of this one, for errors.
CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "max_tokens": "max_output_tokens",
}
# The same inside paths and messages.
CHAT_WORDS = {
    ".function.": ".",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def messages_of(items: str | list[Any], earlier: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Input items → chat messages. Items of one assistant turn (reasoning, text, calls) become one message.

    Args:
        items: the request's `input`.
        earlier: messages of the response that it goes on from; outputs may answer their calls.

    Raises:
        InvalidRequest: names the item.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items:
        raise EmptyArray("input must have at least one item.", param="input")
    messages: list[dict[str, Any]] = []
    known = {call_id for message in earlier for call_id in _call_ids(message)}
    turn, own = None, set[str]()  # the last turn with calls, and their ids
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidType(f"{path} must be an object.", param=path)
        kind = item.get("type", "message")
        reader = _READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise UnsupportedContent(
                f"{path} has type {kind!r}; this server takes messages, function calls, their outputs and reasoning.", param=path
            )
        reader(item, path, messages)
        where = f"{path}.call_id"
        if kind == "function_call":
            if messages[-1] is not turn:
                turn, own = messages[-1], set()
            if item["call_id"] in own:
                raise InvalidRequest(f"{where} is {item['call_id'][:60]!r}, as of another call of the turn.", param=where)
            own.add(item["call_id"])
            known.add(item["call_id"])
        elif kind == "function_call_output" and item["call_id"] not in known:
            raise InvalidRequest(f"{where} is {item['call_id'][:60]!r}, which is the id of no call before it.", param=where)
    if not messages and not earlier:
        raise InvalidRequest("input has no text: its only items are reasoning without content.", param="input")
    return messages


def _call_ids(message: dict[str, Any]) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls", ())]


def _turn(messages: list[dict[str, Any]], *, opens: str) -> dict[str, Any]:
    """The assistant message that an item belongs to: the last one, unless it already has what the item brings."""
    last = messages[-1] if messages else None
    order = ("reasoning_content", "content", "tool_calls")
    later = order[order.index(opens) :] if opens != "tool_calls" else ()
    if last is None or last["role"] != "assistant" or any(last.get(name) for name in later):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _message(item: dict[str, Any], path: str, messages: list[dict[str, Any]]) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(f"{path}.role must be user, assistant, system or developer.", param=f"{path}.role")
    text = content if isinstance(content, str) else _parts(content, f"{path}.content")
    if role == "assistant":
        _turn(messages, opens="content")["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _call(item: dict[str, Any], path: str, messages: list[dict[str, Any]]) -> None:
    call_id, name, arguments = (_string(item, key, path) for key in ("call_id", "name", "arguments"))
    if not name:
        raise InvalidType(f"{path}.name must be a string that is not empty.", param=f"{path}.name")
    if arguments and not isinstance(read_json(arguments, f"{path}.arguments"), dict | NoneType):
        raise InvalidRequest(f"{path}.arguments must hold a JSON object.", param=f"{path}.arguments")
    function = {"name": name, "arguments": arguments}
    _turn(messages, opens="tool_calls").setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _output(item: dict[str, Any], path: str, messages: list[dict[str, Any]]) -> None:
    output = item.get("output")
    text = output if isinstance(output, str) else _parts(output, f"{path}.output")
    messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", path), "content": text})


def _reasoning(item: dict[str, Any], path: str, messages: list[dict[str, Any]]) -> None:
    name = "content" if item.get("content") else "summary"
    if item.get(name):
        _turn(messages, opens="reasoning_content")["reasoning_content"] = _parts(item[name], f"{path}.{name}")


_READERS = {"message": _message, "function_call": _call, "function_call_output": _output, "reasoning": _reasoning}
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}


def _parts(parts: Any, path: str) -> str:
    if not isinstance(parts, list):
        raise InvalidType(f"{path} must be a string or a list of text parts.", param=path)
    if not parts:
        raise EmptyArray(f"{path} must have at least one part.", param=path)
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise UnsupportedContent(f"{path}[{index}] has type {kind!r}: this server takes text parts only.", param=f"{path}[{index}]")
        texts.append(_string(part, name, f"{path}[{index}]"))
    return "".join(texts)


def _string(item: dict[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidType(f"{path}.{key} must be a string.", param=f"{path}.{key}")
    return value


def echoed(body: ResponsesBody) -> dict[str, Any]:
    """What a response object repeats of its request."""
    raw = json.loads(body.model_dump_json(by_alias=True))
    reasoning = raw.get("reasoning") or {}
    return {
        "instructions": raw.get("instructions"),
        "max_output_tokens": raw.get("max_output_tokens"),
        "metadata": raw.get("metadata") or {},
        "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
        "previous_response_id": raw.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": raw.get("store") is not False,
        "temperature": 1.0 if raw.get("temperature") is None else raw["temperature"],
        "text": {"format": (raw.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "top_logprobs": raw.get("top_logprobs") or 0,
        "top_p": 1.0 if raw.get("top_p") is None else raw["top_p"],
        "truncation": "disabled",
        "user": raw.get("user"),
        "background": False,
    }
