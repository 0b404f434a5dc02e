"""Where schemas stand inside a JSON schema, how such a place is written, and where a reference leads."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

_ONE = """additionalItems additionalProperties contains contentSchema else if items not propertyNames then unevaluatedItems
unevaluatedProperties"""
_LISTS = "allOf anyOf items oneOf prefixItems"
_MAPS = "$defs definitions dependencies dependentSchemas patternProperties properties"
ONE, LISTS, MAPS = (frozenset(names.split()) for names in (_ONE, _LISTS, _MAPS))
# Keywords whose schemas speak of the very value that the schema around them speaks of.
_IN_PLACE = frozenset(("allOf", "anyOf", "dependentSchemas", "else", "if", "not", "oneOf", "then"))

_PLAIN = re.compile(r"[A-Za-z0-9_$-]+")
_MAX_NAME = 60


def children(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The schemas directly inside a schema, each with its place; the metaschema says whether they are any."""
    for name, value in schema.items():
        if isinstance(value, dict):
            if name in ONE:
                yield (name,), value
            elif name in MAPS:
                for key, inner in value.items():
                    yield (name, key), inner
        elif isinstance(value, list) and name in LISTS:
            for index, inner in enumerate(value):
                yield (name, index), inner


def in_place(schema: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The schemas inside a schema that speak of the same value as it does."""
    return ((place, inner) for place, inner in children(schema) if place[0] in _IN_PLACE and isinstance(inner, dict))


def written(path: str, *places: str | int) -> str:
    """A place as clients read it: ``tools[0].function.parameters.properties["a b"].type``."""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif _PLAIN.fullmatch(place) and len(place) <= _MAX_NAME:
            path += f".{place}"
        else:
            shown = place if len(place) <= _MAX_NAME else place[:_MAX_NAME] + "…"
            path += '["' + shown.replace("\\", "\\\\").replace('"', '\\"') + '"]'
    return path


def target(root: Any, reference: str) -> tuple[Path, Any] | None:
    """Where a reference inside the document leads, with what stands there; None when it leads nowhere or out of the document.

    Args:
        root: the document.
        reference: the text of a ``$ref``: ``#``, or a JSON pointer as in ``#/$defs/Point``.
    """
    if reference != "#" and not reference.startswith("#/"):
        return None
    fragment = urllib.parse.unquote(reference[1:])
    places: list[str | int] = []
    found = root
    for part in fragment.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < 10 and int(name) < len(found):
            places.append(int(name))
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            places.append(name)
            found = found[name]
        else:
            return None
    return tuple(places), found
