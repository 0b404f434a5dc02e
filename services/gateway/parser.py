"""The one parser of the model's output: token ids and bytes in, reasoning, content and tool calls out.

    REASONING ──</think>──▶ CONTENT ──<tool_call>──▶ CALL ──</tool_call>──▶ CONTENT
        └────────────────<tool_call>──────────────────▲

Control tokens are known by their ids, never by their text: a model that explains ``</think>`` in words writes other tokens.
Streaming sends the deltas as they come, a request without streaming joins the same deltas, so both always agree.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.gateway.deltas import Channel, ContentWasReasoning, Delta, TextDelta
from services.gateway.prompt import PromptTail
from services.gateway.tokenizer import PromptTokenizer
from services.gateway.tool_call import CallState, Tag, ToolCallReader, Utf8
from services.gateway.tool_schema import ToolSchemas


class FinishReason(enum.Enum):
    """Why a generation ended, as OpenAI names it."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True)
class Vocabulary:
    """The control tokens of a checkpoint.

    Attributes:
        tags: token id → tag.
        special: ids whose text is never shown: end of text, roles, images.
    """

    tags: dict[int, Tag]
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PromptTokenizer) -> Vocabulary:
        """The tags that this tokenizer has; a model without some of them is served without what they mean."""
        ids = tokenizer.control_ids
        tags = {ids[tag.value]: tag for tag in Tag if tag.value in ids}
        return cls(tags, tokenizer.special_ids - tags.keys())

    @property
    def has_tools(self) -> bool:
        """True when the model can write tool calls."""
        needed = {Tag.CALL, Tag.CALL_END, Tag.KEY, Tag.KEY_END, Tag.VALUE, Tag.VALUE_END}
        return needed <= set(self.tags.values())


