"""/v1/chat/completions: deltas of the parser → chunks and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import Chunks, Head, Totals, UsageOptions, stopped_by_model
from services.gateway.deltas import Channel, ContentWasReasoning, Delta, Message, TextDelta, ToolArguments, ToolCallStart, merged
from services.gateway.json_response import json_bytes
from services.gateway.logprobs import chat_entry, prompt_entry
from services.gateway.parser import FinishReason, OutputParser
from services.gateway.wire import OPENAI

# Stands for the text of an event where its template is made.
_TEXT = "\ue000text\ue000"


@dataclass(frozen=True)
class ChatOptions:
    """How a chat answer is written.

    Attributes:
        usage: stream_options.
        logprobs: the client wants log-probabilities.
        names_by_id: their tokens are named by ids.
        prompt_logprobs: how many of the most likely tokens stand beside each of the prompt's; None where the prompt's are not wanted.
        prompt_ids: token ids of the prompt, to be shown beside those of the output; None where the client wants no ids.
        show_reasoning: include_reasoning.
        reasoning_fields: names under which reasoning goes out.
        named_tool: tool_choice named a tool: its call ends with `stop`, as OpenAI has it.
        echo: text that continue_final_message continues and the client wants repeated.
    """

    usage: UsageOptions = field(default_factory=UsageOptions)
    logprobs: bool = False
    names_by_id: bool = False
    prompt_logprobs: int | None = None
    prompt_ids: Sequence[int] | None = None
    show_reasoning: bool = True
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    named_tool: bool = False
    echo: str = ""


class ParsedChoice:
    """One generation put together from its deltas, whatever API shows it.

    Args:
        parser: of this choice alone.
    """

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self.message = Message()
        self.stopped = False
        self.moved_reasoning = False

    def take(self, tokens: Sequence[pb.Token]) -> list[Delta]:
        """New tokens → deltas."""
        feed = self.parser.feed
        if len(tokens) == 1:
            return self._keep(feed(tokens[0].id, tokens[0].piece))
        return self._keep([delta for token in tokens for delta in feed(token.id, token.piece)])

    def plain(self, token: pb.Token) -> str | None:
        """The text of a token that only goes on with the text before it; None, with nothing taken, for any other."""
        text = self.parser.plain(token.id, token.piece)
        if text is not None:
            self.message.add_text(self.parser.channel, text)
        return text

    def finish(self, finished: pb.Finished) -> list[Delta]:
        """The end → the last deltas."""
        self.stopped = stopped_by_model(finished)
        deltas = self._keep(self.parser.finish(stopped=self.stopped))
        # The client's stop strings and tokens cut a thought in two; only a model that stops of its own accord has said what it had to say.
        by_itself = self.stopped and not finished.stop_string and self.parser.is_end(finished.stop_token_id)
        self.moved_reasoning = by_itself and self.parser.only_reasoned and self.parser.reasoning_tokens > 0
        return deltas

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended, after `finish`."""
        return self.parser.finish_reason(stopped=self.stopped)

    @property
    def texts(self) -> tuple[str, str]:
        """(reasoning, content) of a whole answer: when the model skipped its thinking, what it wrote before it stopped is the answer."""
        reasoning, content = self.message.reasoning, self.message.content
        return ("", reasoning) if self.moved_reasoning else (reasoning, content)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of what `texts` calls reasoning."""
        return 0 if self.moved_reasoning else self.parser.reasoning_tokens

    def _keep(self, deltas: list[Delta]) -> list[Delta]:
        shown: list[Delta] = []
        for delta in deltas if len(deltas) < 2 else merged(deltas):
            self.message.add(delta)
            if not isinstance(delta, ContentWasReasoning):
                shown.append(delta)
        return shown


class ChatAnswer:
    """/v1/chat/completions.

    Args:
        head: identity of the answer.
        parsers: one per choice.
        prompt_tokens: length of the prompt.
        options: how it is written.
    """

    wire = OPENAI

    def __init__(self, head: Head, parsers: Sequence[OutputParser], prompt_tokens: int, options: ChatOptions) -> None:
        self.head = head
        self._totals = Totals([prompt_tokens], len(parsers))
        self._chunks = Chunks(head, "chat.completion.chunk", options.usage, self._totals)
        self._choices = [_Choice(index, parser, options) for index, parser in enumerate(parsers)]
        self._options = options
        self._prompt_logprobs: list[dict[str, Any] | None] = []
        self._prompt_ids_sent = False
        # Every chunk is the same but for its text.
        self._is_plain = not (options.logprobs or options.usage.in_every_chunk) and options.prompt_ids is None

    @property
    def unclosed_reasoning(self) -> bool:
        """True when a choice stopped inside its reasoning, so that it has no content of its own."""
        return any(choice.parsed.moved_reasoning for choice in self._choices)

    @property
    def num_rejected_calls(self) -> int:
        """Calls of tools that were not declared, passed on as text."""
        return sum(choice.parsed.parser.num_rejected_calls for choice in self._choices)

    def begin(self) -> list[dict[str, Any]]:
        """Nothing: the first delta brings the role."""
        return []

    def prompt(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """Keeps the prompt's log-probabilities for the whole answer."""
        if self._options.prompt_logprobs is not None and choice == 0:
            self._prompt_logprobs += [prompt_entry(token, self._options.prompt_logprobs) for token in tokens]
        return []

    def take(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → stream chunks, perhaps none."""
        self._totals.streamed += len(tokens)
        return [self._chunk(part) for part in self._choices[choice].take(tokens)]

    def quick(self, choice: int, tokens: Sequence[pb.Token]) -> tuple[bytes, int]:
        """Plain text by a template."""
        own = self._choices[choice]
        if not self._is_plain or not own.role_sent:
            return b"", 0
        parsed, channel = own.parsed, own.parsed.parser.channel
        frame = own.frames[channel is Channel.REASONING]
        if frame is None:
            frame = own.frames[channel is Channel.REASONING] = self._frame(own, channel)
        if not frame:
            return b"", 0
        texts: list[str] = []
        for token in tokens:
            text = parsed.plain(token)
            if text is None:
                break
            texts.append(text)
        self._totals.streamed += len(texts)
        return (frame[0] + json_bytes("".join(texts)) + frame[1] if texts else b""), len(texts)

    def _frame(self, own: _Choice, channel: Channel) -> tuple[bytes, ...]:
        """What stands before and after the text of an event; nothing where it stands at no or at several places."""
        chunks = [self._chunk(part) for part in own.parts([TextDelta(channel, _TEXT)])]
        around = b"".join(map(self.wire.event, chunks)).split(json_bytes(_TEXT))
        return tuple(around) if len(around) == 2 else ()

    def finish(self, choice: int, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end of a generation → finish chunk and, after the last, the usage chunk."""
        parts = self._choices[choice].finish(finished)
        chunks = [self._chunk(part) for part in parts]
        # The stream has sent as reasoning what a whole answer moves into its content.
        done = self._totals.add(choice, finished, self._choices[choice].parsed.parser.reasoning_tokens)
        return chunks + self._chunks.last(self._totals.usage(reasoning=True)) if done else chunks

    def response(self) -> dict[str, Any]:
        """The whole answer, after the last `finish`."""
        self._totals.reasoning_tokens = sum(choice.parsed.reasoning_tokens for choice in self._choices)
        choices = [choice.whole() for choice in self._choices]
        whole = self.head.object("chat.completion", choices) | {"usage": self._totals.usage(reasoning=True)}
        if self._options.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs
        if self._options.prompt_ids is not None:
            whole["prompt_token_ids"] = list(self._options.prompt_ids)
        return whole

    def _chunk(self, part: dict[str, Any]) -> dict[str, Any]:
        chunk = self._chunks.choice(part)
        if self._options.prompt_ids is not None and not self._prompt_ids_sent:
            self._prompt_ids_sent = True
            chunk["prompt_token_ids"] = list(self._options.prompt_ids)
        return chunk


class _Choice:
    """One choice of a chat answer."""

    def __init__(self, index: int, parser: OutputParser, options: ChatOptions) -> None:
        self.parsed = ParsedChoice(parser)
        self._index = index
        self._options = options
        self._logprobs: list[dict[str, Any]] = []
        self._unsent_logprobs = 0
        self._ids: list[int] = []
        self._unsent_ids = 0
        self.role_sent = False
        # Of events with content and with reasoning; None until the first of its kind.
        self.frames: list[tuple[bytes, ...] | None] = [None, None]
        self._echo = options.echo

    def take(self, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        if self._options.logprobs:
            self._logprobs += [chat_entry(token, by_id=self._options.names_by_id) for token in tokens if token.piece]
        if self._options.prompt_ids is not None:
            self._ids += [token.id for token in tokens]
        return self.parts(self.parsed.take(tokens))

    def finish(self, finished: pb.Finished) -> list[dict[str, Any]]:
        parts = self.parts(self.parsed.finish(finished))
        return [*parts, self._part({}, self._finish_reason())]

    def whole(self) -> dict[str, Any]:
        reasoning, content = self.parsed.texts
        content = self._options.echo + content
        calls = self.parsed.message.tool_calls
        body: dict[str, Any] = {"role": "assistant", "content": content if content or not (calls or reasoning) else None}
        for name in self._options.reasoning_fields:
            body[name] = (reasoning or None) if self._options.show_reasoning else None
        body["refusal"] = None
        if calls:
            body["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return {
            "index": self._index,
            "message": body,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._options.logprobs else None,
            "finish_reason": self._finish_reason(),
        } | ({} if self._options.prompt_ids is None else {"token_ids": self._ids})

    def _finish_reason(self) -> str:
        reason = self.parsed.finish_reason
        if reason is FinishReason.TOOL_CALLS and self._options.named_tool:
            reason = FinishReason.STOP
        return reason.value

    def parts(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        parts = []
        if self._echo and deltas:
            parts.append(self._part({"content": self._echo}, None))
            self._echo = ""
        if not self._options.show_reasoning:
            deltas = [delta for delta in deltas if not (isinstance(delta, TextDelta) and delta.channel is Channel.REASONING)]
        return parts + [self._part(self._json(delta), None) for delta in deltas]

    def _part(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        if not self.role_sent:
            self.role_sent = True
            delta = {"role": "assistant", **delta}
        new = self._logprobs[self._unsent_logprobs :]
        self._unsent_logprobs = len(self._logprobs)
        logprobs = {"content": new, "refusal": None} if new else None
        part: dict[str, Any] = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._options.prompt_ids is not None:
            part["token_ids"] = self._ids[self._unsent_ids :]
            self._unsent_ids = len(self._ids)
        return part

    def _json(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, TextDelta):
            if delta.channel is Channel.REASONING:
                return dict.fromkeys(self._options.reasoning_fields, delta.text)
            return {"content": delta.text}
        if isinstance(delta, ToolArguments):
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
        assert isinstance(delta, ToolCallStart)
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.call_id, "type": "function", "function": function}]}
