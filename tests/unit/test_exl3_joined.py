"""A chunk of prompt and its tail in one pass: the bits, states and snapshots of two passes, and each layer's experts staged once.

The model is exllamav3's in small (tests/support/layered_model.py) over the real store. Bits of real kernels are compared on a GPU
(tests/gpu/test_joined.py).
"""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends.base import BackendInfo, Logits, PassBrokenOff, Snapshot, chunk_end, prefill_apart, tail_end
from services.gpu_worker.backends.exl3 import backend as module
from services.gpu_worker.backends.exl3 import joined
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import DECODE_ROWS, ExpertOptions
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.backends.exl3.placement import NONE, PlacementOptions
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.loop import EngineLimits, EngineLoop
from services.gpu_worker.metrics import EngineMetrics
from services.gpu_worker.patches.replace import Replacements
from services.gpu_worker.request import (
    Admitted,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    Priority,
    PromptScores,
    Request,
    RequestSpec,
    SamplingParams,
)
from tests.gpu import broken_passes, joined_passes
from tests.support.layered_model import STATE_BYTES, VOCAB, Cache, Model, State, Trace, advance_recurrent_states
from tests.unit import test_exl3_experts as store_tests
from tests.unit import test_exl3_on_demand as pager_tests
from tests.unit.test_exl3_backend import torch_without_a_gpu
from tests.unit.test_exl3_experts import EXPERTS, LAYERS, World
from tests.unit.test_worker_loop import Reader

host_as_device, driver = store_tests.host_as_device, pager_tests.driver
ADMISSIONS = ("between_steps", "in_step")
SLOTS = 14
PAGES = 16
CHUNK = 512
TABLE = TokenTable([bytes([65 + i]) for i in range(VOCAB)], frozenset())
BLOCKS = ("embedding", "block 0", "block 1", "block 2", "block 3")


@pytest.fixture(autouse=True)
def exllamav3_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.SimpleNamespace(advance_recurrent_states=advance_recurrent_states)
    monkeypatch.setitem(sys.modules, "exllamav3.cache.recurrent_util", stand_in)
    monkeypatch.setattr(module, "torch", torch_without_a_gpu())


def options(admission: str = "between_steps") -> ExpertOptions:
    pager = PagerPolicy(max_copies=6)
    return ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=64, on_demand=admission == "in_step", pager=pager)


def make(admission: str = "between_steps", slots: int = SLOTS, *, join: bool = True, streams: int = 4) -> tuple[Exl3Backend, Model, Cache]:
    world = World(slots, options(admission))
    model = Model(world)
    cache = Cache(model, PAGES, streams)
    info = BackendInfo(VOCAB, 8 * PAGE_TOKENS, streams, "cuda", "", "exact", "", "", "", 0, 0, "", CHUNK, PAGE_TOKENS, STATE_BYTES)
    info = replace(info, joined_tail_from=DECODE_ROWS + 1 if join else 0)
    backend = Exl3Backend(model, cache, world.store, None, Replacements(), info)  # type: ignore[arg-type]
    return backend, model, cache


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def read(backend: Exl3Backend, stream: Any, prompt: list[int]) -> tuple[Logits, Snapshot | None]:
    """The rest of a prompt as the engine cuts it; the last logits, and the snapshot before the tail."""
    logits, snapshot = np.zeros((1, VOCAB), np.float32), None
    while stream.length < len(prompt):
        start = stream.length
        end = chunk_end(start, len(prompt), CHUNK, PAGE_TOKENS)
        until = tail_end(end, len(prompt), CHUNK, backend.info)
        if until > end:
            logits, snapshot = backend.prefill_joined(stream, prompt[start:end], prompt[end:until], keep=True)
        else:
            logits = backend.prefill(stream, prompt[start:end], all_logits=False)
            if end == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS:
                snapshot = backend.snapshot(stream)
    return logits, snapshot


def answer(backend: Exl3Backend, stream: Any, logits: Logits, steps: int = 4) -> list[Logits]:
    rows = [logits]
    for _ in range(steps):
        rows.append(backend.decode([stream], [int(rows[-1].argmax())]))
    return rows


