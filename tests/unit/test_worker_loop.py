"""The engine loop over a fake backend: scheduling, failures, slow readers, shutting down. The real backend is tested in tests/worker."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from services.common import errors
from services.gpu_worker.backends.base import BackendInfo, BackendLostError, PassBrokenOff, VerifyReport
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.loop import MAX_FAILURES_IN_A_ROW, EngineLimits, EngineLoop
from services.gpu_worker.metrics import EngineMetrics
from services.gpu_worker.request import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    Priority,
    PromptScores,
    Request,
    RequestSpec,
    RequestState,
    SamplingParams,
    Tokens,
)
from tests.worker.harness import until

VOCAB = 50
EOS = 49
TABLE = TokenTable([bytes([97 + i % 26]) for i in range(VOCAB)], frozenset({EOS}))


class FakeStream:
    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = list(ids)
        self.num_bytes = 100
        self.room = 0
        self.released = False
        self.holds_memory = True

    def release(self) -> None:
        assert not self.released
        self.released = True

    @property
    def length(self) -> int:
        return len(self.ids)


class FakeBackend:
    """Counts upwards: after token n the best token is n + 1. Fails when told to.

    Args:
        memory: tokens that all streams may have room for together; 0 for no bound.
    """

    def __init__(self, max_streams: int = 2, memory: int = 0) -> None:
        self.memory = memory
        self.info = BackendInfo(VOCAB, 1000, max_streams, "fake", "", "exact", "", "none", "", 0, 0, "none")
        self.open: list[FakeStream] = []
        self.passes: list[tuple[str, list[int]]] = []
        self.fed = 0
        self.fail_next: list[BaseException] = []
        self.progress = 0

    @property
    def streams_free(self) -> int:
        return self.info.max_streams - len(self.open)

    @property
    def memory_tokens(self) -> tuple[int, int]:
        return sum(s.length for s in self.open), sum(s.room for s in self.open)

    def fits(self, num_tokens: int) -> bool:
        return self.streams_free > 0 and (not self.memory or num_tokens <= self.memory - self.memory_tokens[1])

    def extend(self, stream: Any, num_tokens: int) -> bool:
        more = max(0, num_tokens - stream.room)
        if self.memory and more > self.memory - self.memory_tokens[1]:
            return False
        stream.room += more
        return True

    def open_stream(self, snapshot: Any = None) -> FakeStream:
        self.open.append(FakeStream(snapshot.ids if snapshot is not None else ()))
        return self.open[-1]

    def snapshot(self, stream: Any) -> FakeStream:
        return FakeStream(stream.ids)

    def close_stream(self, stream: Any) -> None:
        self.open.remove(stream)

    def prefill(self, stream: Any, token_ids: Sequence[int], *, all_logits: bool) -> np.ndarray:
        return self._run("prefill", [stream], [list(token_ids)], all_logits)

    def prefill_joined(self, stream: Any, token_ids: Sequence[int], tail: Sequence[int], *, keep: bool) -> tuple[np.ndarray, Any]:
        raise AssertionError("this backend joins no tail")

    def decode(self, streams: Sequence[Any], token_ids: Sequence[int]) -> np.ndarray:
        return self._run("decode", list(streams), [[t] for t in token_ids], False)

    def _run(self, kind: str, streams: list[FakeStream], ids: list[list[int]], all_logits: bool) -> np.ndarray:
        self.passes.append((kind, [len(part) for part in ids]))
        self.progress += 1
        if self.fail_next:
            raise self.fail_next.pop(0)
        rows = []
        for stream, part in zip(streams, ids, strict=True):
            assert stream in self.open
            self.fed += len(part)
            stream.ids += part
            assert not self.memory or stream.length <= stream.room, "a pass without memory"
            rows += [self._row(token) for token in (part if all_logits else part[-1:])]
        return np.stack(rows)

    def _row(self, token: int) -> np.ndarray:
        row = np.zeros(VOCAB, np.float32)
        row[(token + 1) % VOCAB] = 5.0
        return row

    def check_idle(self) -> None:
        if self.open:
            raise RuntimeError("streams leaked")

    def stats(self) -> dict[str, Any]:
        return {}

    def verify(self) -> VerifyReport:
        return VerifyReport(0, 0, 0, 0)

    def close(self) -> None:
        pass


LAYERS = 5


class LayeredBackend(FakeBackend):
    """Computes prompts layer by layer, and asks before each whether anybody wants it.

    Attributes:
        layers: of every prefill pass, how many were computed.
        before: called with the layer.
    """

    def __init__(self, max_streams: int = 2, memory: int = 0) -> None:
        super().__init__(max_streams, memory)
        self.layers: list[int] = []
        self.before: Callable[[int], object] = lambda _layer: None

    def break_off_when(self, unwanted: Callable[[], bool]) -> None:
        self.unwanted = unwanted

    def prefill(self, stream: Any, token_ids: Sequence[int], *, all_logits: bool) -> np.ndarray:
        self.layers.append(0)
        for layer in range(LAYERS):
            self.before(layer)
            if self.unwanted():
                stream.ids.append(-1)  # a state that nobody may go on from
                raise PassBrokenOff("nobody wants it")
            self.layers[-1] += 1
        return super().prefill(stream, token_ids, all_logits=all_logits)

    def snapshot(self, stream: Any) -> FakeStream:
        assert -1 not in stream.ids
        return super().snapshot(stream)


class Reader:
    """A sink that can be told to be full or stalled."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.full = False
        self.stalled = 0.0

    def put(self, event: Event) -> None:
        self.events.append(event)

    def stalled_s(self, now: float) -> float:
        return self.stalled

    @property
    def ids(self) -> list[int]:
        return [token.token_id for event in self.events if isinstance(event, Tokens) for token in event.tokens]

    @property
    def end(self) -> Event:
        terminal = [event for event in self.events if isinstance(event, Finished | Failed)]
        assert len(terminal) == 1
        assert self.events[-1] is terminal[0]
        return terminal[0]


