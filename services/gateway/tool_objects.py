"""The arguments that a tool's schema describes: which keys there are, which must be there, what their values are."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.schema_parts import Document, Part


@dataclass(frozen=True)
class ObjectWay:
    """One way to satisfy a schema of an object.

    Attributes:
        properties: key → the schemas that its value must satisfy, in the order of the schema.
        required: the keys that must be there.
        extra: schema of values under other keys; None when there may be none.
    """

    properties: dict[str, list[Part]]
    required: frozenset[str]
    extra: Part | None


def object_ways(document: Document) -> list[ObjectWay]:
    """All ways, of which one at least must do.

    Raises:
        UnsupportedParameter: names what cannot be enforced, or that nothing can satisfy the schema.
    """
    ways = document.alternatives([((), document.root)])
    if not ways:
        document.refuse((), "allows no arguments at all")
    return [_way(document, parts) for parts in ways]


def _way(document: Document, parts: list[Part]) -> ObjectWay:
    properties: dict[str, list[Part]] = {}
    required: dict[str, None] = {}
    for place, schema in parts:
        for name in ("const", "enum"):
            if name in schema:
                document.refuse((*place, name), "cannot be enforced on all arguments together")
        if schema.get("patternProperties"):
            document.refuse((*place, "patternProperties"), "cannot be enforced on a tool's arguments")
        required |= dict.fromkeys(schema.get("required") or ())
        for key, inner in (schema.get("properties") or {}).items():
            properties.setdefault(key, []).append(((*place, "properties", key), inner))
    extra: Part | None = ((), True)
    for place, schema in parts:
        if "additionalProperties" not in schema:
            continue
        own, others = schema.get("properties") or {}, schema["additionalProperties"]
        where = (*place, "additionalProperties")
        for key in properties.keys() - own.keys():
            properties[key].append((where, others))
        extra = (where, others) if others is not False else None
    for key in required:
        if key not in properties:
            if extra is None:
                document.refuse((*parts[0][0], "required"), f"names {key[:60]!r}, which additionalProperties does not allow")
            properties[key] = [extra]
    _check_counts(document, parts, len(properties), len(required))
    return ObjectWay(properties, frozenset(required), extra)


def _check_counts(document: Document, parts: list[Part], most: int, least: int) -> None:
    for place, schema in parts:
        if schema.get("minProperties", 0) > least:
            document.refuse((*place, "minProperties"), "cannot be enforced on a tool's arguments; require enough of them")
        if schema.get("maxProperties", most) < most or ("maxProperties" in schema and not most):
            document.refuse((*place, "maxProperties"), "cannot be enforced on a tool's arguments")