def every_bit(cache: Cache) -> list[Any]:
    """What pages and states hold."""
    return [pages.tolist() for pages in cache.pages.values()] + [layer.digests for layer in cache.recurrent_layers.values()]


# ---- the backend ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("slots", [1, SLOTS, LAYERS * EXPERTS])
def test_both_parts_have_the_bits_of_two_passes(driver: Any, admission: str, slots: int) -> None:
    """Logits of the prompt and of the steps that follow, pages, states and snapshots; for tails of every kind, and prompts without one."""
    for length in (9, 200, 256, 257, 258, 265, 266, 300, 511, 512, 513, 1000):
        sides = []
        for join in (True, False):
            backend, model, cache = make(admission, slots, join=join)
            stream = backend.open_stream()
            logits, snapshot = read(backend, stream, prompt_of(length))
            rows = answer(backend, stream, logits)
            assert stream.length == stream.state.position == length + 4
            kept: Any = snapshot
            sides.append((np.array(rows).tolist(), every_bit(cache), kept and (kept.length, kept.state, kept.pages)))
            backend.close_stream(stream)
            if snapshot is not None:
                snapshot.release()
            backend.check_idle()
            assert backend.stats()["cache_pages_free"] == PAGES
            model.world.store.close()
        assert sides[0] == sides[1], length


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_each_layer_is_staged_once_for_both(driver: Any, admission: str) -> None:
    """As many bytes as the chunk alone takes; two passes take twice as many."""
    staged = {}
    for name, join, length in (("joined", True, 400), ("short tail", True, 290), ("apart", False, 400), ("chunk alone", True, 257)):
        backend, model, _ = make(admission, 2 * EXPERTS, join=join)
        read(backend, backend.open_stream(), prompt_of(length))
        staged[name] = backend.stats()["bytes_staged"], backend.stats()["staged_passes"]
        model.world.store.close()
    one = LAYERS * EXPERTS * store_tests.SHAPE.record_bytes
    assert staged == {"joined": (one, 1), "short tail": (one, 1), "apart": (2 * one, 2), "chunk alone": (one, 1)}


