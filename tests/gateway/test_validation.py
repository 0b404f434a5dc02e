"""Bad input: always OpenAI's error shape, always the field at fault, never a generation."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from pydantic import ValidationError

from services.gateway.anthropic_schema import MessagesBody
from services.gateway.formats import Body
from services.gateway.native_schemas import DetokenizeBody, GenerateBody, NativeSampling, TokenizeBody
from services.gateway.refusals import OWN_NAMES, REFUSED
from services.gateway.responses_schema import ResponsesBody
from services.gateway.schemas import ChatRequest, CompletionRequest, SamplingFields
from tests.gateway.fake_worker import Finish, Say
from tests.gateway.stack import HELLO, MODEL, Stack

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, TEXT)
NOT_NUMBERS = ["1", "NaN", True, [], {}]
NOT_INTEGERS = ["1", 1.5, 1e30, True, [], {}]
NOT_BOOLEANS = ["true", 0, 1, [], {}]
NOT_STRINGS = [5, True, [], {}]
NOT_OBJECTS = [5, "x", True, []]

# field → values that must be refused, for both endpoints
SHARED: dict[str, list[Any]] = {
    "model": [None, "", *NOT_STRINGS],
    "temperature": [-1, -0.001, 2.001, *NOT_NUMBERS],
    "top_p": [0, -1, 2, *NOT_NUMBERS],
    "top_k": [-2, -5, 2**40, *NOT_INTEGERS],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "repetition_penalty": [0, -1, 11, *NOT_NUMBERS],
    "presence_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "logit_bias": [
        {"x": 1},
        {"-1": 1},
        {"1.5": 1},
        {"٣": 1},
        {"5": 101},
        {"5": -101},
        {"5": "1"},
        {"5": True},
        {"99999": 1},
        {"9" * 30: 1},
        5,
        "x",
        [],
    ],
    "seed": [2**63, -(2**63) - 1, *NOT_INTEGERS],
    "stop": ["", [""], ["a"] * 17, [5], "x" * 513, 5, True, {}],
    "stop_token_ids": [[-1], [2**33], [True], ["1"], [99999], [0] * 1025, 5, "x", {}],
    "min_tokens": [-1, *NOT_INTEGERS],
    "max_tokens": [0, -1, 10**30, *NOT_INTEGERS],
    "bad_words": [[""], [5], ["a", None], ["x" * 513], ["a"] * 1025, 5, "x", {}],
    "allowed_token_ids": [[], [-1], [2**33], [True], ["1"], [99999], 5, "x", {}],
    "prompt_logprobs": [-1, 21, *NOT_INTEGERS],
    "truncate_prompt_tokens": [0, -2, 1001, *NOT_INTEGERS],
    "return_token_ids": NOT_BOOLEANS,
    "return_tokens_as_token_ids": NOT_BOOLEANS,
    "ignore_eos": NOT_BOOLEANS,
    "include_stop_str_in_output": NOT_BOOLEANS,
    "skip_special_tokens": NOT_BOOLEANS,
    "n": [0, -1, 129, *NOT_INTEGERS],
    "stream": NOT_BOOLEANS,
    "stream_options": [{"include_usage": "x"}, {"include_usage": True}, *NOT_OBJECTS],
    "user": NOT_STRINGS,
    "metadata": NOT_OBJECTS,
    "store": NOT_BOOLEANS,
    "service_tier": NOT_STRINGS,
    "priority": [2**40, *NOT_INTEGERS],
    "structured_outputs": [
        {},
        {"json": None},
        {"regex": "a", "json_object": True},
        {"choice": []},
        {"choice": [""]},
        {"regex": 5},
        *NOT_OBJECTS,
    ],
    "guided_json": ["{", "[]", 5, True, []],
    "guided_regex": NOT_STRINGS,
    "guided_choice": [[], [5], "x", {}],
    "guided_grammar": NOT_STRINGS,
    "guided_json_object": NOT_BOOLEANS,
    "response_format": [
        "json",
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": {}},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_object"},
        {"type": "structural_tag"},
        {"type": "structural_tag", "structures": [], "triggers": ["a"]},
        {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["x"]},
        {"type": "structural_tag", "format": {"type": "any_text"}},
        5,
        [],
    ],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT_ONLY: dict[str, list[Any]] = {
    "messages": [None, [], 5, "x", {}],
    "max_completion_tokens": [0, -1, 10**30, *NOT_INTEGERS],
    "logprobs": NOT_BOOLEANS,
    "top_logprobs": [-1, 21, 5, *NOT_INTEGERS],
    "tools": [5, "x", {}],
    "thinking_token_budget": [-1, *NOT_INTEGERS],
    "continue_final_message": [True, *NOT_BOOLEANS],
    "add_generation_prompt": [False, *NOT_BOOLEANS],
    "echo": NOT_BOOLEANS,
    "tool_choice": ["x", "required", 5, [], {}, {"type": "function", "function": {"name": "g"}}],
    "parallel_tool_calls": NOT_BOOLEANS,
    "reasoning_effort": ["x", "Low", 5, True, [], {}],
    "include_reasoning": NOT_BOOLEANS,
    "chat_template_kwargs": [
        {"enable_thinking": "no"},
        {"thinking": 1},
        {"reasoning_effort": "x"},
        {"clear_thinking": 0},
        {"messages": []},
        {"tools": []},
        {"add_generation_prompt": False},
        {"enable_thinkin": False},
        {"frobnicate": 0},
        *NOT_OBJECTS,
    ],
    "thinking": [
        {},
        {"type": "x"},
        {"type": True},
        {"type": "enabled", "clear_thinking": 1},
        {"type": "enabled", "budget_tokens": 5},
        *NOT_OBJECTS,
    ],
    "reasoning": [
        {"effort": "x"},
        {"effort": "Low"},
        {"effort": 5},
        {"summary": "x"},
        {"summary": True},
        {"max_tokens": 5},
        {"enabled": False},
        *NOT_OBJECTS,
    ],
}
TEXT_ONLY: dict[str, list[Any]] = {
    "prompt": [
        None,
        "",
        [],
        [""],
        ["a", 5],
        ["a", [1]],
        [[]],
        [[1], "a"],
        [[1], []],
        [True],
        [-1],
        [99999],
        [1, "a"],
        [1.5],
        [None],
        {},
        5,
        True,
    ],
    "logprobs": [-1, 21, *NOT_INTEGERS],
    "add_special_tokens": NOT_BOOLEANS,
    "echo": NOT_BOOLEANS,
    "max_tokens": [0, -1, 10**30, *NOT_INTEGERS],
    "suffix": ["x"],
    "best_of": [2],
}
CASES = [
    (path, name, value)
    for path, table in [(CHAT, SHARED), (TEXT, SHARED), (CHAT, CHAT_ONLY), (TEXT, TEXT_ONLY)]
    for name, values in table.items()
    for value in values
]


def check_error(response: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    """The one shape of errors: exactly these four keys, nothing of the framework's own."""
    body = response.json()
    assert response.status_code == status, response.text
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    special = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    assert body["error"]["type"] == special.get(status, "invalid_request_error" if status < 500 else "server_error")
    assert isinstance(body["error"]["code"], str)
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["param"] == param
    return dict(body["error"])


