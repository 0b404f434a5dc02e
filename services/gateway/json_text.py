"""JSON that stands as text inside a request: arguments of past calls, schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.numbers import finite, place_of_infinity, refuse_constant, whole

# Templates and grammars walk through values by recursion.
MAX_DEPTH = 100
_PIECE_CHARS = 64 * 1024
_PAIR = re.compile("[\\ud800-\\udbff][\\udc00-\\udfff]")
_HALF = re.compile("[\\ud800-\\udfff]")


def read_json(text: str, path: str, param: str | None = None) -> Any:
    """The value that a text is; halves of surrogate pairs in its strings are replaced, as in bodies.

    Args:
        text: JSON.
        path: where it stands in the request.
        param: the field to blame, if not `path`.

    Raises:
        InvalidRequest: it is no JSON, holds a number that no double holds, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=refuse_constant, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(_reason(text, path, error), param=param or path) from None
    if is_deep(value):
        raise InvalidRequest(f"{path} is nested deeper than {MAX_DEPTH} levels.", param=param or path)
    return encodable(value) if "\\u" in text else value


def encodable(value: Any) -> Any:
    """The value with text that has an encoding: halves of a surrogate pair that stand together are joined, single ones replaced."""
    if isinstance(value, str):
        return value if value.isascii() else "".join(map(_joined, _pieces(value)))
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return value


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that take little time each; none ends in the middle of a pair."""
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARS
        end += "\ud800" <= text[end - 1 : end] <= "\udbff"
        yield text[start:end]
        start = end


def _joined(text: str) -> str:
    whole = _PAIR.sub(lambda pair: pair.group().encode("utf-16", "surrogatepass").decode("utf-16"), text)
    return _HALF.sub("\ufffd", whole)


def is_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """True when lists and objects stand in each other more than `most` levels deep."""
    level = [value]
    for _ in range(most + 1):
        holders = (outer for outer in level if isinstance(outer, dict | list))
        level = [inner for outer in holders for inner in (outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return False
    return True


def _reason(text: str, path: str, error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return f"{path} is nested deeper than {MAX_DEPTH} levels."
    if not isinstance(error, json.JSONDecodeError):
        try:
            found = place_of_infinity(json.loads(text, parse_int=whole))
        except (ValueError, RecursionError):
            return f"{path} holds a number of more digits than any use has."
        if found is not None:
            place, value = found
            return f"{path} holds {value}{f' at {place}' if place else ''}, which is no number that JSON has or that a double holds."
    return f"{path} is not valid JSON: {error}"