def test_every_module_computes_the_chunk_and_then_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its own positions; the chunk ends inside the last layer with a cache, the head sees the tail's last row alone.

    VRAM is made free for the rows of both.
    """
    backend, model, _ = make()
    stream = backend.open_stream()
    backend.prefill(stream, prompt_of(256), all_logits=False)
    model.trace.clear()
    calls = []
    forward = model.forward
    model.forward = lambda ids, params: calls.append(ids.tolist()) or forward(ids, params)  # type: ignore[method-assign]
    rows: list[int] = []
    begin = backend.experts.begin_prefill
    monkeypatch.setattr(backend.experts, "begin_prefill", lambda count: (rows.append(count), begin(count)))
    prompt = prompt_of(300, 3)
    before = backend.stats()["prefill_steps"]
    logits, _ = backend.prefill_joined(stream, prompt[:256], prompt[256:], keep=False)
    assert calls == []
    want: list[Trace] = [(name, *part) for name in BLOCKS for part in ((256, 256), (512, 44))]
    assert model.trace == [*want, ("head", 512, 1)]
    assert backend.stats()["prefill_steps"] - before == 2 * LAYERS - 1
    assert rows == [300]
    assert logits.shape == (1, VOCAB)
    assert stream.length == 556


def test_the_state_at_the_page_s_end_is_that_of_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that continue it go on with the bits of whole runs; asked not to, nothing is copied."""
    backend, model, cache = make()
    prompt = prompt_of(700)
    stream = backend.open_stream()
    want, snapshot = read(backend, stream, prompt)
    assert snapshot is not None
    assert snapshot.num_bytes == STATE_BYTES
    backend.close_stream(stream)
    other = backend.open_stream()
    read(backend, other, prompt_of(1500, 5))
    model.trace.clear()
    again = backend.open_stream(snapshot)
    assert again.length == 512
    assert np.array_equal(read(backend, again, prompt)[0], want)
    assert model.trace[0] == ("embedding", 512, 187)
    longer = prompt[:512] + prompt_of(400, 9)
    more, fresh = backend.open_stream(snapshot), backend.open_stream()
    assert np.array_equal(read(backend, more, longer)[0], read(backend, fresh, longer)[0])
    for open_one in (other, again, more, fresh):
        backend.close_stream(open_one)
    for layer in cache.recurrent_layers.values():
        monkeypatch.setattr(layer, "stash", lambda _slot: pytest.fail("a state was copied"))
    assert backend.prefill_joined(backend.open_stream(), prompt[:512], prompt[512:699], keep=False)[1] is None


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_a_pass_that_fails_in_the_middle_leaves_the_backend_whole(driver: Any, admission: str) -> None:
    """In any module and either part, while the experts are at hand or before: the stream's length stays, other streams go on."""
    prompt = prompt_of(400)
    quiet, _, _ = make(admission)
    stream = quiet.open_stream()
    want = answer(quiet, stream, read(quiet, stream, prompt)[0])
    backend, model, cache = make(admission)
    places = [(name, start) for name in (*BLOCKS, "head", "read") for start in (0, 256) if (name, start) != ("head", 0)]
    for name, start in places:
        broken = backend.open_stream()

        def fail(at: str, position: int, wanted: tuple[str, int] = (name, start)) -> None:
            if (at, position) == wanted:
                raise RuntimeError("a kernel failed")

        model.before = fail
        reads = itertools.count()

        def read_or_fail(layer: int, expert: int, start: int = start, reads: Iterator[int] = reads) -> None:
            # The eleventh read is the tail's first in the first expert layer.
            if next(reads) == (EXPERTS if start else 3):
                raise RuntimeError("a kernel failed")
            World.read(model.world, layer, expert)

        if name == "read":
            model.world.read = read_or_fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a kernel failed"):
            backend.prefill_joined(broken, prompt[:256], prompt[256:399], keep=True)
        assert (broken.length, broken.state.position) == (0, 0)
        backend.close_stream(broken)
        backend.check_idle()
        model.before = lambda _name, _position: None
        model.world.read = types.MethodType(World.read, model.world)  # type: ignore[method-assign]
        assert backend.stats()["cache_pages_free"] == PAGES
        whole = backend.open_stream()
        logits, snapshot = read(backend, whole, prompt)
        assert np.array_equal(answer(backend, whole, logits), want), (name, start)
        backend.close_stream(whole)
        assert snapshot is not None
        snapshot.release()
    assert len(cache.slots) == 4


Layer = tuple[str, int]  # a block with experts, and where the part begins that is computed
CHUNK_LAYERS, TAIL_LAYERS = ([(name, start) for name in ("block 1", "block 2", "block 3")] for start in (0, 256))


PREFILLS: dict[str, Callable[[Exl3Backend, Any, list[int]], object]] = {
    "joined": lambda backend, stream, prompt: backend.prefill_joined(stream, prompt[:256], prompt[256:399], keep=True),
    "chunk": lambda backend, stream, prompt: backend.prefill(stream, prompt, all_logits=False),
    "scored": lambda backend, stream, prompt: backend.prefill(stream, prompt, all_logits=True),
}


