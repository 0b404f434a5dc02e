"""Memory for contexts that runs short changes no answer: the real engine, with a bound put on its streams' memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.gpu_worker.backends.base import Stream
from services.gpu_worker.backends.cpu import CpuBackend
from tests.worker.harness import RunningWorker


class Bound:
    """At most so many tokens in all open streams together, taken in pages."""

    def __init__(self, backend: CpuBackend, page: int, pages: int) -> None:
        self._backend, self._page, self._free = backend, page, pages
        self._held: dict[int, int] = {}
        self._close = backend.close_stream
        for name in ("fits", "extend", "close_stream"):
            setattr(backend, name, getattr(self, name))

    def fits(self, num_tokens: int) -> bool:
        return self._backend.streams_free > 0 and -(-num_tokens // self._page) <= self._free

    def extend(self, stream: Stream, num_tokens: int) -> bool:
        more = max(0, -(-num_tokens // self._page) - self._held.get(id(stream), 0))
        if more > self._free:
            return False
        self._free -= more
        self._held[id(stream)] = self._held.get(id(stream), 0) + more
        return True

    def close_stream(self, stream: Stream) -> None:
        self._free += self._held.pop(id(stream), 0)
        self._close(stream)


def ask(running: RunningWorker) -> list[Any]:
    """Tokens, log-probabilities and counts of requests that sample in every way there is."""
    requests = [
        running.request(list(range(5, 45)), max_tokens=60, logprobs=2),
        running.request(list(range(70, 75)), max_tokens=70, logprobs=0, temperature=1.0, seed=7, top_p=0.9),
        running.request(list(range(900, 990)), max_tokens=40, logprobs=0, temperature=0.7, seed=8, repetition_penalty=1.2),
        running.request([3, 4, 5], max_tokens=80, logprobs=0, temperature=1.0, seed=9, presence_penalty=0.5, frequency_penalty=0.5),
        running.request(list(range(33, 90)), max_tokens=30, logprobs=1, prompt_logprobs=True),
    ]
    return [
        (
            [(token.id, token.piece, token.logprob, [(top.token_id, top.logprob) for top in token.top]) for token in answer.tokens],
            [(token.id, token.logprob) for event in answer.events for token in event.prefill.prompt_tokens],
            (answer.finished.reason, answer.finished.prompt_tokens, answer.finished.completion_tokens),
        )
        for answer in running.together(requests)
    ]


@pytest.mark.parametrize("pages", [9, 14])
def test_answers_are_the_same_bits_when_requests_were_put_back(start_worker: Callable[..., RunningWorker], pages: int) -> None:
    """Whoever gave its memory up goes on with the same tokens, log-probabilities and random numbers."""
    running = start_worker(max_rq_tokens=8, prefix_cache_mb=0)
    expected = ask(running)
    running.wait_idle()
    assert running.engine.metrics.to_json()["requests_put_back"] == 0
    backend = running.engine.backend
    assert isinstance(backend, CpuBackend)
    Bound(backend, 16, pages)
    assert ask(running) == expected
    running.wait_idle()
    assert running.engine.metrics.to_json()["requests_put_back"] > 0
