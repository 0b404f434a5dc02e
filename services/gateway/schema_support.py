"""What of JSON Schema a grammar can hold an output to: the rest is refused by its place, and what only comments is taken out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

from services.common.errors import UnsupportedParameter
from services.gateway.schema_check import find_cycle, known_draft, referred
from services.gateway.schema_endless import endless_together
from services.gateway.schema_places import Path, children, target, written

# Keyword → the values with which it asks for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "else": (),
    "if": (),
    "maxContains": (),
    "minContains": (),
    "not": (),
    "propertyNames": ({}, True),
    "then": (),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# What the grammar engine knows by name; a format that it does not know says nothing about the value, as JSON Schema has it.
FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))

# Escapes are read too, so that an escaped bracket opens no class: each would be followed to the end of the text.
_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_BEYOND = re.compile(r"\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\(?:[bB1-9]|k<)")


def check_support(schema: dict[str, Any], path: str, param: str | None, advice: str) -> None:
    """Checks that a schema asks for nothing that a grammar cannot hold an output to.

    Args:
        schema: a valid one.
        path: where it stands in the request.
        param: the field to blame; None for the very place at fault.
        advice: what the client can do instead.

    Raises:
        UnsupportedParameter: names the place.
    """

    def refuse(place: Path, why: str) -> NoReturn:
        where = written(path, *place)
        raise UnsupportedParameter(f"{where} {why}; {advice}.", param=param or where)

    waiting: list[tuple[Path, Any]] = [((), schema)]
    seen = set()
    while waiting:
        place, inner = waiting.pop()
        if not isinstance(inner, dict) or id(inner) in seen:
            continue
        seen.add(id(inner))
        for name, neutral in _UNSUPPORTED.items():
            if name in inner and not _is_one_of(inner[name], neutral):
                refuse((*place, name), "cannot be enforced while the answer is written")
        _check_counts(inner, place, refuse)
        for pattern, where in _patterns(inner, place):
            if _BEYOND.search(_CLASS.sub(lambda found: "x" if found[0].startswith("[") else found[0], pattern)):
                refuse(where, "has look-around, a back reference or a word boundary, which cannot be enforced")
        waiting += [((*place, *step), child) for step, child in children(inner)]
        if "$ref" in inner and (found := target(schema, inner["$ref"])) is not None:
            waiting.append(found)
    if find_cycle(schema, lambda part: _needed(schema, part)) is not None:
        refuse((), "asks for values inside values without an end: a required property leads back to the schema that requires it")
    if (together := endless_together(schema)) is not None:
        refuse(together, "holds schemas together that refer to themselves, whose intersection has no end and cannot be enforced")


def for_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without what says nothing and what the grammar engine stumbles over."""
    kept = _without_noise(schema)
    kept.pop("x-guidance", None)
    if known_draft(schema) is None:
        kept.pop("$schema", None)
    return kept


def _without_noise(schema: dict[str, Any]) -> dict[str, Any]:
    kept = dict(schema)
    for name, neutral in _UNSUPPORTED.items():
        if name in kept and _is_one_of(kept[name], neutral):
            del kept[name]
    if kept.get("format", "date") not in FORMATS:
        del kept["format"]
    for place, inner in children(schema):
        if isinstance(inner, dict):
            name = str(place[0])
            if len(place) == 1:
                kept[name] = _without_noise(inner)
            elif name in kept:
                if kept[name] is schema[name]:
                    kept[name] = schema[name].copy()
                kept[name][place[1]] = _without_noise(inner)
    return kept


def _check_counts(schema: dict[str, Any], place: Path, refuse: Any) -> None:
    """Numbers of properties are counted only where every named property is required."""
    properties, required = schema.get("properties"), schema.get("required") or ()
    if isinstance(properties, dict) and not set(properties) <= set(required):
        for name in ("minProperties", "maxProperties"):
            if schema.get(name, 0) > 0:
                refuse((*place, name), "cannot be enforced beside properties that are not required")


def _patterns(schema: dict[str, Any], place: Path) -> Iterator[tuple[str, Path]]:
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"], (*place, "pattern")
    names = schema.get("patternProperties")
    for name in names if isinstance(names, dict) else ():
        yield name, (*place, "patternProperties", name)


def _needed(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of which a value must exist before `schema` can have one."""
    yield from referred(root, schema)
    kind = schema.get("type")
    needed: list[Path] = [("allOf", index) for index in range(len(schema.get("allOf") or ()))]
    needed += [(name, 0) for name in ("anyOf", "oneOf") if len(schema.get(name) or ()) == 1]
    if kind in ("object", ["object"]):
        needed += [("properties", name) for name in schema.get("required") or () if name in (schema.get("properties") or {})]
    if kind in ("array", ["array"]) and schema.get("minItems", 0) > 0:
        needed += [("prefixItems", 0)] if schema.get("prefixItems") else [("items",)] if "items" in schema else []
    for place in needed:
        value: Any = schema
        for step in place:
            value = value[step]
        if isinstance(value, dict):
            yield value


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == item and type(value) is type(item) for item in values)
