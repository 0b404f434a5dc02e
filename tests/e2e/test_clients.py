"""Existing clients against the whole product: OpenAI's, Anthropic's, LangChain's and LiteLLM's."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from bench.server import Server
from tests.e2e import asking

pytestmark = pytest.mark.e2e

FRANCE = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
# The client of today has no such parameter any more, the API has.
GREEDY = {"temperature": 0}
ANTHROPIC_TOOL = {
    "name": "get_weather",
    "description": asking.WEATHER_TOOL["function"]["description"],
    "input_schema": asking.WEATHER_TOOL["function"]["parameters"],
}


@pytest.fixture
def model(stack: Server) -> str:
    """The served name."""
    return asking.model_of(stack.url)


def greedy(client: openai.OpenAI, model: str, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=200, **fields).choices[0]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False},
        {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
            "required": ["ok", "of"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    ],
    ids=["number", "choices", "list"],
)
def test_json_of_a_schema(client: openai.OpenAI, model: str, schema: dict[str, Any]) -> None:
    """Whatever the model would rather say, what follows its reasoning is JSON of the schema, and ends where that ends."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for effort in ("high", "none"):
        choice = greedy(client, model, FRANCE, response_format=wanted, reasoning_effort=effort)
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        if schema["type"] == "array":
            assert 2 <= len(value) <= 3
            assert all(isinstance(item, int) for item in value)
        else:
            assert set(value) == set(schema["properties"])


def test_forms_of_vllm_and_sglang(client: openai.OpenAI, model: str) -> None:
    """Choices, expressions and grammars hold on the real model."""
    for fields, allowed in (
        ({"guided_choice": ["oui", "non"]}, ("oui", "non")),
        ({"structured_outputs": {"regex": "(7|8){2}"}}, ("77", "78", "87", "88")),
        ({"ebnf": 'root ::= "x" | "y"\n'}, ("x", "y")),
    ):
        choice = greedy(client, model, FRANCE, extra_body=fields)
        assert choice.message.content in allowed
        assert choice.finish_reason == "stop"


def test_forced_calls(client: openai.OpenAI, model: str) -> None:
    """required and named give a whole call of a declared tool also where the model would rather talk."""
    choice = greedy(client, model, FRANCE, tools=[asking.WEATHER_TOOL], tool_choice="required")
    assert choice.finish_reason == "tool_calls"
    assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"city"}
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = greedy(client, model, FRANCE, tools=[asking.WEATHER_TOOL], tool_choice=named)
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("stop", 1)
    free = greedy(client, model, WEATHER, tools=[asking.WEATHER_TOOL])
    forced = greedy(client, model, WEATHER, tools=[asking.WEATHER_TOOL], tool_choice="required")
    assert forced.message.tool_calls[0].function.arguments == free.message.tool_calls[0].function.arguments


def test_a_thinking_budget_ends_the_reasoning(client: openai.OpenAI, model: str) -> None:
    """After so many tokens the reasoning is closed and the answer comes."""
    body = {"model": model, "messages": [{"role": "user", "content": FRANCE}], "temperature": 0, "max_tokens": 100}
    found = client.post("/chat/completions", body={**body, "thinking_token_budget": 2}, cast_to=httpx.Response).json()
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 2
    assert found["choices"][0]["message"]["content"]


