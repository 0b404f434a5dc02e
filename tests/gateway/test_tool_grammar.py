"""Calls under a grammar: whatever a model would rather write, its arguments satisfy the schema, or the schema was refused by its place."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import UnsupportedParameter
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.constraints import Wanted, spelled_out
from services.gateway.deltas import Message
from services.gateway.parser import OutputParser, parse_all
from services.gateway.prompt import PromptTail
from services.gateway.text_rules import FORMATS, searching
from services.gateway.tool_grammar import CallStyle, DeclaredTool, ToolGrammar
from services.gateway.tool_schema import ToolSchemas
from tests.gateway.grammars import accepts, write
from tests.gateway.language import IDS, VOCABULARY
from tests.gateway.test_formats import NOW, WEATHER, tools

LINES = CallStyle("\n", "\n", "\n")
STYLES = pytest.mark.parametrize("style", [CallStyle(), LINES], ids=["compact", "with line breaks"])


def grammar(parameters: dict[str, Any], style: CallStyle = CallStyle(), *, must_hold: bool = True) -> pb.Grammar:
    tool = DeclaredTool("f", parameters, "tools[0].function.parameters", must_hold)
    made = Wanted("lark", ToolGrammar([tool], IDS, style).calls(several=False), "tool_choice")
    return pb.Grammar(lark=spelled_out(made, IDS).text)


def call(*arguments: tuple[str, str]) -> str:
    return "<tool_call>f" + "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments) + "</tool_call>"


def parsed(functions: list[dict[str, Any]], tokens: list[tuple[int, bytes]]) -> Message:
    parser = OutputParser(VOCABULARY, PromptTail.CONTENT, ToolSchemas(tools(*functions)))
    message = Message()
    for delta in parse_all(parser, tokens, stopped=True):
        message.add(delta)
    return message


@STYLES
def test_noise_becomes_calls_that_keep_to_their_schemas(style: CallStyle) -> None:
    """Under the grammar of forced calls, any preferences of the model become complete calls whose arguments satisfy their schemas."""
    functions = [WEATHER, NOW, {"name": "nothing", "parameters": {"type": "object", "additionalProperties": False}}]
    declared = [DeclaredTool(function["name"], function.get("parameters", {}), "x") for function in functions]
    text = ToolGrammar(declared, IDS, style).calls(several=True)
    ended, seen = 0, set()
    for seed in range(40):
        tokens = write(pb.Grammar(lark=text), seed)
        if tokens is None:
            continue
        ended += 1
        message = parsed(functions, tokens)
        assert message.content.strip() == ""
        assert message.tool_calls
        for made in message.tool_calls:
            seen.add(made.name)
            arguments = json.loads(made.arguments)
            schema = next(function for function in functions if function["name"] == made.name).get("parameters", {})
            jsonschema_rs.validate(schema, arguments)
            if made.name == "get_weather":
                assert set(arguments) <= set(WEATHER["parameters"]["properties"])
    assert ended >= 25
    assert seen == {"get_weather", "now", "nothing"}


TREE = {"$defs": {"T": {"type": "object", "properties": {"k": {"type": "array", "items": {"$ref": "#/$defs/T"}}}, "required": ["k"]}}}
# schema of the argument x, texts that fit, texts that do not, what else the parameters hold
VALUES: list[tuple[Any, list[str], list[str], dict[str, Any]]] = [
    ({}, ["", "a b\n", "5"], [], {}),
    (True, ["a"], [], {}),
    ({"type": "string"}, ["", "5", "null"], [], {}),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["", "a", "abcd"], {}),
    ({"type": "string", "minLength": 5000}, [], ["", "a"], {}),
    ({"type": "string", "maxLength": 10**9}, ["a"], [], {}),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["", "A", "a1", "a\n"], {}),
    ({"type": "string", "pattern": "[0-9]/"}, ["a1/b", "1/"], ["1", ""], {}),
    ({"type": "string", "pattern": "(?i)abc"}, ["xABCx", "abc"], ["abd"], {}),
    ({"type": "string", "pattern": "((a{100}){100}){100}"}, [], ["a", ""], {}),
    ({"type": "string", "pattern": "^a|b$|^c$"}, ["axx", "xxb", "c"], ["xx", "cc"], {}),
    ({"type": "string", "pattern": r"^\^[[&~]\$$"}, ["^[$", "^&$"], ["x", "^a$"], {}),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ["a", "aa"], ["aaa", "b"], {}),
    ({"type": "string", "format": "something-else"}, ["anything"], [], {}),
    ({"type": ["string", "null"], "maxLength": 2}, ["a", "null", ""], ["aaa", "nul"], {}),
    ({"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}]}, ["ab", "null"], ["b", ""], {}),
    ({"type": "integer", "minimum": 3}, ["3", "40"], ["2", "x", "", "3.5"], {}),
    ({"type": ["string", "integer"], "minimum": 30}, ["40", "x", ""], ["2", " 5", "-1"], {}),
    ({"type": ["string", "integer"]}, ["40", "x", "-1"], [], {}),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["a", '["b"]', "5"], ["[1]", "["], {}),
    ({"type": "boolean"}, ["true", "false"], ["True", "1", ""], {}),
    ({"enum": ["a", 1, None, {"b": [1]}, ""]}, ["a", "1", "null", '{"b": [1]}', ""], ["b", "2"], {}),
    ({"enum": ["a", 1], "type": "integer"}, ["1"], ["a"], {}),
    ({"enum": [str(i) for i in range(3000)] + ["", "ab"]}, ["0", "2999", "", "ab"], ["3000", "a"], {}),
    ({"const": "x"}, ["x"], ["y"], {}),
    ({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["b"], ["a", "c"], {}),
    ({"anyOf": [{"enum": ["a"]}, {"type": "integer"}]}, ["a", "5"], ["b"], {}),
    ({"anyOf": [{"type": "string"}], "maxLength": 1}, ["a"], ["ab"], {}),
    ({"minimum": 5}, ["6", "abc", "true"], ["3"], {}),
    ({"$ref": "#/$defs/S"}, ["ab"], ["a"], {"$defs": {"S": {"type": "string", "minLength": 2}}}),
    ({"allOf": [{"$ref": "#/$defs/S"}], "maxLength": 2}, ["ab"], ["a", "abc"], {"$defs": {"S": {"type": "string", "minLength": 2}}}),
    (
        {"$ref": "#/definitions/P"},
        ['{"y": 1}'],
        ['{"y": "a"}', "{}"],
        {"definitions": {"P": WEATHER["parameters"]["$defs"]["Point"] | {"properties": {"y": {"type": "integer"}}, "required": ["y"]}}},
    ),
    (
        {"type": "object", "properties": {"c": {"$ref": "#/properties/a"}}, "required": ["c"]},
        ['{"c": 1}'],
        ['{"c": "x"}'],
        {"properties": {"a": {"type": "integer"}}},
    ),
    ({"$ref": "#/components/P"}, ["5"], ["a"], {"components": {"P": {"type": "integer"}}}),
    ({"$ref": "#/$defs/T"}, ['{"k": [{"k": []}]}'], ['{"k": [1]}', "{}"], TREE),
    ({"type": "array", "uniqueItems": False, "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"], {}),
    ({"type": "array", "items": [{"type": "integer"}]}, ["[3]"], ['["4"]'], {}),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[3]"], ["[3, 4]"], {}),
    ({"type": "number", "exclusiveMinimum": True, "minimum": 3}, ["4"], ["3"], {}),
    ({"type": "integer", "multipleOf": 3}, ["6"], ["7"], {}),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, ['{"a": 1}'], ['{"a": "x"}'], {}),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["5", "5.5"], ["a"], {}),
    ({"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 1}]}, ["true", "a"], ["ab"], {}),
]


@pytest.mark.parametrize(("schema", "good", "bad", "more"), VALUES, ids=lambda value: str(value)[:60])
@STYLES
def test_a_value_keeps_to_its_schema(schema: Any, good: list[str], bad: list[str], more: dict[str, Any], style: CallStyle) -> None:
    """Lengths, patterns, enums, alternatives, references and ranges hold, for bare strings as for JSON."""
    more = more | {"properties": {"x": schema}} | ({"properties": more["properties"] | {"x": schema}} if "properties" in more else {})
    made = grammar({"type": "object", "required": ["x"], "additionalProperties": False} | more)
    for text in good:
        assert accepts(made, call(("x", text))), text
    for text in bad:
        assert not accepts(made, call(("x", text))), text
    assert not accepts(made, call())
    # The other white space compiles as well.
    assert accepts(grammar({"type": "object", "required": ["x"]} | more, style), f"<tool_call>f{style.after_name}", whole=False)


FORMAT_TEXTS = {
    "date": (["2024-02-29", "2023-12-31", "2000-02-29"], ["2023-02-29", "1900-02-29", "2023-04-31", "2023-4-1", ""]),
    "time": (["10:00:00Z", "23:59:59.5+01:00"], ["10:00", "24:00:00Z"]),
    "date-time": (["2024-02-29T10:00:00Z"], ["2024-02-29", "2024-02-29 10:00:00Z"]),
    "duration": (["P3DT4H", "PT5M", "P2W"], ["P", "3D", "PT"]),
    "email": (["a.b@c.de"], ["a", "a@", "@c.de"]),
    "hostname": (["a.b-c"], ["-a", "a..b", ""]),
    "ipv4": (["10.0.0.255"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (["::1", "1:2:3:4:5:6:7:8", "fe80:1::2"], ["1:2", ":::", ""]),
    "uri": (["http://a.b/c?d=e#f", "https://a.b:80"], ["a.b", "http://"]),
    "uuid": (["01234567-89ab-cdef-0123-456789abcdef"], ["01234567"]),
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_of_bare_strings(name: str) -> None:
    """Every format that JSON strings are held to holds for bare ones too, and what a model writes under it is of that format."""
    good, bad = FORMAT_TEXTS[name]
    schema = {"type": "string", "format": name}
    made = grammar({"properties": {"x": schema}, "required": ["x"]})
    for text in good:
        assert accepts(made, call(("x", text))), text
        assert jsonschema_rs.is_valid(schema, text, validate_formats=True), text
    for text in bad:
        assert not accepts(made, call(("x", text))), text
    for seed in range(8):
        tokens = write(made, seed, limit=120)
        if tokens is not None:
            (found,) = parsed([{"name": "f", "parameters": {"properties": {"x": schema}}}], tokens).tool_calls
            text = json.loads(found.arguments)["x"]
            assert jsonschema_rs.is_valid(schema, text, validate_formats=True), text


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({}, [call(), call(("x", "a"), ("y", "5"))], []),
        ({"type": "object"}, [call(("x", "a"))], []),
        ({"type": "object", "properties": {}}, [call(), call(("x", "a"))], []),
        ({"type": "object", "properties": {}, "additionalProperties": False}, [call()], [call(("x", "a"))]),
        ({"additionalProperties": {"type": "integer"}}, [call(), call(("x", "5"))], [call(("x", "a"))]),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": {"type": "integer"}}}}}, [call(), call(("x", "5"))], [call(("x", "a"))]),
        ({"properties": {"x": {"type": "integer"}}, "required": ["y"]}, [call(("y", "a")), call(("x", "1"), ("y", "a"))], [call()]),
        (
            {"allOf": [{"properties": {"x": {"type": "integer"}}}, {"properties": {"x": {"minimum": 3}}, "required": ["x"]}]},
            [call(("x", "3"))],
            [call(("x", "2")), call()],
        ),
        (
            {"properties": {"x": {}, "y": {}}, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
            [call(("x", "a")), call(("y", "a")), call(("x", "a"), ("y", "a"))],
            [call()],
        ),
        ({"properties": {"x": False, "y": {}}}, [call(), call(("y", "a"))], [call(("x", "a"))]),
        ({"properties": {"x": {}}, "required": ["x"], "minProperties": 1, "maxProperties": 1}, [call(("x", "a"))], [call()]),
        ({"properties": {"": {"type": "integer"}}, "required": [""]}, [call(("", "5"))], [call(("x", "5"))]),
        ({"properties": {" a": {}, "b": {}}}, [call(), call(("b", "5"))], [call((" a", "5"))]),
    ],
    ids=str,
)
def test_the_arguments_together(parameters: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """Required ones are there, unknown ones only where the schema allows them, through references and branches."""
    made = grammar(parameters)
    for text in good:
        assert accepts(made, text), text
    for text in bad:
        assert not accepts(made, text), text


X = "tools[0].function.parameters.properties.x"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"x": schema}, "required": ["x"]}, f"{X}{place}")
    for schema, place in [
        ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
        ({"type": "array", "contains": {}}, ".contains"),
        ({"type": "array", "unevaluatedItems": False}, ".unevaluatedItems"),
        ({"not": {"type": "string"}}, ".not"),
        ({"if": {}, "then": {}}, ".if"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, ".propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
        ({"type": "object", "dependentSchemas": {"a": {}}}, ".dependentSchemas"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, ".dependencies"),
        ({"type": "object", "unevaluatedProperties": False}, ".unevaluatedProperties"),
        ({"type": "object", "minProperties": 1, "properties": {"a": {}}}, ".minProperties"),
        ({"type": "object", "maxProperties": 1, "properties": {"a": {}}}, ".maxProperties"),
        ({"$dynamicRef": "#"}, ".$dynamicRef"),
        ({"type": "array", "items": {"type": "array", "items": {"uniqueItems": True}}}, ".items.items.uniqueItems"),
        ({"anyOf": [{"type": "string"}, {"type": "object", "properties": {"a b": {"not": {}}}}]}, '.anyOf[1].properties["a b"].not'),
        ({"type": "string", "pattern": "(?=a)b"}, ".pattern"),
        ({"type": "string", "pattern": r"(a)\1"}, ".pattern"),
        ({"type": "string", "pattern": r"\bfoo\b"}, ".pattern"),
        ({"type": "string", "pattern": "x(^a)"}, ".pattern"),
        ({"type": "string", "pattern": "a$b"}, ".pattern"),
        ({"type": "object", "patternProperties": {"(?!a)": {}}}, '.patternProperties["(?!a)"]'),
        ({"type": "string", "minLength": 10**7}, ".minLength"),
        ({"enum": ["a"], "type": "integer"}, ""),
        ({"enum": ["aaa"], "pattern": "((a{100}){100}){100}"}, ""),
        ({"const": 5, "minimum": 9}, ""),
        ({"type": "string", "minLength": 5, "maxLength": 2}, ""),
        (False, ""),
        ({"anyOf": [{"anyOf": [{"maxLength": i + j} for i in range(9)]} for j in range(9)]}, ""),
    ]
] + [
    ({"properties": {"x": {}}, "minProperties": 1}, "tools[0].function.parameters.minProperties"),
    ({"properties": {"x": {}}, "maxProperties": 0}, "tools[0].function.parameters.maxProperties"),
    ({"properties": {"x ": {}}, "required": ["x "]}, 'tools[0].function.parameters.properties["x "]'),
    ({"patternProperties": {"^a": {"type": "integer"}}}, "tools[0].function.parameters.patternProperties"),
    ({"enum": [{"x": 1}]}, "tools[0].function.parameters.enum"),
    ({"required": ["y"], "properties": {"x": {}}, "additionalProperties": False}, "tools[0].function.parameters.required"),
    ({"anyOf": [False]}, "tools[0].function.parameters"),
    (
        {
            "$defs": {"T": {"type": "object", "properties": {"k": {"$ref": "#/$defs/T"}}, "required": ["k"]}},
            "properties": {"x": {"$ref": "#/$defs/T"}},
        },
        "tools[0].function.parameters",
    ),
    ({"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"not": {}}}}, "tools[0].function.parameters.$defs.A.not"),
]


@pytest.mark.parametrize(("parameters", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_enforced_is_refused_by_its_place(parameters: dict[str, Any], param: str) -> None:
    """A forced call never pretends to satisfy what nobody checked; where calls need not keep to the schema, they are free instead."""
    with pytest.raises(UnsupportedParameter) as refused:
        grammar(parameters)
    assert refused.value.param == param
    assert refused.value.message.startswith(param)
    free = grammar(parameters, must_hold=False)
    assert accepts(free, call())
    assert accepts(free, call(("x", "whatever")))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("^a$", "(?:a)"),
        ("a", "(?s:.*)(?:a)(?s:.*)"),
        (r"a\$", r"(?s:.*)(?:a\$)(?s:.*)"),
        (r"a\\$", r"(?s:.*)(?:a\\)"),
        ("[|^$]", "(?s:.*)(?:[|^$])(?s:.*)"),
        ("(a|b)", "(?s:.*)(?:(a|b))(?s:.*)"),
        ("(a$)", None),
        ("", "(?s:.*)(?:)(?s:.*)"),
    ],
)
def test_patterns_are_searched_for(pattern: str, found: str | None) -> None:
    """JSON Schema finds a pattern anywhere in a text unless it is anchored."""
    assert searching(pattern) == found


_ODD_NAMES = ["", '"', "\\", "\n", "</think>", "<[5]>", "%json", "a b", "$ref", "type"]
_NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(_ODD_NAMES)
_SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e9, 1e9) | _NAMES
_LEAVES = st.sampled_from(
    [
        {},
        True,
        {"type": "string"},
        {"type": "integer"},
        {"type": ["number", "null"]},
        {"type": ["string", "boolean"], "maxLength": 4},
        {"type": ["string", "number"], "exclusiveMinimum": 100},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"type": "string", "pattern": "^[a-f]+$", "maxLength": 5},
        {"type": "string", "format": "date"},
        {"minLength": 2, "minimum": 7},
        {"$ref": "#/$defs/A"},
        {"$ref": "#/$defs/T"},
        {"type": "integer", "minimum": 5, "maximum": 8},
        {"type": "array", "uniqueItems": True},
        {"type": "integer", "description": "x", "default": 5, "examples": [1], "title": "t"},
        False,
    ]
)
_SCHEMAS = st.recursive(
    _LEAVES | st.builds(lambda values: {"enum": values}, st.lists(_SCALARS, min_size=1, max_size=4)),
    lambda inner: (
        st.builds(lambda properties: {"type": "object", "properties": properties}, st.dictionaries(_NAMES, inner, max_size=3))
        | st.builds(lambda name, branches: {name: branches}, st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1, max_size=3))
        | st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
    ),
    max_leaves=6,
)
_DEFINITIONS = {"A": {"type": "integer", "minimum": 3}, "T": {"type": "array", "items": {"$ref": "#/$defs/T"}, "maxItems": 2}}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    properties=st.dictionaries(_NAMES, _SCHEMAS, max_size=4),
    required=st.lists(_NAMES, max_size=3, unique=True),
    style=st.sampled_from([CallStyle(), LINES]),
    seed=st.integers(0, 2**20),
)
def test_any_schema_holds_or_is_refused(properties: dict[str, Any], required: list[str], style: CallStyle, seed: int) -> None:
    """Whatever a client declares, its grammar compiles and noise under it satisfies the schema, or a place is refused in our words."""
    parameters = {"type": "object", "properties": properties, "required": required, "$defs": _DEFINITIONS}
    try:
        made = grammar(parameters, style)
    except UnsupportedParameter as error:
        assert str(error.param).startswith("tools[0].function.parameters")  # noqa: PT017 - some schemas are refused, others are not
        return
    tokens = write(made, seed, limit=60)
    if tokens is not None:
        (found,) = parsed([{"name": "f", "parameters": parameters}], tokens).tool_calls
        jsonschema_rs.validate(parameters, json.loads(found.arguments))


def test_a_long_list_that_many_arguments_refer_to_is_read_once() -> None:
    """Thousands of arguments with one list of thousands of names took half a minute, in which no other large request was read."""
    names = [f"name {number}" for number in range(5000)]
    listed = {"$defs": {"A": {"enum": names}, "B": {"enum": ["b"]}}}
    many = {f"p{number}": {"$ref": "#/$defs/A"} for number in range(2000)}
    began = time.process_time()
    text = ToolGrammar([DeclaredTool("f", {"properties": many, **listed}, "parameters")], IDS, CallStyle()).calls(several=False)
    assert time.process_time() - began < 6
    assert len(text) < 500_000
    few = {"p": {"$ref": "#/$defs/A"}, "q": {"$ref": "#/$defs/B"}, "r": {"$ref": "#/$defs/A", "maxLength": 6}}
    found = grammar({"type": "object", "properties": few, **listed})
    for key, value, good in (
        ("p", "name 4999", True),
        ("q", "b", True),
        ("p", "b", False),
        ("q", "name 1", False),
        ("r", "name 1", True),
        ("r", "name 4999", False),
    ):
        assert accepts(found, call((key, value))) == good, (key, value)