def new_call_id() -> str:
    """A fresh id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputParser:
    """Reads one choice's tokens.

    Args:
        vocabulary: the checkpoint's control tokens.
        tail: where the prompt left the model.
        schemas: declared tools; None leaves tool-call tags in the text (no tools, or tool_choice none).
        keep_special: show special tokens (skip_special_tokens false).
        parallel: False keeps the first call only.
        trim_newlines: content does not begin with the line breaks that the template puts before it.
        new_id: makes tool-call ids.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        tail: PromptTail,
        schemas: ToolSchemas | None,
        *,
        keep_special: bool = False,
        parallel: bool = True,
        trim_newlines: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._vocabulary = vocabulary
        self._channel = Channel.REASONING if tail is PromptTail.REASONING else Channel.CONTENT
        self._schemas = schemas
        self._keep_special = keep_special
        self._parallel = parallel
        self._trim_newlines = trim_newlines
        self._new_id = new_id
        self._utf8 = Utf8()
        self._held_space: str | None = ""  # white space that may turn out to stand before a call; None: text has begun
        self._call: ToolCallReader | None = None
        self._raw_call = False  # inside a call of an unknown tool, which is passed on as text
        self._closed_reasoning = tail is not PromptTail.REASONING
        self._reasoned = tail is PromptTail.REASONING
        self._said_anything = False
        self._content_tokens = 0
        self.reasoning_tokens = 0
        self.num_calls = 0
        self.num_complete_calls = 0
        self.num_rejected_calls = 0

    @property
    def only_reasoned(self) -> bool:
        """True when all output so far is reasoning that was never closed."""
        return not self._closed_reasoning and not self._said_anything

    def is_end(self, token_id: int) -> bool:
        """True for a token with which the model itself ends: no text, no tag. 0 stands for none."""
        return token_id == 0 or token_id in self._vocabulary.special

    @property
    def channel(self) -> Channel:
        """Where text belongs now."""
        return self._channel

    def plain(self, token_id: int, piece: bytes) -> str | None:
        """The text of a token that does nothing but go on with the text before it: what `feed` makes of most tokens, for less.

        Returns:
            None, with nothing taken, for any other token.
        """
        vocabulary = self._vocabulary
        if token_id in vocabulary.tags or token_id in vocabulary.special or self._call is not None or self._utf8.waits:
            return None
        in_content = self._channel is Channel.CONTENT
        if in_content and self._held_space is not None:
            return None
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            return None
        if text and in_content:
            self._content_tokens += 1
        elif text:
            self.reasoning_tokens += 1
        return text or None

    def feed(self, token_id: int, piece: bytes) -> list[Delta]:
        """Takes the next token.

        Args:
            token_id: its id.
            piece: its bytes as the worker sent them; empty for end-of-text and stop tokens.
        """
        tag = self._vocabulary.tags.get(token_id)
        if tag is not None:
            return self._tag(tag, piece) if self._call is None else self._tag_in_call(self._call, tag, piece)
        if token_id in self._vocabulary.special and not self._keep_special:
            return []
        if self._call is not None:
            return self._call_deltas(self._call.feed_text(piece))
        self.reasoning_tokens += self._channel is Channel.REASONING
        self._content_tokens += self._channel is Channel.CONTENT
        return self._text(piece)

    def finish(self, *, stopped: bool) -> list[Delta]:
        """The output ends.

        Args:
            stopped: the model ended it (not the length limit).
        """
        deltas: list[Delta] = []
        call = self._call
        if call is not None:
            deltas = self._call_deltas(call.end(stopped=stopped))
            if call.state is CallState.NAME and stopped:
                deltas += self._reject(call)
            elif call.emitted:
                self._end_call(call)
        deltas += self._end_text()
        held = self._trimmed(self._held_space or "")
        if held and self.num_calls == 0:
            deltas.append(TextDelta(Channel.CONTENT, held))
        self._held_space = None
        return deltas

    def finish_reason(self, *, stopped: bool) -> FinishReason:
        """The engine's reason wins: only a stop after at least one whole call becomes tool_calls."""
        if not stopped:
            return FinishReason.LENGTH
        return FinishReason.TOOL_CALLS if self.num_complete_calls else FinishReason.STOP

    def _tag(self, tag: Tag, piece: bytes) -> list[Delta]:
        """A control token outside a call."""
        if tag is Tag.THINK_END:
            deltas = self._switch(Channel.CONTENT)
            if not self._reasoned and self._said_anything and self.num_calls == 0:
                # Thinking was off and the model thought all the same.
                deltas.append(ContentWasReasoning())
                self.reasoning_tokens, self._held_space = self._content_tokens, ""
            self._reasoned = self._closed_reasoning = True
            return deltas
        if tag is Tag.THINK:
            self._reasoned = True
            self._closed_reasoning = self._said_anything
            return self._switch(Channel.REASONING)
        if self._schemas is None:
            return self._text(piece)
        if tag is Tag.CALL:
            deltas = self._switch(Channel.CONTENT)
            self._closed_reasoning = True
            self._raw_call = False
            self._begin_call(piece)
            return deltas
        if tag is Tag.CALL_END:
            if not self._raw_call:
                return []
            self._raw_call = False
        return self._text(piece)

    def _tag_in_call(self, call: ToolCallReader, tag: Tag, piece: bytes) -> list[Delta]:
        if tag is Tag.CALL and call.state is not CallState.VALUE:
            # A new call where the last one had no end: what is whole of that one counts.
            if call.state is CallState.NAME:
                deltas = self._reject(call)
            else:
                deltas = self._call_deltas(call.feed_tag(Tag.CALL_END, b""))
                self._end_call(call)
            self._begin_call(piece)
            return deltas
        deltas = self._call_deltas(call.feed_tag(tag, piece))
        if call.state is CallState.COMPLETE:
            self._end_call(call)
        elif call.state is CallState.REJECTED:
            self._raw_call = tag is not Tag.CALL_END
            deltas += self._reject(call)
        return deltas

    def _begin_call(self, piece: bytes) -> None:
        assert self._schemas is not None
        self._call = ToolCallReader(self.num_calls, self._new_id(), self._schemas, piece)

    def _end_call(self, call: ToolCallReader) -> None:
        self.num_calls += 1
        self.num_complete_calls += call.state is CallState.COMPLETE
        self._said_anything = True
        self._held_space = ""
        self._call = None

    def _reject(self, call: ToolCallReader) -> list[Delta]:
        """Gives a call of an undeclared tool back as the text that it was."""
        self._call = None
        self.num_rejected_calls += 1
        return self._text(call.raw)

    def _call_deltas(self, deltas: list[Delta]) -> list[Delta]:
        return deltas if self._parallel or self.num_calls == 0 else []

    def _switch(self, channel: Channel) -> list[Delta]:
        deltas = self._end_text()
        self._channel = channel
        return deltas

    def _text(self, piece: bytes) -> list[Delta]:
        return self._visible(self._utf8.feed(piece))

    def _end_text(self) -> list[Delta]:
        return self._visible(self._utf8.flush())

    def _visible(self, text: str) -> list[Delta]:
        """Text of the current channel, less white space that may only separate calls."""
        if not text:
            return []
        if self._channel is Channel.CONTENT:
            if self._held_space is not None:
                text, self._held_space = self._held_space + text, None
                if text.isspace():
                    self._held_space = text
                    return []
                text = text if self._said_anything else self._trimmed(text)
            self._said_anything = True
        return [TextDelta(self._channel, text)]

    def _trimmed(self, text: str) -> str:
        return text.lstrip("\n") if self._trim_newlines else text


def parse_all(parser: OutputParser, tokens: Iterable[tuple[int, bytes]], *, stopped: bool) -> list[Delta]:
    """All deltas of a finished output."""
    deltas = [delta for token_id, piece in tokens for delta in parser.feed(token_id, piece)]
    return deltas + parser.finish(stopped=stopped)