class Bench:
    """A loop, its backend and a clock that stands still until moved."""

    def __init__(self, max_streams: int = 2, memory: int = 0, kind: type[FakeBackend] = FakeBackend, **limits: Any) -> None:
        self.now = 100.0
        self.backend = kind(max_streams, memory)
        clock = lambda: self.now  # noqa: E731
        self.loop = EngineLoop(
            self.backend,
            TABLE,
            frozenset({EOS}),
            EngineLimits(**{"max_queued": 8, "chunk_size": 8, "busy_chunk_size": 4, **limits}),
            EngineMetrics(clock),
            clock,
        )

    def submit(
        self,
        name: str,
        prompt: Sequence[int] = (1,),
        timeout_s: float = 60.0,
        key: str = "",
        scores: PromptScores | None = None,
        **sampling: Any,
    ) -> tuple[Request, Reader]:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **sampling})
        reader = Reader()
        request = Request(RequestSpec(name, tuple(prompt), params, key, Priority.NORMAL, timeout_s, scores), reader)
        self.loop.submit(request)
        return request, reader

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.loop.step()
        raise AssertionError("it does not come to that")

    def run(self) -> None:
        for _ in range(1000):
            if not self.loop.step():
                return
        raise AssertionError("the loop does not come to rest")


def test_a_request_from_prompt_to_end() -> None:
    """Admission, prefill in chunks, tokens, end; the stream is given back."""
    bench = Bench()
    request, reader = bench.submit("r", prompt=range(20))
    bench.run()
    kinds = [type(event) for event in reader.events]
    assert kinds[:4] == [Admitted, PrefillProgress, PrefillProgress, PrefillProgress]
    assert reader.ids == [20, 21, 22, 23, 24]
    assert isinstance(reader.end, Finished)
    assert (reader.end.reason, reader.end.completion_tokens, reader.end.prompt_tokens) == (FinishReason.LENGTH, 5, 20)
    assert request.state is RequestState.FINISHED
    assert not bench.backend.open
    assert bench.backend.passes[0] == ("prefill", [8])


def test_end_token_stops() -> None:
    """The model's end token ends the request with STOP."""
    bench = Bench()
    _, reader = bench.submit("r", prompt=[EOS - 2], max_tokens=20)
    bench.run()
    assert reader.ids == [EOS - 1, EOS]
    assert isinstance(reader.end, Finished)
    assert (reader.end.reason, reader.end.stop_token_id) == (FinishReason.STOP, EOS)


def test_decode_goes_on_between_chunks_of_a_long_prompt() -> None:
    """While a long prompt is computed in smaller chunks, the running stream gets a token after every chunk."""
    bench = Bench()
    bench.submit("short", max_tokens=12)
    bench.loop.step()
    bench.submit("long", prompt=[1] * 40)
    bench.run()
    passes = bench.backend.passes
    chunks = [i for i, (kind, sizes) in enumerate(passes) if kind == "prefill" and sizes != [1]]
    assert passes[chunks[0]] == ("prefill", [4])
    for first, second in itertools.pairwise(chunks[:9]):
        assert ("decode", [1]) in passes[first:second]


