"""Chat messages as clients send them → messages as the chat template wants them.

Templates were written for tidy histories: they print ``None`` for a null content, fail on arguments that are a JSON string and skip
roles that they do not know. Whatever would go wrong there is put right here or refused here, with the path of the part at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.errors import EmptyArray, InvalidType, MissingParameter, UnsupportedContent
from services.gateway.json_text import MAX_DEPTH, is_deep, read_json

_ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise(messages: list[Any]) -> list[dict[str, Any]]:
    """Checks and tidies a conversation.

    Args:
        messages: the request's `messages`, not empty.

    Returns:
        Messages with string contents, roles system, user, assistant or tool, tool-call arguments as mappings; keys without a
        value are absent.

    Raises:
        InvalidRequest: names the message, e.g. ``messages[2].content``.
    """
    tidy = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _check_calls(tidy)
    return tidy


def _check_calls(messages: list[dict[str, Any]]) -> None:
    """A result belongs to a call that was made: nothing else tells the model what it is the result of.

    Raises:
        InvalidRequest: names the message that answers no call, or the id that two calls of one turn have.
    """
    made = False
    ids: set[str] = set()
    for index, message in enumerate(messages):
        own: set[str] = set()
        for number, call_id in _call_ids(message):
            if call_id in own:
                path = f"messages[{index}].tool_calls[{number}].id"
                raise InvalidRequest(f"{path} is {call_id[:60]!r}, as of another call of the message; ids tell calls apart.", param=path)
            own.add(call_id)
        ids |= own
        made = made or "tool_calls" in message
        if message["role"] != "tool":
            continue
        if not made:
            path = f"messages[{index}].role"
            raise InvalidRequest(f"{path} is 'tool', but no message before it has tool_calls that it could answer.", param=path)
        answered = message.get("tool_call_id")
        if answered is not None and ids and answered not in ids:
            path = f"messages[{index}].tool_call_id"
            raise InvalidRequest(f"{path} is {answered[:60]!r}, which is the id of no call before it.", param=path)


def _call_ids(message: dict[str, Any]) -> Iterator[tuple[int, str]]:
    for number, call in enumerate(message.get("tool_calls", ())):
        if "id" in call:
            yield number, call["id"]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidType(f"{path} must be an object with a role, not {_kind(message)}.", param=path)
    role = message.get("role")
    if role is None:
        raise MissingParameter(f"{path}.role is missing; it is one of {', '.join(_ROLES)}.", param=f"{path}.role")
    if not isinstance(role, str):
        raise InvalidType(f"{path}.role must be a string, not {_kind(role)}.", param=f"{path}.role")
    if role not in _ROLES:
        hint = "; send function results with the role tool" if role == "function" else ""
        raise InvalidRequest(f"{path}.role {role!r} is not one of {', '.join(_ROLES)}{hint}.", param=f"{path}.role")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidType(f"{path}.name must be a string, not {_kind(name)}.", param=f"{path}.name")
    if role == "assistant":
        return _assistant(message, path)
    if role == "tool":
        return _tool(message, path)
    return {"role": "system" if role == "developer" else role, "content": _required_content(message, path)}


def _assistant(message: dict[str, Any], path: str) -> dict[str, Any]:
    if message.get("function_call") is not None:
        where = f"{path}.function_call"
        raise InvalidRequest(f"{where} is of an older API; send it as {path}.tool_calls.", param=where)
    calls = _tool_calls(message.get("tool_calls"), f"{path}.tool_calls")
    reasoning = _reasoning(message, path)
    content = message.get("content")
    if content is None:
        content = message.get("refusal")
    if content is None and not calls and not reasoning:
        raise InvalidRequest(f"{path}.content may be null only in an assistant message that has tool_calls.", param=f"{path}.content")
    tidy: dict[str, Any] = {"role": "assistant", "content": "" if content is None else _text(content, f"{path}.content")}
    if reasoning:
        tidy["reasoning_content"] = reasoning
    if calls:
        tidy["tool_calls"] = calls
    return tidy


def _tool(message: dict[str, Any], path: str) -> dict[str, Any]:
    content = message.get("content")
    tidy: dict[str, Any] = {"role": "tool", "content": "" if content is None else _text(content, f"{path}.content")}
    call_id = message.get("tool_call_id")
    if call_id is not None:
        if not isinstance(call_id, str):
            raise InvalidType(f"{path}.tool_call_id must be a string, not {_kind(call_id)}.", param=f"{path}.tool_call_id")
        # Clients that know no ids leave them empty, here as in the calls.
        if call_id:
            tidy["tool_call_id"] = call_id
    return tidy


def _required_content(message: dict[str, Any], path: str) -> str:
    where = f"{path}.content"
    if "content" not in message:
        raise MissingParameter(f"{where} is missing.", param=where)
    if message["content"] is None:
        raise InvalidType(f"{where} must be a string or a list of text parts, not null.", param=where)
    return _text(message["content"], where)


def _text(content: Any, path: str) -> str:
    """A content's text: the string itself, or its text parts joined without a separator."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidType(f"{path} must be a string or a list of text parts, not {_kind(content)}.", param=path)
    if not content:
        raise EmptyArray(f"{path} must have at least one part.", param=path)
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidType(f"{path} must be an object with a type, not {_kind(part)}.", param=path)
    kind = part.get("type")
    if kind is None:
        raise MissingParameter(f"{path}.type is missing.", param=f"{path}.type")
    field = {"text": "text", "refusal": "refusal"}.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise UnsupportedContent(f"{path} has type {kind!r}: this server takes text parts only.", param=path)
    if field not in part:
        raise MissingParameter(f"{path}.{field} is missing.", param=f"{path}.{field}")
    if not isinstance(part[field], str):
        raise InvalidType(f"{path}.{field} must be a string, not {_kind(part[field])}.", param=f"{path}.{field}")
    return str(part[field])


def _reasoning(message: dict[str, Any], path: str) -> str:
    """Earlier reasoning under either name that servers give it."""
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidType(f"{path}.{name} must be a string, not {_kind(value)}.", param=f"{path}.{name}")
        if value:
            return value
    return ""


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidType(f"{path} must be a list, not {_kind(calls)}.", param=path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InvalidType(f"{path} must be an object, not {_kind(call)}.", param=path)
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{path}.type must be 'function'.", param=f"{path}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidType(f"{path}.function must be an object, not {_kind(function)}.", param=f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidType(f"{path}.function.name must be a string that is not empty.", param=f"{path}.function.name")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidType(f"{path}.id must be a string, not {_kind(call_id)}.", param=f"{path}.id")
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    tidy: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **tidy} if call_id else tidy


def _arguments(value: Any, path: str) -> dict[str, Any]:
    """Arguments of a past call: a JSON object as text (OpenAI's way) or as itself."""
    if isinstance(value, dict):
        if is_deep(value):
            raise InvalidRequest(f"{path} is nested deeper than {MAX_DEPTH} levels.", param=path)
        return value
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        raise InvalidType(f"{path} must be a string that holds a JSON object, not {_kind(value)}.", param=path)
    parsed = read_json(value, path)
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{path} must hold a JSON object, not {_kind(parsed)}.", param=path)
    return parsed


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
