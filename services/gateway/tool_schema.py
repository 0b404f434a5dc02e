"""What a tool's JSON schema says about an argument, and the text of an argument → its JSON value.

The model writes every argument as plain text between two tags. Whether ``7`` is a number or a string is the schema's word, not the
text's. A value that does not fit its schema stays the string that the model wrote: nothing is invented.
"""

from __future__ import annotations

import json
import math
import urllib.parse
from collections.abc import Iterable
from typing import Any

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
STRING_ONLY = frozenset({"string"})
NULLABLE_STRING = frozenset({"string", "null"})

# Schemas are client input: references and branches are followed only so far, and a schema that refers to itself ends.
_MAX_DEPTH = 32
_MAX_STEPS = 2000


class _Walk:
    """One walk through a schema: the document that references point into, and how many steps are left."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.steps_left = _MAX_STEPS

    def step(self) -> bool:
        """Counts a step; False when the walk has been too long."""
        self.steps_left -= 1
        return self.steps_left > 0


class ToolSchemas:
    """The tools that a request declares.

    Args:
        tools: OpenAI tool definitions, already validated.
    """

    def __init__(self, tools: Iterable[dict[str, Any]]) -> None:
        self._parameters: dict[str, dict[str, Any]] = {}
        for tool in tools:
            function = tool["function"]
            parameters = function.get("parameters")
            self._parameters[function["name"]] = parameters if isinstance(parameters, dict) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def argument_schema(self, tool: str, key: str) -> ArgumentSchema:
        """What the schema of `tool` says about its argument `key`; nothing when it does not know the key."""
        root = self._parameters.get(tool, {})
        return ArgumentSchema(_property(root, key, _Walk(root), 0), root)


class ArgumentSchema:
    """One argument's schema, with the document that its references point into."""

    def __init__(self, schema: Any, root: dict[str, Any]) -> None:
        self._known = _types(schema, _Walk(root), 0)
        self._choices = _choices(schema, _Walk(root), 0)

    @property
    def types(self) -> frozenset[str] | None:
        """JSON types that the argument may have; None when the schema does not say."""
        return self._known

    @property
    def choices(self) -> list[Any] | None:
        """The values that an enum or const lists; None when there is none."""
        return self._choices

    def value_of(self, text: str) -> Any:
        """The JSON value of what the model wrote between the tags, which is never stripped when it is a string."""
        if self._choices is not None and text in [choice for choice in self._choices if isinstance(choice, str)]:
            return text
        if self._known == STRING_ONLY:
            return text
        literal = _literal(text)
        if self._known is None:
            return text if literal is _NONE or isinstance(literal, str) else literal
        return _coerce(text, literal, self._known)


_NONE = object()


def _coerce(text: str, literal: Any, types: frozenset[str]) -> Any:
    """`literal` if one of `types` takes it, else `text`."""
    for candidate in (literal, _literal(literal) if isinstance(literal, str) and "string" not in types else _NONE):
        if candidate is _NONE or isinstance(candidate, str):
            continue
        if _is_of(candidate, types):
            return candidate
        if "integer" in types and isinstance(candidate, float) and candidate.is_integer():
            return int(candidate)
    if "string" in types:
        return text
    # The Python spellings, where no string could have been meant.
    spelled = {"True": True, "False": False, "None": None}.get(text.strip(), _NONE)
    return spelled if spelled is not _NONE and _is_of(spelled, types) else text


def _is_of(value: Any, types: frozenset[str]) -> bool:
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return "integer" in types or "number" in types
    if isinstance(value, float):
        return "number" in types
    if isinstance(value, list):
        return "array" in types
    return "object" in types


def _literal(text: str) -> Any:
    """The JSON value that `text` spells, or `_NONE`. NaN, Infinity and numbers too large for a double are not JSON."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NONE


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a JSON number that a double can hold")
    return value


def _resolve(schema: Any, walk: _Walk, depth: int) -> Any:
    """Follows a local `$ref`; a reference that leads nowhere says nothing."""
    if depth > _MAX_DEPTH or not walk.step():
        return {}
    while isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        reference = schema["$ref"]
        if not walk.step() or not reference.startswith("#"):
            return {}
        target: Any = walk.root
        for part in filter(None, reference[1:].split("/")):
            name = urllib.parse.unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                return {}
        schema = target
    return schema


def _branches(schema: dict[str, Any], *names: str) -> list[Any]:
    return [branch for name in names if isinstance(schema.get(name), list) for branch in schema[name]]


def _property(schema: Any, key: str, walk: _Walk, depth: int) -> Any:
    """The schema of property `key` of an object schema."""
    schema = _resolve(schema, walk, depth)
    if not isinstance(schema, dict):
        return {}
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    for branch in _branches(schema, "allOf", "anyOf", "oneOf"):
        found = _property(branch, key, walk, depth + 1)
        if found != {}:
            return found
    extra = schema.get("additionalProperties")
    return extra if isinstance(extra, dict) else {}


def _types(schema: Any, walk: _Walk, depth: int) -> frozenset[str] | None:
    """Types that `schema` allows; None when it allows anything."""
    schema = _resolve(schema, walk, depth)
    if not isinstance(schema, dict):
        return None
    found: frozenset[str] | None = None
    declared = schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    if isinstance(declared, list):
        found = _both(found, frozenset(kind for kind in declared if isinstance(kind, str)) & ALL_TYPES or None)
    if isinstance(schema.get("enum"), list):
        found = _both(found, frozenset(_type_of(value) for value in schema["enum"]))
    if "const" in schema:
        found = _both(found, frozenset({_type_of(schema["const"])}))
    for name in ("anyOf", "oneOf"):
        options = [_types(branch, walk, depth + 1) for branch in _branches(schema, name)]
        if options and all(option is not None for option in options):
            found = _both(found, frozenset().union(*(option for option in options if option is not None)))
    for branch in _branches(schema, "allOf"):
        found = _both(found, _types(branch, walk, depth + 1))
    if found is None and isinstance(schema.get("properties"), dict):
        return frozenset({"object"})
    return found


def _both(left: frozenset[str] | None, right: frozenset[str] | None) -> frozenset[str] | None:
    """Types that two demands leave; a contradiction leaves the first."""
    if left is None or right is None:
        return right if left is None else left
    # An integer is a number: {"type": "number", "enum": [1, 2]} leaves integer.
    widened_left = left | {"integer"} if "number" in left else left
    widened_right = right | {"integer"} if "number" in right else right
    return (widened_left & widened_right) or left


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _choices(schema: Any, walk: _Walk, depth: int) -> list[Any] | None:
    """The values that an enum or const lists, through references and branches."""
    schema = _resolve(schema, walk, depth)
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    found: list[Any] = []
    for branch in _branches(schema, "anyOf", "oneOf", "allOf"):
        found.extend(_choices(branch, walk, depth + 1) or [])
    return found or None
