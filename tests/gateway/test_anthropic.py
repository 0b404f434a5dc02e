"""Anthropic's API, raw and through the official client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from services.common.errors import EngineFailed, QueueFull
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.fake_worker import Fail, Finish, Say
from tests.gateway.language import IDS
from tests.gateway.stack import HELLO, MODEL, Stack
from tests.gateway.test_responses import prompt_of

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}
FULL = "hm</think>So <tool_call>f<arg_key>x</arg_key><arg_value>é🦊</arg_value></tool_call>"
THINK = {"thinking": {"type": "enabled", "budget_tokens": 2000}}


def send(stack: Stack, path: str = "/v1/messages", **fields: Any) -> Any:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 50, **fields}
    return stack.http.post(path, json={name: value for name, value in body.items() if value is not ...})


def create(stack: Stack, **fields: Any) -> dict[str, Any]:
    response = send(stack, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events_of(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    response = send(stack, stream=True, **fields)
    assert response.status_code == 200
    events = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together."""
    message = dict(events[0]["message"])
    blocks: list[dict[str, Any]] = []
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]) | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[delta["type"]]
            block["json" if name == "partial_json" else name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return message | {"content": blocks}


def bare(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": blocks}


def test_a_whole_message_and_its_stream(stack: Stack) -> None:
    """Thinking, text and tool use are blocks in their order; the stream builds the same message."""
    stack.play(Say(FULL), Finish(cached=1))
    found = create(stack, tools=[TOOL], **THINK)
    assert found["id"].startswith("msg_")
    assert (found["type"], found["role"], found["model"], found["stop_reason"]) == ("message", "assistant", MODEL, "tool_use")
    assert found["content"][:2] == [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "So "}]
    assert (found["content"][2]["name"], found["content"][2]["input"]) == ("f", {"x": "é🦊"})
    assert found["usage"]["cache_read_input_tokens"] == 1
    assert found["usage"]["input_tokens"] + 1 == len(stack.worker.requests[0].prompt_token_ids)
    events = events_of(stack, tools=[TOOL], **THINK)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert bare(assembled(events)) == bare(found)


@pytest.mark.parametrize(
    ("text", "reason", "fields", "stop"),
    [
        ("Hi", pb.FINISH_REASON_STOP, {}, "end_turn"),
        ("Hi", pb.FINISH_REASON_LENGTH, {}, "max_tokens"),
        ("<tool_call>f</tool_call>", pb.FINISH_REASON_STOP, {"tools": [TOOL]}, "tool_use"),
    ],
)
def test_stop_reasons(stack: Stack, text: str, reason: int, fields: dict[str, Any], stop: str) -> None:
    """Why an answer ended, in Anthropic's words, whole and streamed."""
    stack.play(Say(text), Finish(reason))
    assert create(stack, **fields)["stop_reason"] == stop
    assert assembled(events_of(stack, **fields))["stop_reason"] == stop


def test_conversations_of_blocks(stack: Stack) -> None:
    """System, thinking, tool use and tool results render as the conversation that they were."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "think", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
                {"type": "tool_use", "id": "t3", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}]},
                {"type": "tool_result", "tool_use_id": "t1", "content": "one", "is_error": False},
                {"type": "tool_result", "tool_use_id": "t3", "content": None},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    create(stack, messages=messages, tools=[TOOL], system=[{"type": "text", "text": "sys"}], **THINK)
    assert prompt_of(stack).endswith(
        "<|system|>sys<|user|>ab<|assistant|><think>think</think>calling"
        "<tool_call>f<arg_key>x</arg_key><arg_value>é</arg_value></tool_call><tool_call>f</tool_call><tool_call>f</tool_call>"
        "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response><tool_response></tool_response>"
        "<|user|>go on<|assistant|><think>"
    )


def test_thinking_is_off_unless_asked_for(stack: Stack) -> None:
    """As in Anthropic's API: nothing said means no thinking; a budget and an effort turn it on."""
    create(stack)
    assert prompt_of(stack).endswith("<think></think>")
    create(stack, **THINK)
    assert prompt_of(stack).endswith("<|assistant|><think>")
    assert stack.worker.requests[-1].thinking_budget.budget == 2000
    create(stack, thinking={"type": "disabled"})
    assert prompt_of(stack).endswith("<think></think>")
    create(stack, thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert "Reasoning Effort: Low" in prompt_of(stack)
    assert prompt_of(stack).endswith("<|assistant|><think>")


def test_a_server_that_always_thinks_answers_plain_requests() -> None:
    """With the policy `reject`, saying nothing about thinking is no error: the model thinks a little."""
    stack = Stack(thinking_off_policy="reject")
    try:
        create(stack)
        assert "Reasoning Effort: Low" in prompt_of(stack)
        assert send(stack, thinking={"type": "disabled"}).status_code == 400
    finally:
        stack.close()


def test_an_assistant_prefill_is_continued(stack: Stack) -> None:
    """A last assistant message is the beginning of the answer."""
    create(stack, messages=[*HELLO, {"role": "assistant", "content": "The"}])
    assert prompt_of(stack).endswith("<think></think>The")


def test_sampling_and_tool_choice(stack: Stack) -> None:
    """Anthropic's names reach the worker."""
    stack.worker.supports_grammar = True
    stack.run(stack.services.watch.refresh())
    try:
        stack.play(Say("<tool_call>f</tool_call>"), Finish(pb.FINISH_REASON_GRAMMAR_END))
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "tools": [TOOL]}
        for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
            assert create(stack, **fields, tool_choice=choice)["stop_reason"] == "tool_use"
            assert stack.worker.requests[-1].grammar.lark
        got = stack.sampling
        assert (got.temperature, got.top_p, got.top_k, list(got.stop), got.max_tokens) == (0.5, 0.9, 5, ["x"], 50)
        create(stack, **fields, tool_choice={"type": "none"})
        assert not stack.worker.requests[-1].HasField("grammar")
        assert IDS["<tool_call>"] not in stack.worker.requests[-1].prompt_token_ids
    finally:
        stack.worker.supports_grammar = False
        stack.run(stack.services.watch.refresh())


def test_count_tokens(stack: Stack) -> None:
    """The count is the prompt's that the same request would have."""
    fields = {"system": "sys", "tools": [TOOL], **THINK}
    counted = send(stack, "/v1/messages/count_tokens", max_tokens=..., **fields).json()
    create(stack, **fields)
    assert counted == {"input_tokens": len(stack.worker.requests[-1].prompt_token_ids)}
    assert len(stack.worker.requests) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "x"}}, "thinking"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"model": "claude"}, "model"),
    ],
    ids=str,
)
def test_bad_fields_are_named_in_anthropics_shape(stack: Stack, fields: dict[str, Any], param: str) -> None:
    """Errors have Anthropic's shape, and the field at fault."""
    response = send(stack, **fields)
    body = response.json()
    assert response.status_code == (404 if param == "model" else 400)
    assert body["type"] == "error"
    assert body["error"]["type"] == ("not_found_error" if param == "model" else "invalid_request_error")
    assert body["error"]["param"] == param
    assert not stack.worker.requests


