"""The engine: receive, schedule, forward, emit. Start reading at `EngineLoop.step`.

One thread runs the loop and is the only one that touches the backend and the requests that it was given. Other threads hand in requests and
cancellations under a lock and read counters. With nothing to do the loop sleeps on a condition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from services.common.errors import DeadlineExceeded, EngineFailed, Glm53Error, InvalidRequest, NotReady, QueueTimeout
from services.common.trace_context import trace_id_of
from services.gpu_worker.backends.base import Backend, BackendLostError, BreaksOff, Logits, PassBrokenOff
from services.gpu_worker.contexts import Contexts, stream_of
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.generation import Generation
from services.gpu_worker.metrics import EngineMetrics
from services.gpu_worker.prefill import next_pass, run_pass
from services.gpu_worker.queue import FairQueue
from services.gpu_worker.request import Admitted, Failed, FinishReason, PrefillProgress, Request, RequestState

log = logging.getLogger(__name__)
R = TypeVar("R")

# After so many failed passes in a row the backend counts as lost: a restart helps more than failing every request.
MAX_FAILURES_IN_A_ROW = 3
IDLE_WAIT_S = 1.0
# How often a busy loop looks for readers that stopped reading, and shows its state to scrapers.
HOUSEKEEPING_S = 0.05


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of the engine."""

    max_queued: int = 64
    chunk_size: int = 256  # prompt tokens of one pass
    busy_chunk_size: int = 64  # the same while others decode, so that their tokens keep coming
    slow_reader_s: float = 30.0
    ageing_s: float = 10.0
    prefix_cache_bytes: int = 64 << 20
    max_rq_tokens: int = 4096  # tokens of an answer that memory is reserved for at admission


