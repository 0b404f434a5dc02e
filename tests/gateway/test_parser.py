"""The output parser: what it finds, and that it finds the same however the bytes arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.deltas import Delta, Message, TextDelta, ToolArguments, ToolCallStart, merged
from services.gateway.parser import OutputParser, parse_all
from services.gateway.prompt import PromptTail
from services.gateway.tool_schema import ToolSchemas
from tests.gateway.language import IDS, VOCABULARY

TEXT_ID = 0  # stands for any ordinary token: the parser looks at its bytes only
TAG = re.compile("|".join(re.escape(name) for name in sorted(IDS, key=len, reverse=True)))


def tool(tool_name: str, /, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool_name, "parameters": {"type": "object", "properties": properties}}}


STRING = {"type": "string"}
TOOLS = [
    tool("save", body=STRING),
    tool("tag", tag={"anyOf": [STRING, {"type": "null"}]}),
    tool("people", names={"type": "array"}, nick={"type": ["string", "null"]}),
    tool("search", limit={"type": "number"}, zip=STRING, deep={"type": "boolean"}, tags={"type": "array"}),
    tool("ls", p=STRING),
    tool("now"),
    tool("run", command=STRING),
    tool("run_in_shell", command=STRING),
    tool("put", o={"type": "object"}),
    {"type": "function", "function": {"name": "free"}},
    {
        "type": "function",
        "function": {
            "name": "send",
            "parameters": {
                "type": "object",
                "properties": {"to": {"type": ["string", "null"]}, "ref": {"$ref": "#/$defs/Id"}},
                "$defs": {"Id": {"type": "integer"}},
            },
        },
    },
]


def call(name: str, /, **arguments: str) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{inner}</tool_call>"


@dataclass
class Case:
    name: str
    text: str
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    stopped: bool = True
    tail: PromptTail = PromptTail.CONTENT
    tools: list[dict[str, Any]] | None = field(default_factory=lambda: TOOLS)
    raw_arguments: list[str] | None = None


THINKING = PromptTail.REASONING
CASES = [
    Case("plain", "Hello", content="Hello"),
    Case("reasoning", "let me see</think>42", "let me see", "42", tail=THINKING),
    Case("no reasoning", "</think>42", "", "42", tail=THINKING),
    Case("emoji and CJK at the border", "想一想 🦊</think>🦊 答案", "想一想 🦊", "🦊 答案", tail=THINKING),
    Case(
        "exact string argument",
        call("save", **{" body ": '  a\n\t"b" \\ c\n'}),
        calls=[("save", {"body": '  a\n\t"b" \\ c\n'})],
        finish="tool_calls",
    ),
    Case(
        "nullable string",
        call("tag", tag="Zürich-9"),
        calls=[("tag", {"tag": "Zürich-9"})],
        raw_arguments=['{"tag": "Zürich-9"}'],
        finish="tool_calls",
    ),
    Case("nullable string that begins like null", call("tag", tag="nullable"), calls=[("tag", {"tag": "nullable"})], finish="tool_calls"),
    Case("null", call("tag", tag="null"), calls=[("tag", {"tag": None})], finish="tool_calls"),
    Case(
        "null and a number behind a reference",
        call("send", to="null", ref="12"),
        calls=[("send", {"to": None, "ref": 12})],
        raw_arguments=['{"to": null, "ref": 12}'],
        finish="tool_calls",
    ),
    Case("empty nullable string", call("tag", tag=""), calls=[("tag", {"tag": ""})], finish="tool_calls"),
    Case(
        "array and nullable string",
        call("people", names='["Ada","Bo"]', nick="Smith"),
        calls=[("people", {"names": ["Ada", "Bo"], "nick": "Smith"})],
        finish="tool_calls",
    ),
    Case(
        "types by schema",
        call("search", limit="7", zip="00501", deep="true", tags="[]"),
        calls=[("search", {"limit": 7, "zip": "00501", "deep": True, "tags": []})],
        raw_arguments=['{"limit": 7, "zip": "00501", "deep": true, "tags": []}'],
        finish="tool_calls",
    ),
    Case("no schema, no literal", call("free", x="123abc"), calls=[("free", {"x": "123abc"})], finish="tool_calls"),
    Case(
        "no schema, literals", call("free", a="1", b="[1]", c="null"), calls=[("free", {"a": 1, "b": [1], "c": None})], finish="tool_calls"
    ),
    Case("nested object", call("put", o='{"k":{"m":[1,2]}}'), calls=[("put", {"o": {"k": {"m": [1, 2]}}})], finish="tool_calls"),
    Case("no arguments", call("now"), calls=[("now", {})], raw_arguments=["{}"], finish="tool_calls"),
    Case(
        "a name that is the beginning of another",
        call("run_in_shell", command="ls"),
        calls=[("run_in_shell", {"command": "ls"})],
        finish="tool_calls",
    ),
    Case(
        "name with line breaks around it",
        "<tool_call>\nls\n<arg_key>p</arg_key><arg_value>/</arg_value></tool_call>",
        calls=[("ls", {"p": "/"})],
        finish="tool_calls",
    ),
    Case("a call ends reasoning", "plan…" + call("ls", p="/"), "plan…", "", [("ls", {"p": "/"})], "tool_calls", tail=THINKING),
    Case(
        "reasoning, text, call",
        "plan</think>I look." + call("ls", p="/"),
        "plan",
        "I look.",
        [("ls", {"p": "/"})],
        "tool_calls",
        tail=THINKING,
    ),
    Case("two calls", call("ls", p="/a") + call("now"), calls=[("ls", {"p": "/a"}), ("now", {})], finish="tool_calls"),
    Case(
        "white space around calls is not content",
        "\n" + call("now") + "\n\n" + call("now") + "\n",
        calls=[("now", {}), ("now", {})],
        finish="tool_calls",
    ),
    Case("text after a call", call("now") + "\nDone.", content="\nDone.", calls=[("now", {})], finish="tool_calls"),
    Case("white space alone is content", "</think>\n\n", content="\n\n", tail=THINKING),
    Case(
        "text in an argument that looks like tags",
        call("save", body="use </think> & <think>"),
        calls=[("save", {"body": "use </think> & <think>"})],
        finish="tool_calls",
    ),
    Case("an undeclared tool is text", "a" + call("rm", p="/") + "b", content="a" + call("rm", p="/") + "b"),
    Case("an undeclared tool without arguments is text", call("rm"), content=call("rm")),
    Case(
        "an undeclared tool, then a declared one",
        call("rm", p="/") + call("now"),
        content=call("rm", p="/"),
        calls=[("now", {})],
        finish="tool_calls",
    ),
    Case("no tools: tags are text", "x" + call("ls", p="/"), content="x" + call("ls", p="/"), tools=None),
    Case("a stray </think> at the start", "</think>b", content="b"),
    Case("thinking that was never opened", "a</think>b", "a", "b"),
    Case("thinking that was never opened, then a call", "a</think>" + call("now"), "a", "", [("now", {})], "tool_calls"),
    Case("a second </think>", "r</think>a</think>b", "r", "ab", tail=THINKING),
    Case("a </think> after a call", "a" + call("now") + "b</think>c", content="abc", calls=[("now", {})], finish="tool_calls"),
    Case("a second <think>", "<think>a<think>b</think>c", "ab", "c", tail=THINKING),
    Case("thinking that is opened again", "<think>hm</think>c", "hm", "c"),
    Case(
        "a call without its end, then another",
        "<tool_call>ls<arg_key>p</arg_key><arg_value>/</arg_value><tool_call>now</tool_call>",
        calls=[("ls", {"p": "/"}), ("now", {})],
        finish="tool_calls",
    ),
    Case(
        "a value without its end",
        "<tool_call>ls<arg_key>p</arg_key><arg_value>/</tool_call>",
        calls=[("ls", {"p": "/"})],
        finish="tool_calls",
    ),
    Case("a key without a value", "<tool_call>ls<arg_key>p</arg_key></tool_call>", calls=[("ls", {})], finish="tool_calls"),
    Case(
        "the model stops before </tool_call>",
        "<tool_call>ls<arg_key>p</arg_key><arg_value>/</arg_value>",
        calls=[("ls", {"p": "/"})],
        finish="tool_calls",
    ),
    Case("the model stops inside a name", "a<tool_call>l", content="a<tool_call>l"),
    Case("</think> in a name is dropped", "<tool_call>now</think></tool_call>", calls=[("now", {})], finish="tool_calls"),
    Case("length in reasoning", "let me", "let me", finish="length", stopped=False, tail=THINKING),
    Case("length in content", "ab", content="ab", finish="length", stopped=False),
    Case("length in a name", "a<tool_call>l", content="a", finish="length", stopped=False),
    Case(
        "length in a string",
        "<tool_call>save<arg_key>body</arg_key><arg_value>some te",
        calls=[("save", None)],
        raw_arguments=['{"body": "some te'],
        finish="length",
        stopped=False,
    ),
    Case(
        "length after a whole call",
        call("now") + "<tool_call>save<arg_key>body</arg_key>",
        calls=[("now", {}), ("save", None)],
        raw_arguments=["{}", ""],
        finish="length",
        stopped=False,
    ),
    Case("special tokens are not shown", "a<|endoftext|>b<|user|>", content="ab"),
]
IDS_OF_CASES = [case.name for case in CASES]


def segments(text: str) -> list[tuple[int, bytes]]:
    """Control tokens and the text between them."""
    found: list[tuple[int, bytes]] = []
    position = 0
    for match in TAG.finditer(text):
        found.append((TEXT_ID, text[position : match.start()].encode()))
        found.append((IDS[match.group()], match.group().encode()))
        position = match.end()
    found.append((TEXT_ID, text[position:].encode()))
    return [(token_id, piece) for token_id, piece in found if piece]


def literal_arguments(case: Case) -> list[tuple[int, bytes]]:
    """The case's tokens; inside "looks like tags" the tags are words, not control tokens."""
    if "looks like tags" not in case.name:
        return segments(case.text)
    tokens = segments(case.text)
    inside = [index for index, (token_id, _) in enumerate(tokens) if token_id in (IDS["<think>"], IDS["</think>"])]
    return [(TEXT_ID, piece) if index in inside else (token_id, piece) for index, (token_id, piece) in enumerate(tokens)]