def test_log_probabilities_of_chat_and_of_responses(client: openai.OpenAI, model: str) -> None:
    """The same tokens with the same values: chat has the reasoning's and the tag's before those of the text."""
    chat = greedy(client, model, FRANCE, seed=1, logprobs=True, top_logprobs=4)
    asked: Any = {"model": model, "input": FRANCE, "temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 4}
    made = client.responses.create(**asked, max_output_tokens=200, extra_body={"seed": 1})
    (part,) = next(item for item in made.output if item.type == "message").content
    entries = [entry.model_dump() for entry in part.logprobs]
    assert made.output_text == chat.message.content
    assert entries == [entry.model_dump() for entry in chat.logprobs.content][-len(entries) :]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == made.output_text
    with client.responses.stream(**asked, max_output_tokens=200) as streaming:
        sent = [entry for event in streaming if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [(entry.token, entry.logprob) for entry in sent] == [(entry["token"], entry["logprob"]) for entry in entries]


def test_usage_of_a_prompt_that_was_there_before(client: openai.OpenAI, model: str) -> None:
    """The second time its tokens come from the cache; answers count the same streamed or whole, reasoning included."""
    question = "Tell me, please: what is the capital of Italy, and what is the capital of Spain, and what is the capital of France?"
    fields: Any = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60}
    first, again = (client.chat.completions.create(**fields) for _ in range(2))
    *_, last = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    for usage in (again.usage, last.usage):
        assert usage.completion_tokens == first.usage.completion_tokens
        assert usage.prompt_tokens == first.usage.prompt_tokens
        assert usage.completion_tokens_details.reasoning_tokens == first.usage.completion_tokens_details.reasoning_tokens > 0
        assert usage.prompt_tokens > usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens_details.cached_tokens


def test_choices_and_scores(client: openai.OpenAI, model: str) -> None:
    """n choices with one seed repeat; echoed prompts score the same whether a token is generated after them or not."""

    def drawn(seed: int) -> list[str]:
        made = client.completions.create(model=model, prompt="The", n=3, seed=seed, temperature=1.5, max_tokens=12)
        return [choice.text for choice in made.choices]

    assert drawn(3) == drawn(3)
    assert len(set(drawn(3))) > 1
    prompts = ["The capital of France is Paris.", "one two three"]
    with_token = client.completions.create(model=model, prompt=prompts, echo=True, logprobs=1, max_tokens=1)
    alone = client.completions.create(model=model, prompt=prompts, echo=True, logprobs=1, max_tokens=0)
    for first, second, text in zip(with_token.choices, alone.choices, prompts, strict=True):
        scores = second.logprobs.token_logprobs
        assert second.text == text
        assert scores[0] is None
        assert first.logprobs.token_logprobs[1 : len(scores)] == pytest.approx(scores[1:], abs=1e-4)


def test_generate_teacher_forces(stack: Server) -> None:
    """Scores of given tokens through /generate are those that they had when the model wrote them."""
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        ids = http.post("/tokenize", json={"prompt": "The capital"}).json()["tokens"]
        fields = {"return_logprob": True, "logprob_start_len": 0}
        made = http.post("/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 6, "temperature": 0}, **fields}).json()
        forced = http.post(
            "/generate", json={"input_ids": ids + made["output_ids"], "sampling_params": {"max_new_tokens": 0}, **fields}
        ).json()
        written = [entry[0] for entry in made["meta_info"]["output_token_logprobs"]]
        scored = [entry[0] for entry in forced["meta_info"]["input_token_logprobs"]][len(ids) :]
        assert scored == pytest.approx(written, abs=1e-3)
        assert http.get("/health_generate").status_code == 200


def test_responses_hold_a_conversation(client: openai.OpenAI, model: str) -> None:
    """previous_response_id: the model knows what was said before, streamed or whole, and tools go round."""
    first = client.responses.create(model=model, input="My name is Ada.", temperature=0)
    second = client.responses.create(model=model, input="What is my name?", previous_response_id=first.id, temperature=0)
    assert "Ada" in second.output_text
    with client.responses.stream(model=model, input="What is my name?", previous_response_id=first.id, temperature=0) as streaming:
        text = "".join(event.delta for event in streaming if event.type == "response.output_text.delta")
    assert text == second.output_text
    tool: Any = {"type": "function", **asking.WEATHER_TOOL["function"], "strict": False}
    call = client.responses.create(model=model, input=WEATHER, tools=[tool], temperature=0)
    item = call.output[-1]
    assert item.type == "function_call"
    assert json.loads(item.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": '{"temperature": 21}'}
    answer = client.responses.create(model=model, input=[result], previous_response_id=call.id, tools=[tool], temperature=0)
    assert "21" in answer.output_text


def test_anthropic(stack: Server, model: str) -> None:
    """anthropic-python: plain, streamed with thinking, a tool round trip, counting."""
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=60) as client:
        question = [{"role": "user", "content": WEATHER}]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        fields = {"model": model, "max_tokens": 2048, "tools": [ANTHROPIC_TOOL], "thinking": thinking}
        made = client.messages.create(messages=question, **fields, extra_body=GREEDY)
        assert made.stop_reason == "tool_use"
        with client.messages.stream(messages=question, **fields, extra_body=GREEDY) as streaming:
            final = streaming.get_final_message()
        assert [block.type for block in final.content] == [block.type for block in made.content] == ["thinking", "tool_use"]
        assert final.content[-1].input == made.content[-1].input == {"city": "Paris"}
        result = {"type": "tool_result", "tool_use_id": made.content[-1].id, "content": '{"temperature": 21}'}
        history = [*question, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(messages=history, **fields, extra_body=GREEDY)
        assert "21" in answer.content[-1].text
        assert client.messages.count_tokens(model=model, messages=history, tools=[ANTHROPIC_TOOL]).input_tokens > 20


@pytest.mark.parametrize("library", ["langchain", "litellm"])
def test_a_python_library(stack: Server, model: str, library: str) -> None:
    """LangChain and LiteLLM, each in a process of its own: they leave connections and event loops to the garbage collector."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.clients.python.{library}"],
        env={**os.environ, "GLM53_TEST_URL": stack.url, "GLM53_TEST_MODEL": model},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{library}: all checks passed" in ran.stdout


def test_the_curl_requests_of_the_page_are_answered(stack: Server) -> None:
    """What docs/clients.md shows works as it stands there: address, header and body."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text()
    block = page.split("## Requests with curl", 1)[1].split("```sh\n", 1)[1].split("```", 1)[0]
    commands = [shlex.split(command) for command in re.findall(r"^curl (.*?)(?=^curl |^#|\Z)", block, re.MULTILINE | re.DOTALL)]
    assert len(commands) >= 7
    for words in commands:
        (url,) = [word for word in words if word.startswith("http://127.0.0.1:30000/")]
        headers = dict([words[words.index("-H") + 1].split(": ", 1)])
        path = url.removeprefix("http://127.0.0.1:30000")
        answer = httpx.post(stack.url + path, headers=headers, content=words[words.index("-d") + 1], timeout=60)
        assert answer.status_code == 200, (path, answer.text)
