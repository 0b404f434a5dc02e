"""Whatever stands in whatever field: an answer or a clear refusal of that very field, never a failure of the server's."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from tests.gateway.stack import HELLO, MODEL, Stack

VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 1e30, "", "x", "5",
    [], [1], ["x"], [None], [[]], [{}], [{"type": []}], {}, {"a": 1}, {"type": "x"}, {"type": {}},
]  # fmt: skip
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("ChatRequest", {"model": MODEL, "messages": HELLO}),
    "/v1/completions": ("CompletionRequest", {"model": MODEL, "prompt": "a"}),
    "/v1/responses": ("ResponsesBody", {"model": MODEL, "input": "a", "store": False}),
    "/v1/messages": ("MessagesBody", {"model": MODEL, "messages": HELLO, "max_tokens": 5}),
    "/v1/messages/count_tokens": ("CountBody", {"model": MODEL, "messages": HELLO}),
    "/generate": ("GenerateBody", {"text": "a"}),
    "/tokenize": ("TokenizeBody", {"prompt": "a"}),
    "/detokenize": ("DetokenizeBody", {"tokens": [1]}),
}
# Of two prompts the first one is named.
INSTEAD = {"input_ids": "text", "messages": "prompt"}
# Words of libraries, which say nothing to a client.
FOREIGN = re.compile(r"Input should|dictionary|instance of|validation|NoneType|Error\b|<class|__")


def check(stack: Stack, path: str, body: dict[str, Any], places: tuple[str, ...]) -> None:
    response = stack.http.post(path, json=body)
    if response.status_code == 200:
        return
    assert response.status_code in (400, 404), (body, response.text)
    error = response.json()["error"]
    assert str(error["param"]).startswith(places), (body, error)
    assert error["message"][0] not in ": .", error
    assert not FOREIGN.search(error["message"]), (body, error)


@pytest.mark.parametrize("path", BODIES)
def test_any_value_in_any_field(stack: Stack, path: str) -> None:
    """Every field that the document lists, with values of every type."""
    schema, body = BODIES[path]
    fields = stack.http.get("/openapi.json").json()["components"]["schemas"][schema]["properties"]
    for field in fields:
        for value in VALUES:
            check(stack, path, body | {field: value}, (field, INSTEAD.get(field, field)))


def test_any_value_in_any_sampling_parameter(stack: Stack) -> None:
    """Those of /generate, for all prompts and for each."""
    fields = stack.http.get("/openapi.json").json()["components"]["schemas"]["NativeSampling"]["properties"]
    for field in fields:
        for value in VALUES:
            check(stack, "/generate", {"text": "a", "sampling_params": {field: value}}, ("sampling_params",))
            check(stack, "/generate", {"text": ["a", "b"], "sampling_params": [{field: value}, {field: value}]}, ("sampling_params",))


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ITEM = {"role": "assistant", "content": "x", "call_id": "c", "name": "f", "arguments": "{}", "output": "x", "id": "i", "summary": []}
BLOCK = {"text": "x", "thinking": "x", "id": "i", "name": "f", "input": {}, "tool_use_id": "i", "content": "x"}
# URL, body, where in it values are put, and what the error may name.
PARTS: list[tuple[str, dict[str, Any], tuple[Any, ...], str]] = [
    *(
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": role, "content": "x"}]}, ("messages", 0, name), "messages[0]")
        for role in ("user", "system", "developer", "assistant", "tool", "function")
        for name in ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content", "reasoning", "refusal", "function_call")
    ),
    *(
        (
            "/v1/chat/completions",
            {"model": MODEL, "messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            ("messages", 1, "tool_calls", 0, *place),
            "messages[1].tool_calls[0]",
        )
        for place in (("id",), ("type",), ("function",), ("function", "name"), ("function", "arguments"))
    ),
    *(
        (
            "/v1/chat/completions",
            {"model": MODEL, "messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]},
            ("tools", 0, *place),
            "tools[0]",
        )
        for place in (("type",), ("function",), ("function", "name"), ("function", "parameters"), ("function", "strict"))
    ),
    *(
        (
            "/v1/responses",
            {"model": MODEL, "store": False, "input": [ITEM | {"type": kind}]},
            ("input", 0, name),
            "input" if kind == "reasoning" else "input[0]",
        )
        for kind in ("message", "function_call", "function_call_output", "reasoning")
        for name in ("type", "role", "content", "call_id", "name", "arguments", "output", "summary")
    ),
    *(
        (
            "/v1/messages",
            # A system prompt stands before the messages, and must not shift their paths.
            {"model": MODEL, "max_tokens": 5, "system": "s", "messages": [*HELLO, {"role": role, "content": [BLOCK | {"type": kind}]}]},
            ("messages", 1, "content", 0, name),
            "messages[1]",
        )
        for role in ("user", "assistant")
        for kind in ("text", "tool_use", "tool_result", "thinking", "image")
        for name in ("type", *BLOCK)
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "place", "named"), PARTS, ids=lambda value: "-".join(map(str, value)) if type(value) is tuple else ""
)
def test_any_value_in_any_part(stack: Stack, path: str, body: dict[str, Any], place: tuple[Any, ...], named: str) -> None:
    """Of messages, calls, tools, items and blocks: the error has the path that the client wrote."""
    for value in VALUES:
        changed = copy.deepcopy(body)
        part: Any = changed
        for step in place[:-1]:
            part = part[step]
        part[place[-1]] = value
        check(stack, path, changed, (named,))