class EngineLoop:
    """Serves requests with a backend.

    Args:
        backend: computes logits.
        tokens: bytes of every token.
        eos_token_ids: the model's end tokens.
        limits: bounds.
        metrics: counters that the loop keeps.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        backend: Backend,
        tokens: TokenTable,
        eos_token_ids: frozenset[int],
        limits: EngineLimits,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self._tokens = tokens
        self._eos = eos_token_ids
        self._limits = limits
        self.metrics = metrics
        self._clock = clock
        self._lock = threading.Condition()
        self._queue = FairQueue(limits.max_queued, limits.ageing_s)
        self._live: dict[str, Request] = {}
        self._generations: dict[str, Generation] = {}
        self._prefilling: deque[Request] = deque()
        self._decoding: list[Request] = []
        # Requests that gave their memory up, oldest first. They are older than all in the queue, so nobody is admitted before them.
        self._put_back: deque[Request] = deque()
        self._num_admitted = 0
        self._contexts = Contexts(backend, limits.prefix_cache_bytes, limits.max_rq_tokens)
        self._failures_in_a_row = 0
        self._in_pass: list[Request] = []
        if isinstance(backend, BreaksOff):
            backend.break_off_when(self._is_pass_unwanted)
        self._num_cancelled = 0  # live requests that were cancelled and not yet ended
        self._tidied_at = 0.0
        self._stopping = False
        self._draining = False
        self.steps = 0
        self.fatal: BaseException | None = None

    # ---- any thread ------------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
            QueueFull: carries a wait estimate.
            NotReady: the engine drains, stopped or is lost.
            InvalidRequest: a live request has the same id.
        """
        with self._lock:
            if self.fatal is not None or self._stopping or self._draining:
                raise NotReady("the worker is shutting down" if self.fatal is None else "the worker failed and restarts", retry_after_s=5.0)
            if request.spec.request_id in self._live:
                raise InvalidRequest(f"a request with id {request.spec.request_id!r} is running", param="request_id")
            request.times.submitted = self._clock()
            self._queue.put(request, self.metrics.tokens_per_s, self._running_tokens())
            self._live[request.spec.request_id] = request
            self.metrics.requests_received.inc()
            self._lock.notify()

    def cancel(self, request_id: str) -> bool:
        """Cancels a request; it leaves the engine before the next pass, where the backend can do so in the middle of its own prefill.

        False when no such request lives.
        """
        with self._lock:
            request = self._live.get(request_id)
            if request is None:
                return False
            self._num_cancelled += not request.cancelled
            request.cancelled = True
            self._lock.notify()
            return True

    def wake(self) -> None:
        """Makes the loop look again: a reader caught up."""
        with self._lock:
            self._lock.notify()

    def drain(self) -> None:
        """From now on new requests are refused with NotReady; live ones go on."""
        with self._lock:
            self._draining = True

    def stop(self) -> None:
        """Ends the loop after the current pass, or in the middle of a prefill as `cancel` does; what still lives fails with NotReady."""
        with self._lock:
            self._stopping = True
            self._lock.notify()

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    @property
    def num_queued(self) -> int:
        """Requests that wait: in the queue, or put back while they ran."""
        return len(self._queue) + len(self._put_back)

    @property
    def num_running(self) -> int:
        """Requests in prefill or decode."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def has_work(self) -> bool:
        """True while a pass is due: a watchdog expects progress then."""
        return any(not r.sink.full for r in [*self._prefilling, *self._decoding]) or (self.num_running == 0 and self.num_queued > 0)

    @property
    def progress(self) -> int:
        """Grows while the engine gets on with its work."""
        return self.steps + self.backend.progress

    # ---- the engine's thread ---------------------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Runs until `stop`, or until the backend is lost: then `fatal` is set and every request has failed."""
        try:
            while not self._stopping:
                if not self.step():
                    self._wait_for_work()
        except Exception as error:
            log.exception("the engine cannot go on")
            self.fatal = error
        finally:
            with self._lock:
                self._stopping = True
            self._fail_all()

    def step(self) -> bool:
        """Receive, schedule, forward, emit. False when there was nothing to do."""
        self.steps += 1
        tidy = self._clock() - self._tidied_at >= HOUSEKEEPING_S
        self._receive()
        if tidy:
            self._end_stalled()
        self._admit()
        worked = self._prefill_one_chunk()
        worked = self._decode_all() or worked
        self.metrics.end_step()
        if not worked and not self._live:
            self.backend.check_idle()
        if tidy or not worked:
            self._update_gauges()
        return worked

    def _wait_for_work(self) -> None:
        with self._lock:
            if not self._stopping and not self._num_cancelled and not self.has_work:
                self._lock.wait(IDLE_WAIT_S)

    def _receive(self) -> None:
        """Acts on cancellations, and on requests that waited too long."""
        if not self._num_cancelled and not self._queue:
            return
        now = self._clock()
        with self._lock:
            cancelled = [request for request in self._live.values() if request.cancelled]
            self._num_cancelled = 0
            for request in cancelled:
                self._queue.remove(request)
            expired = self._queue.expired(now)
            wait_s = self._queue.wait_s(self.metrics.tokens_per_s, self._running_tokens()) if expired else 0.0
        for request in cancelled:
            self._end(request, RequestState.CANCELLED)
        for request in expired:
            self.metrics.queue_wait.observe(now - request.times.submitted)
            waited = f"waited {now - request.times.submitted:.1f} s in the queue, longer than its {request.spec.queue_timeout_s:g} s"
            self._fail(request, QueueTimeout(f"the request {waited}: try again later", retry_after_s=wait_s))

    def _end_stalled(self) -> None:
        """Ends requests whose readers stopped reading."""
        now = self._tidied_at = self._clock()
        with self._lock:
            stalled = [r for r in self._live.values() if r.sink.stalled_s(now) > self._limits.slow_reader_s and not r.cancelled]
        for request in stalled:
            self.metrics.slow_readers.inc()
            self._fail(request, DeadlineExceeded(f"the reader took no event for {self._limits.slow_reader_s:g} s"))

    def _admit(self) -> None:
        """Opens streams while there is room: for those that were put back, then for those in the queue."""
        while self.num_queued and self.backend.streams_free > 0:
            now = self._clock()
            request = self._next(now)
            if request is None:
                return
            request.advance(RequestState.PREFILL)
            self._contexts.open(request)
            self._prefilling.append(request)
            if request.times.admitted is None:
                self._note_admitted(request, now)
            if not self._contexts.extend(stream_of(request), self._contexts.reserve(request)):
                # It was let in although it does not fit because nothing else runs: waiting would never end.
                self._fail(request, EngineFailed("the context memory is too small for this request although nothing else uses it"))

    def _next(self, now: float) -> Request | None:
        """Whose turn it is, or None while that one does not fit: it waits for the running ones, and nobody overtakes it."""
        if self._put_back:
            return self._put_back.popleft() if self._fits(self._put_back[0]) else None
        with self._lock:
            return self._queue.pop(now, self._fits)

    def _fits(self, request: Request) -> bool:
        return self.num_running == 0 or self.backend.fits(self._contexts.reserve(request))

    def _note_admitted(self, request: Request, now: float) -> None:
        """The request is in for the first time."""
        request.times.admitted = now
        self._num_admitted += 1
        request.turn = self._num_admitted
        request.num_cached = request.num_prefilled
        self.metrics.cached_tokens.inc(request.num_cached)
        self._generations[request.spec.request_id] = Generation(request, self._eos, self._tokens)
        self.metrics.queue_wait.observe(now - request.times.submitted)
        request.sink.put(Admitted(now - request.times.submitted, request.num_cached))

    def _prefill_one_chunk(self) -> bool:
        """One chunk of the prompt whose turn it is; prompts take turns, so that a short one does not wait for a long one."""
        request = next((r for r in self._prefilling if not r.sink.full), None)
        if request is None:
            return False
        self._prefilling.remove(request)
        size = self._limits.busy_chunk_size if self._decoding else self._limits.chunk_size
        generation = self._generations[request.spec.request_id]
        scores = generation.wants_prompt_scores and request.times.prefilled is None
        part = next_pass(request, size, self._contexts, self.backend.info, scores=scores)
        done = self._forward([request], lambda: run_pass(self.backend, request, part))
        if done is None:
            return True
        logits, between = done
        self._contexts.keep_snapshot(request, request.feed[: part.end], between)
        request.num_prefilled = part.until
        self.metrics.note_prefill(request, part.until - part.start)
        if request.times.prefilled is None and not self._tell_prefilled(request, part.start, logits):
            return True
        if request.num_prefilled < len(request.feed):
            if request.num_prefilled == part.kept:
                self._contexts.keep(request, request.feed[: part.kept])
            self._prefilling.append(request)
            return True
        self._end_prefill(request, logits[-1])
        return True

    def _tell_prefilled(self, request: Request, start: int, logits: Logits) -> bool:
        """Says how far the prompt is, with its scores; False when these cannot be told and the request has failed."""
        end = request.num_prefilled
        try:
            scored = self._generations[request.spec.request_id].score_prompt(start, request.feed[start:end], logits)
        except EngineFailed as error:
            log.error("%s", error.message, extra={"request_id": request.spec.request_id})
            self._fail(request, error)
            return False
        if end > request.num_lost:
            request.sink.put(PrefillProgress(end, len(request.feed), scored))
        return True

    def _end_prefill(self, request: Request, row: Logits) -> None:
        """The stream is filled: the first token is sampled, or a request that was put back goes on with its newest one."""
        if request.times.prefilled is None:
            request.times.prefilled = self._clock()
        if request.spec.sampling.max_tokens == 0:
            self._end(request, RequestState.FINISHED, reason=FinishReason.LENGTH)
            return
        request.advance(RequestState.DECODE)
        self._decoding.append(request)
        if request.next_token is None:
            self._emit(request, row)

    def _decode_all(self) -> bool:
        """One token for every stream whose reader keeps up."""
        batch = self._with_memory([request for request in self._decoding if not request.sink.full])
        if not batch:
            return False
        tokens = [_next_token(request) for request in batch]
        logits = self._forward(batch, lambda: self.backend.decode([stream_of(r) for r in batch], tokens))
        if logits is None:
            return True
        for i, request in enumerate(batch):
            self._emit(request, logits[i])
        self.metrics.decode_steps.inc()
        return True

    def _with_memory(self, batch: list[Request]) -> list[Request]:
        """Those of the batch that have memory for one more token: where it is short the youngest running ones give theirs up.

        The oldest one therefore always gets on, and with it, sooner or later, everybody.
        """
        for request in sorted(batch, key=lambda r: r.turn):
            while request.stream is not None and not self._contexts.extend(request.stream, request.stream.length + 1):
                self._give_up_memory(max([*self._prefilling, *self._decoding], key=lambda r: r.turn))
        return [request for request in batch if request.stream is not None]

    def _give_up_memory(self, request: Request) -> None:
        """Puts a running request back to wait for memory; its tokens, and the state of its sampling, stay as they are."""
        stream = stream_of(request)
        request.advance(RequestState.WAITING)
        request.num_lost = max(request.num_lost, stream.length)
        request.num_prefilled = 0
        self._take_out(request)
        self._put_back.appendleft(request)
        self.metrics.note_put_back()
        log.info("request put back: the context memory is full", extra={"request_id": request.spec.request_id, "tokens": request.num_lost})

    def _take_out(self, request: Request) -> None:
        """Takes a request out of every list and gives its stream back."""
        for line in (self._prefilling, self._decoding, self._put_back):
            if request in line:
                line.remove(request)
        if request.stream is not None:
            self.backend.close_stream(request.stream)
            request.stream = None

    def _forward(self, requests: list[Request], call: Callable[[], R]) -> R | None:
        """Runs a pass. A pass that fails takes only its own requests with it, unless the backend is lost."""
        self._in_pass = requests
        try:
            result = call()
        except BackendLostError:
            raise
        except PassBrokenOff:
            for request in requests:
                if request.cancelled:
                    self._end(request, RequestState.CANCELLED)
                else:
                    self._fail(request, _interrupted("the worker shut down"))
            return None
        except Exception as error:
            self._failures_in_a_row += 1
            log.exception("a pass over %d requests failed", len(requests))
            for request in requests:
                self._fail(request, EngineFailed(f"the engine failed while computing this request: {type(error).__name__}"))
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise BackendLostError(f"{self._failures_in_a_row} passes failed in a row") from error
            return None
        finally:
            self._in_pass = []
        self._failures_in_a_row = 0
        return result

    def _is_pass_unwanted(self) -> bool:
        """What a backend asks in the middle of a prefill: nobody waits for its result any more."""
        return self._stopping or (bool(self._in_pass) and all(request.cancelled for request in self._in_pass))

    def _emit(self, request: Request, row: Logits) -> None:
        """Samples from a row of logits [vocab] and sends what may go out."""
        try:
            events, ending = self._generations[request.spec.request_id].advance(row)
        except Glm53Error as error:
            # A grammar that outgrows its limits, or logits that are no numbers: it ends this request, and nobody else's.
            if isinstance(error, EngineFailed):
                log.error("%s", error.message, extra={"request_id": request.spec.request_id})
            self._fail(request, error)
            return
        except Exception as error:
            log.exception("sampling failed", extra={"request_id": request.spec.request_id})
            self._fail(request, EngineFailed(f"the engine failed while computing this request: {type(error).__name__}"))
            return
        self.metrics.note_token(request, self._clock())
        for event in events:
            request.sink.put(event)
        if ending is not None:
            # Where chunks have an order of their own a state that single tokens made has other bits than a prompt's.
            if not self.backend.info.page_tokens:
                self._contexts.keep(request, request.spec.prompt + tuple(request.output_ids[:-1]))
            self._end(request, RequestState.FINISHED, ending.reason, ending.stop_string, ending.stop_token_id)

    def _end(
        self,
        request: Request,
        state: RequestState,
        reason: FinishReason = FinishReason.CANCELLED,
        stop_string: bytes = b"",
        stop_token_id: int | None = None,
    ) -> None:
        event = request.finished_event(reason, self._clock(), stop_string=stop_string, stop_token_id=stop_token_id)
        self._leave(request, state)
        request.sink.put(event)

    def _fail(self, request: Request, error: Glm53Error) -> None:
        self._leave(request, RequestState.FAILED)
        request.sink.put(Failed(error))

    def _leave(self, request: Request, state: RequestState) -> None:
        """The request is over: nothing of it stays."""
        request.advance(state)
        request.times.finished = self._clock()
        self._take_out(request)
        self._generations.pop(request.spec.request_id, None)
        with self._lock:
            self._live.pop(request.spec.request_id, None)
            if request.times.admitted is not None:
                self._queue.settle(request)
        self.metrics.note_end(request)
        log.info(
            "request %s",
            state.value,
            extra={
                "request_id": request.spec.request_id,
                "prompt_tokens": len(request.spec.prompt),
                "completion_tokens": request.num_generated,
                "total_s": round(request.times.finished - request.times.submitted, 3),
                **({"trace_id": trace_id_of(request.spec.traceparent)} if request.spec.traceparent else {}),
            },
        )

    def _fail_all(self) -> None:
        with self._lock:
            self._queue.drain()
            left = list(self._live.values())
        for request in left:
            self._fail(request, _interrupted("the worker shut down" if self.fatal is None else "the worker failed and restarts"))

    def _running_tokens(self) -> int:
        """What the running requests are expected to need still."""
        running = [*self._prefilling, *self._decoding, *self._put_back]
        return sum(len(r.feed) - r.num_prefilled + max(0, min(r.spec.sampling.max_tokens, 256) - r.num_generated) for r in running)

    def _update_gauges(self) -> None:
        used, reserved = self.backend.memory_tokens
        self.metrics.set_gauges(self.num_queued, self.num_running, used, reserved)
        self.metrics.set_kept(self._contexts.num_kept, self._contexts.kept_bytes)


def _interrupted(why: str) -> NotReady:
    return NotReady(f"{why} while this request was running", retry_after_s=5.0)


def _next_token(request: Request) -> int:
    assert request.next_token is not None
    return request.next_token
