"""JSON schemas of clients: what is none is refused, with the place at fault and what would be right, wherever a schema may be sent."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.gateway.schema_check import check_schema
from services.gateway.schema_support import check_support, for_grammar
from services.gateway.text_rules import searching
from services.gateway.tool_grammar import CallStyle, DeclaredTool, ToolGrammar
from tests.gateway.language import IDS
from tests.gateway.stack import HELLO, MODEL, Stack
from tests.gateway.test_formats import able  # noqa: F401 - a fixture
from tests.gateway.test_validation import check_error

TYPES = 'it must be one of "array", "boolean", "integer", "null", "number", "object" and "string", or a list of them, each once'
SCHEMA = "it must be a schema: an object, true or false"
SCHEMAS = "it must be a list of schemas, at least one"
NAMES = "it must be a list of property names, each of them once"
COUNT = "it must be a whole number, 0 or more"
LOOP = "leads back to itself without a value in between; let it lead to a schema that has a type"
A = {"$ref": "#/$defs/A"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

# schema, the place at fault, what is said of it
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "strin"}, ".type", f'is "strin"; {TYPES}'),
    ({"type": "any"}, ".type", f'is "any"; {TYPES}'),
    ({"type": None}, ".type", f"is null; {TYPES}"),
    ({"type": []}, ".type", f"is []; {TYPES}"),
    ({"type": ["string", "strin"]}, ".type", f'is ["string", "strin"]; {TYPES}'),
    ({"type": ["string", "string"]}, ".type", f'is ["string", "string"]; {TYPES}'),
    ({"properties": {"x": {"type": "strin"}}}, ".properties.x.type", f'is "strin"; {TYPES}'),
    ({"properties": {"a b": {"type": "strin"}}}, '.properties["a b"].type', f'is "strin"; {TYPES}'),
    ({"properties": {"properties": {"properties": {"type": 5}}}}, ".properties.properties.properties.type", f"is 5; {SCHEMA}"),
    ({"properties": {"type": "string"}}, ".properties.type", f'is "string"; {SCHEMA}'),
    ({"properties": 5}, ".properties", "is 5; it must be an object whose values are schemas"),
    ({"properties": []}, ".properties", "is []; it must be an object whose values are schemas"),
    ({"properties": {"x": None}}, ".properties.x", f"is null; {SCHEMA}"),
    ({"$defs": 5}, ".$defs", "is 5; it must be an object whose values are schemas"),
    ({"definitions": {"A": {"type": "x"}}}, ".definitions.A.type", f'is "x"; {TYPES}'),
    ({"patternProperties": {"(": {}}}, ".patternProperties", 'has the name "("; names must be regular expressions'),
    ({"required": "a"}, ".required", f'is "a"; {NAMES}'),
    ({"required": True}, ".required", f"is true; {NAMES}"),
    ({"required": [1]}, ".required[0]", f"is 1; {NAMES}"),
    ({"required": ["a", "a"]}, ".required", f'is ["a", "a"]; {NAMES}'),
    ({"enum": []}, ".enum", "is []; it must be a list of values, at least one"),
    ({"enum": "x"}, ".enum", 'is "x"; it must be a list of values, at least one'),
    ({"properties": {"enum": {"enum": {}}}}, ".properties.enum.enum", "is an object; it must be a list of values, at least one"),
    ({"anyOf": []}, ".anyOf", f"is []; {SCHEMAS}"),
    ({"oneOf": {}}, ".oneOf", f"is an object; {SCHEMAS}"),
    ({"allOf": [5]}, ".allOf[0]", f"is 5; {SCHEMA}"),
    ({"anyOf": [{"anyOf": [{"type": "q"}]}]}, ".anyOf[0].anyOf[0].type", f'is "q"; {TYPES}'),
    ({"items": 5}, ".items", f"is 5; {SCHEMA}"),
    ({"items": {"items": [{"type": "q"}]}}, ".items.items", f"is a list; {SCHEMA}"),
    ({"additionalProperties": "no"}, ".additionalProperties", f'is "no"; {SCHEMA}'),
    ({"not": 5}, ".not", f"is 5; {SCHEMA}"),
    ({"minLength": -1}, ".minLength", f"is -1; {COUNT}"),
    ({"maxItems": "5"}, ".maxItems", f'is "5"; {COUNT}'),
    ({"maxProperties": 1.5}, ".maxProperties", f"is 1.5; {COUNT}"),
    ({"minimum": "1"}, ".minimum", 'is "1"; it must be a number'),
    ({"maximum": True}, ".maximum", "is true; it must be a number"),
    ({"multipleOf": 0}, ".multipleOf", "is 0; it must be a number above 0"),
    ({"uniqueItems": 1}, ".uniqueItems", "is 1; it must be true or false"),
    ({"pattern": "("}, ".pattern", 'is "("; it must be a regular expression'),
    ({"pattern": 5}, ".pattern", "is 5; it must be a regular expression"),
    ({"format": 5}, ".format", "is 5; it must be a string"),
    ({"description": None}, ".description", "is null; it must be a string"),
    ({"examples": "x"}, ".examples", 'is "x"; it must be a list'),
    ({"$schema": 5}, ".$schema", "is 5; it must be a string"),
    ({"dependentRequired": {"a": 5}}, ".dependentRequired.a", "is 5; it must be an object whose values are lists of property names"),
    ({"$ref": 5}, ".$ref", "is 5; it must be a string"),
    ({"$ref": "#/nowhere"}, ".$ref", 'is "#/nowhere", which leads nowhere; it must lead to a schema, as #/$defs/Name does'),
    (
        {"$ref": "http://x.invalid/y"},
        ".$ref",
        'is "http://x.invalid/y"; only JSON pointers into the schema itself are followed, such as #/$defs/Name',
    ),
    ({"$ref": "#point"}, ".$ref", 'is "#point"; only JSON pointers into the schema itself are followed, such as #/$defs/Name'),
    ({"$ref": "#/a", "a": 5}, ".$ref", f'is "#/a", which leads to 5; {SCHEMA.replace("be", "lead to", 1)}'),
    ({"components": {"S": {"type": "x"}}, "$ref": "#/components/S"}, ".components.S.type", f'is "x"; {TYPES}'),
    ({"$ref": "#"}, ".$ref", LOOP),
    ({"$defs": {"A": A}, "properties": {"x": A}}, ".$defs.A.$ref", LOOP),
    ({"$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}]}, "B": {"anyOf": [{"type": "null"}, A]}}}, "", LOOP),
    ({"$defs": {"A": {"not": A}}}, ".$defs.A.not.$ref", LOOP),
]

RIGHT: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"x": {}, "y": True, "type": {"type": "string"}, "required": {"enum": [[]]}}},
    {"$defs": {"A": {"properties": {"a": A}}}, "properties": {"x": A}},
    {"type": "array", "items": {"$ref": "#"}},
    {"$ref": "#/properties/x", "properties": {"x": {"type": "integer"}}},
    {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {}}},
    {"properties": {"x": {"nullable": True, "example": 5, "x-note": {}, "discriminator": {"propertyName": "k"}}}},
    {"items": [{"type": "string"}]},
    {"$schema": DRAFT_7, "items": [{"type": "string"}], "additionalItems": False},
    {"minimum": 3, "exclusiveMinimum": True},
    {"pattern": "(?i)^a(?P<n>b)$"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "(?=a)b", "format": "whatever"},
    {"$schema": "http://unknown.invalid/draft", "type": "object"},
    {"enum": [1, "a", None, [], {}]},
    {"default": {"$ref": "#/nowhere"}, "const": {"type": "strin"}},
]


@pytest.mark.parametrize(("schema", "place", "said"), WRONG, ids=lambda value: str(value)[:50])
def test_the_place_at_fault_is_named(schema: dict[str, Any], place: str, said: str) -> None:
    """The path, what stands there, and what should."""
    with pytest.raises(InvalidRequest) as refused:
        check_schema(schema, "schema")
    assert refused.value.message.endswith(f" {said}.")
    if place or said != LOOP:
        assert refused.value.message == f"schema{place} {said}."
        assert refused.value.param == f"schema{place}"
    with pytest.raises(InvalidRequest) as named:
        check_schema(schema, "schema", "field")
    assert named.value.param == "field"


@pytest.mark.parametrize("schema", RIGHT, ids=str)
def test_sound_schemas_pass(schema: dict[str, Any]) -> None:
    """Drafts from 4 on, recursion through values, unknown keywords, and data that only looks like a schema."""
    check_schema(schema, "schema")


def test_no_schema_makes_the_server_ask_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever address a client writes into a schema, nobody connects to it."""

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.3)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/schema"
        check_schema({"$schema": url, "properties": {"x": {"$schema": url, "$id": url}}}, "schema")
        with pytest.raises(InvalidRequest):
            check_schema({"$schema": url, "$ref": url}, "schema")
        with pytest.raises(TimeoutError):
            listening.accept()


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"a": json.loads('{"a":' * 150 + "{}" + "}" * 150)}, "schema is nested deeper than 100 levels."),
        ({"enum": list(range(100_001))}, "schema holds more than 100000 values."),
        ({"properties": {str(i): {} for i in range(5001)}}, "schema holds more than 5000 schemas."),
        ({"$defs": {str(i): {"$ref": f"#/$defs/{(i + 1) % 4900}"} for i in range(4900)}}, "schema.$defs."),
    ],
    ids=["deep", "large", "many", "chained"],
)
def test_schemas_have_bounds(schema: dict[str, Any], said: str) -> None:
    """Depth, size and number are bounded; a long chain of references is followed to its end."""
    with pytest.raises(InvalidRequest) as refused:
        check_schema(schema, "schema")
    assert refused.value.message.startswith(said)


