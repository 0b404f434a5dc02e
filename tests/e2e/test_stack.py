"""The whole product as a client sees it: gateway, gpu_worker and cpu_expert as real processes."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx
import openai
import pytest

from bench.server import Server
from tests.e2e import asking

pytestmark = pytest.mark.e2e


def ids(case: dict[str, Any]) -> str:
    return str(case["name"])


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """What of a message does not depend on random ids: content, reasoning, calls with parsed arguments."""
    calls = message.get("tool_calls") or []
    return {
        "content": message.get("content"),
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [{"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])} for c in calls],
    }


@pytest.mark.parametrize("case", asking.expectations(), ids=ids)
def test_answers_are_the_committed_ones(stack: Server, case: dict[str, Any]) -> None:
    """Greedy answers equal the committed expectations, and streaming gives the same text, calls and finish reason."""
    body = {**case["body"], "model": asking.model_of(stack.url)}
    choice = asking.ask(stack.url, body)["choices"][0]
    assert plain(choice["message"]) == case["message"]
    assert choice["finish_reason"] == case["finish_reason"]
    got = asking.stream(stack.url, body)
    assert got.done
    assert got.finish_reason == case["finish_reason"]
    assert (got.content or None) == (case["message"]["content"] or None)
    assert (got.reasoning or None) == case["message"]["reasoning_content"]
    assert [{**c, "arguments": json.loads(c["arguments"])} for c in got.tool_calls] == case["message"]["tool_calls"]


def test_eight_ragged_streams_at_once_give_the_same_answers(stack: Server) -> None:
    """Eight concurrent requests of different lengths get exactly the tokens that each gets alone."""
    cases = (asking.expectations() * 8)[:8]
    model = asking.model_of(stack.url)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: asking.stream(stack.url, {**case["body"], "model": model}), cases))
    for case, got in zip(cases, answers, strict=True):
        assert (got.content or None) == (case["message"]["content"] or None), case["name"]
        assert got.finish_reason == case["finish_reason"], case["name"]


def test_a_tool_round_trip_with_the_official_client(client: openai.OpenAI) -> None:
    """The model calls the declared tool, gets its result and answers from it."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(model=model, messages=messages, tools=[asking.WEATHER_TOOL], temperature=0).choices[0]
    assert first.finish_reason == "tool_calls"
    call = first.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": 17, "condition": "rainy"})}]
    second = client.chat.completions.create(model=model, messages=messages, tools=[asking.WEATHER_TOOL], temperature=0).choices[0]
    assert second.finish_reason == "stop"
    assert "17" in (second.message.content or "")


def test_the_default_run_uses_every_tier(stack: Server) -> None:
    """Hits, admissions, evictions and bytes served by cpu_expert are all above zero in a default run."""
    body = {"model": asking.model_of(stack.url), "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    for question in ("Hello", "What is 17 + 25?", "What is the capital of Japan?", "Who are you?"):
        asking.ask(stack.url, {**body, "messages": [{"role": "user", "content": question}]})
    stats = stack.get_json("/stats")
    tiers = stats["tiers"]
    assert tiers["experts"]["hit"] > 0
    assert tiers["admissions"] > 0
    assert tiers["evictions"] > 0
    assert tiers["cpu_expert_bytes"] > 0
    assert stats["expert_cache"][0]["slots"] > 0


def test_max_tokens_defaults_to_the_remaining_context(stack: Server) -> None:
    """Without max_tokens an answer ends because the model ends it, and usage adds up."""
    answer = asking.ask(
        stack.url, {"model": asking.model_of(stack.url), "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
    )
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_prompt_longer_than_the_context_is_refused_before_any_byte(stack: Server, client: openai.OpenAI) -> None:
    """Streaming or not, the status is 400 context_length_exceeded with both numbers."""
    model = asking.model_of(stack.url)
    text = "word " * 20000
    for streaming in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], stream=streaming)
        assert caught.value.code == "context_length_exceeded"
        assert "16384" in caught.value.message


def test_another_model_name_is_not_found(client: openai.OpenAI) -> None:
    """A name that is not served is 404 model_not_found."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "model_not_found"


def test_images_are_refused(client: openai.OpenAI, stack: Server) -> None:
    """The product is text only: an image part is 400 and names the part."""
    parts: Any = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=asking.model_of(stack.url), messages=[{"role": "user", "content": parts}])
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[0].content[1]")


def test_a_disconnect_frees_the_job(stack: Server) -> None:
    """Closing the socket in mid-answer takes the job out of the engine."""
    body = {
        "model": asking.model_of(stack.url),
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=60) as response:
        # Kept in a variable: an iterator that is dropped closes the connection, and with it the job, before it is seen to run.
        lines = asking.lines_of(response)
        next(lines)
        asking.until(lambda: stack.get_json("/stats")["engine"]["running_requests"] == 1, 5, "the job runs")
    asking.until(lambda: stack.get_json("/stats")["engine"]["running_requests"] == 0, 5, "the job left the engine")
