"""The body of POST /v1/messages, and what it means as a chat request."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Annotated, Any, Literal

from pydantic import Field

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.gateway.errors import EmptyArray, InvalidType, UnsupportedContent
from services.gateway.formats import FIRST, Body, Int
from services.gateway.json_text import MAX_DEPTH, is_deep
from services.gateway.refusals import OF_MESSAGES, refuse_chat_only, refuse_fields, refuse_other_names
from services.gateway.schemas import Number, Parameters, ToolName, with_sampling


class AnthropicTool(Body):
    """One entry of `tools`."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: Parameters | None = None
    strict: bool | None = None


class ToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Body):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Int, Field(ge=0, le=2**31 - 1)] | None = None


class OutputFormat(Body):
    """`output_config.format`: JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


# For /openapi.json: blocks are checked one by one, so that errors name the one at fault.
_BLOCK = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_MESSAGES_SCHEMA: dict[str, Any] = {
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _BLOCK}]},
        },
    },
}


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Any], Field(json_schema_extra=_MESSAGES_SCHEMA)]
    system: str | list[Any] | None = None
    tools: Annotated[list[AnthropicTool], FIRST] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Annotated[Int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=16), FIRST] | None = None
    stream: bool | None = None
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1)] | None = None
    metadata: dict[str, Any] | None = None


_REFUSED = ("container", "mcp_servers", "output_format")

# Fields of the chat request → fields of this one, for errors.
CHAT_NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking",
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "thinking",
    "response_format": "output_config",
}
# The same inside paths and messages.
CHAT_WORDS = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}


def check(body: CountBody) -> None:
    """Refuses what cannot be honoured.

    Raises:
        UnsupportedParameter: names the field.
    """
    for name in _REFUSED:
        if (body.model_extra or {}).get(name):
            raise UnsupportedParameter(f"{name} is not supported by this server; leave it out.", param=name)
    refuse_fields(body.model_extra)
    refuse_chat_only(body.model_extra)
    refuse_other_names(body.model_extra, OF_MESSAGES)
    for index, tool in enumerate(body.tools or []):
        if tool.type not in (None, "custom"):
            raise UnsupportedParameter(
                f"tools[{index}] has type {tool.type!r}; this server takes tools with an input_schema only.", param=f"tools[{index}]"
            )
    if body.tool_choice is not None and body.tool_choice.type == "tool" and not body.tool_choice.name:
        raise InvalidRequest("tool_choice of type tool needs a name.", param="tool_choice")


def chat_fields(body: CountBody, *, may_turn_off: bool) -> dict[str, Any]:
    """The chat request that means the same.

    Args:
        may_turn_off: the server lets clients turn thinking off; a request that says nothing about thinking wants none.
    """
    messages = _system(body.system) + _messages(body.messages)
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages and messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    fields |= _thinking(body, may_turn_off)
    form = body.output_config.format if body.output_config is not None else None
    if form is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
        fields |= {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    return with_sampling(fields, body)


# Other APIs' ways to speak of thinking, which say enough.
_THINKING_FIELDS = ("chat_template_kwargs", "reasoning_effort", "thinking_token_budget")


def _thinking(body: CountBody, may_turn_off: bool) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config is not None else None
    wanted = body.thinking
    if wanted is None and any((body.model_extra or {}).get(name) is not None for name in _THINKING_FIELDS):
        return {} if effort is None else {"reasoning_effort": effort}
    if wanted is None and effort is None:
        return {"chat_template_kwargs": {"enable_thinking": False}} if may_turn_off else {"reasoning_effort": "low"}
    if wanted is not None and wanted.type == "disabled":
        return {"chat_template_kwargs": {"enable_thinking": False}}
    return {"reasoning_effort": effort, "thinking_token_budget": wanted.budget_tokens if wanted is not None else None}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _system(system: str | list[Any] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    text = system if isinstance(system, str) else "\n".join(_text_block(block, f"system[{index}]") for index, block in enumerate(system))
    return [{"role": "system", "content": text}] if text else []


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages of blocks → chat messages; tool results become messages of their own.

    Raises:
        InvalidRequest: names the block.
    """
    if not messages:
        raise EmptyArray("messages must have at least one message.", param="messages")
    found: list[dict[str, Any]] = []
    ids: set[str] = set()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidType(f"{path} must be an object.", param=path)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{path}.role must be user or assistant.", param=f"{path}.role")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise InvalidType(f"{path}.content must be a string or a list of blocks.", param=f"{path}.content")
        elif not content:
            raise EmptyArray(f"{path}.content must have at least one block.", param=f"{path}.content")
        elif role == "assistant":
            found.append(_assistant(content, f"{path}.content"))
            ids.update(call["id"] for call in found[-1].get("tool_calls", ()))
        else:
            found += _user(content, role, f"{path}.content", ids)
    if found[-1].get("tool_calls"):
        path = f"messages[{len(messages) - 1}]"
        raise InvalidRequest(f"{path} ends with tool_use; the message after it brings the tool_result.", param=path)
    return found


def _assistant(blocks: list[Any], path: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[str, dict[str, Any]] = {}
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        kind = _kind(block, where)
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "tool_use":
            given = block.get("input", {})
            if not isinstance(given, dict):
                raise InvalidType(f"{where}.input must be an object.", param=f"{where}.input")
            if is_deep(given):
                raise InvalidRequest(f"{where}.input is nested deeper than {MAX_DEPTH} levels.", param=f"{where}.input")
            function = {"name": _string(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
            if not function["name"]:
                raise InvalidType(f"{where}.name must be a string that is not empty.", param=f"{where}.name")
            call_id = _string(block, "id", where)
            if call_id in calls:
                raise InvalidRequest(f"{where}.id is {call_id[:60]!r}, as of another tool_use of the message.", param=f"{where}.id")
            calls[call_id] = {"id": call_id, "type": "function", "function": function}
        elif kind != "redacted_thinking":
            raise UnsupportedContent(f"{where} has type {kind!r}: this server takes text, thinking and tool_use.", param=where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def _user(blocks: list[Any], role: str, path: str, ids: Set[str]) -> list[dict[str, Any]]:
    """Results first, in their order, then what the user says. `ids` are those of the calls that results may answer."""
    results: list[dict[str, Any]] = []
    texts = []
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if _kind(block, where) == "tool_result":
            call_id = _string(block, "tool_use_id", where)
            if call_id not in ids:
                path = f"{where}.tool_use_id"
                raise InvalidRequest(f"{path} is {call_id[:60]!r}, which is the id of no tool_use before it.", param=path)
            results.append({"role": "tool", "tool_call_id": call_id, "content": _result(block, where)})
        else:
            texts.append(_text_block(block, where))
    return results + ([{"role": role, "content": "".join(texts)}] if texts or not results else [])


def _result(block: dict[str, Any], path: str) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidType(f"{path}.content must be a string or a list of blocks.", param=f"{path}.content")
    return "".join(_text_block(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _text_block(block: Any, path: str) -> str:
    kind = _kind(block, path)
    if kind != "text":
        raise UnsupportedContent(f"{path} has type {kind!r}: this server takes text only.", param=path)
    return _string(block, "text", path)


def _kind(block: Any, path: str) -> str:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise InvalidType(f"{path} must be an object with a type.", param=path)
    return str(block["type"])


def _string(block: dict[str, Any], key: str, path: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidType(f"{path}.{key} must be a string.", param=f"{path}.{key}")
    return value
