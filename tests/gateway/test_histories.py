"""Conversations that a client put together wrongly: named by the path that it wrote, never a failure, never silent nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.stack import HELLO, MODEL, Stack
from tests.gateway.test_validation import check_error


def call(call_id: str = "a", arguments: Any = "{}", name: Any = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": list(calls)}]


def result(call_id: Any = "a") -> dict[str, Any]:
    return {"role": "tool", "content": "x", "tool_call_id": call_id}


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
DEEP = '{"x": ' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        (called(call(arguments='{"x": NaN}')), ARGUMENTS, "holds NaN at x, which is no number that JSON has or that a double holds"),
        (called(call(arguments='{"x": [1, -Infinity]}')), ARGUMENTS, "holds -Infinity at x[1], which"),
        (called(call(arguments='{"x": {"y": 1e400}}')), ARGUMENTS, "holds Infinity at x.y, which"),
        (called(call(arguments="NaN")), ARGUMENTS, "holds NaN, which"),
        (called(call(arguments='{"x": ' + "9" * 5000 + "}")), ARGUMENTS, "holds a number of 5000 digits at x, which"),
        (called(call(arguments=DEEP)), ARGUMENTS, "is nested deeper than 100 levels."),
        (called(call(arguments="[" * 100_000)), ARGUMENTS, "is nested deeper than 100 levels."),
        (called(call(arguments=json.loads('{"a":' * 200 + "{}" + "}" * 200))), ARGUMENTS, "is nested deeper than 100 levels."),
        (called(call(arguments='{"x": 1')), ARGUMENTS, "is not valid JSON: "),
        (called(call(arguments="[1]")), ARGUMENTS, "must hold a JSON object, not a list."),
        (called(call("a"), call("a")), "messages[1].tool_calls[1].id", "is 'a', as of another call of the message"),
        ([*called(call("a")), result("b")], "messages[2].tool_call_id", "is 'b', which is the id of no call before it."),
        ([*called(call("a")), result(5)], "messages[2].tool_call_id", "must be a string"),
        ([result("a")], "messages[0].role", "is 'tool', but no message before it has tool_calls"),
        ([*HELLO, {"role": "tool", "content": "x"}], "messages[1].role", "is 'tool', but no message before it has tool_calls"),
        ([*HELLO, {"role": "assistant", "content": None, "tool_calls": []}], "messages[1].content", "may be null only"),
        (
            [*HELLO, {"role": "assistant", "content": None, "function_call": {"name": "f"}}],
            "messages[1].function_call",
            "is of an older API",
        ),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", "must be a string, not a number."),
        ([{"role": "user", "content": [{"type": "foo", "foo": 1}]}], "messages[0].content[0]", "has type 'foo'"),
        ([{"role": "user", "content": [["a"]]}], "messages[0].content[0]", "must be an object with a type"),
        ([{"role": "User", "content": "x"}], "messages[0].role", "'User' is not one of"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "must be a string, not a list."),
        (called(call(name=5)), "messages[1].tool_calls[0].function.name", "must be a string that is not empty."),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_is_wrong_in_a_history_is_named(stack: Stack, path: str, messages: list[Any], param: str, said: str) -> None:
    """400 with the path, in our own words, and the worker hears nothing."""
    error = check_error(stack.http.post(path, json={"model": MODEL, "messages": messages}), param)
    assert error["message"].startswith(f"{param} {said}")
    assert not stack.worker.requests


@pytest.mark.parametrize(
    "messages",
    [
        [*called(call("a"), call("b")), result("b"), result("a")],
        [*called(call("a")), result("a"), *called(call("a"))[1:], result("a")],
        [*called(call("a")), {"role": "tool", "content": "x"}],
        [*called({"type": "function", "function": {"name": "f", "arguments": "{}"}}), result("z")],
        called(call(arguments='{"x": -0.0, "y": 1e-400, "z": 12345678901234567890}')),
        called(call(arguments='{"x": "a\\ud83d"}')),
        called(call(arguments='{"x": 1, "x": 2}')),
        called(call(name="functions.f:0")),
        [{"role": "user", "content": "x", "name": "n" * 5000}],
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "x"}],
    ],
    ids=lambda value: str(value)[-60:],
)
def test_unusual_histories_are_answered(stack: Stack, messages: list[Any]) -> None:
    """Ids that are used again in a later turn or left out, numbers at the edge, half a surrogate pair in an argument."""
    assert stack.post(messages=messages).status_code == 200


def test_half_a_surrogate_pair_in_an_argument_is_replaced(stack: Stack) -> None:
    """As in texts: what has no encoding becomes U+FFFD, and whole pairs stay."""
    for arguments in ('{"x": "a\\ud83d \\ud83e\\udd8a"}', '{"x": "a\ufffd 🦊"}'):
        assert stack.post(messages=called(call(arguments=arguments))).status_code == 200
    first, second = stack.worker.requests
    assert list(first.prompt_token_ids) == list(second.prompt_token_ids)


CALL_ITEM = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}


@pytest.mark.parametrize(
    ("items", "param", "said"),
    [
        ([OUTPUT], "input[0].call_id", "is 'a', which is the id of no call before it."),
        ([CALL_ITEM, OUTPUT | {"call_id": "b"}], "input[1].call_id", "is 'b', which is the id of no call before it."),
        ([CALL_ITEM, CALL_ITEM], "input[1].call_id", "is 'a', as of another call of the turn."),
        ([CALL_ITEM | {"arguments": "[1]"}], "input[0].arguments", "must hold a JSON object."),
        ([CALL_ITEM | {"arguments": '{"x": NaN}'}], "input[0].arguments", "holds NaN at x, which"),
        ([CALL_ITEM | {"arguments": DEEP}], "input[0].arguments", "is nested deeper than 100 levels."),
        ([CALL_ITEM | {"arguments": "{"}], "input[0].arguments", "is not valid JSON: "),
        ([{"role": "user", "content": []}], "input[0].content", "must have at least one part."),
        ([CALL_ITEM, OUTPUT | {"output": []}], "input[1].output", "must have at least one part."),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_wrong_in_items_is_named(stack: Stack, items: list[Any], param: str, said: str) -> None:
    """Input items are named as the client of /v1/responses wrote them."""
    instructions = "The path counts items, not the messages that they become."
    response = stack.http.post("/v1/responses", json={"model": MODEL, "input": items, "instructions": instructions})
    assert check_error(response, param)["message"].startswith(f"{param} {said}")
    assert not stack.worker.requests


def test_an_output_may_answer_a_kept_responses_call(stack: Stack) -> None:
    """The call may stand in the response that a request goes on from."""
    first = stack.http.post("/v1/responses", json={"model": MODEL, "input": [CALL_ITEM]}).json()
    more = {"model": MODEL, "input": [OUTPUT], "previous_response_id": first["id"]}
    assert stack.http.post("/v1/responses", json=more).status_code == 200
    error = check_error(stack.http.post("/v1/responses", json=more | {"input": [OUTPUT | {"call_id": "z"}]}), "input[0].call_id")
    assert "'z'" in error["message"]


USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
ANSWER = {"type": "tool_result", "tool_use_id": "a", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        (
            [{"role": "user", "content": [ANSWER]}],
            "messages[0].content[0].tool_use_id",
            "is 'a', which is the id of no tool_use before it.",
        ),
        (
            [*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [ANSWER | {"tool_use_id": "b"}]}],
            "messages[2].content[0].tool_use_id",
            "is 'b', which is the id of no tool_use before it.",
        ),
        ([*HELLO, {"role": "assistant", "content": [USE, USE]}], "messages[1].content[1].id", "is 'a', as of another tool_use"),
        (
            [*HELLO, {"role": "assistant", "content": [USE]}],
            "messages[1]",
            "ends with tool_use; the message after it brings the tool_result.",
        ),
        ([{"role": "user", "content": []}], "messages[0].content", "must have at least one block."),
        (
            [*HELLO, {"role": "assistant", "content": [USE | {"input": json.loads(DEEP.replace("[" * 700, "").replace("]" * 700, ""))}]}],
            "messages[1].content[0].input",
            "is nested deeper than 100 levels.",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_is_wrong_in_blocks_is_named(stack: Stack, path: str, messages: list[Any], param: str, said: str) -> None:
    """Blocks are named as the client of Anthropic's API wrote them."""
    response = stack.http.post(path, json={"model": MODEL, "messages": messages, "max_tokens": 5})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param} {said}")
    assert not stack.worker.requests
