"""Lark grammars of the model's own call format, with the arguments that the tools' schemas allow.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>

Control tokens stand in a grammar as ``<[id]>``: text can never match them. Arguments come in the order of the schema, required ones
always, others perhaps. A string is free text; every other value is JSON of its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from services.gateway.tool_call import Tag
from services.gateway.tool_schema import STRING_ONLY, ArgumentSchema, ToolSchemas

# Anything at all, control tokens excepted.
ANY_TEXT = r"/(.|\n)*/"
_MAX_COUNTED_CHARS = 2000


@dataclass(frozen=True)
class CallStyle:
    """White space that a model family writes inside a call.

    Attributes:
        after_name: between the name and the first key.
        after_key: between key and value.
        after_value: after each value.
    """

    after_name: str = ""
    after_key: str = ""
    after_value: str = ""


class ToolGrammar:
    """Rules for calls of the declared tools.

    Args:
        tools: OpenAI tool definitions.
        ids: control token → id.
        style: the model's white space.
    """

    def __init__(self, tools: Sequence[dict[str, Any]], ids: Mapping[str, int], style: CallStyle) -> None:
        self._ids = ids
        self._style = style
        self._schemas = ToolSchemas(tools)
        self._rules: list[str] = [f"ANY_TEXT: {ANY_TEXT}"]
        names = [self._tool(number, tool["function"]) for number, tool in enumerate(tools)]
        self._rules.append(f"call: {self._tag(Tag.CALL)} ({' | '.join(names)}) {self._tag(Tag.CALL_END)}")

    def calls(self, *, several: bool) -> str:
        """One call, or one and more."""
        return self._document("call+" if several else "call")

    def calls_or(self, body: str, rules: str, *, several: bool) -> str:
        """Calls, or something else.

        Args:
            body: what may stand instead of calls.
            rules: rules that `body` needs.
            several: more than one call is allowed.
        """
        return self._document(f"{'call+' if several else 'call'} | {body}", rules)

    def text_with_calls(self, *, several: bool) -> str:
        """Free text, in which calls keep to their schemas."""
        return self._document("ANY_TEXT (call ANY_TEXT)*" if several else "ANY_TEXT (call ANY_TEXT)?")

    def _document(self, start: str, rules: str = "") -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, rules]) + "\n"

    def _tag(self, tag: Tag) -> str:
        return f"<[{self._ids[tag.value]}]>"

    def _tool(self, number: int, function: dict[str, Any]) -> str:
        """Adds the rules of one tool; returns the name of its rule."""
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties")
        parts = [literal(function["name"]), literal(self._style.after_name)]
        if isinstance(properties, dict) and properties:
            required = parameters.get("required") or []
            for position, key in enumerate(properties):
                rule = f"tool_{number}_arg_{position}"
                value = self._value(self._schemas.argument_schema(function["name"], key), properties[key], parameters)
                self._rules.append(f"{rule}: {self._argument(literal(key), value)}")
                parts.append(rule if key in required else f"{rule}?")
        elif "properties" not in parameters and _is_open(parameters):
            rule = f"tool_{number}_any"
            self._rules.append(f"{rule}: {self._argument('ANY_TEXT', 'ANY_TEXT')}")
            parts.append(f"{rule}*")
        self._rules.append(f"tool_{number}: {' '.join(filter(None, parts))}")
        return f"tool_{number}"

    def _argument(self, key: str, value: str) -> str:
        style = self._style
        parts = [self._tag(Tag.KEY), key, self._tag(Tag.KEY_END), literal(style.after_key)]
        parts += [self._tag(Tag.VALUE), value, self._tag(Tag.VALUE_END), literal(style.after_value)]
        return " ".join(filter(None, parts))

    def _value(self, known: ArgumentSchema, schema: Any, root: dict[str, Any]) -> str:
        choices = known.choices
        if choices:
            return "(" + " | ".join(literal(choice if isinstance(choice, str) else _text(choice)) or '""' for choice in choices) + ")"
        if known.types is None or "string" in known.types:
            return self._text(schema) if known.types == STRING_ONLY else "ANY_TEXT"
        whole = _self_contained(schema, root)
        return "ANY_TEXT" if whole is None else json_rule(whole, lenient=True)

    def _text(self, schema: Any) -> str:
        """Free text within the lengths of the schema."""
        least, most = (schema.get(name) if isinstance(schema, dict) else None for name in ("minLength", "maxLength"))
        low = least if _is_count(least) else 0
        high = most if _is_count(most) and most >= low else None
        if low == 0 and high is None:
            return "ANY_TEXT"
        name = f"TEXT_{low}_{'' if high is None else high}"
        rule = f"{name}: /(.|\\n){{{low},{'' if high is None else high}}}/"
        if rule not in self._rules:
            self._rules.append(rule)
        return name


def json_rule(schema: dict[str, Any], *, lenient: bool) -> str:
    """A Lark expression for JSON of a schema.

    Args:
        lenient: keywords that cannot be enforced are ignored: a tool's schema is advice, not a promise.
    """
    options = {"lenient": lenient, "whitespace_pattern": r"( |\n[ \t]{0,32})"}
    return f"%json {json.dumps({'x-guidance': options} | schema)}"


def literal(text: str) -> str:
    """A text as a Lark string; nothing for no text."""
    return json.dumps(text) if text else ""


def _text(value: Any) -> str:
    """A value that is no string, as the model writes it between its tags."""
    return json.dumps(value, ensure_ascii=False)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNTED_CHARS


def _is_open(parameters: dict[str, Any]) -> bool:
    """True when a schema that lists no properties itself may have arguments all the same."""
    branches = parameters.keys() & {"allOf", "anyOf", "oneOf", "$ref"}
    return bool(branches) or parameters.get("additionalProperties") is not False


def _self_contained(schema: Any, root: dict[str, Any]) -> dict[str, Any] | None:
    """The schema with the definitions that it refers to; None when it refers to something else."""
    if not isinstance(schema, dict):
        return None
    definitions = {name: root[name] for name in ("$defs", "definitions") if isinstance(root.get(name), dict)}
    whole = definitions | schema
    if all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references(whole, 0)):
        return whole
    return None


def _references(value: Any, depth: int) -> list[str]:
    if depth > 64:
        return ["too deep"]
    if isinstance(value, list):
        return [found for item in value for found in _references(item, depth + 1)]
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for item in value.values() for found in _references(item, depth + 1)]
    return []
