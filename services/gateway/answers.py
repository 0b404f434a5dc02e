"""The worker's tokens → OpenAI's objects. One class per endpoint; each serves streaming and plain requests alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.errors import Cancelled, EngineFailed
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.deltas import Channel, ContentWasReasoning, Delta, Message, TextDelta, ToolArguments, ToolCallStart, merged
from services.gateway.logprobs import CompletionLogprobs, chat_entry
from services.gateway.parser import OutputParser
from services.gateway.tool_call import Utf8


@dataclass(frozen=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, prefix: str, request_id: str, info: pb.InfoResponse) -> Head:
        """The identity of a request's answer, e.g. ``chatcmpl-…``."""
        return cls(f"{prefix}-{request_id}", info.model_name, f"fp_{info.checkpoint_hash[:12]}")

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One object of the answer."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@dataclass(frozen=True)
class UsageOptions:
    """`stream_options`."""

    at_end: bool = False
    in_every_chunk: bool = False


class Answer(Protocol):
    """What turns one generation into an HTTP answer."""

    head: Head

    def take(self, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → stream chunks, perhaps none."""

    def finish(self, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end of the generation → the last chunks."""

    def response(self) -> dict[str, Any]:
        """The whole answer, after `finish`."""


def stopped_by_model(finished: pb.Finished) -> bool:
    """True when the model or a stop condition ended the output, False when the length limit did.

    Raises:
        Cancelled: somebody cancelled it.
        EngineFailed: the worker gave no reason.
    """
    if finished.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_GRAMMAR_END):
        return True
    if finished.reason == pb.FINISH_REASON_LENGTH:
        return False
    if finished.reason == pb.FINISH_REASON_CANCELLED:
        raise Cancelled("the generation was cancelled")
    raise EngineFailed(f"the worker ended the generation with the unknown reason {finished.reason}")


