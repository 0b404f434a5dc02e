"""Schemas that hold together and refer to themselves: what the grammar engine cannot end is refused, what it can is not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.schema_endless import endless_together
from tests.gateway.grammars import constraint

LIST = {"type": "array", "items": {"$ref": "#/$defs/List"}}
NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "string"},
        "next": {"$ref": "#/$defs/Node"},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
    },
}
TREE = {"type": "object", "additionalProperties": {"$ref": "#/$defs/Tree"}}
DEFINITIONS = {"List": LIST, "Node": NODE, "Tree": TREE, "Either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/List"}]}}
REF = {name: {"$ref": f"#/$defs/{name}"} for name in DEFINITIONS}


def compiles(schema: dict[str, Any]) -> bool:
    """Whether the engine takes a schema; an error that is not that of endless intersections is raised."""
    try:
        constraint(pb.Grammar(json_schema=json.dumps(schema)))
    except InvalidRequest as error:
        if "intersection stack level" not in error.message:
            raise
        return False
    return True


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [REF["List"], REF["List"]]},
        {"allOf": [REF["List"], {"type": "array", "items": REF["List"]}]},
        {"allOf": [{"properties": {"a": REF["Node"]}}, {"properties": {"a": REF["Node"]}}], "type": "object"},
        {"allOf": [REF["Either"], REF["List"]]},
        {"$ref": "#/$defs/Node", "properties": {"next": REF["Node"]}},
        {"allOf": [REF["Tree"], {"type": "object", "properties": {"a": REF["Tree"]}}]},
        {"anyOf": [{"type": "string"}, {"allOf": [REF["Node"], {"type": "object", "properties": {"kids": {"items": REF["Node"]}}}]}]},
        {"allOf": [{"type": "array", "prefixItems": [{"type": "string"}, REF["List"]]}, REF["List"]]},
    ],
)
def test_what_comes_to_no_end_is_found(schema: dict[str, Any]) -> None:
    """And the engine does not take it: the refusal is no more than the truth."""
    whole = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    place = endless_together(whole)
    assert place is not None
    assert place[:2] == ("properties", "a")
    assert not compiles(whole)


@pytest.mark.parametrize(
    "schema",
    [
        REF["Node"],
        {"allOf": [REF["Node"], {"type": "object", "properties": {"more": {"type": "integer"}}, "required": ["more"]}]},
        {"allOf": [REF["List"], {"type": "array", "items": {"type": "array", "maxItems": 1}}]},
        {"allOf": [{"type": "object", "properties": {"a": REF["Node"]}}, {"type": "object", "properties": {"b": REF["Node"]}}]},
        {"anyOf": [REF["List"], REF["Node"], REF["Tree"]]},
        {"allOf": [REF["Node"]], "description": "a node"},
        {"type": "array", "prefixItems": [REF["Node"], REF["List"]], "items": REF["Either"]},
    ],
)
def test_what_the_engine_can_do_is_left_alone(schema: dict[str, Any]) -> None:
    """A base with more properties, references side by side, alternatives."""
    whole = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    assert endless_together(whole) is None
    assert compiles(whole)


def test_a_large_schema_is_read_in_time() -> None:
    """Thousands of references to thousands of alternatives, of branches inside branches: none takes more than a moment of the gateway."""
    many = {f"p{i}": REF["Node"] for i in range(3000)}
    branches = [{**REF["Node"], "title": str(i)} for i in range(3000)]
    deep: dict[str, Any] = REF["Node"]
    nested: dict[str, Any] = REF["Node"]
    for _ in range(3000):
        deep, nested = {"type": "array", "items": deep}, {"allOf": [nested]}
    listed = {f"p{i}": {"$ref": "#/$defs/Branches"} for i in range(3000)}
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"type": "object", "properties": many}, False),
        ({"type": "object", "properties": listed}, False),
        (deep, False),
        (nested, False),
        ({"allOf": [{"type": "object", "properties": {f"{i}.{j}": REF["Node"] for j in range(100)}} for i in range(20)]}, False),
        ({"allOf": [{"anyOf": branches}, {"anyOf": branches}]}, True),
        ({"allOf": [{"type": "object", "properties": many}, {"type": "object", "properties": many}]}, True),
        ({"allOf": [{"type": "object", "properties": {f"p{i}": REF["Node"]}} for i in range(3000)]}, True),  # too much to tell
    ]
    for schema, found in cases:
        began = time.process_time()
        whole = {"properties": {"a": schema}, "$defs": {**DEFINITIONS, "Branches": {"anyOf": branches}}}
        assert (endless_together(whole) is not None) == found
        assert time.process_time() - began < 3
