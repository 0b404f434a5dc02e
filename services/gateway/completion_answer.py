"""/v1/completions: the output as it is, after the prompt where the client wants that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import Chunks, Head, TakenOneByOne, Totals, UsageOptions, stopped_by_model
from services.gateway.logprobs import CompletionLogprobs, prompt_entry
from services.gateway.tool_call import Utf8
from services.gateway.wire import OPENAI


@dataclass(frozen=True)
class CompletionOptions:
    """How a completion is written.

    Attributes:
        usage: stream_options.
        logprobs: how many of the most likely tokens stand beside each; None for no log-probabilities.
        names_by_id: tokens of log-probabilities are named by their ids.
        prompt_logprobs: the same count for vLLM's field of the prompt.
        hidden: token ids whose text is not shown.
        echoes: text of each prompt, to stand before its completions; empty when the prompt is not repeated.
        prompt_ids: token ids of each prompt, to be shown beside those of the output; empty when the client wants no ids.
    """

    usage: UsageOptions = field(default_factory=UsageOptions)
    logprobs: int | None = None
    names_by_id: bool = False
    prompt_logprobs: int | None = None
    hidden: frozenset[int] = frozenset()
    echoes: tuple[str, ...] = ()
    prompt_ids: tuple[Sequence[int], ...] = ()


class CompletionAnswer(TakenOneByOne):
    """/v1/completions.

    Args:
        head: identity of the answer.
        prompts: length of each prompt.
        per_prompt: choices of each prompt (`n`).
        options: how it is written.

    Attributes:
        prompt_lengths: length of each choice's prompt.
    """

    wire = OPENAI
    num_rejected_calls = 0
    unclosed_reasoning = False

    def __init__(self, head: Head, prompts: Sequence[int], per_prompt: int, options: CompletionOptions) -> None:
        self.head = head
        self._options = options
        self.prompt_lengths = [length for length in prompts for _ in range(per_prompt)]
        self._totals = Totals(prompts, per_prompt)
        self._chunks = Chunks(head, "text_completion", options.usage, self._totals)
        self._per_prompt = per_prompt
        self._choices = [
            _Choice(
                index,
                options.echoes[index // per_prompt] if options.echoes else "",
                options.prompt_ids[index // per_prompt] if options.prompt_ids else None,
                options,
            )
            for index in range(len(prompts) * per_prompt)
        ]
        self._prompt_logprobs: list[list[dict[str, Any] | None]] = [[] for _ in prompts]

    def begin(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def prompt(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """Prompt tokens come before the echoed text's chunk, which carries their log-probabilities."""
        if self._options.echoes:
            self._choices[choice].prompt(tokens)
        if self._options.prompt_logprobs is not None and choice % self._per_prompt == 0:
            top = self._options.prompt_logprobs
            self._prompt_logprobs[choice // self._per_prompt] += [prompt_entry(token, top) for token in tokens]
        return []

    def take(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → stream chunks, perhaps none."""
        self._totals.streamed += len(tokens)
        return [self._chunks.choice(part) for part in self._choices[choice].take(tokens)]

    def finish(self, choice: int, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end of a generation → finish chunk and, after the last, the usage chunk."""
        chunks = [self._chunks.choice(part) for part in self._choices[choice].finish(finished)]
        done = self._totals.add(choice, finished)
        return chunks + self._chunks.last(self._totals.usage(reasoning=False)) if done else chunks

    def response(self) -> dict[str, Any]:
        """The whole answer, after the last `finish`."""
        choices = [choice.whole() for choice in self._choices]
        if self._options.prompt_logprobs is not None:
            for index, choice in enumerate(choices):
                choice["prompt_logprobs"] = self._prompt_logprobs[index // self._per_prompt]
        return self.head.object("text_completion", choices) | {"usage": self._totals.usage(reasoning=False)}


class _Choice:
    """One choice of a completion."""

    def __init__(self, index: int, echo: str, prompt_ids: Sequence[int] | None, options: CompletionOptions) -> None:
        self._index = index
        self._options = options
        self._stream_logprobs = CompletionLogprobs(options.logprobs or 0, by_id=options.names_by_id)
        self._all_logprobs = CompletionLogprobs(options.logprobs or 0, by_id=options.names_by_id)
        self._prompt_ids = prompt_ids
        self._ids: list[int] = []
        self._num_ids_sent: int | None = None
        self._utf8 = Utf8()
        self._unsent = echo
        self._text: list[str] = [echo]
        self._length = len(echo)
        self._prompt_length = 0
        self._prompt_utf8 = Utf8()
        self._finish_reason = ""

    def prompt(self, tokens: Sequence[pb.Token]) -> None:
        for token in tokens:
            self._log(token, self._prompt_length)
            self._prompt_length += len(self._prompt_utf8.feed(token.piece))

    def take(self, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        new = ""
        for token in tokens:
            self._ids.append(token.id)
            if token.piece:
                self._log(token, self._length + len(new))
            if token.id not in self._options.hidden:
                new += self._utf8.feed(token.piece)
        self._add(new)
        return [self._part(None)] if self._unsent else []

    def finish(self, finished: pb.Finished) -> list[dict[str, Any]]:
        self._finish_reason = "stop" if stopped_by_model(finished) else "length"
        self._add(self._utf8.flush())
        return [self._part(self._finish_reason)]

    def whole(self) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": self._all_logprobs.take() if self._options.logprobs is not None else None,
            "finish_reason": self._finish_reason,
        } | ({} if self._prompt_ids is None else {"prompt_token_ids": list(self._prompt_ids), "token_ids": self._ids})

    def _log(self, token: pb.Token, offset: int) -> None:
        if self._options.logprobs is not None:
            self._stream_logprobs.add(token, offset)
            self._all_logprobs.add(token, offset)

    def _add(self, text: str) -> None:
        self._text.append(text)
        self._unsent += text
        self._length += len(text)

    def _part(self, finish_reason: str | None) -> dict[str, Any]:
        text, self._unsent = self._unsent, ""
        logprobs = self._stream_logprobs.take() if self._options.logprobs is not None else None
        part: dict[str, Any] = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._prompt_ids is not None:
            if self._num_ids_sent is None:
                part["prompt_token_ids"] = list(self._prompt_ids)
            part["token_ids"] = self._ids[self._num_ids_sent or 0 :]
            self._num_ids_sent = len(self._ids)
        return part
