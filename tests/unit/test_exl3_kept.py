"""Kept states and shared pages of the GPU backend, over a model whose logits depend on every byte that it should read.

The stand-in for the device is exllamav3's cache in small: pages that passes write and read through block tables, and a recurrent state in a
slot. A page that was given away too early, or a state of another moment, changes the logits.
"""

from __future__ import annotations

import itertools
import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from bench import gpu_kept
from services.gpu_worker.backends.base import BackendInfo, chunk_end
from services.gpu_worker.backends.exl3 import backend as module
from services.gpu_worker.backends.exl3.backend import Exl3Backend, KeptState
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS, PagesExhausted, PageTable
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.loop import EngineLimits, EngineLoop
from services.gpu_worker.metrics import EngineMetrics
from services.gpu_worker.patches.replace import Replacements
from services.gpu_worker.request import Admitted, Finished, Priority, PromptScores, Request, RequestSpec, SamplingParams
from tests.unit.test_exl3_backend import FakeExperts, torch_without_a_gpu
from tests.unit.test_worker_loop import Reader

VOCAB = 40
STATE_BYTES = 1000
TABLE = TokenTable([bytes([65 + i]) for i in range(VOCAB)], frozenset())


class State:
    """A recurrent state: a digest of all tokens in their order."""

    def __init__(self, cache: Cache, slot: int, position: int, digest: int) -> None:
        self.cache, self.slot, self.position = cache, slot, position
        cache.digests[slot] = digest

    def stash(self) -> dict[Any, Any]:
        return {"position": self.position, "checkpoint_size": STATE_BYTES, "digest": self.cache.digests[self.slot]}

    def free(self) -> None:
        self.cache.slots.append(self.slot)


class Cache:
    """Pages and slots, as exllamav3's cache has them."""

    def __init__(self, pages: int, slots: int) -> None:
        self.max_num_tokens = pages * PAGE_TOKENS
        self.pages = np.full((pages, PAGE_TOKENS), -1)
        self.slots = list(range(slots))
        self.digests = [0] * slots

    def get_new_state(self) -> State:
        return State(self, self.slots.pop(), 0, 0)

    def new_from_stashed(self, stashed: dict[Any, Any], position: int) -> State:
        assert position == stashed["position"]
        return State(self, self.slots.pop(), position, stashed["digest"])


