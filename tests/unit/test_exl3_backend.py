"""The GPU backend's bookkeeping over a fake model: chunks, pages, batches, device errors. Bits are compared on a GPU (tests/gpu)."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.gpu_worker.backends.arena_check import ArenaCheck
from services.gpu_worker.backends.base import BackendInfo, BackendLostError, BreaksOff
from services.gpu_worker.backends.exl3 import backend as module
from services.gpu_worker.backends.exl3.backend import SCORED_ROWS, Exl3Backend
from services.gpu_worker.backends.exl3.first_uses import CAREFUL, SHORT, FirstUses
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS, PagesExhausted
from services.gpu_worker.patches import decode_blocks
from services.gpu_worker.patches.replace import Replacements
from tests.worker.harness import until
from tests.worker.test_arena_check import FakeArena, reload

VOCAB = 11


class FakeState:
    def __init__(self, cache: FakeCache) -> None:
        self.cache = cache

    def free(self) -> None:
        self.cache.states_open -= 1


class FakeCache:
    def __init__(self, max_num_tokens: int) -> None:
        self.max_num_tokens = max_num_tokens
        self.states_open = 0

    def get_new_state(self) -> FakeState:
        self.states_open += 1
        return FakeState(self)


class FakeModel:
    """Logits whose best column is (token + 1) % VOCAB; keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.events: list[str] = []

    def unload(self) -> None:
        self.events.append("unloaded")

    def get_recurrent_layers(self) -> list[str]:
        return ["kda"]

    def forward(self, ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in params.items()}
        self.calls.append((ids.tolist(), copies))
        rows = params.get("last_tokens_only", ids.shape[1])
        return torch.nn.functional.one_hot((ids[:, -rows:] + 1) % VOCAB, VOCAB + 2).half()


class FakeExperts:
    progress = 7

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.careful: list[bool] = []
        self.unwanted: Callable[[], bool] | None = None

    def layer_by_layer(self, wanted: bool) -> None:
        self.careful.append(wanted)

    def begin_prefill(self, rows: int) -> None:
        self.events.append(rows)

    def between_passes(self) -> None:
        self.events.append("between")

    @contextlib.contextmanager
    def breaking_off(self, unwanted: Callable[[], bool]) -> Iterator[None]:
        self.unwanted = unwanted
        yield
        self.unwanted = None

    def stats(self) -> dict[str, Any]:
        return {"slots": 1, "checksum_failures": 3}

    def repair(self, layer: int, expert: int, data: Any) -> None:
        self.events.append((layer, expert, data.tolist()))

    def close(self) -> None:
        self.events.append("experts closed")


def torch_without_a_gpu() -> Any:
    """What the backend uses of torch, with pageable memory and nothing to wait for."""
    real = {name: getattr(torch, name) for name in ("empty", "zeros")}

    def pageable(name: str) -> Any:
        return lambda *args, pin_memory=False, **kwargs: real[name](*args, **kwargs)

    return types.SimpleNamespace(
        **{name: getattr(torch, name) for name in ("tensor", "int32", "int64", "float32", "inference_mode", "AcceleratorError", "device")},
        empty=pageable("empty"),
        zeros=pageable("zeros"),
        cuda=types.SimpleNamespace(
            synchronize=lambda _d: None, current_device=lambda: 0, current_stream=lambda _d: types.SimpleNamespace(synchronize=lambda: None)
        ),
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Exl3Backend, FakeModel, FakeCache, FakeExperts]:
    monkeypatch.setattr(module, "torch", torch_without_a_gpu())
    info = BackendInfo(VOCAB, 2 * PAGE_TOKENS, 3, "cuda", "", "exact", "", "", "", 0, 0, "")
    model, cache, experts = FakeModel(), FakeCache(5 * PAGE_TOKENS), FakeExperts()
    return Exl3Backend(model, cache, experts, None, Replacements(), info), model, cache, experts  # type: ignore[arg-type]


def test_a_prompt_and_its_answer_go_through_pages_and_positions(made: Any) -> None:
    """A chunk starts where the last one ended, on the stream's own pages; logits are cut to the vocabulary."""
    backend, model, _, experts = made
    stream = backend.open_stream()
    logits = backend.prefill(stream, [1, 2, 3], all_logits=False)
    assert logits.shape == (1, VOCAB)
    assert logits.argmax() == 4
    backend.prefill(stream, list(range(10)) * 30, all_logits=False)
    assert stream.length == 303
    (_, first), (_, second) = model.calls
    assert first["block_table"].tolist() == [[0]]
    assert second["block_table"].tolist() == [[0, 1]]
    assert second["cache_seqlens"].tolist() == [3]
    assert experts.events == [3, "between", 300, "between"]


