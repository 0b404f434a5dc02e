"""Rules for one argument's value, as the model writes it between its tags: a string bare, anything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.gateway.lark import json_rule, literal
from services.gateway.schema_check import known_draft, validator_of
from services.gateway.schema_parts import Document, Part, kinds_of, narrowed
from services.gateway.schema_places import children
from services.gateway.text_rules import FORMATS, searching, terminal

# Longer texts than this do not end an answer's limits; shorter ones are counted.
_MAX_COUNTED_CHARS = 1_000_000
# How the JSON of a type begins: a bare string that begins so could be read as a value of it.
_BEGINS = {"array": r"\[", "object": r"\{", "integer": "0-9-", "number": "0-9-"}
_DOCUMENT = "whole"
_MAX_RULE_CHOICES = 64


class ValueRules:
    """Makes rules, and adds the terminals that they need to a grammar.

    Args:
        rules: lines of the grammar.
    """

    def __init__(self, rules: list[str]) -> None:
        self._rules = rules
        # Many arguments may refer to one long list: it is read once. Its document is kept with it, so that nothing else has its ids.
        self._lists: dict[tuple[Any, ...], tuple[dict[str, Any], list[str] | None]] = {}
        self._written: dict[tuple[str, ...], list[str]] = {}

    def rule(self, document: Document, parts: Sequence[Part]) -> str | None:
        """A Lark expression for values that satisfy all of `parts`; None when there is no such value.

        Raises:
            UnsupportedParameter: names what cannot be enforced.
        """
        texts: list[list[str]] = []
        others: list[str] = []
        choices: list[str] = []
        lookalikes: set[str] = set()
        for way in document.alternatives(parts):
            kinds = kinds_of(way)
            narrow = narrowed(way, kinds)
            listed = self._listed(document, way)
            if listed is not None:
                choices += listed
                continue
            rest = kinds - {"string"}
            if "string" in kinds:
                text = _expressions(document, way)
                texts += [] if text is None else [text]
            if rest and not ("string" in kinds and not narrow):
                others.append(json_rule(_whole(document, way, rest)))
            lookalikes |= narrow & rest
        rules = list(dict.fromkeys([*self._choices(choices), *others, *(self._terminal(expressions, lookalikes) for expressions in texts)]))
        if not rules:
            return None
        return rules[0] if len(rules) == 1 else f"({' | '.join(rules)})"

    def _listed(self, document: Document, way: list[Part]) -> list[str] | None:
        """The values that a way lists, as the model writes them."""
        key = (id(document.root), *((name, id(value)) for _, schema in way for name, value in schema.items()))
        if key not in self._lists:
            values = _listed(document, way)
            texts = None if values is None else [value if isinstance(value, str) else _text(value) for value in values]
            self._lists[key] = document.root, texts
        return self._lists[key][1]

    def _choices(self, choices: list[str]) -> list[str]:
        key = tuple(choices)
        if key not in self._written:
            self._written[key] = self._rules_of(choices)
        return self._written[key]

    def _rules_of(self, choices: list[str]) -> list[str]:
        written = [literal(choice) or '""' for choice in dict.fromkeys(choices)]
        if len(written) <= _MAX_RULE_CHOICES:
            return written
        # The parser has a bound on what it follows at once; the lexer has not.
        return [*(['""'] if "" in choices else []), self._named(" | ".join(text for text in written if text != '""'))]

    def _terminal(self, expressions: list[str], lookalikes: set[str]) -> str:
        begins = "".join(sorted({_BEGINS[kind] for kind in lookalikes if kind in _BEGINS}))
        if begins:
            expressions = [*expressions, rf"([^\s{begins}](.|\n)*)?"]
        if not expressions:
            return "ANY_TEXT"
        return self._named(terminal(expressions))

    def _named(self, body: str) -> str:
        """The name of a terminal, made when there is none like it yet."""
        for line in self._rules:
            name, _, known = line.partition(": ")
            if name.startswith("TEXT_") and known == body:
                return name
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _listed(document: Document, way: list[Part]) -> list[Any] | None:
    """The values that enum or const list and everything else allows; None when nothing lists values."""
    for place, schema in way:
        if "enum" in schema or "const" in schema:
            candidates = [schema["const"]] if "const" in schema else schema["enum"]
            allows = validator_of(_whole(document, way, None))
            if allows is None:
                document.refuse(place, "lists values beside a pattern by which they cannot be checked")
            return [value for value in candidates if allows.is_valid(value)]
    return None


def _whole(document: Document, way: list[Part], kinds: frozenset[str] | None) -> dict[str, Any]:
    """One schema of a way, complete in itself, of certain types only."""
    schemas = [schema for _, schema in way if schema]
    refers = any(_refers(schema) for schema in schemas)
    if refers:
        schemas = [_moved(schema) for schema in schemas]
    whole = dict(schemas[0]) if len(schemas) == 1 else {"allOf": schemas}
    if kinds is not None:
        whole["type"] = sorted(kinds - {"integer"} if "number" in kinds else kinds)
    if refers:
        whole["$defs"] = {_DOCUMENT: _moved(document.root)}
    draft = known_draft(document.root)
    return whole if draft is None else whole | {"$schema": draft}


def _refers(schema: Any) -> bool:
    return isinstance(schema, dict) and ("$ref" in schema or any(_refers(inner) for _, inner in children(schema)))


def _moved(schema: Any) -> Any:
    """A copy whose references lead into the whole document, which stands among the definitions."""
    if isinstance(schema, list):
        return [_moved(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value) for name, value in schema.items()}
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        moved["$ref"] = f"#/$defs/{_DOCUMENT}{schema['$ref'][1:]}"
    return moved


def _expressions(document: Document, way: list[Part]) -> list[str] | None:
    """Regular expressions that a string must match; None when the lengths contradict each other."""
    found = []
    least, most = 0, None
    for place, schema in way:
        least = max(least, int(schema.get("minLength", 0)))
        if "maxLength" in schema:
            most = min(int(schema["maxLength"]), _MAX_COUNTED_CHARS if most is None else most)
        if least > _MAX_COUNTED_CHARS:
            document.refuse((*place, "minLength"), f"is more than {_MAX_COUNTED_CHARS}, which cannot be enforced")
        if "pattern" in schema:
            expression = searching(schema["pattern"])
            if expression is None:
                document.refuse((*place, "pattern"), "has an anchor inside, which cannot be enforced; put ^ first and $ last")
            found.append(expression)
        if schema.get("format") in FORMATS:
            found.append(FORMATS[schema["format"]])
    if most == _MAX_COUNTED_CHARS:
        most = None
    if most is not None and least > most:
        return None
    if least or most is not None:
        found.insert(0, rf"(.|\n){{{least},{'' if most is None else most}}}")
    return found


def _text(value: Any) -> str:
    """A value that is no string, as the model writes it between its tags."""
    return json.dumps(value, ensure_ascii=False)
