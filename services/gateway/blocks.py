"""An answer as a sequence of blocks, reasoning, text or call, one after the other: how /v1/responses and /v1/messages see it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.deltas import Channel, Delta, TextDelta, ToolArguments, ToolCallStart


class Kind(enum.Enum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass
class Block:
    """One block.

    Attributes:
        index: its place in the answer.
        call_id, name: of a call.
    """

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def text(self) -> str:
        """Everything so far; of a call its JSON arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True)
class More:
    """A block goes on."""

    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    """A block is whole."""

    block: Block


Step = Opened | More | Closed


class Blocks:
    """Puts deltas into blocks."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def add(self, deltas: Sequence[Delta]) -> list[Step]:
        """What the deltas open, continue and close."""
        steps: list[Step] = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                kind = Kind.REASONING if delta.channel is Channel.REASONING else Kind.TEXT
                if self._open is None or self._open.kind is not kind:
                    steps += [*self.close(), self._begin(kind)]
                steps.append(self._more(delta.text))
            elif isinstance(delta, ToolCallStart):
                steps += [*self.close(), self._begin(Kind.CALL, delta.call_id, delta.name)]
            elif isinstance(delta, ToolArguments) and self._open is not None:
                steps.append(self._more(delta.text))
        return steps

    def close(self) -> list[Step]:
        """Closes the open block, if there is one."""
        block = self._open
        if block is None:
            return []
        block.closed = True
        return [Closed(block)]

    @property
    def _open(self) -> Block | None:
        return self.all[-1] if self.all and not self.all[-1].closed else None

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Step:
        self.all.append(Block(len(self.all), kind, call_id, name))
        return Opened(self.all[-1])

    def _more(self, text: str) -> Step:
        self.all[-1].pieces.append(text)
        return More(self.all[-1], text)


def whole_blocks(reasoning: str, content: str, calls: Sequence[tuple[str, str, str]]) -> list[Block]:
    """The blocks of a whole answer: reasoning, then content, then calls as (id, name, arguments)."""
    found = [(Kind.REASONING, reasoning, "", ""), (Kind.TEXT, content, "", "")]
    found = [entry for entry in found if entry[1]] + [(Kind.CALL, arguments, call_id, name) for call_id, name, arguments in calls]
    return [Block(index, kind, call_id, name, [text], closed=True) for index, (kind, text, call_id, name) in enumerate(found)]