def test_the_first_passes_of_a_shape_run_layer_by_layer(made: Any) -> None:
    """Decode steps and prompts as short as one, for each number of streams and each size of context anew; longer prompts ask nobody."""
    backend, _, _, experts = made
    one, other = backend.open_stream(), backend.open_stream()
    backend.prefill(one, [i % 9 for i in range(SHORT - 65)], all_logits=False)
    assert experts.careful == []
    backend.prefill(other, [1, 2, 3, 4, 5, 6, 7, 8], all_logits=False)
    backend.decode([one, other], [1, 1])
    assert experts.careful == [True, True]
    backend.close_stream(other)
    for _ in range(64 + 1):
        backend.decode([one], [1])
    # From the first token on, and from SHORT.
    assert experts.careful[2:] == [True] * CAREFUL + [False] * (64 - CAREFUL) + [True]


@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_pass_whose_own_tokens_outgrow_a_power_of_two_is_of_another_shape(tokens: int) -> None:
    """Attention is sparse from the pass on that ends behind 2,048 tokens, wherever it begins."""
    uses, limit = FirstUses(), 2 * SHORT
    for _ in range(CAREFUL):
        assert uses.is_first(1, tokens, limit - tokens, 1, prompt=True)
    assert not uses.is_first(1, tokens, limit - tokens, 1, prompt=True)
    assert uses.is_first(1, tokens, limit - tokens + 1, 1, prompt=True)


@pytest.mark.parametrize("prompts_first", [True, False])
def test_a_prompt_of_one_token_takes_no_careful_pass_off_decode_steps(made: Any, prompts_first: bool) -> None:
    """Nor the other way round: they run different code for the same numbers of streams and tokens."""
    backend, model, _, experts = made
    stream = backend.open_stream()

    def prompt() -> None:
        backend.prefill(stream, [1], all_logits=False)

    def step() -> None:
        backend.decode([stream], [1])

    for run in (prompt, step) if prompts_first else (step, prompt):
        for _ in range(CAREFUL + 1):
            run()
    assert experts.careful == 2 * ([True] * CAREFUL + [False])
    steps = [decode_blocks.DECODE in params for _, params in model.calls]
    assert steps == (CAREFUL + 1) * [not prompts_first] + (CAREFUL + 1) * [prompts_first]


def test_scores_come_for_every_position_in_bounded_pieces(made: Any) -> None:
    """As many rows as tokens; no pass returns more than SCORED_ROWS of them."""
    backend, model, _, _ = made
    stream = backend.open_stream()
    tokens = [i % 9 for i in range(SCORED_ROWS + 20)]
    logits = backend.prefill(stream, tokens, all_logits=True)
    assert logits.argmax(axis=1).tolist() == [t + 1 for t in tokens]
    assert [len(ids[0]) for ids, _ in model.calls] == [SCORED_ROWS, 20]


def test_a_batch_has_one_row_per_stream_and_the_result_is_the_callers(made: Any) -> None:
    """Rows, lengths and block tables belong together; a later step does not change an earlier result."""
    backend, model, _, _ = made
    a, b = backend.open_stream(), backend.open_stream()
    backend.prefill(a, [0] * PAGE_TOKENS, all_logits=False)
    backend.prefill(b, [0] * 5, all_logits=False)
    first = backend.decode([a, b], [3, 8])
    kept = first.copy()
    backend.decode([b, a], [1, 2])
    ids, params = model.calls[2]
    assert ids == [[3], [8]]
    assert params["cache_seqlens"].tolist() == [PAGE_TOKENS, 5]
    assert params["block_table"][:, :2].tolist() == [[0, 2], [1, 0]]
    assert params["block_table"].shape[1] % 16 == 0
    assert np.array_equal(first, kept)
    assert first.argmax(axis=1).tolist() == [4, 9]
    assert (a.length, b.length) == (PAGE_TOKENS + 2, 7)