def test_prompts_take_turns() -> None:
    """A short prompt that came after a long one is done long before it."""
    bench = Bench(max_streams=4)
    bench.submit("long", prompt=[1] * 200)
    _, reader = bench.submit("short", prompt=[1] * 4, max_tokens=1)
    for _ in range(4):
        bench.loop.step()
    assert isinstance(reader.end, Finished)


def test_streams_wait_for_a_free_place() -> None:
    """No more streams than the backend has; the rest is served afterwards, in order."""
    bench = Bench(max_streams=2)
    readers = [bench.submit(f"r{i}", key=f"k{i}")[1] for i in range(5)]
    bench.loop.step()
    assert len(bench.backend.open) == 2
    assert bench.loop.num_queued == 3
    bench.run()
    assert all(reader.ids == [2, 3, 4, 5, 6] for reader in readers)


def test_cancel_acts_before_the_next_pass() -> None:
    """A cancelled request computes nothing more, running or waiting, and ends exactly once."""
    bench = Bench(max_streams=1)
    running, reader = bench.submit("running", max_tokens=100)
    waiting, other = bench.submit("waiting", key="k")
    for _ in range(3):
        bench.loop.step()
    passes = len(bench.backend.passes)
    assert bench.loop.cancel("running")
    assert bench.loop.cancel("waiting")
    bench.loop.step()
    assert len(bench.backend.passes) == passes
    for request, events in ((running, reader), (waiting, other)):
        assert request.state is RequestState.CANCELLED
        assert isinstance(events.end, Finished)
        assert events.end.reason is FinishReason.CANCELLED
    assert not bench.backend.open
    assert not bench.loop.cancel("running")


def layered(**limits: Any) -> tuple[Bench, LayeredBackend]:
    bench = Bench(kind=LayeredBackend, **limits)
    assert isinstance(bench.backend, LayeredBackend)
    return bench, bench.backend


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_cancel_breaks_the_request_s_own_prefill_off(layer: int, chunk: int) -> None:
    """In whichever chunk and layer it comes: the request ends once, in that step, and its stream is given back; others get on as alone."""
    bench, backend = layered()
    _, beside = bench.submit("beside", prompt=[7], max_tokens=30)
    bench.loop.step()
    request, reader = bench.submit("r", prompt=[1] * 40)
    for _ in range(chunk):
        bench.loop.step()
    backend.layers.clear()
    backend.before = lambda at: bench.loop.cancel("r") if at == layer else None
    tokens = len(beside.ids)
    bench.loop.step()
    assert backend.layers == [layer]
    assert request.state is RequestState.CANCELLED
    assert isinstance(reader.end, Finished)
    assert (reader.end.reason, reader.end.completion_tokens) == (FinishReason.CANCELLED, 0)
    assert len(backend.open) == 1
    assert len(beside.ids) == tokens + 1
    backend.before = lambda _at: None
    bench.submit("r", prompt=[1] * 40)
    bench.run()
    assert beside.ids == alone([7], max_tokens=30)
    assert isinstance(reader.end, Finished)
    assert not backend.open
    document = bench.loop.metrics.prometheus_text().decode()
    assert 'glm53_requests_total{outcome="cancelled"} 1.0' in document
    assert 'glm53_requests_total{outcome="failed"} 0.0' in document


@pytest.mark.parametrize("other", ["decodes", "prefills", "waits"])
def test_a_cancel_breaks_nobody_else_s_prefill_off(other: str) -> None:
    """The pass that runs goes through all its layers, whatever the cancelled one is doing; that one leaves before the next pass."""
    bench, backend = layered(max_streams=1 if other == "waits" else 2)
    prompts = {"decodes": [9], "prefills": [9] * 40, "waits": [9]}
    if other == "waits":
        _, reader = bench.submit("r", prompt=[1] * 20)
        gone, events = bench.submit("gone", prompt=prompts[other])
    else:
        gone, events = bench.submit("gone", prompt=prompts[other], max_tokens=30)
        _, reader = bench.submit("r", prompt=[1] * 20)
        # Prompts take turns: the next chunk is r's.
        bench.loop.step()
    backend.layers.clear()
    backend.before = lambda at: bench.loop.cancel("gone") if at == 2 else None
    bench.loop.step()
    assert backend.layers == [LAYERS]
    assert not gone.done
    assert any(isinstance(event, PrefillProgress) for event in reader.events)
    bench.run()
    assert gone.state is RequestState.CANCELLED
    assert isinstance(events.end, Finished)
    assert events.end.reason is FinishReason.CANCELLED
    assert set(backend.layers) == {LAYERS}
    assert reader.ids == alone([1] * 20)
    assert not backend.open