@pytest.mark.parametrize(("path", "name", "value"), CASES, ids=lambda value: str(value)[:40])
def test_every_field_out_of_range_or_of_the_wrong_type_is_refused_by_name(stack: Stack, path: str, name: str, value: Any) -> None:
    """400, OpenAI's shape, `param` names the field, and the worker is not bothered."""
    error = check_error(stack.post(path, **{name: value}), name)
    assert name in error["message"]
    assert stack.worker.requests == []


@pytest.mark.parametrize(("path", "name"), [(CHAT, "model"), (CHAT, "messages"), (TEXT, "model"), (TEXT, "prompt")])
def test_a_missing_field_is_named(stack: Stack, path: str, name: str) -> None:
    """Required fields are asked for by name."""
    error = check_error(stack.post(path, **{name: ...}), name)
    assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]}, "messages[0].content[1]"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ],
)
def test_nested_faults_are_named_by_path(stack: Stack, fields: dict[str, Any], param: str) -> None:
    """Inside messages and tools, `param` is the path of the part at fault."""
    check_error(stack.post(**fields), param)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", sorted(REFUSED.keys() - SamplingFields.model_fields.keys()))
def test_fields_that_cannot_be_honoured_are_refused_but_their_neutral_values_pass(stack: Stack, path: str, name: str) -> None:
    """What would silently change the answer is 400 unsupported_parameter; null and the values that ask for nothing are accepted."""
    error = check_error(stack.post(path, **{name: {"some": "thing"}}), name)
    assert error["code"] == "unsupported_parameter"
    for neutral in (None, *REFUSED[name]):
        assert stack.post(path, **{name: neutral}).status_code == 200


