"""The worker's tokens → an API's objects. One class per endpoint; each serves streaming and plain requests alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.errors import Cancelled, EngineFailed
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.wire import Wire


def weight_version(info: pb.InfoResponse) -> str:
    """The checkpoint in a few characters: the same in every answer that names it."""
    return info.checkpoint_hash[:12]


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
        return cls(f"{prefix}-{request_id}", info.model_name, f"fp_{weight_version(info)}")

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
    """What turns the generations of one request into an HTTP answer. `choice` is the generation's position in the request.

    Attributes:
        wire: how its chunks are written.
    """

    wire: Wire

    @property
    def num_rejected_calls(self) -> int:
        """Calls of tools that were not declared, passed on as text."""

    @property
    def unclosed_reasoning(self) -> bool:
        """True when a choice stopped inside its reasoning and has no content of its own."""

    def begin(self) -> list[dict[str, Any]]:
        """Chunks that go out before the first token."""

    def prompt(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """Tokens of the prompt with their log-probabilities, for answers that show them."""

    def take(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → stream chunks, perhaps none."""

    def quick(self, choice: int, tokens: Sequence[pb.Token]) -> tuple[bytes, int]:
        """What `take` and `wire` make of the first tokens, where that costs less, and of how many; nothing of none elsewhere."""

    def finish(self, choice: int, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end of a generation → its last chunks; the last generation brings the answer's last chunks too."""

    def response(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer, after the last `finish`."""


class TakenOneByOne:
    """An answer without a quicker way."""

    def quick(self, choice: int, tokens: Sequence[pb.Token]) -> tuple[bytes, int]:
        """Nothing."""
        del choice, tokens
        return b"", 0


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


class Totals:
    """Token counts of all generations of one request.

    Args:
        prompts: length of each prompt.
        per_prompt: generations of each prompt; they follow each other.
    """

    def __init__(self, prompts: Sequence[int], per_prompt: int = 1) -> None:
        self._per_prompt = per_prompt
        self._prompt_tokens = list(prompts)
        self._cached = [0] * len(prompts)
        self._left = len(prompts) * per_prompt
        self.streamed = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(self._prompt_tokens)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that needed no computing."""
        return sum(self._cached)

    def add(self, choice: int, finished: pb.Finished, reasoning_tokens: int = 0) -> bool:
        """Counts an ended generation; True when it was the last."""
        prompt = choice // self._per_prompt
        self._prompt_tokens[prompt] = finished.prompt_tokens
        self._cached[prompt] = max(self._cached[prompt], finished.cached_tokens)
        self.completion_tokens += finished.completion_tokens
        self.reasoning_tokens += reasoning_tokens
        self._left -= 1
        return self._left == 0

    def usage(self, *, reasoning: bool) -> dict[str, Any]:
        """OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class Chunks:
    """Stream chunks of one answer, with usage where the client wants it."""

    def __init__(self, head: Head, kind: str, usage: UsageOptions, totals: Totals) -> None:
        self._head = head
        self._kind = kind
        self._usage = usage
        self._totals = totals

    def choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk with one choice."""
        chunk = self._head.object(self._kind, [choice])
        if self._usage.in_every_chunk:
            prompt, streamed = self._totals.prompt_tokens, self._totals.streamed
            chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": streamed, "total_tokens": prompt + streamed}
        elif self._usage.at_end:
            chunk["usage"] = None
        return chunk

    def last(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The usage chunk, if the client asked for it."""
        return [self._head.object(self._kind, []) | {"usage": usage}] if self._usage.at_end else []
