"""Whether a client's JSON schema is one: its keywords by the metaschema, its references, its size. Errors name the place at fault."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import jsonschema_rs

from services.common.errors import InvalidRequest
from services.gateway.schema_places import LISTS, MAPS, ONE, Path, children, in_place, target, written

_DRAFT_4, _DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"
_NEWEST = "https://json-schema.org/draft/2020-12/schema"
_DRAFTS = (_NEWEST, "https://json-schema.org/draft/2019-09/schema", _DRAFT_7, "http://json-schema.org/draft-06/schema#", _DRAFT_4)
_KNOWN = {draft.partition("://")[2].rstrip("#"): draft for draft in _DRAFTS}
_MAX_DEPTH = 100
_MAX_VALUES = 100_000
_MAX_SCHEMAS = 5_000

# Of all expressions of Python's in one schema: a class of characters that ignores case costs it 5 ms.
_MAX_PYTHON_CHARS = 4000
# The library reads patterns in quadratic time and lets nobody else run meanwhile: 4000 characters are seconds.
_MAX_VALIDATOR_CHARS = 1000
_IS_REGEX = jsonschema_rs.validator_for({"format": "regex"}, validate_formats=True, offline=True)

_NAMES = "a list of property names, each of them once"
_SCHEMA = "a schema: an object, true or false"
_SCHEMAS = "a list of schemas, at least one"
_NAMED = "an object whose values are schemas"
_COUNT = "a whole number, 0 or more"
_WANTED = {
    "type": 'one of "array", "boolean", "integer", "null", "number", "object" and "string", or a list of them, each once',
    "required": _NAMES,
    "enum": "a list of values, at least one",
    "dependentRequired": "an object whose values are lists of property names",
    "multipleOf": "a number above 0",
    "examples": "a list",
    "pattern": "a regular expression",
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"), _NAMED),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum"), "a number"),
    **dict.fromkeys(("deprecated", "readOnly", "uniqueItems", "writeOnly"), "true or false"),
    **dict.fromkeys(("title", "description", "format", "$comment", "$id", "$ref", "$schema"), "a string"),
    **{f"{end}{what}": _COUNT for end in ("min", "max") for what in ("Contains", "Items", "Length", "Properties")},
}


def check_schema(schema: dict[str, Any], path: str, param: str | None = None) -> None:
    """Checks that a schema is valid and complete in itself.

    Args:
        schema: as the client sent it.
        path: where it stands in the request.
        param: the field to blame; None for the very place at fault.

    Raises:
        InvalidRequest: names the place, what stands there and what should.
    """
    _Check(schema, path, param).run()


def known_draft(schema: dict[str, Any]) -> str | None:
    """The draft that a schema says it is of; None when it does not say, or names none that exists."""
    named = schema.get("$schema")
    return _KNOWN.get(named.partition("://")[2].rstrip("#")) if isinstance(named, str) else None


class Validator(Protocol):
    """What a compiled schema can be asked."""

    def is_valid(self, instance: Any) -> bool:
        """Whether a value fits."""


def validator_of(schema: dict[str, Any]) -> Validator | None:
    """What says whether a value fits a valid schema; its patterns take time in proportion to the text.

    Returns:
        None for a pattern that cannot be searched so, or that would take too much memory; for patterns of more than 1000 characters.
    """
    if _pattern_chars(schema) > _MAX_VALIDATOR_CHARS:
        return None
    schema = {name: value for name, value in schema.items() if name != "$schema"} if known_draft(schema) is None else schema
    for make in (jsonschema_rs.validator_for, jsonschema_rs.Draft7Validator, jsonschema_rs.Draft4Validator):
        with contextlib.suppress(jsonschema_rs.ValidationError):
            return make(schema, offline=True, pattern_options=jsonschema_rs.RegexOptions())
    return None


def _pattern_chars(schema: dict[str, Any]) -> int:
    count = 0
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            patterns = value.get("patternProperties")
            count += sum(map(len, patterns)) if isinstance(patterns, dict) else 0
            count += len(value["pattern"]) if isinstance(value.get("pattern"), str) else 0
            value = value.values()
        waiting += [inner for inner in value if isinstance(inner, dict | list)]
    return count


@dataclass
class _Check:
    root: dict[str, Any]
    path: str
    param: str | None
    _python_chars: int = 0

    def run(self) -> None:
        self._size()
        self._keywords(self.root, ())
        schemas = self._schemas()
        if not any("$ref" in schema for _, schema in schemas):
            return
        places = {id(schema): place for place, schema in schemas}
        cycle = find_cycle(self.root, lambda schema: _same_value(self.root, schema))
        if cycle is not None:
            place = next(places[id(schema)] for schema in cycle if "$ref" in schema)
            self._refuse((*place, "$ref"), "leads back to itself without a value in between; let it lead to a schema that has a type")

    def _size(self) -> None:
        """Bounds what everything after this walks through."""
        level: list[Any] = [self.root]
        count = depth = 0
        while level:
            count, depth = count + len(level), depth + 1
            if depth > _MAX_DEPTH:
                self._refuse((), f"is nested deeper than {_MAX_DEPTH} levels")
            inner: list[Any] = []
            for value in level:
                inner += value.values() if isinstance(value, dict) else value
            level = [value for value in inner if isinstance(value, dict | list)]
            count += len(inner) - len(level)
            if count + len(level) > _MAX_VALUES:
                self._refuse((), f"holds more than {_MAX_VALUES} values")

    def _keywords(self, schema: dict[str, Any], place: Path) -> None:
        """The metaschema's word on a schema and all that stands in it."""
        draft = known_draft(schema) or known_draft(self.root)
        error = _first_error(schema, draft or _NEWEST)
        if error is None:
            return
        at = tuple(error.instance_path)
        keyword = _keyword(at)
        value: Any = schema
        for step in at:
            value = value[step]
        # Ways of older drafts that clients write without naming the draft.
        older = _DRAFT_7 if at[-1:] == ("items",) and isinstance(value, list) else None
        older = _DRAFT_4 if keyword in ("exclusiveMaximum", "exclusiveMinimum") and isinstance(value, bool) else older
        if draft is None and older is not None and _first_error(schema, older) is None:
            return
        self._wrong((*place, *at), value, _SCHEMA if keyword is None else _WANTED.get(keyword, "what the JSON Schema specification says"))

    def _schemas(self) -> list[tuple[Path, dict[str, Any]]]:
        """Every schema with its place; those that only references lead to are checked by themselves."""
        found: list[tuple[Path, dict[str, Any]]] = []
        references: list[tuple[str, Path]] = []
        waiting: list[tuple[Path, Any]] = [((), self.root)]
        seen = set()
        while waiting or references:
            if not waiting:
                referred_to = self._follow(*references.pop())
                if isinstance(referred_to[1], dict) and id(referred_to[1]) not in seen:
                    # It stands under a name that no metaschema knows.
                    self._keywords(referred_to[1], referred_to[0])
                    waiting.append(referred_to)
                continue
            place, schema = waiting.pop()
            if not isinstance(schema, dict):
                continue
            seen.add(id(schema))
            found.append((place, schema))
            if len(found) > _MAX_SCHEMAS:
                self._refuse((), f"holds more than {_MAX_SCHEMAS} schemas")
            self._values(schema, place)
            if "$ref" in schema:
                references.append((schema["$ref"], place))
            waiting += [((*place, *inner), child) for inner, child in children(schema)]
        return found

    def _values(self, schema: dict[str, Any], place: Path) -> None:
        """What the metaschema does not say."""
        if schema.get("enum") == []:
            self._wrong((*place, "enum"), [], _WANTED["enum"])
        if not isinstance(schema.get("$ref", ""), str):
            self._wrong((*place, "$ref"), schema["$ref"], _WANTED["$ref"])
        self._patterns(schema, place)

    def _patterns(self, schema: dict[str, Any], place: Path) -> None:
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and not self._is_regex(pattern, (*place, "pattern")):
            self._wrong((*place, "pattern"), pattern, _WANTED["pattern"])
        patterns = schema.get("patternProperties")
        for pattern in patterns if isinstance(patterns, dict) else ():
            if not self._is_regex(pattern, (*place, "patternProperties")):
                self._refuse((*place, "patternProperties"), f"has the name {_shown(pattern)}; names must be regular expressions")

    def _is_regex(self, pattern: str, place: Path) -> bool:
        """True for an expression of JavaScript's, which JSON Schema means, or of Python's, in which many servers of tools write theirs."""
        if _IS_REGEX.is_valid(pattern):
            return True
        self._python_chars += len(pattern)
        if self._python_chars > _MAX_PYTHON_CHARS:
            self._refuse(place, f"is no expression of JavaScript's; other languages' may have {_MAX_PYTHON_CHARS} characters in all")
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            return False
        return True

    def _follow(self, reference: str, place: Path) -> tuple[Path, Any]:
        where = (*place, "$ref")
        if reference != "#" and not reference.startswith("#/"):
            self._refuse(where, f"is {_shown(reference)}; only JSON pointers into the schema itself are followed, such as #/$defs/Name")
        found = target(self.root, reference)
        if found is None:
            self._refuse(where, f"is {_shown(reference)}, which leads nowhere; it must lead to a schema, as #/$defs/Name does")
        if not isinstance(found[1], dict | bool):
            self._refuse(where, f"is {_shown(reference)}, which leads to {_shown(found[1])}; it must lead to {_SCHEMA}")
        return found

    def _wrong(self, place: Path, value: Any, wanted: str) -> NoReturn:
        self._refuse(place, f"is {_shown(value)}; it must be {wanted}")

    def _refuse(self, place: Path, what: str) -> NoReturn:
        where = written(self.path, *place)
        raise InvalidRequest(f"{where} {what}.", param=self.param or where)