class Model:
    """Logits from what the pages of a row hold and from its state."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.passes: list[list[tuple[int, int]]] = []  # (first position, tokens) of every row

    def get_recurrent_layers(self) -> list[str]:
        return ["kda"]

    def forward(self, ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        tables, starts, states = params["block_table"].tolist(), params["cache_seqlens"].tolist(), params["recurrent_states"]
        self.passes.append([(start, ids.shape[1]) for start in starts])
        rows = params.get("last_tokens_only", ids.shape[1])
        return torch.stack([torch.stack(self._row(*row, rows)) for row in zip(ids.tolist(), tables, starts, states, strict=True)])

    def _row(self, tokens: list[int], table: list[int], start: int, state: State, rows: int) -> list[torch.Tensor]:
        assert start == state.position
        logits = []
        for position, token in enumerate(tokens, start):
            self.cache.pages[table[position // PAGE_TOKENS], position % PAGE_TOKENS] = token
            digest = zlib.crc32(token.to_bytes(4, "little"), self.cache.digests[state.slot])
            self.cache.digests[state.slot] = digest
            if position < start + len(tokens) - rows:
                continue
            seen = np.concatenate([self.cache.pages[page] for page in table[: position // PAGE_TOKENS + 1]])[: position + 1]
            draw = np.random.default_rng([digest, zlib.crc32(seen.astype(np.int64).tobytes())])
            logits.append(torch.from_numpy(draw.random(VOCAB, np.float32)))
        state.position += len(tokens)
        return logits


def make(monkeypatch: pytest.MonkeyPatch, pages: int = 12, streams: int = 4) -> tuple[Exl3Backend, Model]:
    monkeypatch.setattr(module, "torch", torch_without_a_gpu())
    info = BackendInfo(
        VOCAB,
        min(8, pages) * PAGE_TOKENS,
        streams,
        "cuda",
        "",
        "exact",
        "",
        "",
        "",
        0,
        0,
        "",
        page_tokens=PAGE_TOKENS,
        snapshot_bytes=STATE_BYTES,
    )
    cache = Cache(pages, streams)
    model = Model(cache)
    return Exl3Backend(model, cache, FakeExperts(), None, Replacements(), info), model  # type: ignore[arg-type]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def read(backend: Exl3Backend, stream: Any, prompt: list[int], chunk: int = 512) -> Any:
    """The rest of a prompt in its chunks; the last logits."""
    logits: Any = None
    while stream.length < len(prompt):
        end = chunk_end(stream.length, len(prompt), chunk, PAGE_TOKENS)
        logits = backend.prefill(stream, prompt[stream.length : end], all_logits=False)
    return logits


def test_a_kept_state_continues_with_the_logits_of_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt, and a longer one, from a page's end: only the rest is computed, in the passes of a run that was cut there."""
    backend, model = make(monkeypatch)
    prompt = prompt_of(700)
    first = backend.open_stream()
    backend.prefill(first, prompt[:512], all_logits=False)
    kept = backend.snapshot(first)
    assert kept is not None
    assert (kept.length, kept.num_bytes) == (512, STATE_BYTES)
    want = read(backend, first, prompt)
    answer = [backend.decode([first], [token]) for token in (3, 1, 4)]
    backend.close_stream(first)
    for _ in range(2):
        # What the cache gives away in between must not be the kept pages.
        other = backend.open_stream()
        read(backend, other, prompt_of(1500, 5))
        model.passes.clear()
        again = backend.open_stream(kept)
        assert again.length == 512
        assert np.array_equal(read(backend, again, prompt), want)
        assert [np.array_equal(backend.decode([again], [token]), row) for token, row in zip((3, 1, 4), answer, strict=True)] == [True] * 3
        assert model.passes == [[(512, 187)], [(699, 1)], [(700, 1)], [(701, 1)], [(702, 1)]]
        for stream in (other, again):
            backend.close_stream(stream)
    longer = prompt[:512] + prompt_of(400, 9)
    fresh, more = backend.open_stream(), backend.open_stream(kept)
    assert np.array_equal(read(backend, fresh, longer), read(backend, more, longer))
    backend.close_stream(fresh)
    backend.close_stream(more)
    backend.check_idle()
    kept.release()
    assert backend.stats()["cache_pages_free"] == 12