OTHERS: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/responses", {"model": "tiny", "input": "Hello"}, None),
    ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 5}, None),
    ("/generate", {"text": "Hello"}, None),
    ("/generate", {"text": "Hello"}, "sampling_params"),
]


@pytest.mark.parametrize(("path", "body", "inside"), OTHERS)
def test_the_other_apis_refuse_the_same_fields(stack: Stack, path: str, body: dict[str, Any], inside: str | None) -> None:
    """Whatever the URL, what cannot be honoured is refused by name, and nothing runs."""
    own = set(NativeSampling.model_fields) if inside else set()
    for name in sorted(REFUSED.keys() - own):
        field = {name: {"some": "thing"}}
        refused = stack.http.post(path, json=body | ({inside: field} if inside else field))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", inside or name)
        assert name in error["message"]
    assert not stack.worker.requests
    neutral = {name: values[0] for name, values in REFUSED.items() if values and name not in own}
    assert stack.http.post(path, json=body | ({inside: neutral} if inside else neutral)).status_code == 200


def test_a_refusal_names_what_to_use_instead(stack: Stack) -> None:
    """Other servers' names of what this one has are answered with its own name, and that one exists."""
    known = set(SHARED) | set(CHAT_ONLY) | set(TEXT_ONLY) | set(ChatRequest.model_fields) | {"its fields by themselves"}
    for name, other in OWN_NAMES.items():
        assert f"use {other}" in check_error(stack.post(**{name: {"some": "thing"}}), name)["message"]
        assert set(other.split(" and ")) <= known


