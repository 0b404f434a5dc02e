"""Arguments: text and schema → JSON values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tool_schema import ArgumentSchema, ToolSchemas

DEFS = {"$defs": {"Id": {"type": "integer"}, "Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b~c": {"type": "boolean"}}}


def value_of(schema: Any, text: str) -> Any:
    return ArgumentSchema(schema, DEFS).value_of(text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, ' "a" ', ' "a" '),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, " 3\n", 3),
        ({"type": "integer"}, '"3"', 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "7", 7),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "-Infinity", "-Infinity"),
        ({"type": "number"}, "00501", "00501"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "boolean"}, '"false"', False),
        ({"type": "null"}, "null", None),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, '["Ada","Bo"]', ["Ada", "Bo"]),
        ({"type": "array"}, '["Ada"', '["Ada"'),
        ({"type": "array"}, "[1e999]", "[1e999]"),
        ({"type": "object"}, '{"k":{"m":[1,2]}}', {"k": {"m": [1, 2]}}),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "null"]}, "Smith", "Smith"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "12a", "12a"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"oneOf": [{"type": "number"}, {"type": "boolean"}]}, "false", False),
        ({"allOf": [{"type": ["string", "number"]}, {"type": "number"}]}, "12", 12),
        ({"anyOf": [{"$ref": "#/$defs/Id"}, {"type": "null"}]}, "12", 12),
        ({"$ref": "#/$defs/Id"}, "12", 12),
        ({"$ref": "#/$defs/Name"}, "12", "12"),
        ({"$ref": "#/$defs/a~1b~0c"}, "true", True),
        ({"$ref": "#/$defs/Nowhere"}, "12", 12),
        ({"$ref": "https://example.com/x"}, "12", 12),
        ({"$ref": "#/$defs/Loop"}, "12", 12),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": [None, "x"]}, "null", None),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"type": "number", "enum": [1, 2]}, "2", 2),
        ({}, "12", 12),
        ({}, "true", True),
        ({}, "null", None),
        ({}, "[1]", [1]),
        ({}, '"quoted"', '"quoted"'),
        ({}, "123abc", "123abc"),
        ({}, "", ""),
        (True, "12", 12),
        ("nonsense", "12", 12),
        ({"type": 7, "enum": "x", "anyOf": 3}, "12", 12),
    ],
)
def test_values(schema: Any, text: str, value: Any) -> None:
    """The schema decides; what does not fit stays the string that the model wrote."""
    found = value_of(schema, text)
    assert found == value
    assert type(found) is type(value)


def tool(parameters: Any) -> ToolSchemas:
    return ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


@pytest.mark.parametrize(
    ("parameters", "types"),
    [
        ({"properties": {"x": {"type": "integer"}}}, {"integer"}),
        ({"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"x": {"type": "integer"}}}}}, {"integer"}),
        ({"allOf": [{"properties": {"y": {}}}, {"properties": {"x": {"type": "integer"}}}]}, {"integer"}),
        ({"properties": {}, "additionalProperties": {"type": "integer"}}, {"integer"}),
        ({"properties": {"y": {"type": "integer"}}}, None),
        ({}, None),
        (None, None),
    ],
)
def test_an_arguments_schema_is_found_wherever_it_stands(parameters: Any, types: set[str] | None) -> None:
    """Properties are found through references, branches and additionalProperties; an unknown key has no type."""
    assert tool(parameters).argument_schema("f", "x").types == types


def test_a_schema_that_refers_to_itself_ends() -> None:
    """Recursive schemas with branching references cost a bounded time."""
    branch = {"$ref": "#/$defs/A"}
    root = {"$defs": {"A": {"anyOf": [branch] * 8, "oneOf": [branch] * 8, "allOf": [branch] * 8}}, "properties": {"x": branch}}
    assert tool(root).argument_schema("f", "x").value_of("12") == 12
    assert tool(root["$defs"]["A"] | {"$defs": root["$defs"]}).argument_schema("f", "x").value_of("12") == 12


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_json_value_that_is_no_string_survives_without_a_schema(value: Any) -> None:
    """A literal comes back as itself; a JSON string stays quoted text."""
    text = json.dumps(value)
    assert value_of({}, text) == (text if isinstance(value, str) else value)


@given(JSON, st.text(max_size=20))
def test_no_schema_is_an_error(schema: Any, text: str) -> None:
    """Whatever JSON a client sends as a schema, an argument gets a value that JSON can hold."""
    for found in (value_of(schema, text), tool(schema).argument_schema("f", "x").value_of(text)):
        json.dumps(found, allow_nan=False)