KEYWORDS = ["type", "properties", "$ref", "$defs", "items", "anyOf", "enum", "required", "not"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.sampled_from(["#", "#/$defs/A", "string"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*KEYWORDS, "A", "pattern", "minLength", "x"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*KEYWORDS, "allOf", "dependencies"]), JSON))
def test_any_json_is_a_schema_or_refused_in_words(schema: dict[str, Any]) -> None:
    """Nothing but our own refusal comes out, and what passes can be made ready for a grammar."""
    try:
        check_schema(schema, "schema")
    except InvalidRequest as error:
        assert error.message.startswith("schema")  # noqa: PT017 - some are refused, others are not
        return
    json.dumps(for_grammar(schema))


def test_what_says_nothing_stays_out_of_grammars() -> None:
    """Formats that nobody knows, keywords that ask for nothing and options of the engine are no part of a grammar; names like them are."""
    schema = {
        "$schema": "http://unknown.invalid/draft",
        "x-guidance": {"lenient": True},
        "uniqueItems": False,
        "properties": {"uniqueItems": {"type": "string", "format": "iri"}, "format": {"format": "date"}},
        "anyOf": [{"format": "int32"}],
        "enum": [{"format": "iri"}],
    }
    assert for_grammar(schema) == {
        "properties": {"uniqueItems": {"type": "string"}, "format": {"format": "date"}},
        "anyOf": [{}],
        "enum": [{"format": "iri"}],
    }
    assert schema["uniqueItems"] is False