def test_decode_steps_are_not_broken_off() -> None:
    """The step that runs when its request is cancelled goes through, and nobody is asked."""
    bench, backend = layered()
    request, reader = bench.submit("r", prompt=[1], max_tokens=30)
    bench.loop.step()
    asked, step = [], backend.decode
    backend.unwanted = lambda: bool(asked.append(True))
    backend.decode = lambda *args: (bench.loop.cancel("r"), step(*args))[1]  # type: ignore[method-assign]
    tokens = len(reader.ids)
    bench.loop.step()
    assert len(reader.ids) == tokens + 1
    bench.loop.step()
    assert request.state is RequestState.CANCELLED
    assert asked == []


def test_prefills_that_were_broken_off_are_no_failures() -> None:
    """However many follow each other, the backend is not lost."""
    bench, backend = layered()
    for i in range(2 * MAX_FAILURES_IN_A_ROW):
        bench.submit(f"r{i}", prompt=[1] * 20)
        backend.before = lambda at, i=i: bench.loop.cancel(f"r{i}") if at == 1 else None
        bench.run()
    assert backend.layers == [1] * 2 * MAX_FAILURES_IN_A_ROW
    _, reader = bench.submit("fine", prompt=[3])
    bench.run()
    assert reader.ids == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_running_loop_leaves_a_prefill_that_is_cancelled_or_stopped(how: str) -> None:
    """From another thread, while the pass is between two layers that it would never end by itself."""
    bench, backend = layered()
    inside = threading.Event()

    def for_ever(layer: int) -> None:
        if layer == 3:
            inside.set()
            deadline = time.monotonic() + 10
            while not backend.unwanted() and time.monotonic() < deadline:
                time.sleep(0.001)

    backend.before = for_ever
    request, reader = bench.submit("r", prompt=[1] * 20)
    thread = threading.Thread(target=bench.loop.run_forever, daemon=True)
    thread.start()
    assert inside.wait(10)
    if how == "cancel":
        assert bench.loop.cancel("r")
        until(lambda: request.done, "the request has left")
        assert isinstance(reader.end, Finished)
        assert reader.end.reason is FinishReason.CANCELLED
        backend.before = lambda _layer: None
        _, later = bench.submit("later", prompt=[3])
        until(lambda: len(later.events) > 0 and isinstance(later.events[-1], Finished), "the next one is served")
        assert later.ids == [4, 5, 6, 7, 8]
    bench.loop.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert bench.loop.fatal is None
    assert backend.layers[0] == 3
    if how == "stop":
        assert isinstance(reader.end, Failed)
        assert isinstance(reader.end.error, errors.NotReady)
        assert reader.end.error.message == "the worker shut down while this request was running"
    assert not backend.open


def test_a_failing_pass_fails_only_its_own_requests() -> None:
    """An exception in a pass ends the requests in it with EngineFailed; others and later ones are served."""
    bench = Bench(max_streams=2)
    _, broken = bench.submit("broken", prompt=[3])
    bench.backend.fail_next = [RuntimeError("boom")]
    bench.loop.step()
    assert isinstance(broken.end, Failed)
    assert isinstance(broken.end.error, errors.EngineFailed)
    assert "boom" not in broken.end.error.message
    _, fine = bench.submit("fine", prompt=[3])
    bench.run()
    assert fine.ids == [4, 5, 6, 7, 8]
    assert not bench.backend.open


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_request_alone(value: float, temperature: float) -> None:
    """Damaged memory must not come out as an answer: the request fails, its neighbour and the next one are served."""
    bench = Bench(max_streams=2)
    row = bench.backend._row

    def damaged(token: int) -> np.ndarray:
        out = row(token)
        out[7] = value if token == 12 else 0
        return out

    bench.backend._row = damaged  # type: ignore[method-assign]
    _, bad = bench.submit("bad", prompt=[10], temperature=temperature, top_k=1)
    _, good = bench.submit("good", prompt=[30], temperature=temperature, top_k=1)
    bench.run()
    assert isinstance(bad.end, Failed)
    assert isinstance(bad.end.error, errors.EngineFailed)
    assert bad.ids == [11, 12]
    assert isinstance(good.end, Finished)
    assert good.ids == [31, 32, 33, 34, 35]
    _, later = bench.submit("later", prompt=[20])
    bench.run()
    assert isinstance(later.end, Finished)