class Unwanted:
    """A pass that is not wanted any more from some place on.

    Attributes:
        asked: how often that was asked.
    """

    def __init__(self, backend: Exl3Backend, model: Model, place: Layer) -> None:
        self.gone, self.asked, self._place = False, 0, place
        backend.break_off_when(self._ask)
        model.before = self._look

    def _look(self, name: str, position: int) -> None:
        self.gone = self.gone or (name, position) == self._place

    def _ask(self) -> bool:
        self.asked += 1
        return self.gone


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("kind", PREFILLS)
def test_a_prefill_that_is_not_wanted_any_more_leaves_the_backend_whole(driver: Any, admission: str, kind: str) -> None:
    """In every layer and part it ends there; its pages and state come back, and all others have the bits that they have without it."""
    prompt, other = prompt_of(400), prompt_of(300, 7)
    quiet, _, _ = make(admission)
    mine, beside = quiet.open_stream(), quiet.open_stream()
    want = answer(quiet, mine, read(quiet, mine, prompt)[0])
    want_beside = answer(quiet, beside, read(quiet, beside, other)[0], steps=12)
    backend, model, cache = make(admission)
    running = backend.open_stream()
    first, kept = read(backend, running, other)
    rows = [first]
    places = {"joined": CHUNK_LAYERS[:2] + TAIL_LAYERS, "chunk": CHUNK_LAYERS, "scored": CHUNK_LAYERS + TAIL_LAYERS}[kind]
    for place in places:
        unwanted, broken = Unwanted(backend, model, place), backend.open_stream()
        model.trace.clear()
        with pytest.raises(PassBrokenOff):
            PREFILLS[kind](backend, broken, prompt)
        assert [(name, start) for name, start, _ in model.trace][-1] == place
        assert backend.experts._staging.now is None
        backend.close_stream(broken)
        assert backend.stats()["cache_pages_free"] == PAGES - len(running.pages)
        asked = unwanted.asked
        # A decode step of others is not asked about, whoever has gone.
        rows += answer(backend, running, rows[-1], steps=2)[1:]
        assert unwanted.asked == asked
        unwanted.gone, model.before = False, lambda _name, _position: None
        whole = backend.open_stream()
        logits, snapshot = read(backend, whole, prompt)
        assert np.array_equal(answer(backend, whole, logits), want), place
        assert np.array_equal(rows, want_beside[: len(rows)]), place
        backend.close_stream(whole)
        assert snapshot is not None
        snapshot.release()
    backend.close_stream(running)
    assert kept is not None
    kept.release()
    backend.check_idle()
    assert backend.stats()["cache_pages_free"] == PAGES
    assert len(cache.slots) == 4


def test_a_step_of_many_streams_is_not_broken_off(driver: Any) -> None:
    """More rows than decode's kernels take go as a prefill; a step it is all the same."""
    backend, _, _ = make(slots=2 * EXPERTS, streams=DECODE_ROWS + 1)
    streams = [backend.open_stream() for _ in range(DECODE_ROWS + 1)]
    for seed, stream in enumerate(streams):
        backend.prefill(stream, prompt_of(20, seed), all_logits=False)
    backend.break_off_when(lambda: True)
    assert backend.decode(streams, list(range(len(streams)))).shape == (DECODE_ROWS + 1, VOCAB)


def test_a_pass_that_nobody_announced_is_staged_after_one_that_broke() -> None:
    """Its layer 0 is no second part of the broken pass."""
    world = World(2 * EXPERTS, options())
    world.store.begin_prefill(300)

    def broken_part() -> None:
        with world.store.part_follows():
            world.store.before_experts(0, 300, None)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        broken_part()
    staged = world.store.stats()["staged_passes"]
    for layer in range(LAYERS):
        world.store.before_experts(layer, 300, None)
        for expert in range(EXPERTS):
            world.read(layer, expert)
        world.store.after_experts(layer)
    assert world.store.stats()["staged_passes"] == staged + 1


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("between", [0, 1])
def test_a_step_of_many_streams_is_no_part_of_a_pass_that_broke(driver: Any, admission: str, between: int) -> None:
    """More rows than decode's kernels take go as a prefill, and do not read slots that the broken pass has filled with other layers."""
    backend, model, _ = make(admission, 2 * EXPERTS, streams=DECODE_ROWS + 3)
    streams = [backend.open_stream() for _ in range(DECODE_ROWS + 1)]
    for seed, stream in enumerate(streams):
        backend.prefill(stream, prompt_of(20, seed), all_logits=False)

    def fail(at: str, position: int) -> None:
        if (at, position) == ("block 2", 256):
            raise RuntimeError("a kernel failed")

    model.before = fail
    broken = backend.open_stream()
    with pytest.raises(RuntimeError, match="a kernel failed"):
        backend.prefill_joined(broken, prompt_of(256), prompt_of(143), keep=False)
    backend.close_stream(broken)
    model.before = lambda _name, _position: None
    for _ in range(between):
        backend.decode(streams[:2], [1, 2])
    # The model in small checks every byte that it reads.
    assert backend.decode(streams, list(range(len(streams)))).shape == (DECODE_ROWS + 1, VOCAB)


