"""One gateway for the templates of every GLM generation: where the prompt leaves the model, how calls are written, what is trimmed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.parser import OutputParser, parse_all
from services.gateway.prompt import ChatTemplate, PromptTail, Thinking
from services.gateway.tool_grammar import CallStyle, DeclaredTool, ToolGrammar
from services.gateway.tool_schema import ToolSchemas
from tests.gateway.events import stream
from tests.gateway.fake_worker import Finish, Say
from tests.gateway.grammars import accepts
from tests.gateway.language import CHAT_TEMPLATE, IDS, TOKENIZER, VOCABULARY, tokens_of
from tests.gateway.stack import Stack

_TURNS = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|assistant|>{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}NL
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key>NL<arg_value>{{ value if value is string else value | tojson }}</arg_value>NL
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- else -%}<|{{ m.role }}|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}TAIL{%- endif -%}
"""


def template(newline: str, tail: str) -> str:
    """Our own miniature of a generation's template: its white space in calls and its generation prompt."""
    return _TURNS.replace("NL", newline).replace("TAIL", tail).strip()


@dataclass(frozen=True)
class Generation:
    """What a generation's template does.

    Attributes:
        on, off: where the prompt leaves the model, with thinking and without.
        says: what the model writes after a thinking prompt up to its content.
    """

    source: str
    style: CallStyle
    on: PromptTail
    off: str
    says: str


LINES, COMPACT = CallStyle("\n", "\n", "\n"), CallStyle()
GENERATIONS = {
    "4.5": Generation(
        template("{{ '\\n' }}", "<|assistant|>{{ '\\n<think></think>' if not enable_thinking }}"),
        LINES,
        PromptTail.UNDECIDED,
        "<|assistant|>\n<think></think>",
        "\n<think>hm</think>\n",
    ),
    "4.7": Generation(
        template("", "<|assistant|>{{ '<think>' if enable_thinking else '</think>' }}"),
        COMPACT,
        PromptTail.REASONING,
        "<|assistant|></think>",
        "hm</think>",
    ),
    "5.2": Generation(
        template("", "<|assistant|>{{ '<think>' if enable_thinking else '<think></think>' }}"),
        COMPACT,
        PromptTail.REASONING,
        "<|assistant|><think></think>",
        "hm</think>",
    ),
    "5.3": Generation(CHAT_TEMPLATE, COMPACT, PromptTail.REASONING, "<|assistant|><think></think>", "hm</think>"),
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["x", "n"],
        },
    },
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module", params=GENERATIONS)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Generation, Stack]]:
    """A generation, and a gateway whose worker brings its template."""
    generation = GENERATIONS[request.param]
    stack = Stack(chat_template=generation.source)
    stack.worker.supports_grammar = True
    stack.run(stack.services.watch.refresh())
    yield generation, stack
    stack.close()


def call(style: CallStyle, text: str = "é\n 1", number: str = "7") -> str:
    """A call as the generation writes it."""
    first = f"<arg_key>x</arg_key>{style.after_key}<arg_value>{text}</arg_value>{style.after_value}"
    second = f"<arg_key>n</arg_key>{style.after_key}<arg_value>{number}</arg_value>{style.after_value}"
    return f"<tool_call>f{style.after_name}{first}{second}</tool_call>"


def test_style_and_tails(case: tuple[Generation, Stack]) -> None:
    """The template itself tells how calls are written, and where the model begins, thinking or not."""
    generation, _stack = case
    made = ChatTemplate(generation.source, TOKENIZER)
    assert made.call_style == generation.style
    assert made.prompt([USER], [], Thinking("max")).tail is generation.on
    off = made.prompt([USER], [], Thinking("max", off=True))
    assert off.tail is PromptTail.CONTENT
    assert TOKENIZER.decode(off.token_ids).endswith(generation.off)


def test_answers_and_calls(case: tuple[Generation, Stack]) -> None:
    """Reasoning, content and calls come out alike for every generation, streamed or whole; values keep their white space."""
    generation, stack = case
    stack.play(Say(generation.says + "Yes\n" + call(generation.style)), Finish())
    whole = stack.message(tools=[TOOL])
    streamed = stream(stack, tools=[TOOL])
    message = whole["message"]
    assert (message["reasoning_content"], message["content"].rstrip("\n"), whole["finish_reason"]) == ("hm", "Yes", "tool_calls")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": "é\n 1", "n": 7}
    assert streamed.text("content") == message["content"]
    assert streamed.text("reasoning_content") == "hm"
    assert streamed.tool_calls[0]["function"] == message["tool_calls"][0]["function"]


def test_forced_calls_are_written_as_the_generation_writes_them(case: tuple[Generation, Stack]) -> None:
    """The grammar of a forced call has the generation's white space, begins after </think> where the model may think, and at once else."""
    generation, stack = case
    stack.play(Say("</think>" + call(generation.style)), Finish(pb.FINISH_REASON_GRAMMAR_END))
    stack.message(tools=[TOOL], tool_choice="required")
    grammar = stack.worker.requests[-1].grammar
    assert grammar.after_token_id == IDS["</think>"]
    assert accepts(grammar, call(generation.style))
    other = LINES if generation.style == COMPACT else COMPACT
    assert not accepts(grammar, call(other))
    stack.message(tools=[TOOL], tool_choice="required", reasoning_effort="none")
    assert stack.worker.requests[-1].grammar.after_token_id == 0


def test_budgets_count_where_the_model_thinks(case: tuple[Generation, Stack]) -> None:
    """A thinking budget is for every prompt after which the model may think."""
    _generation, stack = case
    stack.post(thinking_token_budget=4)
    assert stack.worker.requests[-1].thinking_budget.budget == 4
    stack.post(thinking_token_budget=4, reasoning_effort="none")
    assert not stack.worker.requests[-1].HasField("thinking_budget")


@pytest.mark.parametrize("style", [LINES, COMPACT], ids=["with line breaks", "compact"])
def test_every_split_of_either_style_gives_the_same_calls(style: CallStyle) -> None:
    """However the text is cut into events, the parser's deltas join to the same calls in both styles."""
    tokens = tokens_of("\nA\n" + call(style) + "\n" + call(style, "  ", "x") + "\n")
    schemas = ToolSchemas([TOOL])

    def run(trim: bool) -> list[Any]:
        return parse_all(
            OutputParser(VOCABULARY, PromptTail.CONTENT, schemas, trim_newlines=trim, new_id=lambda: "id"), tokens, stopped=True
        )

    joined: dict[int, str] = {}
    for delta in run(trim=True):
        if hasattr(delta, "index") and hasattr(delta, "text"):
            joined[delta.index] = joined.get(delta.index, "") + delta.text
    assert [json.loads(text) for text in joined.values()] == [{"x": "é\n 1", "n": 7}, {"x": "  ", "n": "x"}]
    declared = DeclaredTool("f", TOOL["function"]["parameters"], "tools[0].function.parameters")
    assert accepts(pb.Grammar(lark=ToolGrammar([declared], IDS, style).calls(several=True)), call(style) + call(style, "", "0"))


def test_a_template_without_calls_is_compact() -> None:
    """A template that writes no calls, or fails on them, says nothing about white space."""
    for source in (
        "{{ messages[0].content }}",
        "{{ raise_exception('no') }}",
        "{{ messages[1].tool_calls[0].function.arguments.nothing.x }}",
    ):
        assert ChatTemplate(source, TOKENIZER).call_style == COMPACT