def test_prompt_scores_from_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    """Scoring a prompt refuses damaged logits as generation does: no NaN goes out, and the engine serves on."""
    bench = Bench(max_streams=2)
    row = bench.backend._row
    bench.backend._row = lambda token: row(token) * (np.nan if token == 12 else 1)  # type: ignore[method-assign]
    _, bad = bench.submit("bad", prompt=[10, 11, 12, 13, 14], max_tokens=0, scores=PromptScores(1, 1))
    _, good = bench.submit("good", prompt=[30, 31, 32], max_tokens=0, scores=PromptScores(1, 1))
    bench.run()
    assert isinstance(bad.end, Failed)
    assert isinstance(bad.end.error, errors.EngineFailed)
    assert isinstance(good.end, Finished)
    assert not bench.backend.open


@pytest.mark.parametrize(
    "failures", [[BackendLostError("gone")], [RuntimeError("x")] * MAX_FAILURES_IN_A_ROW], ids=["lost", "again and again"]
)
def test_a_lost_backend_ends_the_loop(failures: list[BaseException]) -> None:
    """When the backend is lost every request fails, the loop ends with the reason, and new requests get NotReady."""
    bench = Bench(max_streams=2)
    readers = [bench.submit(f"r{i}", key=f"k{i}")[1] for i in range(4)]
    bench.backend.fail_next = list(failures)
    thread = threading.Thread(target=bench.loop.run_forever)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(bench.loop.fatal, BackendLostError)
    assert all(isinstance(reader.end, Failed) for reader in readers)
    assert not bench.backend.open
    with pytest.raises(errors.NotReady):
        bench.submit("late")


def test_a_full_reader_pauses_only_itself() -> None:
    """A request whose reader is full is left out of the batch and goes on when the reader caught up."""
    bench = Bench(max_streams=2)
    _, slow = bench.submit("slow", key="a")
    _, quick = bench.submit("quick", key="b")
    bench.loop.step()
    slow.full = True
    bench.run()
    assert quick.ids == [2, 3, 4, 5, 6]
    assert len(slow.ids) < 5
    assert not bench.loop.has_work
    slow.full = False
    assert bench.loop.has_work
    bench.run()
    assert slow.ids == [2, 3, 4, 5, 6]


def test_a_reader_that_takes_nothing_is_ended() -> None:
    """A reader that is stalled for longer than allowed loses its stream; the error says why."""
    bench = Bench(slow_reader_s=30.0)
    _, reader = bench.submit("r", max_tokens=100)
    bench.loop.step()
    reader.full, reader.stalled = True, 29.0
    bench.now += 29.0
    bench.loop.step()
    assert bench.backend.open
    reader.stalled = 31.0
    bench.now += 2.0
    bench.loop.step()
    assert isinstance(reader.end, Failed)
    assert isinstance(reader.end.error, errors.DeadlineExceeded)
    assert not bench.backend.open


def test_waiting_too_long_ends_with_queue_timeout() -> None:
    """A request that waited longer than it wanted fails without ever being computed, and hears how long the line is now."""
    bench = Bench(max_streams=1)
    bench.submit("busy", max_tokens=100)
    _, reader = bench.submit("late", key="k", timeout_s=5.0)
    bench.loop.step()
    bench.now += 6.0
    bench.loop.step()
    assert isinstance(reader.end, Failed)
    assert isinstance(reader.end.error, errors.QueueTimeout)
    # 100 tokens of the running request, less those it has, at the slowest speed that is ever assumed: half of it must be done.
    assert reader.end.error.retry_after_s == pytest.approx((100 - 2) / 2, abs=1)
    assert [type(event) for event in reader.events] == [Failed]
    # Else the worse the queue, the better it would look.
    text = bench.loop.metrics.prometheus_text().decode()
    assert "glm53_queue_wait_seconds_count 2.0" in text
    assert 'glm53_queue_wait_seconds_bucket{le="5.0"} 1.0' in text


def test_the_first_failure_is_no_new_series() -> None:
    """Every outcome is counted from nought on: a rate says nothing of a series' first value."""
    text = Bench().loop.metrics.prometheus_text().decode()
    for outcome in ("finished", "cancelled", "failed"):
        assert f'glm53_requests_total{{outcome="{outcome}"}} 0.0' in text


