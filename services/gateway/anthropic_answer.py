"""/v1/messages: deltas → content blocks and Anthropic's events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.common.errors import Glm53Error
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import TakenOneByOne, Totals
from services.gateway.blocks import Block, Blocks, Kind, More, Opened, Step, whole_blocks
from services.gateway.chat_answer import ParsedChoice
from services.gateway.error_shapes import anthropic_body
from services.gateway.parser import OutputParser
from services.gateway.wire import Wire, named_event


class MessagesAnswer(TakenOneByOne, Wire):
    """/v1/messages.

    Args:
        answer_id: ``msg_…``.
        model: served name.
        parser: of the one choice.
        prompt_tokens: length of the prompt.
    """

    end = b""

    def __init__(self, answer_id: str, model: str, parser: OutputParser, prompt_tokens: int) -> None:
        self.wire: Wire = self
        self._id = answer_id
        self._model = model
        self._parsed = ParsedChoice(parser)
        self._totals = Totals([prompt_tokens])
        self._blocks = Blocks()
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    @property
    def num_rejected_calls(self) -> int:
        """Calls of tools that were not declared, passed on as text."""
        return self._parsed.parser.num_rejected_calls

    @property
    def unclosed_reasoning(self) -> bool:
        """True when the answer ended inside its reasoning."""
        return self._parsed.moved_reasoning

    def event(self, payload: dict[str, Any]) -> bytes:
        """One event, named by its type."""
        return named_event(payload)

    def error(self, error: Glm53Error) -> bytes:
        """The error as an event."""
        return named_event(anthropic_body(error))

    def begin(self) -> list[dict[str, Any]]:
        """The message begins, empty."""
        return [{"type": "message_start", "message": self._message([])}]

    def prompt(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """Nothing: the prompt is not shown."""
        del choice, tokens
        return []

    def take(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → events, perhaps none."""
        del choice
        return [event for step in self._blocks.add(self._parsed.take(tokens)) for event in _events(step)]

    def finish(self, choice: int, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end → the last events."""
        steps = self._blocks.add(self._parsed.finish(finished)) + self._blocks.close()
        self._totals.add(choice, finished)
        self._stop = self._reason(finished)
        return [
            *(event for step in steps for event in _events(step)),
            {"type": "message_delta", "delta": dict(self._stop), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def response(self) -> dict[str, Any]:
        """The whole message, after `finish`."""
        calls = [(call.call_id, call.name, call.arguments) for call in self._parsed.message.tool_calls]
        return self._message([_content(block) for block in whole_blocks(*self._parsed.texts, calls)])

    def _reason(self, finished: pb.Finished) -> dict[str, Any]:
        if not self._parsed.stopped:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._parsed.parser.num_complete_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finished.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        totals = self._totals
        return {
            "input_tokens": totals.prompt_tokens - totals.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": totals.cached_tokens,
            "output_tokens": totals.completion_tokens,
        }

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._stop,
            "usage": self._usage(),
        }


def _content(block: Block, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    if block.kind is Kind.REASONING:
        # The signature proves to other servers where thoughts come from; this one needs no proof.
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {} if empty else _arguments(text)}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments; those of a call that was cut short are not JSON and count as none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _events(step: Step) -> list[dict[str, Any]]:
    block = step.block
    if isinstance(step, Opened):
        return [{"type": "content_block_start", "index": block.index, "content_block": _content(block, empty=True)}]
    if isinstance(step, More):
        delta = {
            Kind.REASONING: {"type": "thinking_delta", "thinking": step.text},
            Kind.TEXT: {"type": "text_delta", "text": step.text},
            Kind.CALL: {"type": "input_json_delta", "partial_json": step.text},
        }[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]
    return [{"type": "content_block_stop", "index": block.index}]