def splits(tokens: list[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Whole, byte by byte, and cut once at every byte."""
    yield tokens
    yield cut_bytes(tokens)
    for index, (token_id, piece) in enumerate(tokens):
        if token_id == TEXT_ID:
            for at in range(1, len(piece)):
                yield [*tokens[:index], (TEXT_ID, piece[:at]), (TEXT_ID, piece[at:]), *tokens[index + 1 :]]


def cut_bytes(tokens: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return [
        cut
        for token_id, piece in tokens
        for cut in ([(TEXT_ID, bytes([byte])) for byte in piece] if token_id == TEXT_ID else [(token_id, piece)])
    ]


def new_parser(tail: PromptTail = PromptTail.CONTENT, tools: list[dict[str, Any]] | None = None, **options: Any) -> OutputParser:
    numbers = iter(range(1000))
    schemas = ToolSchemas(tools) if tools else None
    return OutputParser(VOCABULARY, tail, schemas, new_id=lambda: f"call_{next(numbers)}", **options)


def joined(deltas: list[Delta]) -> Message:
    message = Message()
    for delta in deltas:
        message.add(delta)
    return message


def summary(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.reasoning, message.content, [(found.name, found.arguments) for found in message.tool_calls]


@pytest.mark.parametrize("case", CASES, ids=IDS_OF_CASES)
def test_every_split_of_the_bytes_gives_the_expected_message(case: Case) -> None:
    """Whatever the token borders, the joined deltas are the expected reasoning, content and calls, without U+FFFD."""
    seen = set()
    for tokens in splits(literal_arguments(case)):
        parser = new_parser(case.tail, case.tools)
        deltas = parse_all(parser, tokens, stopped=case.stopped)
        message = joined(deltas)
        assert message.reasoning == case.reasoning
        assert message.content == case.content
        assert parser.finish_reason(stopped=case.stopped).value == case.finish
        assert [found.name for found in message.tool_calls] == [name for name, _ in case.calls]
        for found, (_, expected) in zip(message.tool_calls, case.calls, strict=True):
            if expected is not None:
                assert json.loads(found.arguments) == expected
        if case.raw_arguments is not None:
            assert [found.arguments for found in message.tool_calls] == case.raw_arguments
        assert not any("\ufffd" in getattr(delta, "text", "") for delta in deltas)
        assert summary(joined(merged(deltas))) == summary(message)
        seen.add(str(summary(message)))
    assert len(seen) == 1


@pytest.mark.parametrize("case", CASES, ids=IDS_OF_CASES)
def test_a_call_is_announced_once_and_then_only_arguments_follow(case: Case) -> None:
    """Per call: one start with id and whole name, indices in order, then argument deltas of that index only."""
    deltas = parse_all(new_parser(case.tail, case.tools), cut_bytes(literal_arguments(case)), stopped=case.stopped)
    starts = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
    assert [start.index for start in starts] == list(range(len(case.calls)))
    assert len({start.call_id for start in starts}) == len(starts)
    current = -1
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            current = delta.index
        elif isinstance(delta, ToolArguments):
            assert delta.index == current


def test_a_string_argument_streams_as_it_comes() -> None:
    """The client sees each piece of a string argument at once, before the argument has ended."""
    parser = new_parser(tools=TOOLS)
    for token_id, piece in segments("<tool_call>save<arg_key>body</arg_key><arg_value>"):
        parser.feed(token_id, piece)
    assert parser.feed(TEXT_ID, b'one "') == [ToolArguments(0, 'one \\"')]
    assert parser.feed(TEXT_ID, b"two") == [ToolArguments(0, "two")]


def test_a_character_that_ends_in_mid_token_is_shown_whole() -> None:
    """Bytes of a fox over two tokens become one character; a character that never ends becomes U+FFFD at the end only."""
    parser = new_parser()
    assert parser.feed(TEXT_ID, b"\xf0\x9f") == []
    assert parser.feed(TEXT_ID, b"\xa6\x8a") == [TextDelta(joined_channel(), "🦊")]
    assert parser.feed(TEXT_ID, b"\xf0\x9f") == []
    assert joined(parser.finish(stopped=False)).content == "\ufffd"


def joined_channel() -> Any:
    delta = new_parser().feed(TEXT_ID, b"x")[0]
    assert isinstance(delta, TextDelta)
    return delta.channel


def test_parallel_tool_calls_false_keeps_the_first_call_only() -> None:
    """Later calls are not shown, and the finish reason is still tool_calls."""
    parser = new_parser(tools=TOOLS, parallel=False)
    message = joined(parse_all(parser, segments(call("now") + call("ls", p="/")), stopped=True))
    assert summary(message) == ("", "", [("now", "{}")])
    assert parser.finish_reason(stopped=True).value == "tool_calls"


def test_special_tokens_are_kept_on_request() -> None:
    """skip_special_tokens false shows tokens such as <|user|> as text."""
    message = joined(parse_all(new_parser(keep_special=True), segments("a<|user|>"), stopped=True))
    assert message.content == "a<|user|>"


@pytest.mark.parametrize(
    ("text", "tail", "only_reasoned"),
    [
        ("Paris", THINKING, True),
        ("hm</think>Paris", THINKING, False),
        ("hm</think>", THINKING, False),
        ("hm" + call("now"), THINKING, False),
        ("hm<tool_call>save<arg_key>body</arg_key><arg_value>x", THINKING, False),
        ("Paris", PromptTail.CONTENT, False),
        ("<think>Paris", PromptTail.CONTENT, True),
    ],
)
def test_an_answer_inside_unclosed_reasoning_is_noticed(text: str, tail: PromptTail, only_reasoned: bool) -> None:
    """The parser knows when all it saw was reasoning without an end."""
    parser = new_parser(tail, TOOLS)
    parse_all(parser, segments(text), stopped=True)
    assert parser.only_reasoned is only_reasoned


def test_reasoning_tokens_are_counted_without_tags() -> None:
    """Tokens of the reasoning channel count; tags and content do not."""
    parser = new_parser(THINKING, TOOLS)
    parse_all(parser, [(TEXT_ID, b"a"), (TEXT_ID, b"b"), (IDS["</think>"], b"</think>"), (TEXT_ID, b"c")], stopped=True)
    assert parser.reasoning_tokens == 2


TEXTS = st.text(alphabet=st.sampled_from(list('ab "\\\n\t{}[]:,null123é漢🦊<>/')), max_size=20)
PARTS = st.one_of(TEXTS, st.sampled_from([*IDS, "now", "ls", "save", "body", "p", call("now"), call("save", body='"x"')]))


@given(st.lists(PARTS, max_size=12), st.sampled_from(list(PromptTail)), st.booleans(), st.booleans(), st.data())
def test_any_output_parses_the_same_in_any_pieces(parts: list[str], tail: PromptTail, tools: bool, stopped: bool, data: Any) -> None:
    """No output of a model raises, splits never matter, think tags never show outside arguments, announced calls stay in order."""
    tokens = segments("".join(parts))
    whole = parse_all(new_parser(tail, TOOLS if tools else None), tokens, stopped=stopped)
    cuts: list[tuple[int, bytes]] = []
    for token_id, piece in tokens:
        at = data.draw(st.integers(0, len(piece))) if token_id == TEXT_ID else 0
        cuts += [(token_id, part) for part in (piece[:at], piece[at:]) if part]
    assert summary(joined(parse_all(new_parser(tail, TOOLS if tools else None), cuts, stopped=stopped))) == summary(joined(whole))
    message = joined(whole)
    if "<think>" not in "".join(part for part in parts if part not in IDS):
        assert "</think>" not in message.content
    assert [delta.index for delta in whole if isinstance(delta, ToolCallStart)] == list(range(len(message.tool_calls)))


@given(
    st.dictionaries(
        st.text(alphabet="abcxyz", min_size=1, max_size=5), st.text(max_size=30).filter(lambda s: not TAG.search(s)), max_size=4
    )
)
def test_string_arguments_arrive_exactly(arguments: dict[str, str]) -> None:
    """Whatever text the model writes between the tags is what json.loads gives back."""
    tools = [tool("f", **dict.fromkeys(arguments, STRING))]
    message = joined(parse_all(new_parser(tools=tools), cut_bytes(segments(call("f", **arguments))), stopped=True))
    assert json.loads(message.tool_calls[0].arguments) == arguments
