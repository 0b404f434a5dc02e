"""What the parser finds in the model's output: the vocabulary between parser and API."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Channel(enum.Enum):
    """Where a piece of text belongs."""

    REASONING = "reasoning_content"
    CONTENT = "content"


@dataclass(frozen=True)
class TextDelta:
    """More text of one channel."""

    channel: Channel
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call to a declared tool begins; sent once per call."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """More of a call's JSON arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class ContentWasReasoning:
    """All content so far turns out to have been reasoning: its end came where no reasoning was expected.

    A whole answer moves it; a stream has sent it already.
    """


Delta = TextDelta | ToolCallStart | ToolArguments | ContentWasReasoning


class ToolCall:
    """A call put together from its deltas."""

    def __init__(self, start: ToolCallStart) -> None:
        self.call_id = start.call_id
        self.name = start.name
        self._arguments: list[str] = []

    def add(self, text: str) -> None:
        """Joins more of the arguments."""
        self._arguments.append(text)

    @property
    def arguments(self) -> str:
        """The JSON text of the arguments."""
        return "".join(self._arguments)


class Message:
    """An answer put together from its deltas: what a request without streaming gets."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.tool_calls: list[ToolCall] = []

    def add_text(self, channel: Channel, text: str) -> None:
        """Joins more text of a channel."""
        (self._reasoning if channel is Channel.REASONING else self._content).append(text)

    def add(self, delta: Delta) -> None:
        """Joins one more delta."""
        if isinstance(delta, TextDelta):
            self.add_text(delta.channel, delta.text)
        elif isinstance(delta, ToolCallStart):
            self.tool_calls.append(ToolCall(delta))
        elif isinstance(delta, ToolArguments):
            self.tool_calls[delta.index].add(delta.text)
        else:
            self._reasoning += self._content
            self._content = []

    @property
    def reasoning(self) -> str:
        """The reasoning channel."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """The content channel."""
        return "".join(self._content)


def merged(deltas: list[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one kind joined, so that one step of the engine makes few events."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta) and last.channel is delta.channel:
            joined[-1] = TextDelta(delta.channel, last.text + delta.text)
        elif isinstance(delta, ToolArguments) and isinstance(last, ToolArguments) and last.index == delta.index:
            joined[-1] = ToolArguments(delta.index, last.text + delta.text)
        else:
            joined.append(delta)
    return joined