def test_a_layer_stays_staged_until_its_last_part_is_launched() -> None:
    """Between the parts, and while the second computes, its tables lead to slots; then back to the host."""
    world = World(2 * EXPERTS, options())
    store = world.store
    store.begin_prefill(300)
    low, high = store._slots.data_ptr(), store._slots.data_ptr() + store._slots.numel()

    def in_slots(layer: int) -> bool:
        return all(low <= int(address) < high for address in world.table[layer].flatten())

    for layer in range(LAYERS):
        with store.part_follows():
            store.before_experts(layer, 300, None)
            assert in_slots(layer)
            store.after_experts(layer)
        assert in_slots(layer)
        assert store._staging.slot_of(layer, 3) != NONE
        store.before_experts(layer, 40, None)
        assert in_slots(layer)
        for expert in range(EXPERTS):
            world.read(layer, expert)
        store.after_experts(layer)
        assert not in_slots(layer)
    assert store.stats()["prefill_steps"] == store.progress == 2 * LAYERS


def test_a_tail_of_few_rows_is_a_pass_of_its_own() -> None:
    """Decode's kernels compute it, for which no layer is staged; from nine rows on it is joined, however short for staging alone."""
    for rows, parts in ((DECODE_ROWS, [(0, 256), (256, 8)]), (DECODE_ROWS + 1, [(0, 256), (256, 9)])):
        backend, model, _ = make()
        stream = backend.open_stream()
        backend.prefill_joined(stream, prompt_of(256), prompt_of(rows), keep=False)
        assert [(start, tokens) for name, start, tokens in model.trace if name == "block 1"] == parts
        joined_up = [name for name, start, _ in model.trace[:2] if start == 256] == ["embedding"]
        assert joined_up == (rows > DECODE_ROWS)
        assert stream.length == 256 + rows


def test_a_chunk_that_ends_inside_a_page_is_refused() -> None:
    """There no state can be kept, and two passes would be cut elsewhere."""
    backend, _, _ = make()
    stream = backend.open_stream()
    with pytest.raises(ValueError, match="ends at 300, not where a page of 256 tokens does"):
        backend.prefill_joined(stream, prompt_of(300), prompt_of(20), keep=True)
    assert (stream.length, stream.pages) == (0, [])


def test_models_whose_layers_look_beyond_their_part_are_not_joined() -> None:
    """Each with its reason."""
    _, model, _ = make()
    assert joined.why_not(model, State) == ""
    assert joined.why_not(model, dict) == "its layers read the position of a State"
    model.modules[2].caps["prefetch_ids"] = True
    assert joined.why_not(model, State) == "it has layers that read a pass's tokens ahead"
    model.modules[2].caps.clear()
    model.last_kv_module_idx_instance = (9, 0)
    assert joined.why_not(model, State) == "its last layer with a cache is not known"
    model.recurrent_state_cls = None  # type: ignore[assignment]
    assert joined.why_not(model, State) == "it has no recurrent layers"


def test_two_passes_let_go_of_the_state_when_the_second_fails() -> None:
    """Nobody else would."""
    backend, model, _ = make(join=False)
    stream = backend.open_stream()

    def fail(_name: str, position: int) -> None:
        if position == 256:
            raise RuntimeError("a kernel failed")

    model.before = fail
    with pytest.raises(RuntimeError, match="a kernel failed"):
        prefill_apart(backend, stream, prompt_of(256), prompt_of(100), keep=True)
    backend.close_stream(stream)
    assert backend.stats()["cache_pages_free"] == PAGES


# ---- where prompts are cut --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "total", "size", "until"),
    [
        (256, 300, 512, 299),  # all but the last token
        (256, 257, 512, 256),  # nothing is left but that
        (256, 265, 512, 256),  # eight rows
        (256, 266, 512, 265),
        (256, 512, 256, 511),
        (512, 513, 512, 512),
        (256, 1000, 256, 256),  # not the last full page
        (768, 1000, 256, 999),
        (768, 1000, 200, 768),  # the tail would be cut
        (100, 300, 512, 100),
        (299, 300, 512, 299),
        (300, 300, 512, 300),
    ],
)
def test_tails_are_the_rest_behind_the_last_full_page(end: int, total: int, size: int, until: int) -> None:
    """But for the last token, whole or not at all; none where the backend joins none."""
    backend, _, _ = make()
    assert tail_end(end, total, size, backend.info) == until
    for other in ({"joined_tail_from": 0}, {"page_tokens": 0}):
        assert tail_end(end, total, size, replace(backend.info, **other)) == end


