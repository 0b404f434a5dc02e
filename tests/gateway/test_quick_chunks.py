"""Chunks of plain text are made by a template: the same bytes as the long way's, whatever the model writes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import Head, UsageOptions
from services.gateway.chat_answer import ChatAnswer, ChatOptions
from services.gateway.parser import OutputParser
from services.gateway.prompt import PromptTail
from services.gateway.tool_schema import ToolSchemas
from tests.gateway.events import stream
from tests.gateway.fake_worker import Finish, Say
from tests.gateway.language import VOCABULARY
from tests.gateway.stack import Stack
from tests.gateway.test_parser import PARTS, TEXT_ID, TOOLS, segments

OPTIONS = st.builds(
    ChatOptions,
    usage=st.sampled_from([UsageOptions(), UsageOptions(at_end=True), UsageOptions(at_end=True, in_every_chunk=True)]),
    logprobs=st.booleans(),
    prompt_ids=st.sampled_from([None, [1, 2]]),
    show_reasoning=st.booleans(),
    reasoning_fields=st.sampled_from([("reasoning_content",), ("reasoning",), ("reasoning_content", "reasoning")]),
    echo=st.sampled_from(["", "before"]),
)
PLAIN = st.builds(ChatOptions, show_reasoning=st.booleans())


def answer(options: ChatOptions, tail: PromptTail, tools: bool) -> ChatAnswer:
    ids = itertools.count()
    schemas = ToolSchemas(TOOLS) if tools else None
    parser = OutputParser(VOCABULARY, tail, schemas, trim_newlines=True, new_id=lambda: f"call_{next(ids)}")
    return ChatAnswer(Head("chatcmpl-1", 'a "model"', "fp", created=5), [parser], 3, options)


def texts(sent: bytes) -> list[tuple[str, Any]]:
    """What the events of one step say, neighbours of one kind joined."""
    found: list[tuple[str, Any]] = []
    for event in sent.decode().split("\n\n")[:-1]:
        delta = json.loads(event.removeprefix("data: "))["choices"][0]["delta"]
        for name, value in delta.items():
            if found and found[-1][0] == name and isinstance(value, str):
                found[-1] = (name, found[-1][1] + value)
            else:
                found.append((name, value))
    return found


@given(
    st.lists(PARTS, max_size=12),
    st.one_of(PLAIN, OPTIONS),
    st.sampled_from(list(PromptTail)),
    st.booleans(),
    st.lists(st.integers(1, 3), min_size=40, max_size=40),
    st.data(),
)
def test_the_quick_way_says_what_the_long_way_says(
    parts: list[str], options: ChatOptions, tail: PromptTail, tools: bool, sizes: list[int], data: Any
) -> None:
    """Step by step the same text in the same order, one token at a time the same bytes; the end and the whole answer are the same too."""
    tokens = []
    for token_id, piece in segments("".join(parts)):
        at = data.draw(st.integers(0, len(piece))) if token_id == TEXT_ID else 0
        tokens += [pb.Token(id=token_id, piece=part, logprob=-1) for part in (piece[:at], piece[at:]) if part]
    quick, long = answer(options, tail, tools), answer(options, tail, tools)
    steps = iter(itertools.chain(sizes, itertools.repeat(1)))
    while tokens:
        size = next(steps)
        step, tokens = tokens[:size], tokens[size:]
        sent, taken = quick.quick(0, step)
        sent += b"".join(map(quick.wire.event, quick.take(0, step[taken:]) if taken < len(step) else []))
        wanted = b"".join(map(long.wire.event, long.take(0, step)))
        assert sent == wanted if len(step) == 1 else texts(sent) == texts(wanted)
    finished = pb.Finished(reason=pb.FINISH_REASON_STOP, prompt_tokens=3, completion_tokens=9)
    assert quick.finish(0, finished) == long.finish(0, finished)
    assert quick.response() == long.response()


def test_most_tokens_go_the_quick_way(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stream of the default kind only the first chunk of a channel and what is no plain text go the long way."""
    slow: list[int] = []
    take = ChatAnswer.take

    def counted(self: ChatAnswer, choice: int, tokens: Any) -> Any:
        slow.append(len(tokens))
        return take(self, choice, tokens)

    monkeypatch.setattr(ChatAnswer, "take", counted)
    said = "one two three four five six seven"
    stack.play(Say(f"{said}</think>{said}"), Finish())
    found = stream(stack)
    assert (found.text("reasoning_content"), found.text("content")) == (said, said)
    # The first token, the tag, the first token behind it.
    assert sum(slow) <= 4