def test_streams_take_pages_as_they_grow(made: Any) -> None:
    """What is reserved is taken, the rest comes page by page until none of five is free; closing gives pages and states back."""
    backend, _, cache, _ = made
    assert backend.streams_free == 3
    streams = [backend.open_stream(), backend.open_stream()]
    assert backend.fits(5 * PAGE_TOKENS)
    assert not backend.fits(5 * PAGE_TOKENS + 1)
    assert backend.extend(streams[0], 3 * PAGE_TOKENS - 20)
    assert backend.memory_tokens == (0, 3 * PAGE_TOKENS)
    backend.prefill(streams[0], [1] * 300, all_logits=False)
    assert backend.memory_tokens == (300, 3 * PAGE_TOKENS)
    assert not backend.fits(2 * PAGE_TOKENS + 1)
    assert not backend.extend(streams[1], 2 * PAGE_TOKENS + 1)
    assert backend.memory_tokens == (300, 3 * PAGE_TOKENS)
    assert backend.extend(streams[1], 2 * PAGE_TOKENS)
    assert backend.extend(streams[0], 3 * PAGE_TOKENS)
    assert not backend.extend(streams[0], 3 * PAGE_TOKENS + 1)
    backend.open_stream()
    with pytest.raises(RuntimeError, match="3 streams are open"):
        backend.open_stream()
    backend.close_stream(list(backend._open.values())[-1])
    with pytest.raises(RuntimeError, match="2 streams are open"):
        backend.check_idle()
    for stream in streams:
        backend.close_stream(stream)
    backend.check_idle()
    assert (backend.streams_free, cache.states_open, backend.memory_tokens) == (3, 0, (0, 0))


def test_prefills_can_be_broken_off_and_decode_steps_cannot(made: Any) -> None:
    """Whoever runs the backend is asked within prefills alone, be their logits scored or not."""
    backend, model, _, experts = made
    asked: list[Any] = []
    forward = model.forward
    model.forward = lambda *args: (asked.append(experts.unwanted), forward(*args))[1]
    unwanted = lambda: False  # noqa: E731
    assert isinstance(backend, BreaksOff)
    backend.break_off_when(unwanted)
    stream = backend.open_stream()
    backend.prefill(stream, [1, 2, 3], all_logits=False)
    backend.prefill(stream, [1] * (SCORED_ROWS + 1), all_logits=True)
    backend.decode([stream], [1])
    assert asked == [unwanted] * 3 + [None]


def test_reserved_pages_change_no_pass(made: Any) -> None:
    """Block tables name the pages that a pass reads and writes, and no more: equal passes, whatever their streams have in reserve."""
    backend, model, _, _ = made
    plain, ahead = backend.open_stream(), backend.open_stream()
    assert backend.extend(plain, 1)
    assert backend.extend(ahead, 3 * PAGE_TOKENS)
    for stream in (plain, ahead):
        backend.prefill(stream, [1] * 5, all_logits=False)
        backend.decode([stream], [1])
    (_, a), (_, b), (_, c), (_, d) = model.calls
    assert a["block_table"].tolist() == [[0]]
    assert c["block_table"].tolist() == [[1]]
    assert b["block_table"].shape == d["block_table"].shape
    assert d["block_table"][0, 1:].tolist() == [0] * (d["block_table"].shape[1] - 1)


def test_pages_are_told(made: Any) -> None:
    """All of the cache's, and those that nobody has."""
    backend, _, _, _ = made
    backend.extend(backend.open_stream(), 2 * PAGE_TOKENS)
    assert backend.stats() == {"slots": 1, "checksum_failures": 3, "cache_pages": 5, "cache_pages_free": 3, "cache_pages_kept": 0}


def test_more_tokens_than_the_cache_has_fail_this_call_alone(made: Any) -> None:
    """The stream keeps what it has."""
    backend, _, _, _ = made
    stream = backend.open_stream()
    with pytest.raises(PagesExhausted):
        backend.prefill(stream, [1] * (6 * PAGE_TOKENS), all_logits=False)
    assert stream.length == 0
    assert backend.prefill(stream, [1], all_logits=False).argmax() == 2


def test_closing_takes_addresses_back_before_patches_and_memory_go(made: Any) -> None:
    """The arena's check ends, heat is saved; slots are let go, patches taken out, the model unloaded, records unpinned and unmapped."""
    backend, model, _, experts = made
    order = model.events = experts.events
    records = types.SimpleNamespace(close=lambda: order.append("unpinned"))
    records.arena = types.SimpleNamespace(close=lambda: order.append("unmapped"))
    backend._records = records
    backend._heat = types.SimpleNamespace(close=lambda: order.append("heat saved"))
    backend.check = types.SimpleNamespace(close=lambda: order.append("check ended"))
    backend._replacements = types.SimpleNamespace(undo=lambda: order.append("patches out"))
    backend.close()
    assert order == ["check ended", "heat saved", "experts closed", "patches out", "unloaded", "unpinned", "unmapped"]


