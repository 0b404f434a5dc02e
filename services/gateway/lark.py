"""Pieces of the Lark grammars that the worker follows."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.schema_support import for_grammar

# Anything at all, control tokens excepted.
ANY_TEXT = r"/(.|\n)*/"
# Between JSON's tokens may stand one space, or a line break with indentation. A oneOf is held as an anyOf.
_JSON_OPTIONS = {"lenient": False, "coerce_one_of": True, "whitespace_pattern": r"( |\n[ \t]{0,32})"}


def literal(text: str) -> str:
    """A text as a Lark string; nothing for no text."""
    return json.dumps(text) if text else ""


def json_rule(schema: dict[str, Any]) -> str:
    """A Lark expression for JSON of a valid schema that `check_support` has let through."""
    return f"%json {json.dumps(for_grammar(schema) | {'x-guidance': _JSON_OPTIONS})}"
