"""What clients say about thinking, on every URL: typed, in range, honoured, or refused with the names that there are."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.refusals import CHAT_ONLY
from tests.gateway.fake_worker import Finish, Say
from tests.gateway.stack import HELLO, MODEL, Stack
from tests.gateway.test_formats import SCHEMA, able  # noqa: F401 - a fixture
from tests.gateway.test_responses import prompt_of

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"messages": HELLO},
}
ANSWERING = list(BODIES)[:3]


def send(stack: Stack, path: str, **fields: Any) -> Any:
    return stack.http.post(path, json={"model": MODEL, **BODIES[path], **fields})


def refused(stack: Stack, path: str, **fields: Any) -> dict[str, Any]:
    response = send(stack, path, **fields)
    assert response.status_code == 400, response.text
    assert not stack.worker.requests
    return dict(response.json()["error"])


@pytest.mark.parametrize("path", BODIES)
def test_template_options_are_the_known_ones(stack: Stack, path: str) -> None:
    """An option that no template here reads is refused with the list of those that are; null says nothing."""
    error = refused(stack, path, chat_template_kwargs={"enable_thinking": True, "add_vision_id": True})
    assert error["param"] == "chat_template_kwargs"
    assert error["message"] == (
        "chat_template_kwargs.add_vision_id is not an option of this server; "
        "chat_template_kwargs has enable_thinking, thinking, reasoning_effort, clear_thinking."
    )
    error = refused(stack, path, chat_template_kwargs={"enable_thinking": "no"})
    assert error["param"] == "chat_template_kwargs"
    assert error["message"].startswith("chat_template_kwargs.enable_thinking must be ")
    assert send(stack, path, chat_template_kwargs={"add_vision_id": None, "enable_thinking": True}).status_code == 200


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/responses", {"reasoning": {"effort": "x"}}, "reasoning", "reasoning.effort must be "),
    ("/v1/responses", {"reasoning": {"effort": 5}}, "reasoning", "reasoning.effort must be "),
    ("/v1/responses", {"reasoning": {"effort": ["low"]}}, "reasoning", "reasoning.effort must be "),
    ("/v1/responses", {"reasoning": {"summary": "long"}}, "reasoning", "reasoning.summary must be "),
    ("/v1/responses", {"reasoning": {"generate_summary": 1}}, "reasoning", "reasoning.generate_summary must be "),
    (
        "/v1/responses",
        {"reasoning": {"budget": 5}},
        "reasoning",
        "reasoning.budget is not an option of this server; reasoning has effort, ",
    ),
    ("/v1/responses", {"reasoning": "low"}, "reasoning", "reasoning must be "),
    ("/v1/responses", {"reasoning_effort": "x"}, "reasoning_effort", "reasoning_effort must be "),
    ("/v1/responses", {"thinking_token_budget": -1}, "thinking_token_budget", "thinking_token_budget must be "),
    ("/v1/responses", {"thinking": {"type": "x"}}, "thinking", "thinking.type must be "),
    ("/v1/responses", {"text": {"verbosity": "loud"}}, "text", "text.verbosity must be "),
    ("/v1/chat/completions", {"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning", "reasoning.effort is low, but"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking", "thinking.budget_tokens must be "),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking", "thinking.budget_tokens must be "),
    ("/v1/messages", {"thinking": {}}, "thinking", "thinking.type is missing"),
    ("/v1/messages", {"thinking": "enabled"}, "thinking", "thinking must be "),
    ("/v1/messages", {"output_config": {"effort": "none"}}, "output_config", "output_config.effort must be "),
    ("/v1/messages", {"output_config": {"effort": 1}}, "output_config", "output_config.effort must be "),
    ("/v1/messages", {"output_config": {"format": {"type": "json"}}}, "output_config", "output_config.format.type must be "),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config", "output_config.format.schema is missing"),
    ("/v1/messages", {"output_config": []}, "output_config", "output_config must be "),
    ("/v1/messages", {"reasoning_effort": "x"}, "reasoning_effort", "reasoning_effort must be "),
    ("/v1/messages/count_tokens", {"thinking": {"type": "x"}}, "thinking", "thinking.type must be "),
    ("/tokenize", {"reasoning_effort": "x"}, "reasoning_effort", "reasoning_effort must be "),
    ("/tokenize", {"reasoning": {"effort": "x"}}, "reasoning", "reasoning.effort must be "),
    ("/tokenize", {"thinking": {"type": "x"}}, "thinking", "thinking.type must be "),
]


@pytest.mark.parametrize(("path", "fields", "param", "said"), WRONG, ids=str)
def test_fields_about_thinking_are_typed_everywhere(stack: Stack, path: str, fields: dict[str, Any], param: str, said: str) -> None:
    """What is no effort, no budget and no switch is refused under the name that the URL's clients use."""
    error = refused(stack, path, **fields)
    assert error["param"] == param
    assert error["message"].startswith(said)


