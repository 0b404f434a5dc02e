"""Forms of answers: every dialect becomes the right grammar, and noise under it becomes what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.lark import literal
from tests.gateway.fake_worker import Fail, Finish, Say
from tests.gateway.grammars import VOCAB, accepts, constraint
from tests.gateway.language import IDS, piece
from tests.gateway.stack import Stack
from tests.gateway.test_validation import check_error

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["celsius", "kelvin", 5]},
            "where": {"$ref": "#/$defs/Point"},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city", "days", "unit", "where"],
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
}
NOW = {"name": "now"}


def tools(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in functions]


@pytest.fixture
def able(stack: Stack) -> Iterator[Stack]:
    """The gateway on a worker that can constrain its output."""
    stack.worker.supports_grammar = True
    stack.run(stack.services.watch.refresh())
    stack.play(Say("</think>{}"), Finish())
    yield stack
    stack.worker.supports_grammar = False
    stack.run(stack.services.watch.refresh())


def grammar_of(stack: Stack, path: str = "/v1/chat/completions", **fields: Any) -> pb.Grammar:
    response = stack.post(path, **fields)
    assert response.status_code == 200, response.text
    assert stack.worker.requests[-1].HasField("grammar")
    return stack.worker.requests[-1].grammar


JSON_SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("fields", JSON_SCHEMAS, ids=str)
def test_json_schemas_in_every_dialect(able: Stack, path: str, fields: dict[str, Any]) -> None:
    """OpenAI's, vLLM's, its older and llama-server's fields mean one grammar, after </think> where there is one."""
    grammar = grammar_of(able, path, **fields)
    assert json.loads(grammar.json_schema) == SCHEMA
    assert grammar.after_token_id == (IDS["</think>"] if "chat" in path else 0)
    assert accepts(grammar, '{"n": 12}')
    assert not accepts(grammar, '{"m": 12}')


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"structured_outputs": {"regex": "[ab]+/c"}}, "aba/c", "abc"),
        ({"guided_regex": "[ab]+"}, "ab", "abc"),
        ({"regex": "[ab]+"}, "ab", "abc"),
        ({"structured_outputs": {"choice": ["yes", 'n"o\n', "né"]}}, 'n"o\n', "no"),
        ({"guided_choice": ["yes", "no"]}, "no", "yesno"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x5", "xx"),
        ({"guided_grammar": 'root ::= "x" [0-9]\n'}, "x5", "xx"),
        ({"grammar": 'root ::= "x" [0-9]\n'}, "x5", "xx"),
        ({"ebnf": 'root ::= "x" [0-9]\n'}, "x5", "xx"),
        ({"response_format": {"type": "json_object"}}, '{"a": []}', "[]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"guided_json_object": True}, "{}", "1"),
    ],
    ids=str,
)
def test_other_forms(able: Stack, fields: dict[str, Any], good: str, bad: str) -> None:
    """Expressions, choices, grammars and plain JSON objects take what they should and nothing else."""
    grammar = grammar_of(able, **fields)
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_structural_tags(able: Stack) -> None:
    """Text is free until a trigger; then one of its structures must follow."""
    structures = [
        {"begin": "<f=get>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=put>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "<tool_call>", "schema": {"type": "integer"}, "end": "</tool_call>"},
    ]
    triggers = ["<f=", "<tool_call>", "unused"]
    grammar = grammar_of(able, response_format={"type": "structural_tag", "structures": structures, "triggers": triggers})
    for text in ("", "hello", 'a <f=get>{"n": 1}</f> b <f=put>true</f>', "x <tool_call>5</tool_call> y"):
        assert accepts(grammar, text), text
    for text in ("<f=del>", '<f=get>{"m": 1}</f>', "<tool_call>x"):
        assert not accepts(grammar, text, whole=False), text
    assert not accepts(grammar, '<f=get>{"n": 1}')


def test_two_forms_are_one_too_many(able: Stack) -> None:
    """A second field that asks for a form is refused by name."""
    check_error(able.post(guided_regex="a", response_format={"type": "json_object"}), "guided_regex")
    check_error(able.post(guided_regex="a", structured_outputs={"json": SCHEMA}), "guided_regex")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"tools": tools(NOW), "tool_choice": "required"}, "tool_choice"),
        ({"tools": tools(NOW), "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ],
)
def test_a_worker_that_cannot_constrain_says_so(stack: Stack, fields: dict[str, Any], param: str) -> None:
    """Free text never pretends to be checked."""
    assert check_error(stack.post(**fields), param)["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"tools": tools(NOW), "tool_choice": "required"}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_a_grammar_that_does_not_compile_names_the_clients_field(able: Stack, fields: dict[str, Any], param: str, streaming: bool) -> None:
    """The worker speaks of its grammar; the client hears of the field that it sent, as a status also when streaming."""
    able.play(Fail(InvalidRequest("The JSON schema cannot be used: because", param="grammar")), admit=False)
    assert "because" in check_error(able.post(**fields, stream=streaming), param)["message"]


def test_required_is_constrained_in_the_models_own_format(able: Stack) -> None:
    """tool_choice required: calls of declared tools and nothing else, after the reasoning, which cannot end the answer."""
    able.play(Say("hm</think><tool_call>now</tool_call>"), Finish(pb.FINISH_REASON_GRAMMAR_END))
    choice = able.message(tools=tools(WEATHER, NOW), tool_choice="required")
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["name"]) == ("tool_calls", "now")
    grammar = able.worker.requests[-1].grammar
    assert grammar.after_token_id == IDS["</think>"]
    assert list(grammar.not_before_token_ids) == [IDS["<tool_call>"]]
    assert accepts(grammar, "<tool_call>now</tool_call>")
    assert accepts(grammar, "<tool_call>now</tool_call><tool_call>now</tool_call>")
    assert not accepts(grammar, "Sure")
    assert not accepts(grammar, "<tool_call>tomorrow</tool_call>")
    assert not accepts(grammar, "<tool_call>get_weather</tool_call>")
    single = grammar_of(able, tools=tools(WEATHER, NOW), tool_choice="required", parallel_tool_calls=False)
    assert not accepts(single, "<tool_call>now</tool_call><tool_call>now</tool_call>")


@pytest.mark.parametrize(
    "parameters", [..., None, {"type": "object", "properties": {}}, {"properties": {}, "required": [], "title": "Now"}]
)
def test_a_tool_without_parameters_is_called_without_arguments(able: Stack, parameters: Any) -> None:
    """Whatever the model would make up; a schema that lets anything in still does."""
    function = {"name": "f"} | ({} if parameters is ... else {"parameters": parameters})
    made_up = "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>"
    grammar = grammar_of(able, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert accepts(grammar, "<tool_call>f</tool_call>")
    assert not accepts(grammar, made_up)
    for free in ({"type": "object"}, {}, {"properties": {}, "additionalProperties": {"type": "string"}}):
        function = {"name": "f", "parameters": free}
        assert accepts(grammar_of(able, tools=[{"type": "function", "function": function}], tool_choice="required"), made_up)


def test_a_named_tool_is_the_only_one(able: Stack) -> None:
    """A named tool_choice allows one call of that tool and ends with `stop`, as OpenAI has it; the others stay in the prompt."""
    able.play(Say("</think><tool_call>now</tool_call>"), Finish(pb.FINISH_REASON_GRAMMAR_END))
    named = {"type": "function", "function": {"name": "now"}}
    choice = able.message(tools=tools(WEATHER, NOW), tool_choice=named)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    grammar = able.worker.requests[-1].grammar
    assert not accepts(grammar, "<tool_call>get_weather", whole=False)
    assert not accepts(grammar, "<tool_call>now</tool_call><tool_call>now</tool_call>")


def test_a_format_leaves_room_for_calls(able: Stack) -> None:
    """With tools and a JSON format the answer is a call or the JSON."""
    for fields in ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, {"guided_json": SCHEMA}):
        grammar = grammar_of(able, tools=tools(NOW), **fields)
        assert accepts(grammar, '{"n": 5}')
        assert accepts(grammar, "<tool_call>now</tool_call>")
        assert not accepts(grammar, "hello")
    grammar = grammar_of(able, tools=tools(NOW), guided_regex="a/b|c\\/d")
    assert accepts(grammar, "a/b")
    assert accepts(grammar, "c/d")
    assert accepts(grammar, "<tool_call>now</tool_call>")
    grammar = grammar_of(able, tools=tools(NOW), guided_choice=["yes", "no"])
    assert accepts(grammar, "no")
    assert accepts(grammar, "<tool_call>now</tool_call>")
    assert not accepts(grammar, "maybe")
    check_error(able.post(tools=tools(NOW), guided_grammar='start: "x"'), "guided_grammar")
    free = grammar_of(able, tools=tools(NOW), tool_choice="none", guided_grammar='start: "x"')
    assert accepts(free, "x")


def test_strict_tools_are_held_to_their_schemas(able: Stack) -> None:
    """strict: text is free, calls are not; without strict nothing is constrained."""
    grammar = grammar_of(able, tools=tools(WEATHER | {"strict": True}, NOW))
    assert accepts(grammar, "hello\n<tool_call>now</tool_call> and <tool_call>now</tool_call>")
    assert not accepts(grammar, "hello <tool_call>get_weather</tool_call>")
    able.message(tools=tools(WEATHER, NOW))
    assert not able.worker.requests[-1].HasField("grammar")


def test_strict_is_a_wish_where_the_worker_cannot(stack: Stack) -> None:
    """A worker without grammars still serves strict tools."""
    stack.message(tools=tools(WEATHER | {"strict": True}))
    assert not stack.worker.requests[-1].HasField("grammar")


def test_thinking_off_constrains_at_once(able: Stack) -> None:
    """Without reasoning the grammar begins with the first token, and the JSON is content."""
    able.play(Say('{"n": 1}'), Finish(pb.FINISH_REASON_GRAMMAR_END))
    choice = able.message(response_format={"type": "json_object"}, reasoning_effort="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"n": 1}', "stop")
    assert able.worker.requests[-1].grammar.after_token_id == 0


@settings(max_examples=60, deadline=None)
@given(choices=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=10), min_size=1, max_size=4))
def test_any_choice_can_be_written(choices: list[str]) -> None:
    """Choices hold whatever characters they hold."""
    grammar = pb.Grammar(lark="%llguidance {}\nstart: " + " | ".join(map(literal, choices)) + "\n")
    for choice in choices:
        made, left = constraint(grammar), choice.encode()
        while left:
            allowed = made.allowed(VOCAB)
            assert allowed is not None
            fitting = [int(token) for token in np.flatnonzero(allowed) if left.startswith(piece(int(token)))]
            assert fitting, choice
            made.observe(fitting[-1])
            left = left.removeprefix(piece(fitting[-1]))
