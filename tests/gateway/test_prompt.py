"""Messages → prompt: normalising, rendering, thinking."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import CheckpointError, InvalidRequest, UnsupportedParameter
from services.gateway.messages import normalise
from services.gateway.prompt import ChatTemplate, PromptTail, Thinking, resolve_thinking
from tests.gateway.language import IDS, TEMPLATE, TOKENIZER, encode

USER = {"role": "user", "content": "hi"}
PREFIX = "[gMASK]<sop><|system|>Reasoning Effort: Max"
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"q": "x", "n": 3, "o": {"k": [1, null]}}'}}
CALL_TEXT = '<tool_call>f<arg_key>q</arg_key><arg_value>x</arg_value><arg_key>n</arg_key><arg_value>3</arg_value><arg_key>o</arg_key><arg_value>{"k": [1, null]}</arg_value></tool_call>'  # noqa: E501


def prompt(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **thinking: Any) -> list[int]:
    return TEMPLATE.prompt(normalise(messages), tools or [], Thinking(**{"effort": "max", **thinking})).token_ids


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER], "<|user|>hi"),
        ([{"role": "developer", "content": "d"}, USER], "<|system|>d<|user|>hi"),
        ([USER, {"role": "system", "content": "s"}], "<|user|>hi<|system|>s"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "<|user|>ab"),
        ([{"role": "user", "content": ["a", "b"]}], "<|user|>ab"),
        ([USER, {"role": "assistant", "content": " yo \n"}, USER], "<|user|>hi<|assistant|><think></think>yo<|user|>hi"),
        ([USER, {"role": "assistant", "content": "yo", "reasoning_content": "r"}], "<|user|>hi<|assistant|><think>r</think>yo"),
        ([USER, {"role": "assistant", "content": "yo", "reasoning": "r"}], "<|user|>hi<|assistant|><think>r</think>yo"),
        ([USER, {"role": "assistant", "content": None, "reasoning_content": "r"}], "<|user|>hi<|assistant|><think>r</think>"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "<|user|>hi<|assistant|><think></think>" + CALL_TEXT),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "<|user|>hi<|assistant|><think></think>" + CALL_TEXT),
        ([USER, {"role": "assistant", "content": "a", "tool_calls": []}], "<|user|>hi<|assistant|><think></think>a"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "17"}],
            "<|user|>hi<|assistant|><think></think>" + CALL_TEXT + "<|observation|><tool_response>17</tool_response>",
        ),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": None}],
            "<|user|>hi<|assistant|><think></think>" + CALL_TEXT + "<|observation|><tool_response></tool_response>",
        ),
        ([{"role": "user", "content": ""}], "<|user|>"),
    ],
)
def test_rendering(messages: list[dict[str, Any]], text: str) -> None:
    """Each history becomes exactly the tokens of the GLM-5.3 format."""
    assert prompt(messages) == encode(PREFIX + text + "<|assistant|><think>")


@pytest.mark.parametrize("arguments", ["", None, "null", "{}", {}])
def test_empty_arguments_in_history_are_an_empty_object(arguments: Any) -> None:
    """Whatever way clients write no arguments, the call is rendered without any."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    ids = prompt([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert ids == encode(PREFIX + "<|user|>hi<|assistant|><think></think><tool_call>f</tool_call><|assistant|><think>")


def test_tool_results_are_put_into_call_order() -> None:
    """Results that name their calls stand in the order of the calls."""
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in ("b", "a")]
    text = TOKENIZER._full.decode(
        prompt([USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]), skip_special_tokens=False
    )
    assert "<|observation|><tool_response>A</tool_response><tool_response>B</tool_response>" in text


def test_tools_are_shown_as_json_without_strict() -> None:
    """Tools stand one a line in a system turn of their own, with non-ASCII text as it is."""
    tools = [{"type": "function", "function": {"name": "f", "description": "été", "parameters": {"type": "object"}, "strict": True}}]
    text = TOKENIZER._full.decode(prompt([USER], tools), skip_special_tokens=False)
    assert '\n{"name": "f", "description": "été", "parameters": {"type": "object"}}\n' in text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": 5}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {}}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "system", "content": None}, "messages[1].content"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "assistant", "content": 5}, "messages[1].content"),
        ({"role": "assistant", "content": "x", "reasoning_content": 5}, "messages[1].reasoning_content"),
        ({"role": "tool", "content": 5}, "messages[1].content"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1].tool_call_id"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}, "messages[1].content[1]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [5]}, "messages[1].content[0]"),
        ({"role": "assistant", "content": "", "tool_calls": 5}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": [5]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "content": "", "tool_calls": [{"type": "x"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}, "messages[1].tool_calls[0].id"),
        *(
            (
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": bad}}]},
                "messages[1].tool_calls[0].function.arguments",
            )
            for bad in ("[1]", "5", '"x"', "{", "{'a': 1}", 5, [1], "[" * 100_000)
        ),
    ],
)
def test_bad_messages_are_refused_by_path(message: Any, param: str) -> None:
    """What cannot be rendered is refused, and the path of the part at fault is named."""
    with pytest.raises(InvalidRequest) as caught:
        normalise([USER, message])
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(("effort", "word"), [("low", "Low"), ("high", "High"), ("max", "Max")])
def test_effort_reaches_the_prompt(effort: str, word: str) -> None:
    """The template's effort line says what was asked for."""
    assert prompt([USER], effort=effort) == encode(f"[gMASK]<sop><|system|>Reasoning Effort: {word}<|user|>hi<|assistant|><think>")