def test_overload_and_errors_in_mid_stream(stack: Stack) -> None:
    """A full queue is overloaded_error with Retry-After; what breaks later is an event."""
    stack.play(Fail(QueueFull("full", retry_after_s=3.0)), admit=False)
    response = send(stack, stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["type"] == "overloaded_error"
    stack.play(Say("x"), Fail(EngineFailed("broken")))
    last = events_of(stack)[-1]
    assert (last["type"], last["error"]["type"], last["error"]["message"]) == ("error", "api_error", "broken")


def test_the_official_client(stack: Stack) -> None:
    """anthropic-python: create, stream, tool round trip, count, errors."""
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        stack.play(Say(FULL), Finish())
        thinking = {"type": "enabled", "budget_tokens": 1024}
        made = client.messages.create(model=MODEL, max_tokens=2000, messages=HELLO, tools=[TOOL], thinking=thinking)
        assert [block.type for block in made.content] == ["thinking", "text", "tool_use"]
        with client.messages.stream(model=MODEL, max_tokens=2000, messages=HELLO, tools=[TOOL], thinking=thinking) as streaming:
            texts = list(streaming.text_stream)
            final = streaming.get_final_message()
        assert "".join(texts) == "So "
        assert final.content[-1].input == {"x": "é🦊"}
        assert final.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": final.content[-1].id, "content": "42"}
        history = [*HELLO, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
        stack.play(Say("42"), Finish())
        answer = client.messages.create(model=MODEL, max_tokens=20, messages=history, tools=[TOOL])
        assert answer.content[0].text == "42"
        assert "<tool_response>42</tool_response>" in prompt_of(stack)
        counted = client.messages.count_tokens(model=MODEL, messages=history, tools=[TOOL])
        assert counted.input_tokens == len(stack.worker.requests[-1].prompt_token_ids)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", max_tokens=20, messages=HELLO)