def test_scores_cross_chunk_borders() -> None:
    """Prompt scores come for every asked position, over chunk borders, and a request of no tokens ends after prefill."""
    bench = Bench()
    prompt = [1, 2, 3, 9, 10, 11, 12, 13, 14, 30]
    _, reader = bench.submit("r", prompt=prompt, max_tokens=0, scores=PromptScores(2, 1))
    bench.run()
    scored = [token for event in reader.events if isinstance(event, PrefillProgress) for token in event.prompt_tokens]
    assert [token.token_id for token in scored] == prompt[2:]
    best = [token.top[0].token_id == token.token_id for token in scored]
    assert best == [True, False, True, True, True, True, True, False]
    assert isinstance(reader.end, Finished)
    assert reader.end.completion_tokens == 0


def test_draining_refuses_and_finishes() -> None:
    """While draining live requests go on and new ones are refused."""
    bench = Bench()
    _, reader = bench.submit("r")
    bench.loop.drain()
    with pytest.raises(errors.NotReady):
        bench.submit("new")
    bench.run()
    assert reader.ids == [2, 3, 4, 5, 6]


def test_stopping_fails_what_still_lives() -> None:
    """Stopping the loop ends every request with NotReady, so that no stream is left open."""
    bench = Bench(max_streams=1)
    readers = [bench.submit(f"r{i}", key=f"k{i}", max_tokens=10**9, ignore_eos=True)[1] for i in range(3)]
    thread = threading.Thread(target=bench.loop.run_forever)
    thread.start()
    bench.loop.stop()
    thread.join(10)
    for reader in readers:
        assert isinstance(reader.end, Failed)
        assert isinstance(reader.end.error, errors.NotReady)
    assert not bench.backend.open


def test_a_leak_is_noticed_when_idle() -> None:
    """A stream that nobody gave back stops the loop at the next idle moment instead of shrinking the service silently."""
    bench = Bench()
    bench.backend.open_stream()
    with pytest.raises(RuntimeError, match="leaked"):
        bench.loop.step()


def test_duplicate_ids_are_refused_only_while_live() -> None:
    """An id can be used again after its request ended."""
    bench = Bench()
    bench.submit("same")
    with pytest.raises(errors.InvalidRequest) as caught:
        bench.submit("same")
    assert caught.value.param == "request_id"
    bench.run()
    bench.submit("same")
    bench.run()


def test_the_next_turn_computes_only_what_is_new() -> None:
    """A prompt that begins with an earlier prompt, or with an earlier prompt and its answer, starts from the kept state and says so."""
    bench = Bench()
    first = [i % 40 for i in range(60)]
    _, reader = bench.submit("first", prompt=first, max_tokens=4)
    bench.run()
    for name, prompt, cached in (
        ("again", first, 59),
        ("longer", [*first, 7, 8, 9], 60),  # "again" ended right after its prompt
        ("with the answer", [*first, *reader.ids, 5, 6], 63),
        ("other", [3, *first], 0),
    ):
        before = bench.backend.fed
        _, other = bench.submit(name, prompt=prompt, max_tokens=1)
        bench.run()
        assert isinstance(other.events[0], Admitted)
        assert isinstance(other.end, Finished)
        assert other.events[0].cached_tokens == other.end.cached_tokens == cached, name
        assert bench.backend.fed - before == len(prompt) - cached
        assert other.ids == [(prompt[-1] + 1) % VOCAB]
        assert other.end.prompt_tokens == len(prompt)


def test_keys_do_not_share_states() -> None:
    """Another key's identical prompt is computed in full."""
    bench = Bench()
    for key, cached in (("a", 0), ("b", 0), ("a", 59)):
        _, reader = bench.submit("r", prompt=[i % 40 for i in range(60)], key=key, max_tokens=1)
        bench.run()
        assert isinstance(reader.end, Finished)
        assert reader.end.cached_tokens == cached


def test_kept_states_are_bounded() -> None:
    """The longest unused states make room; without memory nothing is kept."""
    bench = Bench(prefix_cache_bytes=350)
    prompts = [[n] + [i % 40 for i in range(59)] for n in range(3)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt=prompt, max_tokens=1)
        bench.run()
    cached = []
    for i in (2, 0):
        _, reader = bench.submit(f"again{i}", prompt=prompts[i], max_tokens=1)
        bench.run()
        assert isinstance(reader.end, Finished)
        cached.append(reader.end.cached_tokens)
    assert cached == [59, 0]
    off = Bench(prefix_cache_bytes=0)
    for name in ("one", "two"):
        _, reader = off.submit(name, prompt=prompts[0], max_tokens=1)
        off.run()
        assert isinstance(reader.end, Finished)
        assert reader.end.cached_tokens == 0


