"""Whether the tools that a request declares can be told apart and have sound schemas."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.gateway.beside import beside
from services.gateway.json_text import MAX_DEPTH, is_deep
from services.gateway.schema_check import check_schema
from services.gateway.schema_places import target

# Agents send the same tools with every request: what was sound stays so.
_MAX_KNOWN = 4096
_known: OrderedDict[bytes, None] = OrderedDict()


# What is longer is checked beside the event loop.
_SMALL_BYTES = 20_000


def check_names(tools: Sequence[dict[str, Any]]) -> None:
    """Checks that tools can be told apart, and can be walked through.

    Args:
        tools: OpenAI's, of the right types.

    Raises:
        InvalidRequest: names the tool.
    """
    first: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in first:
            path = f"tools[{index}].function.name"
            raise InvalidRequest(f"{path} is {name!r}, as of tools[{first[name]}]; calls could not tell them apart.", param=path)
        first[name] = index
        rest = {key: value for key, value in tool["function"].items() if key != "parameters"}
        parts = {"": tool | {"function": None}, ".function": rest, ".function.parameters": tool["function"].get("parameters")}
        for part, value in parts.items():
            if is_deep(value):
                path = f"tools[{index}]{part}"
                raise InvalidRequest(f"{path} is nested deeper than {MAX_DEPTH} levels.", param=path)


async def check_schemas(tools: Sequence[dict[str, Any]]) -> None:
    """Checks the schemas of tools whose names are checked.

    Raises:
        InvalidRequest: names the place.
    """
    for index, tool in enumerate(tools):
        parameters = tool["function"].get("parameters")
        if parameters:
            await _check_parameters(parameters, f"tools[{index}].function.parameters")


async def _check_parameters(parameters: dict[str, Any], path: str) -> None:
    encoded = _encoded(parameters)
    key = hashlib.blake2b(encoded, digest_size=16).digest() if encoded is not None else None
    if key is not None and key in _known:
        with contextlib.suppress(KeyError):
            # Another thread may have let it go just now.
            _known.move_to_end(key)
        return
    if encoded is not None and len(encoded) < _SMALL_BYTES:
        check_schema(parameters, path)
    else:
        await beside(check_schema, parameters, path)
    _check_object(parameters, path)
    if key is not None:
        _known[key] = None
        if len(_known) > _MAX_KNOWN:
            _known.popitem(last=False)


def _check_object(parameters: dict[str, Any], path: str) -> None:
    """Arguments are named values: their schema is one of an object."""
    schema: Any = parameters
    while isinstance(schema, dict) and "type" not in schema and "$ref" in schema:
        schema = (target(parameters, schema["$ref"]) or ((), None))[1]
    kinds = schema.get("type", "object") if isinstance(schema, dict) else "object"
    if kinds != "object" and "object" not in kinds:
        raise InvalidRequest(f'{path}.type must be "object": a tool\'s arguments have names.', param=f"{path}.type")


def _encoded(parameters: dict[str, Any]) -> bytes | None:
    try:
        return orjson.dumps(parameters)
    except (TypeError, ValueError):
        # Numbers that are beyond 64 bits, or nested too deeply for the encoder.
        return None
