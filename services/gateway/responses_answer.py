"""/v1/responses: deltas → output items and the events of their making."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from services.common.errors import Glm53Error
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway import errors
from services.gateway.answers import Head, TakenOneByOne, Totals
from services.gateway.blocks import Block, Blocks, Closed, Kind, More, Opened, Step, whole_blocks
from services.gateway.chat_answer import ParsedChoice
from services.gateway.logprobs import TextLogprobs
from services.gateway.parser import OutputParser
from services.gateway.wire import Wire, named_event

_PREFIX = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
_DELTA = {
    Kind.REASONING: "response.reasoning_text.delta",
    Kind.TEXT: "response.output_text.delta",
    Kind.CALL: "response.function_call_arguments.delta",
}


class ResponsesAnswer(TakenOneByOne, Wire):
    """/v1/responses.

    Args:
        head: identity of the answer; its id is the response's.
        parser: of the one choice.
        prompt_tokens: length of the prompt.
        echoed: what the response repeats of its request.
        logprobs: the client wants log-probabilities of the text.

    Attributes:
        parsed: the answer as a message, for the next turn.
        status: in_progress, completed, incomplete, cancelled or failed.
    """

    end = b""

    def __init__(self, head: Head, parser: OutputParser, prompt_tokens: int, echoed: dict[str, Any], *, logprobs: bool = False) -> None:
        self.wire: Wire = self
        self.head = head
        self.parsed = ParsedChoice(parser)
        self.status = "in_progress"
        self._echoed = echoed
        self._totals = Totals([prompt_tokens])
        self._blocks = Blocks()
        self._ids: dict[int, str] = {}
        self._sequence = 0
        self._usage: dict[str, Any] | None = None
        self._whole: list[Block] | None = None
        self._error: dict[str, Any] | None = None
        self._text_logprobs = TextLogprobs() if logprobs else None
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of the blocks of text, reasoning included, by index

    @property
    def num_rejected_calls(self) -> int:
        """Calls of tools that were not declared, passed on as text."""
        return self.parsed.parser.num_rejected_calls

    @property
    def unclosed_reasoning(self) -> bool:
        """True when the answer ended inside its reasoning."""
        return self.parsed.moved_reasoning

    def event(self, payload: dict[str, Any]) -> bytes:
        """One event, named by its type."""
        return named_event(payload)

    def error(self, error: Glm53Error) -> bytes:
        """The error, and the failed response."""
        self.status = "failed"
        body = errors.body_of(error)["error"]
        self._error = {"code": body["code"], "message": body["message"]}
        event = self._numbered({"type": "error", "code": body["code"], "message": body["message"], "param": body["param"]})
        return self.event(event) + self.event(self._numbered({"type": "response.failed", "response": self.response()}))

    def begin(self) -> list[dict[str, Any]]:
        """The response exists."""
        return [self._numbered({"type": kind, "response": self.response()}) for kind in ("response.created", "response.in_progress")]

    def prompt(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """Nothing: the prompt is not shown."""
        del choice, tokens
        return []

    def take(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → events, perhaps none."""
        del choice
        if self._text_logprobs is None:
            return self._events(self._blocks.add(self.parsed.take(tokens)))
        events: list[dict[str, Any]] = []
        for token in tokens:
            # One by one, so that each text is told from which tokens it came.
            self._text_logprobs.add(token)
            events += self._events(self._blocks.add(self.parsed.take([token])))
        return events

    def finish(self, choice: int, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end → the last events."""
        cancelled = finished.reason == pb.FINISH_REASON_CANCELLED
        if cancelled:
            finished = _as_cut_short(finished)
        steps = self._blocks.add(self.parsed.finish(finished)) + self._blocks.close()
        self._totals.add(choice, finished, self.parsed.reasoning_tokens)
        usage = self._totals.usage(reasoning=True)
        self._usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        self.status = "cancelled" if cancelled else "completed" if self.parsed.stopped else "incomplete"
        events = self._events(steps)
        kind = "response.completed" if self.status == "completed" else "response.incomplete"
        if self.parsed.moved_reasoning:
            # Streams have sent it as reasoning; the response that is kept has it as the answer.
            calls = [(call.call_id, call.name, call.arguments) for call in self.parsed.message.tool_calls]
            self._whole = whole_blocks(*self.parsed.texts, calls)
            self._ids = {}
            self._logprobs = {0: [entry for entries in self._logprobs.values() for entry in entries]}
        return [*events, self._numbered({"type": kind, "response": self.response()})]

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        blocks = self._blocks.all if self._whole is None else self._whole
        details = None
        if self.status in ("incomplete", "cancelled"):
            details = {"reason": "max_output_tokens" if self.status == "incomplete" else "cancelled"}
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": self.status,
            "error": self._error,
            "incomplete_details": details,
            "model": self.head.model,
            "output": [self._item(block) for block in blocks if block.closed] if self.status != "in_progress" else [],
            "usage": self._usage,
            **self._echoed,
        }

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._sequence += 1
        return event | {"sequence_number": self._sequence - 1}

    def _events(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        return [self._numbered(event) for step in steps for event in self._of(step)]

    def _of(self, step: Step) -> list[dict[str, Any]]:
        block = step.block
        where = {"item_id": self._id(block), "output_index": block.index}
        part = where | {"content_index": 0}
        if isinstance(step, Opened):
            added = {"type": "response.output_item.added", "output_index": block.index, "item": self._item(block, empty=True)}
            if block.kind is Kind.CALL:
                return [added]
            return [added, {"type": "response.content_part.added", **part, "part": _part(block.kind, "", [])}]
        if isinstance(step, More):
            new = self._new_logprobs(step)
            if block.kind is Kind.CALL:
                return [{"type": _DELTA[block.kind], **where, "delta": step.text}]
            logprobs: dict[str, Any] = {"logprobs": new} if block.kind is Kind.TEXT else {}
            return [{"type": _DELTA[block.kind], **part, "delta": step.text, **logprobs}]
        assert isinstance(step, Closed)
        done = {"type": "response.output_item.done", "output_index": block.index, "item": self._item(block)}
        if block.kind is Kind.CALL:
            arguments = {"name": block.name, "arguments": block.text}
            return [{"type": "response.function_call_arguments.done", **where, **arguments}, done]
        kind = "response.output_text.done" if block.kind is Kind.TEXT else "response.reasoning_text.done"
        whole = self._part(block)
        text: dict[str, Any] = {name: whole[name] for name in ("text", "logprobs") if name in whole}
        return [
            {"type": kind, **part, **text},
            {"type": "response.content_part.done", **part, "part": whole},
            done,
        ]

    def _new_logprobs(self, more: More) -> list[dict[str, Any]]:
        """Log-probabilities of a text that has just come."""
        if self._text_logprobs is None:
            return []
        if more.block.kind is Kind.CALL:
            self._text_logprobs.drop()
            return []
        new = self._text_logprobs.take(more.text)
        self._logprobs.setdefault(more.block.index, []).extend(new)
        return new

    def _part(self, block: Block) -> dict[str, Any]:
        """The content of a message or of reasoning."""
        return _part(block.kind, block.text, self._logprobs.get(block.index, []))

    def _id(self, block: Block) -> str:
        return self._ids.setdefault(block.index, f"{_PREFIX[block.kind]}_{uuid.uuid4().hex}")

    def _item(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        """An output item; `empty` as it looks when it begins."""
        # Only the last item can be the one that was cut.
        cut = self.status not in ("completed", "in_progress") and block is self._blocks.all[-1]
        status = "in_progress" if empty else "incomplete" if cut else "completed"
        own = {"id": self._id(block), "status": status}
        if block.kind is Kind.CALL:
            arguments = "" if empty else block.text
            return own | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": arguments}
        content = [] if empty else [self._part(block)]
        if block.kind is Kind.REASONING:
            return own | {"type": "reasoning", "summary": [], "content": content}
        return own | {"type": "message", "role": "assistant", "content": content}


def _part(kind: Kind, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _as_cut_short(finished: pb.Finished) -> pb.Finished:
    """A cancelled generation keeps what it has."""
    copy = pb.Finished()
    copy.CopyFrom(finished)
    copy.reason = pb.FINISH_REASON_LENGTH
    return copy