def test_scored_prompts_are_computed_in_full() -> None:
    """A request that wants scores of its prompt gets them all, whatever is kept."""
    bench = Bench()
    prompt = [i % 40 for i in range(60)]
    bench.submit("first", prompt=prompt, max_tokens=1)
    bench.run()
    _, reader = bench.submit("scored", prompt=prompt, max_tokens=0, scores=PromptScores(1, 0))
    bench.run()
    scored = [token for event in reader.events if isinstance(event, PrefillProgress) for token in event.prompt_tokens]
    assert len(scored) == 60


def alone(prompt: Sequence[int], **sampling: Any) -> list[int]:
    """The tokens of a request that nobody disturbs."""
    bench = Bench()
    _, reader = bench.submit("alone", prompt=prompt, **sampling)
    bench.run()
    return reader.ids


def test_a_request_reserves_its_prompt_and_part_of_its_answer() -> None:
    """Far more of it is allowed to come than memory is reserved for; the next one in line waits until that much is free."""
    bench = Bench(max_streams=4, memory=50, max_rq_tokens=8)
    bench.submit("a", prompt=range(10), max_tokens=500)
    bench.submit("b", prompt=range(10), max_tokens=3)
    bench.submit("c", prompt=range(20), max_tokens=500)
    bench.loop.step()
    assert [stream.room for stream in bench.backend.open] == [18, 13]
    assert (bench.loop.num_running, bench.loop.num_queued) == (2, 1)
    bench.step_until(lambda: len(bench.backend.open) != 2)
    bench.loop.step()
    assert bench.backend.open[-1].room == 28


def test_nobody_overtakes_a_request_that_waits_for_memory() -> None:
    """Short requests that would fit do not keep a long one waiting for ever."""
    bench = Bench(max_streams=8, memory=40, max_rq_tokens=4)
    bench.submit("running", prompt=range(20), max_tokens=4)
    long, _ = bench.submit("long", prompt=range(30), max_tokens=2)
    shorts = [bench.submit(f"short{i}", prompt=[1], max_tokens=2)[0] for i in range(4)]
    bench.loop.step()
    assert bench.loop.num_running == 1
    assert all(short.state is RequestState.WAITING for short in shorts)
    bench.run()
    assert all(short.turn > long.turn > 0 for short in shorts)
    assert long.done


@pytest.mark.parametrize("seed", range(6))
def test_a_request_that_was_put_back_loses_and_doubles_nothing(seed: int) -> None:
    """Where memory is short the youngest give theirs up and go on later: same tokens as alone, one admission, one end, growing progress."""
    draw = np.random.default_rng(seed)
    bench = Bench(max_streams=6, memory=120, max_rq_tokens=2, max_queued=32, prefix_cache_bytes=0)
    asked = []
    for i in range(12):
        prompt = [int(t) for t in draw.integers(0, 40, draw.integers(1, 60))]
        sampling: dict[str, Any] = {"max_tokens": int(draw.integers(1, 60)), "temperature": float(i % 2), "seed": i, "ignore_eos": True}
        if i % 3 == 0:
            sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logprobs": 1, "stop": (b"xyz",)}
        asked.append((prompt, sampling, bench.submit(f"r{i}", prompt=prompt, key=f"k{i % 3}", **sampling)))
    bench.run()
    for prompt, sampling, (request, reader) in asked:
        assert reader.ids == alone(prompt, **sampling), request.spec.request_id
        end = reader.end
        assert isinstance(end, Finished)
        assert end.completion_tokens == request.num_generated
        assert sum(isinstance(event, Admitted) for event in reader.events) == 1
        progress = [event.done_tokens for event in reader.events if isinstance(event, PrefillProgress)]
        assert progress == sorted(set(progress))
        assert progress[-1] == len(prompt)
    document = bench.loop.metrics.to_json()
    assert document["requests_put_back"] > 0
    assert 0 < document["recomputed_tokens"] < document["prefill_tokens"]
    text = bench.loop.metrics.prometheus_text().decode()
    assert f"glm53_requests_put_back_total {document['requests_put_back']:.1f}" in text
    assert f'vllm:num_preemptions_total{{engine="0",model_name=""}} {document["requests_put_back"]:.1f}' in text
    # Every prompt was read once, however often it was computed.
    assert f'vllm:prompt_tokens_total{{engine="0",model_name=""}} {sum(len(p) for p, _, _ in asked):.1f}' in text