def test_a_device_error_ends_the_backend_and_others_do_not(made: Any) -> None:
    """The engine restarts the worker for the first and fails one request for the second."""
    backend, model, _, _ = made
    stream = backend.open_stream()
    model.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(BackendLostError, match="the GPU failed: CUDA error"):
        backend.decode([stream], [1])
    model.error = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        backend.decode([stream], [1])


def test_more_streams_than_a_pass_takes_have_turns_in_one_step(made: Any) -> None:
    """Every stream gets its token in the step, in passes of the size that is set, each with its own pages and positions."""
    backend, model, _, experts = made
    backend._step_streams = 2
    streams = [backend.open_stream() for _ in range(2)]
    for stream in streams:
        backend.prefill(stream, [1, 2], all_logits=False)
    model.calls.clear()
    experts.events.clear()
    backend.decode(streams, [5, 6])
    assert [ids for ids, _ in model.calls] == [[[5], [6]]]
    backend._step_streams = 1
    model.calls.clear()
    logits = backend.decode(streams, [7, 8])
    assert [ids for ids, _ in model.calls] == [[[7]], [[8]]]
    assert logits.argmax(-1).tolist() == [8, 9]
    assert [params["cache_seqlens"].tolist() for _, params in model.calls] == [[3], [3]]
    assert model.calls[0][1]["block_table"][0, 0] != model.calls[1][1]["block_table"][0, 0]
    assert experts.events == ["between"] * 3


def test_a_repair_waits_for_the_pass_and_comes_before_the_next(made: Any) -> None:
    """However close passes follow each other: the record is replaced while none reads it."""
    backend, model, _, experts = made
    stream = backend.open_stream()
    inside, go_on, forward = threading.Event(), threading.Event(), model.forward

    def slow(*args: Any) -> Any:
        inside.set()
        experts.events.append("pass begins")
        assert go_on.wait(10)
        try:
            return forward(*args)
        finally:
            experts.events.append("pass ends")

    model.forward = slow

    def passes() -> None:
        for _ in range(3):
            backend.decode([stream], [1])

    threads = [threading.Thread(target=passes), threading.Thread(target=backend.repair, args=(1, 2, np.array([7], np.uint8)))]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    until(lambda: backend._passes._door.locked(), "the repair waits")
    assert (1, 2, [7]) not in experts.events
    go_on.set()
    for thread in threads:
        thread.join(10)
    one = ["pass begins", "pass ends", "between"]
    assert experts.events == [*one, (1, 2, [7]), *one, *one]


def test_a_pass_that_does_not_end_is_not_waited_for_for_ever(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is told by an error of its own kind, and passes go on."""
    backend, _, _, experts = made
    monkeypatch.setattr(module, "REPAIR_WAIT_S", 0.05)
    with backend._passes.in_pass(), pytest.raises(OSError, match="a pass has not ended"):
        backend.repair(0, 0, np.array([1], np.uint8))
    backend.decode([backend.open_stream()], [1])
    assert experts.events == ["between"]


def test_a_device_error_in_a_repair_loses_the_record_and_a_lost_record_the_backend(made: Any) -> None:
    """The next pass of any kind refuses, and no later worker finds the arena."""
    backend, model, _, experts = made
    stream = backend.open_stream()

    def broken(*_args: Any) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    experts.repair = broken
    arena = FakeArena((1, 2))
    backend.check = ArenaCheck(arena, reload, backend.repair)
    backend.check.start()
    until(lambda: backend.check.lost != "", "the record is lost")
    for call in (lambda: backend.decode([stream], [1]), lambda: backend.prefill(stream, [1], all_logits=False)):
        with pytest.raises(BackendLostError, match=r"layer 1, expert 2 .* the GPU failed: CUDA error"):
            call()
    assert model.calls == []
    assert not arena.has_name
    backend.check.close()
    assert backend.stats()["arena_check"] == {"checked": 7, "bad": 1, "repaired": 0, "done": False}
    assert backend.stats()["checksum_failures"] == 3 + 1
