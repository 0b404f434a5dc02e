"""One tool call, from ``<tool_call>`` to ``</tool_call>``: tags and bytes in, OpenAI tool-call deltas out.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>

The name goes out once and whole, when its end is seen and only if the request declared it. A string argument goes out as it arrives;
any other argument is held until its end and serialised once.
"""

from __future__ import annotations

import codecs
import enum
import json

from services.gateway.deltas import Delta, ToolArguments, ToolCallStart
from services.gateway.tool_schema import NULLABLE_STRING, STRING_ONLY, ArgumentSchema, ToolSchemas


class Tag(enum.Enum):
    """The control tokens that structure the model's output."""

    THINK = "<think>"
    THINK_END = "</think>"
    CALL = "<tool_call>"
    CALL_END = "</tool_call>"
    KEY = "<arg_key>"
    KEY_END = "</arg_key>"
    VALUE = "<arg_value>"
    VALUE_END = "</arg_value>"


class CallState(enum.Enum):
    """Where in the call the reader is."""

    NAME = enum.auto()
    BETWEEN = enum.auto()  # after the name or after an argument
    KEY = enum.auto()
    AFTER_KEY = enum.auto()
    VALUE = enum.auto()
    COMPLETE = enum.auto()
    REJECTED = enum.auto()  # not a call: what was read is text


class Utf8:
    """Bytes of one channel → text; a character that is cut between tokens waits for its rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """The characters that `data` completes."""
        return self._decoder.decode(data)

    @property
    def waits(self) -> bool:
        """True while a character waits for its rest."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The end of the channel: a character that never got its rest becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ToolCallReader:
    """Reads one call.

    Args:
        index: position of the call in the message.
        call_id: id that the client will answer to.
        schemas: the declared tools.
        opening: the raw opening tag, for giving it back as text.
    """

    def __init__(self, index: int, call_id: str, schemas: ToolSchemas, opening: bytes) -> None:
        self.state = CallState.NAME
        self.name = ""
        self._index = index
        self._call_id = call_id
        self._schemas = schemas
        self._raw = bytearray(opening)
        self._text = Utf8()
        self._pending = ""
        self._key = ""
        self._num_arguments = 0
        self._schema: ArgumentSchema | None = None
        self._streaming = False

    @property
    def raw(self) -> bytes:
        """Everything read before the name was accepted, as the model wrote it."""
        return bytes(self._raw)

    @property
    def emitted(self) -> bool:
        """True when the client has been told of this call."""
        return self.state not in (CallState.NAME, CallState.REJECTED)

    def feed_text(self, piece: bytes) -> list[Delta]:
        """Takes the bytes of an ordinary token."""
        if self.state is CallState.NAME:
            self._raw += piece
        if self.state in (CallState.NAME, CallState.KEY):
            self._pending += self._text.feed(piece)
        elif self.state is CallState.VALUE:
            return self._value_text(self._text.feed(piece))
        return []

    def feed_tag(self, tag: Tag, piece: bytes) -> list[Delta]:
        """Takes a control token; `piece` is its text."""
        if self.state is CallState.NAME:
            return [] if tag in (Tag.THINK, Tag.THINK_END) else self._end_name(tag, piece)
        if self.state is CallState.VALUE:
            return self._tag_in_value(tag, piece)
        if tag is Tag.CALL_END:
            return self._close()
        if tag is Tag.KEY:
            self._begin_text(CallState.KEY)
        elif self.state is CallState.KEY and tag in (Tag.KEY_END, Tag.VALUE):
            self._key = (self._pending + self._text.flush()).strip()
            self.state = CallState.AFTER_KEY
        if self.state is CallState.AFTER_KEY and tag is Tag.VALUE:
            return self._begin_value()
        return []

    def end(self, *, stopped: bool) -> list[Delta]:
        """The output ends inside the call.

        A call whose last argument is whole and that the model ended itself is closed; anything cut short stays as it is.
        """
        if self.state is CallState.BETWEEN and stopped:
            return self._close()
        return []

    def _end_name(self, tag: Tag, piece: bytes) -> list[Delta]:
        self._raw += piece
        name = (self._pending + self._text.flush()).strip()
        if tag not in (Tag.KEY, Tag.CALL_END) or name not in self._schemas:
            self.state = CallState.REJECTED
            return []
        self.name = name
        self._raw.clear()
        self.state = CallState.BETWEEN
        start: list[Delta] = [ToolCallStart(self._index, self._call_id, name)]
        return start + self.feed_tag(tag, piece)

    def _begin_text(self, state: CallState) -> None:
        self.state = state
        self._pending = ""
        self._text.flush()

    def _begin_value(self) -> list[Delta]:
        self._begin_text(CallState.VALUE)
        self._schema = self._schemas.argument_schema(self.name, self._key)
        self._streaming = self._schema.types == STRING_ONLY
        return [self._arguments(self._head() + '"')] if self._streaming else []

    def _value_text(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._streaming:
            return [self._arguments(_escape(text))]
        self._pending += text
        assert self._schema is not None
        if self._schema.types == NULLABLE_STRING and not "null".startswith(self._pending):
            self._streaming = True
            return [self._arguments(self._head() + '"' + _escape(self._pending))]
        return []

    def _tag_in_value(self, tag: Tag, piece: bytes) -> list[Delta]:
        if tag not in (Tag.VALUE_END, Tag.CALL_END, Tag.KEY):
            return self._value_text(self._text.feed(piece))
        deltas = self._value_text(self._text.flush())
        if self._streaming:
            deltas.append(self._arguments('"'))
        else:
            assert self._schema is not None
            value = self._schema.value_of(self._pending)
            deltas.append(self._arguments(self._head() + json.dumps(value, ensure_ascii=False)))
        self._num_arguments += 1
        self.state = CallState.BETWEEN
        return deltas if tag is Tag.VALUE_END else deltas + self.feed_tag(tag, piece)

    def _close(self) -> list[Delta]:
        self.state = CallState.COMPLETE
        return [self._arguments("}" if self._num_arguments else "{}")]

    def _head(self) -> str:
        return ("{" if self._num_arguments == 0 else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "

    def _arguments(self, text: str) -> ToolArguments:
        return ToolArguments(self._index, text)


def _escape(text: str) -> str:
    """The inside of a JSON string; escaping works character by character, so pieces can be joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