def test_the_oldest_keeps_its_memory() -> None:
    """The youngest is put back, whatever it is doing; it is in again before anybody from the queue."""
    bench = Bench(max_streams=4, memory=48, max_rq_tokens=1)
    old, reader = bench.submit("old", prompt=[1] * 8, max_tokens=36, ignore_eos=True)
    bench.loop.step()
    young, _ = bench.submit("young", prompt=[2] * 24, max_tokens=10, ignore_eos=True)
    late, _ = bench.submit("late", prompt=[3] * 20, max_tokens=1)
    states = []
    for _ in range(100):
        bench.loop.step()
        states.append((old.state, young.state, late.state))
    assert all(state in (RequestState.DECODE, RequestState.FINISHED) for state, _, _ in states)
    assert (RequestState.DECODE, RequestState.WAITING, RequestState.WAITING) in states
    assert isinstance(reader.end, Finished)
    assert all(other is RequestState.WAITING for _, state, other in states if state is RequestState.WAITING)
    bench.run()
    assert young.state is late.state is RequestState.FINISHED


def test_scores_of_a_prompt_that_was_put_back_come_once() -> None:
    """A prompt that loses its memory half way is scored to its end, no position twice."""
    bench = Bench(max_streams=2, memory=60, max_rq_tokens=1, busy_chunk_size=4)
    bench.submit("old", prompt=[1] * 12, max_tokens=40, ignore_eos=True)
    bench.loop.step()
    prompt = [i % 40 for i in range(40)]
    request, reader = bench.submit("scored", prompt=prompt, max_tokens=0, scores=PromptScores(1, 1))
    bench.step_until(lambda: request.num_lost > 0)
    assert 0 < request.num_lost < len(prompt)
    bench.run()
    scored = [token.token_id for event in reader.events if isinstance(event, PrefillProgress) for token in event.prompt_tokens]
    assert scored == prompt
    assert isinstance(reader.end, Finished)


def test_what_was_put_back_can_be_cancelled_and_fails_with_the_loop() -> None:
    """Waiting for memory a request still ends once: when it is cancelled, when its reader is gone, when the loop stops."""
    for how in ("cancel", "stalled", "stop"):
        bench = Bench(max_streams=4, memory=40, max_rq_tokens=1)
        bench.submit("old", prompt=[1] * 8, max_tokens=10**6, ignore_eos=True)
        bench.loop.step()
        young, reader = bench.submit("young", prompt=[2] * 20, max_tokens=10, ignore_eos=True)
        bench.step_until(lambda: young.num_lost > 0)  # noqa: B023 - called at once
        assert bench.loop.num_queued == 1
        if how == "cancel":
            bench.loop.cancel("young")
            bench.loop.step()
            assert young.state is RequestState.CANCELLED
        elif how == "stalled":
            reader.stalled, bench.now = 100.0, bench.now + 100
            bench.loop.step()
            assert isinstance(reader.end, Failed)
        else:
            bench.loop.stop()
            bench.loop.run_forever()
            assert isinstance(reader.end, Failed)
            assert not bench.backend.open
        assert bench.loop.num_queued == 0
        assert reader.events[-1] is reader.end


def test_a_request_larger_than_all_memory_fails_alone() -> None:
    """It would wait for ever: it is told so, and the next one is served."""
    bench = Bench(memory=20)
    _, large = bench.submit("large", prompt=[1] * 30)
    _, small = bench.submit("small", prompt=[1] * 10)
    bench.run()
    assert isinstance(large.end, Failed)
    assert "too small" in large.end.error.message
    assert isinstance(small.end, Finished)
    assert not bench.backend.open


def test_a_paused_reader_that_holds_the_memory_is_waited_for_and_not_spun_on() -> None:
    """The oldest stream's reader is slow: the loop rests, and all end as soon as it reads on."""
    bench = Bench(max_streams=4, memory=40, max_rq_tokens=1)
    _, slow = bench.submit("slow", prompt=[1] * 20, max_tokens=15, ignore_eos=True)
    bench.loop.step()
    slow.full = True
    young, reader = bench.submit("young", prompt=[2] * 10, max_tokens=20, ignore_eos=True)
    bench.run()
    assert young.state is RequestState.WAITING
    assert not bench.loop.has_work
    slow.full = False
    assert bench.loop.has_work
    bench.run()
    assert reader.ids == alone([2] * 10, max_tokens=20, ignore_eos=True)
    assert isinstance(slow.end, Finished)