@pytest.mark.parametrize(("path", "body"), [entry[:2] for entry in OTHERS[:2]])
def test_sampling_fields_count_on_the_other_apis(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """Responses and messages take vLLM's sampling fields too, checked as in chat."""
    assert stack.http.post(path, json=body | {"seed": 7, "top_k": 3, "stop": ["x"], "min_p": 0.1, "priority": -1}).status_code == 200
    got = stack.sampling
    assert (got.seed, got.top_k, list(got.stop), got.min_p) == (7, 3, ["x"], pytest.approx(0.1))
    refused = stack.http.post(path, json=body | {"min_p": 7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_p")


def test_unknown_fields_are_counted_by_name(stack: Stack) -> None:
    """/metrics tells which fields clients send in vain; odd names, which could be anything, count together."""

    def counted(field: str) -> float:
        for line in stack.http.get("/metrics").text.splitlines():
            if line.startswith(f'glm53_gateway_unknown_fields_total{{field="{field}"}}'):
                return float(line.split()[-1])
        return 0.0

    named, other = counted("cache_salt"), counted("other")
    stack.post(cache_salt="secret", **{"my password is": 1, "x" * 65: 2})
    stack.post("/v1/completions", cache_salt="secret")
    assert (counted("cache_salt") - named, counted("other") - other) == (2, 2)
    assert "password" not in stack.http.get("/metrics").text


@pytest.mark.parametrize("path", BOTH)
def test_null_means_absent(stack: Stack, path: str) -> None:
    """Every optional field may be null."""
    required = {"model", "messages", "prompt"}
    table = SHARED | (CHAT_ONLY if path == CHAT else TEXT_ONLY)
    assert stack.post(path, **{name: None for name in table if name not in required}).status_code == 200


@pytest.mark.parametrize("path", BOTH)
def test_unknown_and_harmless_fields_are_ignored(stack: Stack, path: str) -> None:
    """Fields of other servers, user, metadata and the like change nothing."""
    fields = {"user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "frobnicate": 5}
    assert stack.post(path, **fields).status_code == 200


def test_an_unknown_field_is_logged_once(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """However often a client sends it, the log has its name once, and never its value."""
    with caplog.at_level(logging.INFO, logger="services.gateway.schemas"):
        for _ in range(3):
            stack.post(a_field_of_tomorrow="secret")
    lines = [record.getMessage() for record in caplog.records if "a_field_of_tomorrow" in record.getMessage()]
    assert lines == ["ignoring the unknown field a_field_of_tomorrow: a field of another server, or misspelt"]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"model":"tiny",}', "application/json"),
        (b"[]", "application/json"),
        (b'"x"', "application/json"),
        (b"5", "application/json"),
        (b"null", "application/json"),
        (b"", "application/json"),
        (b"  \n", "application/json"),
        (b"\xff\xfe\x00", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"a":' * 100_000, "application/json"),
        (b"{}", "text/plain"),
        (b"model=tiny", "application/x-www-form-urlencoded"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bodies_that_are_no_json_object(stack: Stack, path: str, body: bytes, content_type: str) -> None:
    """Whatever is not a JSON object is 400 invalid_json, never 500."""
    response = stack.http.post(path, content=body, headers={"Content-Type": content_type})
    assert check_error(response, None)["code"] == "invalid_json"


EVERY_POST = {
    CHAT: {"model": MODEL, "messages": HELLO},
    TEXT: {"model": MODEL, "prompt": "a"},
    "/v1/responses": {"model": MODEL, "input": "a"},
    "/v1/messages": {"model": MODEL, "messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": HELLO},
    "/generate": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/v1/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", EVERY_POST)
@pytest.mark.parametrize(
    ("field", "where"),
    [
        ('"temperature": @', "temperature"),
        ('"metadata": {"a b": [1, {"c": @}]}', 'metadata["a b"][1].c'),
        ('"tools": [{"function": {"parameters": {"minimum": @}}}]', "tools[0].function.parameters.minimum"),
        ('"frobnicate": [@]', "frobnicate[0]"),
    ],
)
@pytest.mark.parametrize(
    ("number", "name"),
    [
        ("NaN", "NaN"),
        ("Infinity", "Infinity"),
        ("-Infinity", "-Infinity"),
        ("1e400", "Infinity"),
        ("-1e999", "-Infinity"),
        ("9" * 5000, "a number of 5000 digits"),
        ("-" + "9" * 5000, "a number of 5000 digits"),
    ],
)
def test_numbers_that_json_has_not_are_refused_by_their_place(
    stack: Stack, path: str, field: str, where: str, number: str, name: str
) -> None:
    """NaN, the infinities and what a double cannot hold: in known fields and unknown ones, on every URL."""
    text = json.dumps(EVERY_POST[path])[:-1] + ", " + field.replace("@", number) + "}"
    response = stack.http.post(path, content=text.encode(), headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, where)
    assert error["message"] == f"{where} is {name}, which is no number that JSON has or that a double holds."
    assert not stack.worker.requests


@pytest.mark.parametrize("path", EVERY_POST)
@pytest.mark.parametrize("field", ['"metadata": {"a": @}', '"frobnicate": @', '"tools": [{"default": @}]'])
@pytest.mark.parametrize("inner", ['"\\ud83d"', "1"])
def test_a_deep_body_is_no_failure(stack: Stack, path: str, field: str, inner: str) -> None:
    """Small and large, with and without broken text: what can be walked through is taken or refused by name, what cannot is 400."""
    for levels in (100, 240, 300, 480, 600, 960, 3000):
        for padding in (0, 70_000):
            value = "[" * levels + inner + "]" * levels
            text = json.dumps(EVERY_POST[path])[:-1] + ", " + field.replace("@", value) + "}" + " " * padding
            response = stack.http.post(path, content=text.encode(), headers={"Content-Type": "application/json"})
            if levels > 250:
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, "invalid_json"), response.text
                assert "nested too deeply" in error["message"]
                # Beyond what the reader itself goes down there are no fields yet.
                assert error["param"] == field.split('"')[1] or levels > 900
            else:
                assert response.status_code in (200, 400)
                assert "nested too deeply" not in response.text


@pytest.mark.parametrize("number", ["-0.0", "-0", "1e-400", "0.1e1", "1E0"])
def test_unusual_numbers_are_numbers(stack: Stack, number: str) -> None:
    """A negative zero and what rounds to zero are in range where zero is."""
    text = json.dumps(EVERY_POST[CHAT])[:-1] + f', "temperature": {number}}}'
    assert stack.http.post(CHAT, content=text.encode(), headers={"Content-Type": "application/json"}).status_code == 200
    assert stack.sampling.temperature == float(number)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", None])
def test_content_types_that_are_taken(stack: Stack, content_type: str | None) -> None:
    """JSON with a charset, in any case, or without a type is read."""
    body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
    headers = {} if content_type is None else {"Content-Type": content_type}
    assert stack.http.post(CHAT, content=body, headers=headers).status_code == 200


def test_half_a_surrogate_pair_in_text_is_replaced(stack: Stack) -> None:
    """A client that cut text inside an emoji gets an answer; whole pairs stay what they are."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\ud83d b \\ud83e\\udd8a"}]}'
    assert stack.http.post(CHAT, content=body).status_code == 200
    clean = '{"model": "tiny", "messages": [{"role": "user", "content": "a\ufffd b 🦊"}]}'.encode()
    assert stack.http.post(CHAT, content=clean).status_code == 200
    first, second = stack.worker.requests
    assert list(first.prompt_token_ids) == list(second.prompt_token_ids)


@pytest.mark.parametrize("path", BOTH)
def test_a_body_over_the_limit_is_413(stack: Stack, path: str) -> None:
    """Declared or chunked, a body beyond GLM53_MAX_BODY_BYTES is refused before it is parsed."""
    size = stack.settings.max_body_bytes + 1
    check_error(stack.http.post(path, content=b" " * size), None, 413)
    check_error(stack.http.post(path, content=iter([b" " * 1024 * 1024] * (size // 2**20 + 1))), None, 413)


BODIES = [ChatRequest, CompletionRequest, ResponsesBody, MessagesBody, GenerateBody, TokenizeBody, DetokenizeBody]
LISTS = [
    (schema, name)
    for schema in BODIES
    for name, field in schema.model_fields.items()
    if "list[" in str(field.annotation) and name not in ("messages", "prompt", "input", "system")
]


@pytest.mark.parametrize(("schema", "name"), LISTS, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_long_list_of_mistakes_is_one_mistake(schema: type[Body], name: str) -> None:
    """Making an error of each of a million wrong entries would hold everybody up for a minute."""
    for wrong in ([None] * 500, [[None] * 500] * 500):
        with pytest.raises(ValidationError) as refused:
            schema.model_validate({name: wrong})
        assert len([error for error in refused.value.errors() if error["loc"][0] == name]) <= 4


def test_a_list_of_the_wrong_length_is_told_its_length(stack: Stack) -> None:
    """That it is a list helps nobody."""
    error = check_error(stack.post(guided_choice=["x"] * 2000), "guided_choice")
    assert error["message"] == "guided_choice must be a list of at most 1024 entries (got 2000)."


def test_a_long_logit_bias_of_mistakes_is_one_mistake(stack: Stack) -> None:
    """The same for keys and values of an object."""
    for bias in ({str(i): "x" for i in range(500)}, {f"x{i}": 1 for i in range(500)}):
        with pytest.raises(ValidationError) as refused:
            ChatRequest.model_validate({"model": MODEL, "messages": HELLO, "logit_bias": bias})
        assert refused.value.error_count() == 1
    for key in ("05", "0" * 5000, "00", "4294967296", "1e1", "１"):
        check_error(stack.post(logit_bias={key: 1}), "logit_bias")


def test_a_body_has_not_thousands_of_fields(stack: Stack) -> None:
    """Unknown fields are ignored one by one, but not without end."""
    assert "1002 fields" in check_error(stack.post(**{f"u{i}": 1 for i in range(1000)}), None)["message"]


def test_what_a_grammar_would_be_too_large_for_is_refused(stack: Stack) -> None:
    """Before the worker hears of it, and named."""
    stack.worker.supports_grammar = True
    stack.run(stack.services.watch.refresh())
    try:
        error = check_error(stack.post(guided_choice=["x" * 5000 + str(i) for i in range(1000)]), "guided_choice")
        assert "this server takes 2000000" in error["message"]
        assert not stack.worker.requests
    finally:
        stack.worker.supports_grammar = False
        stack.run(stack.services.watch.refresh())


def test_what_is_nested_without_end_in_a_tool_is_refused(stack: Stack) -> None:
    """Templates write a tool as it came: parts that nobody knows are bounded too."""
    deep = json.loads('{"a":' * 240 + "1" + "}" * 240)
    check_error(stack.post(tools=[{"type": "function", "function": {"name": "f", "x": deep}}]), "tools[0].function")
    check_error(stack.post(tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}]), "tools[0].function.parameters")
    check_error(stack.post(tools=[{"type": "function", "function": {"name": "f"}, "x": deep}]), "tools[0]")
    assert stack.post(metadata={"x": deep}, frobnicate=deep).status_code == 200


def test_too_many_messages_are_refused(stack: Stack) -> None:
    """The number of messages is bounded and the bound is named."""
    error = check_error(stack.post(messages=HELLO * (stack.settings.max_messages + 1)), "messages")
    assert str(stack.settings.max_messages) in error["message"]


@pytest.mark.parametrize("path", BOTH)
def test_another_model_is_404(stack: Stack, path: str) -> None:
    """A name that is not served is model_not_found, and the right name is told."""
    error = check_error(stack.post(path, model="gpt-4o"), "model", 404)
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]


def test_models_can_be_listed_and_looked_up(stack: Stack) -> None:
    """/v1/models lists the one model with its context; another name is 404."""
    listed = stack.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(entry["id"], entry["object"], entry["max_model_len"]) for entry in listed["data"]] == [(MODEL, "model", 1000)]
    assert stack.http.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
    check_error(stack.http.get("/v1/models/some/other"), "model", 404)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("POST", "/", 404), ("GET", CHAT, 405), ("PUT", TEXT, 405)]
)
def test_unknown_urls_and_methods_have_openais_shape(stack: Stack, method: str, path: str, status: int) -> None:
    """The framework's own refusals look like ours."""
    response = stack.http.request(method, path)
    check_error(response, None, status)
    if status == 405:
        assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", BOTH)
def test_a_prompt_without_room_is_refused_before_any_byte(stack: Stack, path: str, streaming: bool) -> None:
    """A prompt of the whole context or more is 400 context_length_exceeded with both numbers, streaming or not."""
    for length in (1000, 1001, 5000):
        fields = {"prompt": [5] * length} if path == TEXT else {"messages": [{"role": "user", "content": "7" * length}]}
        error = check_error(stack.post(path, stream=streaming, **fields), "prompt" if path == TEXT else "messages")
        assert error["code"] == "context_length_exceeded"
        assert "1000" in error["message"]
        assert str(length) in error["message"] or path == CHAT
    assert stack.worker.requests == []


def test_one_free_token_is_enough(stack: Stack) -> None:
    """A prompt that leaves room for one token is taken, and max_tokens is one."""
    stack.play(Say("a"), Finish())
    assert stack.post(TEXT, prompt=[5] * 999).status_code == 200
    assert stack.sampling.max_tokens == 1