def _first_error(schema: dict[str, Any], draft: str) -> jsonschema_rs.ValidationError | None:
    try:
        # Never as the client names it: the library would ask the network for a draft that it does not know.
        jsonschema_rs.meta.validate({**schema, "$schema": draft} if isinstance(schema.get("$schema", ""), str) else schema)
    except jsonschema_rs.ValidationError as error:
        return error
    return None


def _keyword(place: Path) -> str | None:
    """The keyword whose value stands at a place or around it; None where a schema should stand."""
    keyword: str | None = None
    named = False
    for step in place:
        if named:
            keyword, named = None, False
        elif isinstance(step, int):
            keyword = None if keyword in LISTS else keyword
        elif keyword is None or keyword in ONE:
            keyword, named = step, step in MAPS
    return None if keyword in ONE else keyword


def _same_value(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that must be asked about a value before `schema` has an answer."""
    yield from (inner for _, inner in in_place(schema))
    yield from referred(root, schema)


def referred(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema that a schema's ``$ref`` leads to, if it has one."""
    reference = schema.get("$ref")
    found = target(root, reference) if isinstance(reference, str) else None
    if found is not None and isinstance(found[1], dict):
        yield found[1]


def find_cycle(root: dict[str, Any], edges: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """A way from a schema back to itself along `edges`, starting anywhere in the document; None when there is none."""
    done: set[int] = set()
    waiting: list[Any] = [root]
    seen: set[int] = set()
    while waiting:
        start = waiting.pop()
        if not isinstance(start, dict) or id(start) in seen:
            continue
        seen.add(id(start))
        waiting += [inner for _, inner in children(start)]
        waiting += referred(root, start)
        way: list[dict[str, Any]] = []
        open_edges: list[Iterator[dict[str, Any]]] = [iter((start,))]
        on_way: set[int] = set()
        while open_edges:
            following = next(open_edges[-1], None)
            if following is None:
                open_edges.pop()
                if way:
                    left = way.pop()
                    on_way.discard(id(left))
                    done.add(id(left))
            elif id(following) in on_way:
                return way[[id(schema) for schema in way].index(id(following)) :]
            elif id(following) not in done:
                way.append(following)
                on_way.add(id(following))
                open_edges.append(edges(following))
    return None


def _shown(value: Any) -> str:
    """A value in a few characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list) and (len(value) > 4 or any(isinstance(item, dict | list) for item in value)):
        return "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
