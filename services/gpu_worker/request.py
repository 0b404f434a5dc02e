"""A request's life in the worker: what was asked, which state it is in, and the events that it sends.

    WAITING -> PREFILL -> DECODE -> FINISHED | CANCELLED | FAILED

Where memory for contexts is short a running request is put back to WAITING, and computes what it had once more when its turn comes.
`Request.advance` is the only place that changes the state. Every request sends exactly one terminal event (`Finished` or `Failed`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from services.common.errors import Glm53Error
from services.gpu_worker.backends.base import Stream
from services.gpu_worker.grammar import Grammar


class RequestState(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


ALLOWED: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.PREFILL: frozenset(
        {RequestState.WAITING, RequestState.DECODE, RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED}
    ),
    RequestState.DECODE: frozenset({RequestState.WAITING, RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}
TERMINAL = frozenset(state for state, following in ALLOWED.items() if not following)


class Priority(enum.IntEnum):
    """Bands of the queue; smaller goes first. Values equal the proto's."""

    HIGH = 1
    NORMAL = 2
    BATCH = 3


class FinishReason(enum.IntEnum):
    """Why a generation ended. Values equal the proto's."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    GRAMMAR_END = 4


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Ranges are checked where requests enter the worker (convert.py)."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[bytes, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    show_special_tokens: bool = False  # stop strings are looked for in the text of control tokens too
    logprobs: int = -1  # -1 none, 0 the chosen token's, n the n most likely too
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of each


@dataclass(frozen=True)
class ThinkingBudget:
    """After `budget` tokens without `end_token_id`, `forced_token_ids` are produced."""

    budget: int
    end_token_id: int
    forced_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the prompt's own tokens, from position `first` (>= 1) on, with the `top` most likely beside each."""

    first: int
    top: int


@dataclass(frozen=True)
class RankedToken:
    """A token and its log-probability under the model, before any sampling step."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class OutToken:
    """A token on its way out. `piece` holds its bytes as far as they belong to the output; `rank` is 0 but for scored prompt tokens."""

    token_id: int
    piece: bytes
    special: bool = False
    logprob: float | None = None
    top: tuple[RankedToken, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class Admitted:
    """The request left the queue."""

    queue_wait_s: float
    cached_tokens: int


@dataclass(frozen=True)
class PrefillProgress:
    """Part of the prompt is computed. `prompt_tokens` only when prompt scores were asked for."""

    done_tokens: int
    total_tokens: int
    prompt_tokens: tuple[OutToken, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """New tokens."""

    tokens: tuple[OutToken, ...]


@dataclass(frozen=True)
class Finished:
    """The terminal event of a request that ran or was cancelled. Times in seconds."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    stop_string: bytes = b""
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Failed:
    """The terminal event of a request that could not be served."""

    error: Glm53Error


Event = Admitted | PrefillProgress | Tokens | Finished | Failed


class EventSink(Protocol):
    """Where a request's events go: services.gpu_worker.mailbox.Mailbox, or a list in tests."""

    @property
    def full(self) -> bool:
        """True while the reader must catch up before more tokens are computed."""
        ...

    def put(self, event: Event) -> None:
        """Takes one event; never blocks."""
        ...

    def stalled_s(self, now: float) -> float:
        """For how long the oldest event that nobody took has been waiting, in seconds; 0 when nothing waits."""
        ...


@dataclass(frozen=True)
class RequestSpec:
    """What a client asked for, checked."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    key_id: str = ""
    priority: Priority = Priority.NORMAL
    queue_timeout_s: float = 60.0
    prompt_scores: PromptScores | None = None
    thinking_budget: ThinkingBudget | None = None
    grammar: Grammar | None = None
    traceparent: str = ""  # of the call that brought it


@dataclass
class Times:
    """Moments of a request's life on the engine's monotonic clock, in seconds."""

    submitted: float = 0.0
    admitted: float | None = None
    prefilled: float | None = None
    finished: float | None = None


@dataclass
class Request:
    """A request as the engine keeps it."""

    spec: RequestSpec
    sink: EventSink
    times: Times = field(default_factory=Times)
    state: RequestState = RequestState.WAITING
    stream: Stream | None = None
    turn: int = 0  # counts admissions: the larger, the younger
    feed: tuple[int, ...] = ()  # what the stream is filled with before it decodes: the prompt, and after a put-back what had been produced
    num_prefilled: int = 0  # of `feed`
    num_lost: int = 0  # tokens of `feed` that had been computed when the request was put back
    num_generated: int = 0
    num_cached: int = 0  # prompt tokens whose state was kept from an earlier request, when the request was first admitted
    next_token: int | None = None  # sampled, not yet in the stream's state
    output_ids: list[int] = field(default_factory=list)  # every sampled token
    finish_reason: FinishReason | None = None  # once the request ended with `Finished`
    cancelled: bool = False  # asked for from another thread; the engine acts on it between steps

    def advance(self, new: RequestState) -> None:
        """Moves to another state.

        Raises:
            RuntimeError: the transition is not in ALLOWED: a bug in the engine.
        """
        if new not in ALLOWED[self.state]:
            raise RuntimeError(f"request {self.spec.request_id}: illegal transition {self.state.name} -> {new.name}")
        self.state = new

    @property
    def done(self) -> bool:
        """True after the terminal event."""
        return self.state in TERMINAL

    def finished_event(self, reason: FinishReason, now: float, *, stop_string: bytes = b"", stop_token_id: int | None = None) -> Finished:
        """The terminal event with this request's counts and times."""
        self.finish_reason = reason
        times = self.times
        admitted = now if times.admitted is None else times.admitted
        prefilled = now if times.prefilled is None else times.prefilled
        return Finished(
            reason,
            prompt_tokens=len(self.spec.prompt),
            completion_tokens=self.num_generated,
            cached_tokens=self.num_cached,
            queue_s=admitted - times.submitted,
            prefill_s=prefilled - admitted,
            decode_s=now - prefilled,
            stop_string=stop_string,
            stop_token_id=stop_token_id,
        )