@pytest.mark.parametrize(
    ("path", "fields", "tail", "effort"),
    [
        ("/v1/chat/completions", {"reasoning": {"effort": "low"}}, "<think>", "Low"),
        ("/v1/chat/completions", {"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "<think>", "Low"),
        ("/v1/chat/completions", {"reasoning": {"effort": "none"}}, "<think></think>", "Max"),
        ("/v1/responses", {"reasoning": {"effort": "high", "summary": "auto"}}, "<think>", "High"),
        ("/v1/responses", {"reasoning_effort": "low"}, "<think>", "Low"),
        ("/v1/responses", {"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>", "Max"),
        ("/v1/responses", {"thinking": {"type": "disabled"}}, "<think></think>", "Max"),
        ("/v1/messages", {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}}, "<think>", "Low"),
        ("/v1/messages", {"reasoning_effort": "low"}, "<think>", "Low"),
        ("/v1/messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "<think>", "Low"),
    ],
    ids=str,
)
def test_fields_about_thinking_count_everywhere(stack: Stack, path: str, fields: dict[str, Any], tail: str, effort: str) -> None:
    """In whichever dialect it is said, on whichever URL: it reaches the prompt."""
    assert send(stack, path, **fields).status_code == 200
    assert prompt_of(stack).endswith(f"<|assistant|>{tail}")
    assert f"Reasoning Effort: {effort}<" in prompt_of(stack)


@pytest.mark.parametrize("path", ANSWERING)
def test_a_budget_counts_everywhere(stack: Stack, path: str) -> None:
    """thinking_token_budget reaches the worker from the other APIs as well."""
    assert send(stack, path, thinking_token_budget=17).status_code == 200
    assert stack.worker.requests[-1].thinking_budget.budget == 17


@pytest.mark.parametrize("path", ANSWERING[1:])
@pytest.mark.parametrize("name", sorted(CHAT_ONLY))
def test_what_only_chat_can_answer_is_refused_elsewhere(stack: Stack, path: str, name: str) -> None:
    """Nothing that was asked for is silently left out; values that ask for nothing pass."""
    error = refused(stack, path, **{name: 2 if name in ("n", "top_logprobs") else not CHAT_ONLY[name][0]})
    assert error["param"] == name
    for value in (None, *CHAT_ONLY[name]):
        assert send(stack, path, **{name: value}).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/messages", {"guided_json": SCHEMA}),
        ("/v1/responses", {"structured_outputs": {"json": SCHEMA}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
    ids=str,
)
def test_forms_count_on_the_other_apis(able: Stack, path: str, fields: dict[str, Any]) -> None:  # noqa: F811
    """Anthropic's form, and those of vLLM on the other URLs, hold the answer."""
    able.play(Say('</think>{"n": 1}'), Finish())
    assert send(able, path, **fields).status_code == 200
    assert '"n"' in able.worker.requests[-1].grammar.json_schema


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": 0}, "temperature", "temperature belongs into sampling_params"),
        ({"max_new_tokens": 5}, "max_new_tokens", "max_new_tokens belongs into sampling_params"),
        (
            {"sampling_params": {"max_tokens": 5}},
            "sampling_params",
            "sampling_params.max_tokens is not a name of this API; use max_new_tokens",
        ),
        ({"sampling_params": {"seed": 5}}, "sampling_params", "sampling_params.seed is not a name of this API; use sampling_seed"),
        (
            {"sampling_params": {"guided_json": {}}},
            "sampling_params",
            "sampling_params.guided_json is not a name of this API; leave it out",
        ),
    ],
)
def test_misplaced_parameters_of_generate_are_refused(stack: Stack, fields: dict[str, Any], param: str, said: str) -> None:
    """A parameter that would be honoured elsewhere is not silently dropped where it stands."""
    response = stack.http.post("/generate", json={"text": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.json()["error"]["message"].startswith(said)
    assert stack.http.post("/generate", json={"text": "a", "temperature": None, "sampling_params": {"seed": None}}).status_code == 200