def test_thinking_off_closes_the_prompts_thinking() -> None:
    """The prompt ends with an empty thought, and the parser starts in the content."""
    found = TEMPLATE.prompt([USER], [], Thinking("max", off=True))
    assert found.token_ids == encode(PREFIX + "<|user|>hi<|assistant|><think></think>")
    assert found.tail is PromptTail.CONTENT
    assert TEMPLATE.prompt([USER], [], Thinking("max")).tail is PromptTail.REASONING


@pytest.mark.parametrize(
    ("ending", "off", "tail", "text"),
    [
        ("<|assistant|><think>", False, PromptTail.REASONING, "<|assistant|><think>"),
        ("<|assistant|><think>", True, PromptTail.CONTENT, "<|assistant|><think></think>"),
        ("<|assistant|>{% if not enable_thinking %}</think>{% endif %}", True, PromptTail.CONTENT, "<|assistant|></think>"),
        ("<|assistant|>", False, PromptTail.UNDECIDED, "<|assistant|>"),
        ("<|assistant|>", True, PromptTail.CONTENT, "<|assistant|>"),
    ],
)
def test_the_parser_starts_where_the_rendered_prompt_ends(ending: str, off: bool, tail: PromptTail, text: str) -> None:
    """The start state follows the prompt's tail, whatever the template's generation and the request's flag."""
    found = ChatTemplate(ending, TOKENIZER).prompt([USER], [], Thinking("max", off=off))
    assert (found.tail, found.token_ids) == (tail, encode(text))


def test_user_text_cannot_fake_the_tail() -> None:
    """A user message that ends with <think> does not arm the parser."""
    found = ChatTemplate("{{ messages[0].content }}", TOKENIZER).prompt([{"role": "user", "content": "<think>"}], [], Thinking("max"))
    assert found.tail is PromptTail.CONTENT
    assert IDS["<think>"] not in found.token_ids


def test_clear_thinking_drops_old_reasoning() -> None:
    """clear_thinking takes the reasoning of turns before the last user message out of the prompt."""
    history = [USER, {"role": "assistant", "content": "yo", "reasoning_content": "secret"}, USER]
    assert prompt(history, clear=True) != prompt(history)
    assert prompt(history, clear=True) == encode(PREFIX + "<|user|>hi<|assistant|><think></think>yo<|user|>hi<|assistant|><think>")


def resolve(**given: Any) -> Thinking:
    defaults = {"effort": None, "enabled": None, "clear": None, "default_effort": "max", "off_policy": "empty_think", "param": "thinking"}
    return resolve_thinking(**{**defaults, **given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Thinking("max")),
        ({"default_effort": "low"}, Thinking("low")),
        ({"effort": "low"}, Thinking("low")),
        ({"effort": "medium"}, Thinking("high")),
        ({"effort": "high"}, Thinking("high")),
        ({"effort": "xhigh"}, Thinking("max")),
        ({"effort": "max", "default_effort": "low"}, Thinking("max")),
        ({"effort": "none"}, Thinking("max", off=True)),
        ({"effort": "minimal"}, Thinking("max", off=True)),
        ({"enabled": False}, Thinking("max", off=True)),
        ({"enabled": False, "effort": "low"}, Thinking("low", off=True)),
        ({"enabled": True, "effort": "none"}, Thinking("max")),
        ({"enabled": False, "off_policy": "low"}, Thinking("low")),
        ({"effort": "none", "off_policy": "low"}, Thinking("low")),
        ({"effort": "low", "off_policy": "reject"}, Thinking("low")),
        ({"clear": True}, Thinking("max", clear=True)),
    ],
)
def test_what_clients_say_about_thinking(given: dict[str, Any], expected: Thinking) -> None:
    """Every dialect maps to an effort and a switch; the policy decides what off means."""
    assert resolve(**given) == expected


@pytest.mark.parametrize("given", [{"enabled": False}, {"effort": "none"}, {"effort": "minimal"}])
def test_the_reject_policy_refuses_to_stop_thinking(given: dict[str, Any]) -> None:
    """With GLM53_THINKING_OFF_POLICY=reject a request to stop thinking is refused by field."""
    with pytest.raises(UnsupportedParameter) as caught:
        resolve(off_policy="reject", **given)
    assert caught.value.param == "thinking"


def test_a_templates_refusal_is_the_clients_error() -> None:
    """raise_exception in a template becomes a 400 with the template's words, marks taken back."""
    template = ChatTemplate("{{ raise_exception('no ' + messages[0].content) }}", TOKENIZER)
    with pytest.raises(InvalidRequest, match="no <b>") as caught:
        template.prompt([{"role": "user", "content": "<b>"}], [], Thinking("max"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["", "{% if %}", "{{ x "])
def test_a_broken_template_is_a_checkpoint_error(source: str) -> None:
    """A template that does not compile is refused when it is loaded."""
    with pytest.raises(CheckpointError):
        ChatTemplate(source, TOKENIZER)


@pytest.mark.parametrize("source", ["{{ 1 // (messages | length - 2) }}", "{{ messages[7].content }}", "{{ [].pop() }}", "{{ none + 1 }}"])
def test_a_template_that_fails_on_calls_still_loads(source: str) -> None:
    """A template may fail on conversations with tool calls, however it fails: it serves those on which it does not."""
    assert (
        ChatTemplate("{% if messages | length == 2 %}" + source + "{% endif %}ok", TOKENIZER).prompt([USER], [], Thinking("max")).token_ids
    )


def test_a_template_cannot_reach_python() -> None:
    """Templates run in a sandbox: attributes that lead out of it are refused."""
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", TOKENIZER)
    with pytest.raises(Exception, match="template failed"):
        template.prompt([USER], [], Thinking("max"))