# ---- the engine -------------------------------------------------------------------------------------------------------------------------


class Bench:
    """The engine over the backend, with a bound on kept states in units of one."""

    def __init__(self, *, join: bool = True, states: int = 8, **limits: Any) -> None:
        self.backend, self.model, _ = make(join=join)
        limit = {"max_queued": 64, "chunk_size": CHUNK, "busy_chunk_size": 256, "prefix_cache_bytes": states * STATE_BYTES, **limits}
        self.loop = EngineLoop(self.backend, TABLE, frozenset(), EngineLimits(**limit), EngineMetrics())
        self._numbers = itertools.count()

    def submit(self, prompt: list[int], scores: PromptScores | None = None, **sampling: Any) -> Reader:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "logprobs": 5, **sampling})
        reader = Reader()
        spec = RequestSpec(f"r{next(self._numbers)}", tuple(prompt), params, "", Priority.NORMAL, 60.0, scores)
        self.loop.submit(Request(spec, reader))
        return reader

    def run(self) -> None:
        for _ in range(2000):
            if not self.loop.step():
                return
        raise AssertionError("the loop does not come to rest")

    def ask(self, prompt: list[int], **fields: Any) -> tuple[Reader, list[tuple[int, int]]]:
        """A request alone, and its passes through the first block as (first position, tokens)."""
        self.model.trace.clear()
        reader = self.submit(prompt, **fields)
        self.run()
        assert isinstance(reader.end, Finished)
        return reader, [(start, tokens) for name, start, tokens in self.model.trace if name == "block 0" and tokens > 1]


def test_answers_and_kept_states_are_those_of_two_passes() -> None:
    """Every prompt twice, the second time behind the state that the first one left."""
    joining, apart = Bench(), Bench(join=False)
    for length in (100, 256, 257, 264, 266, 300, 512, 513, 700, 1000, 1281):
        for _turn in range(2):
            (mine, passes), (theirs, wanted) = (bench.ask(prompt_of(length, length)) for bench in (joining, apart))
            assert passes == wanted
            mine_told, theirs_told = ([e for e in r.events if not isinstance(e, PrefillProgress)] for r in (mine, theirs))
            assert [getattr(e, "tokens", None) for e in mine_told] == [getattr(e, "tokens", None) for e in theirs_told]
            assert isinstance(mine.end, Finished)
            assert isinstance(theirs.end, Finished)
            assert mine.end.cached_tokens == theirs.end.cached_tokens
    for name in ("kept_states", "kept_state_bytes", "prefill_tokens", "cached_prompt_tokens"):
        assert joining.loop.metrics.to_json()[name] == apart.loop.metrics.to_json()[name], name
    assert joining.loop.metrics.to_json()["kept_states"] > 0


def test_a_joined_pass_is_one_step_of_the_engine() -> None:
    """The reader is told of both parts at once, and the last chunk alone is joined."""
    bench = Bench()
    reader = bench.submit(prompt_of(1000))
    steps = []
    for _ in range(4):
        bench.model.trace.clear()
        bench.loop.step()
        steps.append([(start, tokens) for name, start, tokens in bench.model.trace if name == "block 0"])
    assert steps[:2] == [[(0, 512)], [(512, 256), (768, 231)]]
    assert steps[2] == [(999, 1), (1000, 1)]
    assert [(e.done_tokens, e.total_tokens) for e in reader.events if isinstance(e, PrefillProgress)] == [
        (512, 1000),
        (999, 1000),
        (1000, 1000),
    ]


