"""Between protobuf messages and the engine's own types. Every field of a request is checked here, and the error names it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.grammar import GrammarSource
from services.gpu_worker.request import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    OutToken,
    PrefillProgress,
    Priority,
    PromptScores,
    RequestSpec,
    SamplingParams,
    ThinkingBudget,
    Tokens,
)

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 512
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 100
MAX_ID_CHARS = 256
MAX_GRAMMAR_BYTES = 512 * 1024
MAX_BAD_WORDS = 4096
MAX_BAD_WORD_TOKENS = 1024
MAX_QUEUE_TIMEOUT_MS = 24 * 3600 * 1000

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.GRAMMAR_END: pb.FINISH_REASON_GRAMMAR_END,
}


@dataclass(frozen=True)
class RequestLimits:
    """What requests are checked against."""

    vocab_size: int
    max_context: int
    default_temperature: float
    default_top_p: float
    default_top_k: int
    default_queue_timeout_s: float


def spec_of(request: pb.GenerateRequest, limits: RequestLimits) -> RequestSpec:
    """A checked request.

    Raises:
        InvalidRequest: names the field.
        ContextLengthExceeded: prompt and max_tokens do not fit the context.
    """
    _check_id("request_id", request.request_id)
    if len(request.key_id) > MAX_ID_CHARS:
        raise InvalidRequest(f"key_id has {len(request.key_id)} characters, at most {MAX_ID_CHARS}", param="key_id")
    if request.queue_timeout_ms > MAX_QUEUE_TIMEOUT_MS:
        raise InvalidRequest(f"queue_timeout_ms is {request.queue_timeout_ms}, at most {MAX_QUEUE_TIMEOUT_MS}", param="queue_timeout_ms")
    prompt = _prompt(request.prompt_token_ids, limits)
    sampling = _sampling(request.sampling, limits)
    if request.prompt_top > MAX_LOGPROBS:
        raise InvalidRequest(f"prompt_top is {request.prompt_top}, at most {MAX_LOGPROBS}", param="prompt_top")
    _check_forced(request, sampling)
    if len(prompt) + sampling.max_tokens > limits.max_context:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}: together more than the context of"
            f" {limits.max_context} tokens. Shorten the prompt or lower max_tokens.",
            param="max_tokens" if len(prompt) < limits.max_context else "prompt_token_ids",
        )
    return RequestSpec(
        request.request_id,
        prompt,
        sampling,
        key_id=request.key_id,
        priority=_priority(request.priority),
        queue_timeout_s=request.queue_timeout_ms / 1000 or limits.default_queue_timeout_s,
        prompt_scores=PromptScores(1, max(0, sampling.logprobs, request.prompt_top)) if request.prompt_logprobs else None,
        thinking_budget=_budget(request.thinking_budget, limits) if request.HasField("thinking_budget") else None,
    )


def score_spec_of(request: pb.ScoreRequest, limits: RequestLimits) -> RequestSpec:
    """A Score request as a generation of no tokens. Raises as `spec_of` does."""
    _check_id("request_id", request.request_id)
    prompt = _prompt(request.token_ids, limits, "token_ids")
    if len(prompt) > limits.max_context:
        raise ContextLengthExceeded(
            f"token_ids has {len(prompt)} tokens, the context is {limits.max_context}: score a shorter text", param="token_ids"
        )
    if not 1 <= request.first_scored < len(prompt):
        raise InvalidRequest(f"first_scored is {request.first_scored}, need 1..{len(prompt) - 1}", param="first_scored")
    if request.top > MAX_LOGPROBS:
        raise InvalidRequest(f"top is {request.top}, at most {MAX_LOGPROBS}", param="top")
    return RequestSpec(
        request.request_id,
        prompt,
        SamplingParams(max_tokens=0),
        queue_timeout_s=limits.default_queue_timeout_s,
        prompt_scores=PromptScores(request.first_scored, request.top),
    )


def grammar_of(request: pb.GenerateRequest, limits: RequestLimits) -> GrammarSource | None:
    """The grammar that a request brings, not compiled yet; None when it brings none.

    Raises:
        InvalidRequest: names the field.
    """
    if not request.HasField("grammar"):
        return None
    message = request.grammar
    kind = message.WhichOneof("kind")
    if kind is None or (kind == "any_json_object" and not message.any_json_object):
        raise InvalidRequest("grammar has no kind: need json_schema, regex, lark or any_json_object", param="grammar")
    text = "" if kind == "any_json_object" else str(getattr(message, kind))
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the grammar has {len(text.encode())} bytes, at most {MAX_GRAMMAR_BYTES}", param="grammar")
    _check_tokens("grammar.after_token_id", [message.after_token_id], limits)
    _check_tokens("grammar.not_before_token_ids", message.not_before_token_ids, limits)
    if request.HasField("thinking_budget") and request.thinking_budget.end_token_id != message.after_token_id:
        raise InvalidRequest(
            "thinking_budget forces tokens while the grammar constrains them: grammar.after_token_id must be its end_token_id",
            param="thinking_budget.end_token_id",
        )
    return GrammarSource(kind, text, message.after_token_id or None, frozenset(message.not_before_token_ids))


def _check_id(name: str, value: str) -> None:
    if not 1 <= len(value) <= MAX_ID_CHARS:
        raise InvalidRequest(f"{name} has {len(value)} characters, need 1..{MAX_ID_CHARS}", param=name)


def _prompt(ids: Sequence[int], limits: RequestLimits, name: str = "prompt_token_ids") -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest(f"{name} is empty: at least one token is needed", param=name)
    _check_tokens(name, ids, limits)
    return tuple(ids)


def _check_tokens(name: str, ids: Iterable[int], limits: RequestLimits) -> None:
    for i, token_id in enumerate(ids):
        if token_id >= limits.vocab_size:
            raise InvalidRequest(f"{name}[{i}] is {token_id}, the vocabulary has {limits.vocab_size} tokens", param=f"{name}[{i}]")


def _priority(value: int) -> Priority:
    if value == pb.PRIORITY_UNSPECIFIED:
        return Priority.NORMAL
    try:
        return Priority(value)
    except ValueError:
        raise InvalidRequest(f"priority is {value}, need 1 (high), 2 (normal) or 3 (batch)", param="priority") from None


def _number(message: pb.SamplingParams, name: str, default: float, low: float, high: float, *, open_low: bool = False) -> float:
    """An optional number within its range; `open_low` leaves `low` itself out."""
    if not message.HasField(name):
        return default
    value = float(getattr(message, name))
    if not (math.isfinite(value) and low <= value <= high) or (open_low and value == low):
        bounds = f"{'above' if open_low else 'from'} {low:g} to {high:g}"
        raise InvalidRequest(f"{name} is {value:g}, need a number {bounds}", param=name)
    return value


def _sampling(message: pb.SamplingParams, limits: RequestLimits) -> SamplingParams:
    top_k = message.top_k if message.HasField("top_k") else limits.default_top_k
    if top_k < -1:
        raise InvalidRequest(f"top_k is {top_k}, need a positive number, or 0 or -1 for off", param="top_k")
    if not 1 <= message.max_tokens <= limits.max_context:
        if message.max_tokens > limits.max_context:
            raise ContextLengthExceeded(
                f"max_tokens is {message.max_tokens}, the context is {limits.max_context} tokens: lower it", param="max_tokens"
            )
        raise InvalidRequest("max_tokens is 0, need at least 1", param="max_tokens")
    if message.min_tokens > message.max_tokens:
        raise InvalidRequest(f"min_tokens is {message.min_tokens}, more than max_tokens {message.max_tokens}", param="min_tokens")
    if not -1 <= message.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs is {message.logprobs}, need -1 (none) to {MAX_LOGPROBS}", param="logprobs")
    if len(message.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids has {len(message.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids")
    _check_tokens("stop_token_ids", message.stop_token_ids, limits)
    return SamplingParams(
        temperature=_number(message, "temperature", limits.default_temperature, 0, 100),
        top_p=_number(message, "top_p", limits.default_top_p, 0, 1, open_low=True),
        top_k=max(0, top_k),
        min_p=_number(message, "min_p", 0.0, 0, 1),
        repetition_penalty=_number(message, "repetition_penalty", 1.0, 0, 10, open_low=True),
        presence_penalty=_number(message, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, -2, 2),
        logit_bias=_logit_bias(message, limits),
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop=_stop_strings(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_str_in_output=message.include_stop_str_in_output,
        show_special_tokens=message.show_special_tokens,
        logprobs=message.logprobs,
        allowed_token_ids=_allowed(message, limits),
        bad_words=_bad_words(message, limits),
    )


def _allowed(message: pb.SamplingParams, limits: RequestLimits) -> tuple[int, ...]:
    _check_tokens("allowed_token_ids", message.allowed_token_ids, limits)
    return tuple(sorted(set(message.allowed_token_ids)))


def _bad_words(message: pb.SamplingParams, limits: RequestLimits) -> tuple[tuple[int, ...], ...]:
    if len(message.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words has {len(message.bad_words)} sequences, at most {MAX_BAD_WORDS}", param="bad_words")
    for i, word in enumerate(message.bad_words):
        if not 1 <= len(word.token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(f"bad_words[{i}] has {len(word.token_ids)} tokens, need 1..{MAX_BAD_WORD_TOKENS}", param=f"bad_words[{i}]")
        _check_tokens(f"bad_words[{i}]", word.token_ids, limits)
    return tuple({tuple(word.token_ids): None for word in message.bad_words})


def _check_forced(request: pb.GenerateRequest, sampling: SamplingParams) -> None:
    """What ends the reasoning comes whatever is likely: a request that forbids it contradicts itself."""
    forced = list(request.thinking_budget.forced_token_ids) if request.HasField("thinking_budget") else []
    forced += [request.grammar.after_token_id] if request.HasField("grammar") and request.grammar.after_token_id else []
    for token_id in forced:
        if sampling.allowed_token_ids and token_id not in sampling.allowed_token_ids:
            raise InvalidRequest(
                f"allowed_token_ids lacks {token_id}, the token that ends the reasoning: add it, or switch the reasoning off",
                param="allowed_token_ids",
            )
        if any(token_id in word for word in sampling.bad_words):
            raise InvalidRequest(
                f"bad_words has {token_id}, the token that ends the reasoning: leave it out, or switch the reasoning off",
                param="bad_words",
            )


def _logit_bias(message: pb.SamplingParams, limits: RequestLimits) -> tuple[tuple[int, float], ...]:
    if len(message.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(message.logit_bias)} entries, at most {MAX_LOGIT_BIAS}", param="logit_bias")
    for token_id, bias in message.logit_bias.items():
        if token_id >= limits.vocab_size:
            raise InvalidRequest(f"logit_bias names token {token_id}, the vocabulary has {limits.vocab_size}", param="logit_bias")
        if not (math.isfinite(bias) and -100 <= bias <= 100):
            raise InvalidRequest(f"logit_bias of token {token_id} is {bias:g}, need a number from -100 to 100", param="logit_bias")
    return tuple(sorted(message.logit_bias.items()))


def _stop_strings(stops: Sequence[str]) -> tuple[bytes, ...]:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS}", param="stop")
    encoded = tuple(stop.encode() for stop in stops)
    for i, stop in enumerate(encoded):
        if not 1 <= len(stop) <= MAX_STOP_BYTES:
            raise InvalidRequest(f"stop[{i}] has {len(stop)} bytes, need 1..{MAX_STOP_BYTES}", param=f"stop[{i}]")
    return encoded


def _budget(message: pb.ThinkingBudget, limits: RequestLimits) -> ThinkingBudget:
    if not message.forced_token_ids:
        raise InvalidRequest(
            "thinking_budget.forced_token_ids is empty: nothing would end the thinking", param="thinking_budget.forced_token_ids"
        )
    _check_tokens("thinking_budget.forced_token_ids", message.forced_token_ids, limits)
    _check_tokens("thinking_budget.end_token_id", [message.end_token_id], limits)
    return ThinkingBudget(message.budget, message.end_token_id, tuple(message.forced_token_ids))


def token_pb(token: OutToken, tokens: TokenTable) -> pb.Token:
    """A token as it goes over the wire."""
    out = pb.Token(id=token.token_id, piece=token.piece, special=token.special, rank=token.rank)
    if token.logprob is not None:
        out.logprob = token.logprob
    for entry in token.top:
        out.top.add(token_id=entry.token_id, logprob=entry.logprob, piece=tokens.pieces[entry.token_id])
    return out


def event_pb(event: Event, tokens: TokenTable) -> pb.GenerateEvent:
    """An event as it goes over the wire. `Failed` has no message: it becomes a status."""
    if isinstance(event, Tokens):
        return pb.GenerateEvent(tokens=pb.Tokens(tokens=[token_pb(t, tokens) for t in event.tokens]))
    if isinstance(event, PrefillProgress):
        prompt = [token_pb(t, tokens) for t in event.prompt_tokens]
        return pb.GenerateEvent(
            prefill=pb.PrefillProgress(done_tokens=event.done_tokens, total_tokens=event.total_tokens, prompt_tokens=prompt)
        )
    if isinstance(event, Admitted):
        return pb.GenerateEvent(admitted=pb.Admitted(queue_wait_ms=int(event.queue_wait_s * 1000), cached_tokens=event.cached_tokens))
    if isinstance(event, Finished):
        return pb.GenerateEvent(
            finished=pb.Finished(
                reason=_REASONS[event.reason],
                stop_string=event.stop_string.decode(errors="replace"),
                stop_token_id=event.stop_token_id or 0,
                prompt_tokens=event.prompt_tokens,
                completion_tokens=event.completion_tokens,
                cached_tokens=event.cached_tokens,
                queue_s=event.queue_s,
                prefill_s=event.prefill_s,
                decode_s=event.decode_s,
            )
        )
    raise TypeError(f"{type(event).__name__} has no protobuf event")


def merged(events: Sequence[Event]) -> list[Event]:
    """The same events with neighbouring `Tokens` put together: a reader that fell behind catches up in one message."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, Tokens) and out and isinstance(out[-1], Tokens):
            out[-1] = Tokens(out[-1].tokens + event.tokens)
        else:
            out.append(event)
    return out
