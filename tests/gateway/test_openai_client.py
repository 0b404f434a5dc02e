"""The official client against the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from services.common import errors
from tests.gateway.fake_worker import Fail, Finish, Say, Script
from tests.gateway.stack import HELLO, MODEL, Stack
from tests.gateway.test_parser import call

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
        },
    }
]
MESSAGES: Any = HELLO


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.client() as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    """models.list and models.retrieve read our model."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "glm53-offload"


def test_chat(client: openai.OpenAI, stack: Stack) -> None:
    """Content, reasoning_content, finish reason and usage as the client's own types."""
    stack.play(Say("hm</think>Hi"), Finish(cached=4))
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    message = answer.choices[0].message
    assert message.content == "Hi"
    assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_stream(client: openai.OpenAI, stack: Stack) -> None:
    """Chunks join to the answer; the last one has the usage."""
    stack.play(Say("hm</think>Hi there"), Finish())
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hi there"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens


def test_the_stream_helper_with_tools(client: openai.OpenAI, stack: Stack) -> None:
    """The client's accumulator, which joins repeated roles, ids and names, gets them once each."""
    stack.play(Say("hm</think>" + call("get_weather", city="Paris", days="3") + call("get_weather", city='a "b"')), Finish())
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as events:
        final = events.get_final_completion()
    choice = final.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert [entry.function.name for entry in choice.message.tool_calls] == ["get_weather"] * 2
    assert [json.loads(entry.function.arguments) for entry in choice.message.tool_calls] == [
        {"city": "Paris", "days": 3},
        {"city": 'a "b"'},
    ]
    assert all(entry.id.startswith("call_") and len(entry.id) == 29 for entry in choice.message.tool_calls)


def test_a_tool_round_trip(client: openai.OpenAI, stack: Stack) -> None:
    """The client's message object goes back as history, with the tool's result."""
    stack.play(Say("hm</think>" + call("get_weather", city="Paris")), Finish())
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS).choices[0].message
    assert first.tool_calls is not None
    stack.play(Say("so</think>It is 17 degrees."), Finish())
    history: Any = [*MESSAGES, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "17"}]
    second = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS).choices[0]
    assert (second.message.content, second.finish_reason) == ("It is 17 degrees.", "stop")


def test_thinking_off(client: openai.OpenAI, stack: Stack) -> None:
    """extra_body switches thinking off; the answer is content only."""
    stack.play(Say("Hi"), Finish())
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    message = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra).choices[0].message
    assert message.content == "Hi"
    assert message.reasoning_content is None  # type: ignore[attr-defined]


def test_logprobs(client: openai.OpenAI, stack: Stack) -> None:
    """Chat log-probabilities as the client's types."""
    stack.play(Say("</think>Hi"), Finish())
    found = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [len(entry.top_logprobs) for entry in found.content] == [2] * len(found.content)


def test_completions(client: openai.OpenAI, stack: Stack) -> None:
    """The text endpoint, whole and streamed."""
    stack.play(Say("a b"), Finish())
    assert client.completions.create(model=MODEL, prompt="x", logprobs=0).choices[0].text == "a b"
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt="x", stream=True)) == "a b"


def test_errors_become_the_clients_exceptions(client: openai.OpenAI, stack: Stack) -> None:
    """Status, code and param arrive in the exception that the client has for them."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("temperature", "invalid_value", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    stack.play(Fail(errors.QueueFull("full", retry_after_s=1)), admit=False)
    with pytest.raises(openai.InternalServerError) as busy:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert (busy.value.status_code, busy.value.code) == (503, "queue_full")


def test_an_error_in_mid_stream_raises(client: openai.OpenAI, stack: Stack) -> None:
    """The client raises our error after the tokens that came before it."""
    stack.play(Say("</think>a"), Fail(errors.EngineFailed("step failed")))
    got: list[str | None] = []
    chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="step failed") as caught:
        got.extend(chunk.choices[0].delta.content for chunk in chunks)
    assert caught.value.code == "internal_error"
    assert "a" in got


def test_a_retry_after_a_full_queue(stack: Stack) -> None:
    """With retries on, the client waits as told and gets its answer."""
    answers = iter([Script((Fail(errors.QueueFull("full", retry_after_s=0.05)),), admit=False)])
    stack.worker.script_for = lambda request: next(answers, Script((Say("</think>Hi"), Finish())))
    with stack.client() as client:
        patient = client.with_options(max_retries=1)
        answer = patient.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Hi"
    assert len(stack.worker.requests) == 2