def test_a_prompt_whose_state_is_kept_computes_its_tail_alone() -> None:
    """There is no chunk to join it to."""
    bench = Bench()
    assert bench.ask(prompt_of(700))[1] == [(0, 512), (512, 187)]
    assert bench.ask(prompt_of(700))[1] == [(512, 187)]
    assert bench.ask(prompt_of(512) + prompt_of(500, 4))[1] == [(512, 256), (768, 243)]


def test_a_scored_prompt_is_not_joined() -> None:
    """Logits of all its positions are wanted, in the pieces of every other scored prompt."""
    bench, apart = Bench(), Bench(join=False)
    sides = [b.ask(prompt_of(400), scores=PromptScores(1, 2)) for b in (bench, apart)]
    assert sides[0][1] == sides[1][1]
    scored = [[t for e in r.events if isinstance(e, PrefillProgress) for t in e.prompt_tokens] for r, _ in sides]
    assert len(scored[0]) == 400
    assert scored[0] == scored[1]


def test_a_scored_prompt_is_a_page_in_each_step() -> None:
    """Others get their tokens between two pages, and no more rows of logits lie in host memory at once."""
    bench = Bench(busy_chunk_size=CHUNK)
    running = bench.submit(prompt_of(20), max_tokens=40)
    for _ in range(2):
        bench.loop.step()
    scored = bench.submit(prompt_of(1000, 2), scores=PromptScores(1, 0))
    steps = []
    for _ in range(5):
        bench.model.trace.clear()
        before = len(running.ids)
        bench.loop.step()
        assert len(running.ids) == before + 1
        steps.append([(start, tokens) for name, start, tokens in bench.model.trace if name == "head" and start < 1000 and tokens > 1])
    assert steps == [[(0, 256)], [(256, 256)], [(512, 256)], [(768, 231)], []]
    bench.run()
    assert isinstance(scored.end, Finished)


def test_running_streams_get_their_token_after_a_joined_pass() -> None:
    """One step lies between any two of their tokens, as without a tail."""
    bench = Bench()
    running = bench.submit(prompt_of(20), max_tokens=40)
    for _ in range(2):
        bench.loop.step()
    bench.submit(prompt_of(600, 2))
    bench.model.trace.clear()
    for _ in range(3):
        before = len(running.ids)
        bench.loop.step()
        assert len(running.ids) == before + 1
    prefill = [part for part in bench.model.trace if part[0] == "block 0" and part[2] > 1]
    assert prefill == [("block 0", 0, 256), ("block 0", 256, 256), ("block 0", 512, 87)]
    bench.run()
    assert isinstance(running.end, Finished)


def test_a_joined_pass_that_fails_takes_its_own_request_alone() -> None:
    """Pages and states come back, and the next prompt is computed."""
    bench = Bench()
    want = Bench().ask(prompt_of(400, 1))[0].ids

    def fail(name: str, position: int) -> None:
        if (name, position) == ("block 2", 256):
            raise RuntimeError("a kernel failed")

    bench.model.before = fail
    reader = bench.submit(prompt_of(400, 1))
    bench.run()
    assert isinstance(reader.end, Failed)
    assert bench.loop.metrics.to_json()["kept_states"] == 0
    bench.model.before = lambda _name, _position: None
    assert bench.ask(prompt_of(400, 1))[0].ids == want


@pytest.mark.parametrize("place", [("block 2", 0), ("block 1", 256), ("block 3", 256)])
def test_a_cancelled_request_leaves_in_the_middle_of_its_pass(place: Layer) -> None:
    """Before the experts of the next layer, be it the chunk's or the tail's. No state is kept of it, and nobody else's answer changes."""
    want = Bench().ask(prompt_of(20, 4), max_tokens=9)[0].ids
    bench = Bench()
    running = bench.submit(prompt_of(20, 4), max_tokens=9)
    for _ in range(2):
        bench.loop.step()
    reader = bench.submit(prompt_of(400))
    bench.model.trace.clear()
    running_length = bench.backend.memory_tokens[0]
    bench.model.before = lambda name, position: bench.loop.cancel("r1") if (name, position) == place else None
    bench.loop.step()
    assert [(name, start) for name, start, tokens in bench.model.trace if tokens > 1][-1] == place
    assert [start for name, start, _ in bench.model.trace if name == "head"] == [running_length]
    assert isinstance(reader.events[0], Admitted)
    assert isinstance(reader.end, Finished)
    assert (reader.end.reason, reader.end.prompt_tokens, reader.ids) == (FinishReason.CANCELLED, 400, [])
    assert not any(isinstance(event, PrefillProgress) for event in reader.events)
    assert bench.backend.memory_tokens[1] == PAGE_TOKENS
    bench.model.before = lambda _name, _position: None
    bench.run()
    assert running.ids == want
    assert bench.loop.metrics.to_json()["kept_states"] == 0
    assert bench.backend.stats()["cache_pages_free"] == PAGES
    assert bench.ask(prompt_of(400))[1] == [(0, 256), (256, 143)]