def test_states_fit_only_at_a_pages_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a later token would still be written to the last page."""
    backend, _ = make(monkeypatch)
    stream = backend.open_stream()
    assert backend.snapshot(stream) is None
    backend.prefill(stream, prompt_of(PAGE_TOKENS - 1), all_logits=False)
    assert backend.snapshot(stream) is None
    backend.prefill(stream, [1], all_logits=False)
    assert isinstance(backend.snapshot(stream), KeptState)
    backend.prefill(stream, [1], all_logits=False)
    assert backend.snapshot(stream) is None


def test_pages_are_free_when_nobody_holds_them() -> None:
    """Streams and kept states in every order of letting go; spare pages are those that no stream holds."""
    for order in itertools.permutations(range(4)):
        table = PageTable(6)
        pages: list[int] = []
        table.grow(pages, 3 * PAGE_TOKENS)
        table.keep(pages[:2])
        table.keep(pages[:1])
        shared = table.share(pages[:2])
        table.grow(shared, 3 * PAGE_TOKENS)
        assert shared[:2] == pages[:2]
        assert (table.num_free, table.num_spare, table.num_kept) == (2, 2, 0)
        kept = [pages[:2], pages[:1]]
        for what in order:
            if what < 2:
                table.let_go(kept[what])
            else:
                table.release(pages if what == 2 else shared)
            assert table.num_spare == table.num_free + table.num_kept <= 6
        assert (table.num_free, table.num_kept) == (6, 0)
        with pytest.raises(PagesExhausted):
            table.grow([], 7 * PAGE_TOKENS)


class Bench:
    """The engine over the backend with a bound on kept states, in units of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, states: float, pages: int = 12, **limits: Any) -> None:
        self.backend, self.model = make(monkeypatch, pages)
        limit = EngineLimits(
            **{"max_queued": 64, "chunk_size": 512, "busy_chunk_size": 256, "prefix_cache_bytes": int(states * STATE_BYTES), **limits}
        )
        self.loop = EngineLoop(self.backend, TABLE, frozenset(), limit, EngineMetrics())
        self._numbers = itertools.count()

    def submit(self, prompt: list[int], key: str = "", scores: PromptScores | None = None, **sampling: Any) -> Reader:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, **sampling})
        reader = Reader()
        spec = RequestSpec(f"r{next(self._numbers)}", tuple(prompt), params, key, Priority.NORMAL, 60.0, scores)
        self.loop.submit(Request(spec, reader))
        return reader

    def ask(self, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
        """(tokens, cached tokens) of a request alone."""
        reader = self.submit(prompt, **fields)
        self.run()
        assert isinstance(reader.events[0], Admitted)
        assert isinstance(reader.end, Finished)
        assert reader.events[0].cached_tokens == reader.end.cached_tokens
        return reader.ids, reader.end.cached_tokens

    def run(self) -> None:
        for _ in range(5000):
            if not self.loop.step():
                return
        raise AssertionError("the loop does not come to rest")


def test_the_longest_fitting_state_serves_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the last page that is full before a prompt's last token; answers are those of a worker that keeps nothing."""
    bench, without = Bench(monkeypatch, states=8), Bench(monkeypatch, states=0)
    base = prompt_of(600)
    for prompt, cached in (
        (base, 0),
        (base, 512),
        (base[:513], 512),
        (base[:512], 0),  # one token must be left to compute: a state at 256 was never made
        (base[:512], 256),
        ([*base, *prompt_of(500, 1)], 512),
        ([*base, *prompt_of(500, 1), 7], 1024),
        ([*base[:300], *prompt_of(300, 2)], 256),
        ([3, *base], 0),
        (base[:100], 0),
    ):
        bench.model.passes.clear()
        answer, told = bench.ask(prompt)
        assert told == cached
        assert bench.model.passes[0][0][0] == cached
        assert (answer, 0) == without.ask(prompt)
    assert bench.loop.metrics.to_json()["kept_states"] == 5
    assert bench.loop.metrics.to_json()["kept_state_bytes"] == 5 * STATE_BYTES
    assert without.loop.metrics.to_json()["kept_states"] == 0


def test_keys_do_not_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long an answer takes must not tell what others asked."""
    bench = Bench(monkeypatch, states=8)
    assert [bench.ask(prompt_of(300), key=key)[1] for key in ("a", "b", "a", "b")] == [0, 0, 256, 256]


def test_a_scored_prompt_is_computed_whole_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes have other rows than those of a prompt: so has its state other bits on a device."""
    bench = Bench(monkeypatch, states=8)
    prompt = prompt_of(600)
    assert bench.ask(prompt, scores=PromptScores(1, 0), max_tokens=0)[1] == 0
    assert bench.ask(prompt)[1] == 0
    assert bench.ask(prompt, scores=PromptScores(1, 0), max_tokens=0)[1] == 0


def test_a_budget_for_less_than_one_state_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that nobody could keep is not made either."""
    bench = Bench(monkeypatch, states=0.9)
    monkeypatch.setattr(bench.backend, "snapshot", lambda _stream: pytest.fail("a snapshot was made"))
    assert [bench.ask(prompt_of(300))[1] for _ in range(2)] == [0, 0]


def test_the_budget_is_kept_and_what_was_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states fit; a state that was used stays."""
    bench = Bench(monkeypatch, states=2.5)
    a, b, c = (prompt_of(300, seed) for seed in (1, 2, 3))
    assert [bench.ask(prompt)[1] for prompt in (a, b, a, c, a, b)] == [0, 0, 256, 0, 256, 0]
    assert bench.loop.metrics.to_json()["kept_states"] == 2
    assert bench.backend.stats()["cache_pages_kept"] == 2


def test_kept_pages_give_way_to_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """States hold pages only as long as no stream needs them; the whole cache can be had with any number of them."""
    bench = Bench(monkeypatch, states=100, pages=8)
    for seed in range(8):
        bench.ask(prompt_of(300, seed))
    assert bench.backend.stats()["cache_pages_free"] < 2
    long = prompt_of(8 * PAGE_TOKENS - 3, 50)
    want, _ = Bench(monkeypatch, states=0, pages=8).ask(long)
    assert bench.ask(long) == (want, 0)
    assert bench.loop.metrics.to_json()["requests_put_back"] == 0
    bench.backend.check_idle()


def test_a_request_that_was_put_back_goes_on_from_its_kept_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """States whose pages running streams hold are not given up for nothing: only what follows the state is computed again."""
    bench = Bench(monkeypatch, states=8, pages=8, max_rq_tokens=1)
    old = bench.submit(prompt_of(500, 1), max_tokens=100)
    bench.loop.step()
    prompt = prompt_of(1300, 2)
    young = bench.submit(prompt, max_tokens=100)
    for _ in range(60):
        bench.loop.step()
        if bench.loop.metrics.to_json()["requests_put_back"]:
            break
    assert bench.loop.num_queued == 1
    assert bench.loop._contexts.num_kept == 2
    bench.model.passes.clear()
    bench.run()
    assert min(rows[0][0] for rows in bench.model.passes if rows[0][1] > 1) == 1280
    assert young.ids == Bench(monkeypatch, states=0).ask(prompt, max_tokens=100)[0]
    assert isinstance(old.end, Finished)


def crowded(monkeypatch: pytest.MonkeyPatch, seed: int) -> dict[str, Any]:
    """Talks that grow turn by turn, several at a time, in twelve pages; the engine's counts."""
    draw = random.Random(seed)
    bench = Bench(monkeypatch, states=draw.choice((5, 50)), max_rq_tokens=16)
    talks = [prompt_of(draw.randrange(1, 700), 100 * seed + i) for i in range(5)]
    for _ in range(3):
        turn = []
        for talk in (talk for talk in talks if len(talk) < 1400):
            sampling: dict[str, Any] = {"max_tokens": draw.randrange(1, 300), "temperature": draw.choice((0.0, 1.0)), "seed": seed}
            turn.append((talk, sampling, bench.submit(talk, **sampling)))
            for _ in range(draw.randrange(4)):
                bench.loop.step()
        bench.run()
        for talk, sampling, reader in turn:
            assert isinstance(reader.end, Finished)
            assert reader.ids == Bench(monkeypatch, states=0).ask(talk, **sampling)[0]
            talk += [*reader.ids, *prompt_of(draw.randrange(200), draw.randrange(10**6))]
    counts = bench.loop.metrics.to_json()
    bench.backend.check_idle()
    while bench.loop._contexts._prefixes.make_room():
        pass
    assert bench.backend.stats()["cache_pages_free"] == 12
    return counts


def test_conversations_in_a_crowded_cache_answer_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kept states and put-backs among them every answer is that of an empty worker, and no page is lost."""
    counts = [crowded(monkeypatch, seed) for seed in range(5)]
    for name in ("cached_prompt_tokens", "requests_put_back"):
        assert sum(count[name] for count in counts) > 0, name


def test_the_comparison_of_a_gpu_machine_runs_here_and_sees_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole over the stand-in: all rows equal; with pages that are given away, or a state of another moment, some differ."""

    def rows() -> list[dict[str, Any]]:
        backend, _ = make(monkeypatch, gpu_kept.PAGES)
        return list(gpu_kept.every_case(backend, TABLE))

    sound = rows()
    assert len(sound) == 23
    assert all(row["equal"] and row.get("steps", 99) > 10 for row in sound)
    assert sound[-1]["put_back"] > 0
    assert sum(row["cached"] for row in sound if "cached" in row) == 256 + 512 + 1280
    with monkeypatch.context() as patch:
        patch.setattr(PageTable, "keep", lambda _self, _pages: None)
        patch.setattr(PageTable, "let_go", lambda _self, _pages: None)
        patch.setattr(Exl3Backend, "check_idle", lambda _self: None)
        assert not all(row["equal"] for row in rows())
    stash = State.stash
    monkeypatch.setattr(State, "stash", lambda self: {**stash(self), "digest": 5})
    assert not all(row["equal"] for row in rows())
