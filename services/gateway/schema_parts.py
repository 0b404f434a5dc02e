"""A schema taken apart: the plain schemas that must hold together, one list for each alternative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from services.common.errors import UnsupportedParameter
from services.gateway.schema_places import Path, target, written

ALL_KINDS = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAX_ALTERNATIVES = 64

# A place and what stands there: an object, true or false.
Part = tuple[Path, Any]


class Document:
    """A valid schema whose parts reference each other.

    Args:
        root: the schema.
        path: where it stands in the request.
        advice: what a client can do where something cannot be enforced.
    """

    def __init__(self, root: dict[str, Any], path: str, advice: str) -> None:
        self.root = root
        self._path = path
        self._advice = advice

    def refuse(self, place: Path, why: str) -> NoReturn:
        """Raises `UnsupportedParameter` for a place."""
        where = written(self._path, *place)
        raise UnsupportedParameter(f"{where} {why}; {self._advice}.", param=where)

    def alternatives(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Ways to satisfy all of `parts`: lists of schemas without $ref, allOf, anyOf and oneOf that must hold together.

        A ``oneOf`` counts as ``anyOf``. A way that holds ``false`` is none.

        Raises:
            UnsupportedParameter: there are too many.
        """
        done: list[list[Part]] = []
        waiting: list[tuple[list[Part], list[Part]]] = [([], list(parts))]
        while waiting:
            plain, open_parts = waiting.pop()
            while open_parts:
                place, schema = open_parts.pop(0)
                if schema is False:
                    break
                if not isinstance(schema, dict):
                    continue
                found = target(self.root, schema["$ref"]) if "$ref" in schema else None
                open_parts = [*self._inner(place, schema, "allOf"), *open_parts]
                if found is not None:
                    open_parts.insert(0, found)
                choices = [branches for name in ("anyOf", "oneOf") if (branches := self._inner(place, schema, name))]
                rest = {name: value for name, value in schema.items() if name not in ("$ref", "allOf", "anyOf", "oneOf")}
                plain = [*plain, (place, rest)]
                if choices:
                    others = [(place, {"anyOf": [branch for _, branch in choices[1]]})] if len(choices) > 1 else []
                    waiting += [(plain, [branch, *others, *open_parts]) for branch in reversed(choices[0])]
                    break
            else:
                done.append(plain)
            if len(done) + len(waiting) > _MAX_ALTERNATIVES:
                self.refuse(parts[0][0], f"has more than {_MAX_ALTERNATIVES} alternatives, which cannot be enforced")
        return done

    def _inner(self, place: Path, schema: dict[str, Any], name: str) -> list[Part]:
        return [((*place, name, index), inner) for index, inner in enumerate(schema.get(name) or ())]


def kinds_of(parts: Sequence[Part]) -> frozenset[str]:
    """JSON types that all of the plain schemas allow; ``number`` takes ``integer`` along."""
    kinds = set(ALL_KINDS)
    for _, schema in parts:
        if isinstance(schema, dict) and "type" in schema:
            declared = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
            kinds &= declared | ({"integer"} if "number" in declared else set())
    return frozenset(kinds)


# Keywords that narrow a type of their own.
_NARROWING = {
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "object": ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    "string": ("minLength", "maxLength", "pattern", "format"),
}


def narrowed(parts: Sequence[Part], kinds: frozenset[str]) -> frozenset[str]:
    """Those of `kinds` of which not every value will do."""
    given = {name for _, schema in parts if isinstance(schema, dict) for name in schema}
    if given & {"enum", "const"}:
        return kinds
    return frozenset(kind for kind in kinds if given & set(_NARROWING.get(kind, ())))