BAD = {"type": "object", "properties": {"x": {"type": "strin"}}}
CHOICES = [None, "auto", "none", "required", "named"]


def request_with(path: str, parameters: Any, choice: str | None, *, strict: bool) -> tuple[dict[str, Any], str]:
    """A request with one tool, and where the tool's schema stands in it."""
    if path.startswith("/v1/messages"):
        named: Any = {
            "auto": {"type": "auto"},
            "none": {"type": "none"},
            "required": {"type": "any"},
            "named": {"type": "tool", "name": "f"},
        }
        body = {"messages": HELLO, "max_tokens": 5, "tools": [{"name": "f", "input_schema": parameters, "strict": strict}]}
        return body | ({"tool_choice": named[choice]} if choice else {}), "tools[0].input_schema"
    function = {"name": "f", "parameters": parameters, "strict": strict}
    if path == "/v1/responses":
        tool_choice: Any = {"type": "function", "name": "f"} if choice == "named" else choice
        return {"input": "Hello", "tools": [{"type": "function", **function}], "tool_choice": tool_choice}, "tools[0].parameters"
    tool_choice = {"type": "function", "function": {"name": "f"}} if choice == "named" else choice
    return {
        "messages": HELLO,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": tool_choice,
    }, "tools[0].function.parameters"


PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"]


def refusal(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/messages/count_tokens":
        body = {name: value for name, value in body.items() if name != "max_tokens"}
    response = stack.http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 400, response.text
    assert not stack.worker.requests
    return dict(response.json()["error"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("strict", [False, True])
def test_a_tool_without_a_sound_schema_is_refused_everywhere(able: Stack, path: str, choice: str | None, strict: bool) -> None:  # noqa: F811
    """On every URL and for every tool_choice, with the path as that URL's clients write it."""
    body, where = request_with(path, BAD, choice, strict=strict)
    error = refusal(able, path, body)
    assert error["param"] == f"{where}.properties.x.type"
    assert error["message"] == f'{where}.properties.x.type is "strin"; {TYPES}.'
    body, where = request_with(path, {"type": "string"}, choice, strict=strict)
    assert refusal(able, path, body)["param"] == f"{where}.type"
    body, where = request_with(path, {"$ref": "#/$defs/S", "$defs": {"S": {"type": ["array"]}}}, choice, strict=strict)
    assert refusal(able, path, body)["param"] == f"{where}.type"


@pytest.mark.parametrize("path", PATHS[:3])
@pytest.mark.parametrize(("choice", "strict"), [("required", False), ("named", False), ("auto", True), (None, True)])
def test_what_cannot_be_enforced_is_refused_where_it_must_hold(able: Stack, path: str, choice: str | None, strict: bool) -> None:  # noqa: F811
    """Forced and strict calls are refused with the keyword's place; the same schema is fine where calls are free."""
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    body, where = request_with(path, schema, choice, strict=strict)
    error = refusal(able, path, body)
    assert error["param"] == f"{where}.properties.x.uniqueItems"
    assert error["message"].startswith(f"{where}.properties.x.uniqueItems cannot be enforced")
    body, _ = request_with(path, schema, "auto", strict=False)
    assert able.http.post(path, json={"model": MODEL, **body}).status_code == 200


@pytest.mark.parametrize("path", PATHS[:3])
def test_two_tools_of_one_name_are_refused(stack: Stack, path: str) -> None:
    """Their calls could not be told apart."""
    body, where = request_with(path, {}, None, strict=False)
    body["tools"] = body["tools"] * 2
    error = refusal(stack, path, body)
    assert error["param"] == where.replace("[0]", "[1]").replace("input_schema", "name").replace("parameters", "name")
    assert error["message"].startswith(f"{error['param']} is 'f', as of tools[0]")


FORMS: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "@"}}},
        "response_format.json_schema.schema",
        "response_format",
    ),
    ("/v1/completions", {"response_format": {"type": "json_object", "schema": "@"}}, "response_format.schema", "response_format"),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": "@", "end": "x"}]}},
        "response_format.structures[0].schema",
        "response_format",
    ),
    ("/v1/chat/completions", {"structured_outputs": {"json": "@"}}, "structured_outputs.json", "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"json": "text"}}, "structured_outputs.json", "structured_outputs"),
    ("/v1/chat/completions", {"guided_json": "@"}, "guided_json", "guided_json"),
    ("/v1/chat/completions", {"json_schema": "text"}, "json_schema", "json_schema"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": "@"}}}, "text.format.schema", "text"),
    ("/generate", {"sampling_params": {"json_schema": "text"}}, "sampling_params.json_schema", "sampling_params"),
]


def filled(fields: Any, schema: dict[str, Any]) -> Any:
    if isinstance(fields, dict):
        return {name: filled(value, schema) for name, value in fields.items()}
    if isinstance(fields, list):
        return [filled(value, schema) for value in fields]
    return {"@": schema, "text": json.dumps(schema)}.get(fields, fields)


@pytest.mark.parametrize(("path", "fields", "where", "param"), FORMS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (BAD, f'.properties.x.type is "strin"; {TYPES}.'),
        ({"$defs": {"A": A}, "properties": {"x": A}}, f".$defs.A.$ref {LOOP}."),
        ({"type": "array", "uniqueItems": True}, ".uniqueItems cannot be enforced while the answer is written; "),
        ({"type": "string", "pattern": "(?!a)b"}, ".pattern has look-around, a back reference or a word boundary, "),
    ],
    ids=["type", "loop", "feature", "pattern"],
)
def test_schemas_of_answers_are_checked_too(
    able: Stack,  # noqa: F811
    path: str,
    fields: dict[str, Any],
    where: str,
    param: str,
    schema: dict[str, Any],
    said: str,
) -> None:
    """In every dialect: the field is blamed, the message has the whole path, and none of it is a library's text."""
    base: dict[str, Any] = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
    }.get(path, {"text": "a"})
    body = base | filled(fields, schema) | ({} if path == "/generate" else {"model": MODEL})
    error = check_error(able.http.post(path, json=body), param)
    assert error["message"].startswith(f"{where}{said}")
    assert not able.worker.requests