def usage_of(finished: pb.Finished, reasoning_tokens: int | None) -> dict[str, Any]:
    """OpenAI's usage object."""
    usage: dict[str, Any] = {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


class _Chunks:
    """Stream chunks of one answer, with usage where the client wants it."""

    def __init__(self, head: Head, kind: str, usage: UsageOptions, prompt_tokens: int) -> None:
        self._head = head
        self._kind = kind
        self._usage = usage
        self._prompt_tokens = prompt_tokens
        self.num_tokens = 0

    def choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk with one choice."""
        chunk = self._head.object(self._kind, [choice])
        if self._usage.in_every_chunk:
            chunk["usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self.num_tokens,
                "total_tokens": self._prompt_tokens + self.num_tokens,
            }
        elif self._usage.at_end:
            chunk["usage"] = None
        return chunk

    def last(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The usage chunk, if the client asked for it."""
        return [self._head.object(self._kind, []) | {"usage": usage}] if self._usage.at_end else []


class ChatAnswer:
    """/v1/chat/completions.

    Args:
        head: identity of the answer.
        parser: of the choice.
        prompt_tokens: length of the prompt.
        usage: stream_options.
        logprobs: the client wants log-probabilities.
        show_reasoning: include_reasoning.
    """

    def __init__(
        self,
        head: Head,
        parser: OutputParser,
        prompt_tokens: int,
        *,
        usage: UsageOptions,
        logprobs: bool,
        show_reasoning: bool,
    ) -> None:
        self.head = head
        self._parser = parser
        self._chunks = _Chunks(head, "chat.completion.chunk", usage, prompt_tokens)
        self._wants_logprobs = logprobs
        self._show_reasoning = show_reasoning
        self._logprobs: list[dict[str, Any]] = []
        self._unsent_logprobs = 0
        self._message = Message()
        self._role_sent = False
        self._finish_reason = ""
        self._usage: dict[str, Any] = {}
        self._moved_reasoning = False

    @property
    def unclosed_reasoning(self) -> bool:
        """True when the model stopped inside its reasoning, so that the answer has no content of its own."""
        return self._moved_reasoning

    @property
    def num_rejected_calls(self) -> int:
        """Calls of tools that were not declared, passed on as text."""
        return self._parser.num_rejected_calls

    def take(self, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → stream chunks, perhaps none."""
        deltas: list[Delta] = []
        for token in tokens:
            deltas += self._parser.feed(token.id, token.piece)
            if self._wants_logprobs and token.piece:
                self._logprobs.append(chat_entry(token))
        self._chunks.num_tokens += len(tokens)
        return self._delta_chunks(deltas)

    def finish(self, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end of the generation → finish chunk and usage chunk."""
        stopped = stopped_by_model(finished)
        chunks = self._delta_chunks(self._parser.finish(stopped=stopped))
        self._finish_reason = self._parser.finish_reason(stopped=stopped).value
        self._moved_reasoning = stopped and self._parser.only_reasoned and self._parser.reasoning_tokens > 0
        self._usage = usage_of(finished, self._parser.reasoning_tokens)
        chunks.append(self._chunk({}, self._finish_reason))
        return chunks + self._chunks.last(self._usage)

    def response(self) -> dict[str, Any]:
        """The whole answer, after `finish`."""
        message = self._message
        reasoning, content, usage = message.reasoning, message.content, self._usage
        if self._moved_reasoning:
            # The model skipped its thinking: what it wrote before it stopped is the answer.
            reasoning, content = "", reasoning
            usage = usage | {"completion_tokens_details": {"reasoning_tokens": 0}}
        body: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not (message.tool_calls or reasoning) else None,
            "reasoning_content": (reasoning or None) if self._show_reasoning else None,
            "refusal": None,
        }
        if message.tool_calls:
            body["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        choice = {
            "index": 0,
            "message": body,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._wants_logprobs else None,
            "finish_reason": self._finish_reason,
        }
        return self.head.object("chat.completion", [choice]) | {"usage": usage}

    def _delta_chunks(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        chunks = []
        for delta in merged(deltas):
            self._message.add(delta)
            if isinstance(delta, ContentWasReasoning):
                continue
            if self._show_reasoning or not (isinstance(delta, TextDelta) and delta.channel is Channel.REASONING):
                chunks.append(self._chunk(_delta_json(delta), None))
        return chunks

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        if not self._role_sent:
            self._role_sent = True
            delta = {"role": "assistant", **delta}
        new = self._logprobs[self._unsent_logprobs :]
        self._unsent_logprobs = len(self._logprobs)
        logprobs = {"content": new, "refusal": None} if new else None
        return self._chunks.choice({"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})


def _delta_json(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {delta.channel.value: delta.text}
    if isinstance(delta, ToolArguments):
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    assert isinstance(delta, ToolCallStart)
    function = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [{"index": delta.index, "id": delta.call_id, "type": "function", "function": function}]}


class CompletionAnswer:
    """/v1/completions: the output as it is.

    Args:
        head: identity of the answer.
        hidden: token ids whose text is not shown.
        prompt_tokens: length of the prompt.
        usage: stream_options.
        logprobs: the client wants log-probabilities.
    """

    def __init__(self, head: Head, hidden: frozenset[int], prompt_tokens: int, *, usage: UsageOptions, logprobs: bool) -> None:
        self.head = head
        self._hidden = hidden
        self._chunks = _Chunks(head, "text_completion", usage, prompt_tokens)
        self._wants_logprobs = logprobs
        self._stream_logprobs = CompletionLogprobs()
        self._all_logprobs = CompletionLogprobs()
        self._utf8 = Utf8()
        self._text: list[str] = []
        self._length = 0
        self._finish_reason = ""
        self._usage: dict[str, Any] = {}

    def take(self, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → stream chunks, perhaps none."""
        new = ""
        for token in tokens:
            if self._wants_logprobs and token.piece:
                self._stream_logprobs.add(token, self._length + len(new))
                self._all_logprobs.add(token, self._length + len(new))
            if token.id not in self._hidden:
                new += self._utf8.feed(token.piece)
        self._chunks.num_tokens += len(tokens)
        self._add(new)
        return [self._chunk(new, None)] if new else []

    def finish(self, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end of the generation → finish chunk and usage chunk."""
        self._finish_reason = "stop" if stopped_by_model(finished) else "length"
        rest = self._utf8.flush()
        self._add(rest)
        self._usage = usage_of(finished, None)
        return [self._chunk(rest, self._finish_reason), *self._chunks.last(self._usage)]

    def response(self) -> dict[str, Any]:
        """The whole answer, after `finish`."""
        choice = {
            "index": 0,
            "text": "".join(self._text),
            "logprobs": self._all_logprobs.take() if self._wants_logprobs else None,
            "finish_reason": self._finish_reason,
        }
        return self.head.object("text_completion", [choice]) | {"usage": self._usage}

    def _add(self, text: str) -> None:
        self._text.append(text)
        self._length += len(text)

    def _chunk(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._stream_logprobs.take() if self._wants_logprobs else None
        return self._chunks.choice({"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})
