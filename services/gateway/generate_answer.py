"""SGLang's /generate: the text so far in every event, tokens and their log-probabilities by id."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import TakenOneByOne, stopped_by_model
from services.gateway.logprobs import finite, token_text
from services.gateway.tool_call import Utf8
from services.gateway.wire import OPENAI


@dataclass(frozen=True)
class GenerateOptions:
    """How the answer is written.

    Attributes:
        hidden: token ids whose text is not shown.
        logprobs: return_logprob.
        top: top_logprobs_num.
        first: logprob_start_len, -1 for none of the prompt.
        texts: return_text_in_logprobs.
    """

    hidden: frozenset[int] = frozenset()
    logprobs: bool = False
    top: int = 0
    first: int = -1
    texts: bool = False


class GenerateAnswer(TakenOneByOne):
    """/generate.

    Args:
        ids: of each choice.
        prompt_tokens: length of each choice's prompt.
        options: how each is written.
        version: of the weights, as /model_info names it.
        alone: one prompt and one choice: the answer is an object and not a list.
    """

    wire = OPENAI
    num_rejected_calls = 0
    unclosed_reasoning = False

    def __init__(
        self, ids: Sequence[str], prompt_tokens: Sequence[int], options: Sequence[GenerateOptions], version: str, *, alone: bool
    ) -> None:
        self._alone = alone
        self._choices = [_Choice(*each, version) for each in zip(ids, prompt_tokens, options, strict=True)]

    def begin(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def prompt(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """Prompt tokens with their log-probabilities."""
        self._choices[choice].prompt(tokens)
        return []

    def take(self, choice: int, tokens: Sequence[pb.Token]) -> list[dict[str, Any]]:
        """New tokens → one event with everything so far."""
        self._choices[choice].take(tokens)
        return [self._event(choice)]

    def finish(self, choice: int, finished: pb.Finished) -> list[dict[str, Any]]:
        """The end → the last event of the choice."""
        self._choices[choice].finish(finished)
        return [self._event(choice)]

    def response(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer."""
        found = [choice.body() for choice in self._choices]
        return found[0] if self._alone else found

    def _event(self, choice: int) -> dict[str, Any]:
        body = self._choices[choice].body()
        return body if self._alone else body | {"index": choice}


class _Choice:
    def __init__(self, own_id: str, prompt_tokens: int, options: GenerateOptions, version: str) -> None:
        self._options = options
        self._began = time.monotonic()
        self._utf8 = Utf8()
        self._text: list[str] = []
        self._ids: list[int] = []
        self._position = 0
        self._input: tuple[list[Any], list[Any]] = ([], [])
        self._output: tuple[list[Any], list[Any]] = ([], [])
        self._meta: dict[str, Any] = {
            "id": own_id,
            "finish_reason": None,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 0,
            "cached_tokens": 0,
            "weight_version": version,
        }

    def prompt(self, tokens: Sequence[pb.Token]) -> None:
        for token in tokens:
            if self._position >= self._options.first >= 0:
                self._log(self._input, token)
            self._position += 1

    def take(self, tokens: Sequence[pb.Token]) -> None:
        for token in tokens:
            if token.piece:
                self._ids.append(token.id)
            if self._options.logprobs:
                self._log(self._output, token)
            if token.id not in self._options.hidden:
                self._text.append(self._utf8.feed(token.piece))
        self._meta["completion_tokens"] += len(tokens)

    def finish(self, finished: pb.Finished) -> None:
        stopped = stopped_by_model(finished)
        self._text.append(self._utf8.flush())
        if stopped:
            matched = finished.stop_string or finished.stop_token_id or None
            self._meta["finish_reason"] = {"type": "stop", "matched": matched}
        else:
            self._meta["finish_reason"] = {"type": "length", "length": finished.completion_tokens}
        self._meta["prompt_tokens"] = finished.prompt_tokens
        self._meta["completion_tokens"] = finished.completion_tokens
        self._meta["cached_tokens"] = finished.cached_tokens

    def body(self) -> dict[str, Any]:
        meta = self._meta | {"e2e_latency": round(time.monotonic() - self._began, 6)}
        if self._options.logprobs:
            meta |= {"input_token_logprobs": list(self._input[0]), "output_token_logprobs": list(self._output[0])}
            if self._options.top:
                meta |= {"input_top_logprobs": list(self._input[1]), "output_top_logprobs": list(self._output[1])}
        return {"text": "".join(self._text), "output_ids": list(self._ids), "meta_info": meta}

    def _log(self, target: tuple[list[Any], list[Any]], token: pb.Token) -> None:
        known = token.HasField("logprob")
        target[0].append(self._entry(finite(token.logprob) if known else None, token.id, token.piece))
        target[1].append([self._entry(finite(top.logprob), top.token_id, top.piece) for top in token.top] if known else None)

    def _entry(self, logprob: float | None, token_id: int, piece: bytes) -> list[Any]:
        return [logprob, token_id, token_text(piece) if self._options.texts else None]