def test_expressions_of_pythons_are_bounded_together() -> None:
    """They are looked at one by one, and each may cost; JavaScript's cost nothing."""
    costly = "(?i)" + "[\u0000-\uffff]" * 190
    properties = {f"p{number}": {"pattern": costly} for number in range(1000)}
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="may have 4000 characters in all"):
        check_schema({"properties": properties}, "schema")
    assert time.process_time() - began < 20
    check_schema({"properties": {"a": {"pattern": "(?P<x>a)"}, "b": {"pattern": "[a-z]" * 5000}}}, "schema")


@pytest.mark.parametrize("pattern", ["\\w" * 20_000, "(?i:" + "[\u0000-\uffff]" * 4000 + ")"], ids=["escapes", "classes"])
@pytest.mark.parametrize("where", ["pattern", "patternProperties", "$ref"])
def test_a_costly_pattern_beside_listed_values_stops_nobody(pattern: str, where: str) -> None:
    """What says whether an enum's values fit would keep the whole process for minutes: such a pattern is refused by its place at once."""
    beside: dict[str, Any] = {"pattern": pattern} if where == "pattern" else {"patternProperties": {pattern: {}}}
    value = {"enum": ["a"], **(beside if where != "$ref" else {"$ref": "#/$defs/A"})}
    parameters = {"type": "object", "properties": {"x": value}, "required": ["x"], "$defs": {"A": {"pattern": pattern}}}
    began = time.process_time()
    check_schema(parameters, "parameters")
    with pytest.raises(UnsupportedParameter, match="cannot be checked") as caught:
        ToolGrammar([DeclaredTool("f", parameters, "parameters")], IDS, CallStyle())
    assert time.process_time() - began < 3
    assert caught.value.param == "parameters.properties.x"


@pytest.mark.parametrize("piece", [r"\[", r"\\", "[a]", "[^a]", "(?:a)", "/", "()", r"\/", "a|", "[[]"])
def test_a_long_pattern_is_read_in_proportion_to_its_length(piece: str) -> None:
    """Whatever it is made of: one call into a library of expressions lets nobody else run."""
    pattern = piece * (200_000 // len(piece)) + "a"
    began = time.process_time()
    check_schema({"pattern": pattern}, "schema")
    check_support({"pattern": pattern}, "schema", None, "leave it out")
    searching(pattern)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("pattern", "enforceable"),
    [(r"\[\b]", False), (r"[\b]", True), (r"\\b", True), (r"\[(?=a)]", False), (r"[(?=a)]", True), (r"(\[)\1", False)],
)
def test_what_stands_in_a_class_is_no_look_around(pattern: str, enforceable: bool) -> None:
    """Escaped brackets open no class, and an escaped bracket ends none."""
    check_schema({"pattern": pattern}, "schema")
    if enforceable:
        check_support({"pattern": pattern}, "schema", None, "leave it out")
    else:
        with pytest.raises(UnsupportedParameter, match="look-around"):
            check_support({"pattern": pattern}, "schema", None, "leave it out")