def test_a_request_that_is_cancelled_after_its_last_layer_leaves_behind_the_pass() -> None:
    """Nothing asks any more; its state at the page's end serves whoever asks the same."""
    bench = Bench()
    reader = bench.submit(prompt_of(400))
    bench.model.before = lambda name, position: bench.loop.cancel("r0") if (name, position) == ("head", 256) else None
    bench.run()
    assert isinstance(reader.end, Finished)
    assert reader.end.reason is FinishReason.CANCELLED
    assert bench.ask(prompt_of(400))[1] == [(256, 143)]


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_the_comparison_of_a_gpu_machine_runs_here_and_sees_faults(driver: Any, admission: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows equal over the stand-in; with kept states of another moment those that have a tail are not."""
    lengths = (257, 300, 511, 1000)

    def rows() -> list[dict[str, Any]]:
        backend, model, _ = make(admission)
        model.world.store.place(range(SLOTS // 2))
        found = list(joined_passes.every_case(backend, "here", lengths))
        model.world.store.close()
        return found

    sound = rows()
    assert [row["length"] for row in sound] == [*lengths]
    assert all(row["equal"] and row["states_equal"] and row["steps"] > joined_passes.STEPS for row in sound)
    assert [row["staged_joined"] < row["staged_apart"] for row in sound] == [False, False, True, True]
    copy = joined.StateAtPageEnd.copy

    def too_late(self: joined.StateAtPageEnd, layer: Any, instance: int) -> None:
        copy(self, layer, instance)
        self.stashed |= {key: value + 1 for key, value in self.stashed.items() if isinstance(key, tuple)}

    with monkeypatch.context() as patch:
        patch.setattr(joined.StateAtPageEnd, "copy", too_late)
        assert [row["states_equal"] and row["equal"] for row in rows()] == [True, False, False, False]


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_the_comparison_behind_broken_passes_runs_here_and_sees_faults(
    driver: Any, admission: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows equal over the stand-in; not those behind a pass whose pages somebody else has written to, nor where none breaks off."""

    def rows() -> list[dict[str, Any]]:
        backend, model, _ = make(admission)
        model.world.store.place(range(SLOTS // 2))
        found = list(broken_passes.every_case(backend, "here"))
        model.world.store.close()
        return found

    sound = rows()
    assert [row["name"].split(", before ")[1] for row in sound] == [
        *(f"layer {layer} of {LAYERS}" for layer in (1, 2, LAYERS)),
        # Of the chunk's last layer with a cache nothing but the cache is computed.
        *(f"layer {layer} of {2 * LAYERS - 1}" for layer in (1, 2, 2 * LAYERS - 1)),
    ]
    assert all(row["equal"] and row["states_equal"] and row["beside_equal"] and 0 <= row["took_s"] < 60 for row in sound)
    close = Exl3Backend.close_stream

    def scribble(self: Exl3Backend, stream: Any) -> None:
        close(self, stream)
        if not stream.length:
            for pages in self._cache.pages.values():
                pages[:3] += 1

    with monkeypatch.context() as patch:
        patch.setattr(Exl3Backend, "close_stream", scribble)
        assert not any(row["beside_equal"] for row in rows())
    monkeypatch.setattr(Exl3Backend, "break_off_when", lambda _self, _unwanted: None)
    with pytest.raises(RuntimeError, match="went on although nobody wanted it"):
        rows()
