"""Hints where it counts: a full and hot cache, the default policy, and traces of the model's kind (bench/routing_trace.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from bench import routing_trace
from kernels.python.pager import HintCounters, PagerCounters, PagerPolicy
from tests.tier.simulated_gpu import COPY
from tests.tier.test_pager import STRIDE
from tests.tier.test_pager_hints import HintedWorld

DEPTHS = (0, 15, 30)
LAYERS, EXPERTS, TOP_K = len(DEPTHS), routing_trace.EXPERTS, routing_trace.TOP_K
RECORDS = LAYERS * EXPERTS
SLOTS, TRANSIT = 98 + TOP_K, TOP_K  # the slice's share, and one for every pick, so that nothing is read in place
TOKENS, WARM = 120, 60
HINTS = PagerPolicy(hint_records=3, hint_chunk=96)
POOL = 6

Ids = npt.NDArray[np.int64]


class TracedWorld(HintedWorld):
    """Layers of the model's shape with small records."""

    layers, experts, top_k = LAYERS, EXPERTS, TOP_K


@dataclasses.dataclass
class Run:
    """What a trace came to: the slot of every record after each token, and the counters of the tokens after the warm-up."""

    where: list[npt.NDArray[np.int32]]
    picks: int
    hits: int
    missed: int
    bytes_copied: int
    hints: HintCounters
    started_late: int  # of the copies begun for hints, those after the warm-up

    @property
    def resident(self) -> list[set[int]]:
        """Records in slots after each token."""
        return [set(np.flatnonzero(where >= 0).tolist()) for where in self.where]


def trace() -> Ids:
    """Picks of one stream: [tokens, layers, top_k]."""
    return routing_trace.make(3, TOKENS, depths=DEPTHS)[:, 0].astype(np.int64)


def distinct_heat() -> npt.NDArray[np.float32]:
    """A little heat for every record, of no two the same: which of two equally cold records goes depends on slots, not on policy."""
    return np.random.default_rng(0).permutation(np.linspace(1e-4, 1e-3, RECORDS)).astype(np.float32)


def decode(picks: Ids, num_slots: int, policy: PagerPolicy, guesses: Ids | None = None, *, equal_heat: bool = False) -> Run:
    """Decodes the trace; guesses: [tokens, layers, ids], what the step of the layer before says."""
    world = TracedWorld(1, num_slots, TRANSIT, policy)
    try:
        if not equal_heat:
            world.pager.set_heat(distinct_heat(), np.zeros(RECORDS, np.float32))
        where, before, hints_before = [], world.pager.counters(), world.hints()
        for token, layers in enumerate(picks):
            if token == WARM:
                before, hints_before = world.pager.counters(), world.hints()
            for layer, row in enumerate(layers):
                hint = [guesses[token, layer + 1].tolist()] if guesses is not None and layer + 1 < LAYERS else None
                world.step(layer, [row.tolist()], hint)
                if hint is not None:
                    world.pause(0.004, chunks=9)  # an attention's time, in which the copies run
            world.gpu.synchronize()
            world.kept.clear()
            where.append(world.pager.where())
        world.run(0, [[-1] * TOP_K])  # ends the last hint
        assert world.gpu.problems == []
        world.check_slots()
        counters, hints = world.pager.counters(), world.hints()
        assert counters.in_place == 0
        spent = PagerCounters(*(a - b for a, b in zip(dataclasses.astuple(counters), dataclasses.astuple(before), strict=True)))
        return Run(where, spent.picks, spent.hits, spent.missed, spent.bytes_copied, hints, hints.started - hints_before.started)
    finally:
        world.closing = True
        world.gpu.release(COPY)
        world.close()


def model(picks: Ids, num_slots: int, policy: PagerPolicy) -> list[npt.NDArray[np.int32]]:
    """The pager's decisions without hints, from its description: the slot of every record after each token."""
    ages = np.arange(8192, dtype=np.float32)
    slow_table, fast_table = (np.exp2(-ages / np.float32(life)) for life in (policy.slow_half_life, policy.fast_half_life))
    slow_gain, fast_gain = (np.float32(1) - np.exp2(np.float32(-1 / life)) for life in (policy.slow_half_life, policy.fast_half_life))
    slow, fast = np.zeros(RECORDS, np.float32), np.zeros(RECORDS, np.float32)
    history = np.zeros(LAYERS, np.float32)
    last, clock = np.zeros(RECORDS, np.int64), np.zeros(LAYERS, np.int64)
    held = np.full(num_slots - TRANSIT, -1)
    result = []

    def score(records: Ids) -> npt.NDArray[np.float32]:
        age = clock[records // EXPERTS] - last[records]
        known = np.float32(1) / (history[records // EXPERTS] + slow_gain)
        both: npt.NDArray[np.float32] = (
            slow[records] * slow_table[age] * known + np.float32(policy.fast_weight) * fast[records] * fast_table[age]
        )
        return both

    for layers in picks:
        for layer, row in enumerate(layers):
            records = row + layer * EXPERTS
            clock[layer] += 1
            history[layer] = history[layer] * slow_table[1] + slow_gain
            age = clock[layer] - last[records]
            slow[records] = slow[records] * slow_table[age] + slow_gain
            fast[records] = fast[records] * fast_table[age] + fast_gain
            last[records] = clock[layer]
            heat = dict(zip(records.tolist(), score(records).tolist(), strict=True))
            taken = set(np.flatnonzero(np.isin(held, records)).tolist())
            for record in sorted(set(heat) - set(held.tolist()), key=lambda r: (-heat[r], r)):
                free = np.flatnonzero(held < 0)
                if len(free):
                    slot = int(free[0])
                else:
                    scores = score(held)
                    scores[list(taken)] = np.inf
                    slot = int(np.argmin(scores))
                    if not heat[record] > policy.admit_margin * scores[slot]:
                        continue
                held[slot] = record
                taken.add(slot)
        where = np.full(RECORDS, -1, np.int32)
        where[held[held >= 0]] = np.flatnonzero(held >= 0) + TRANSIT
        result.append(where)
    return result


@pytest.fixture(scope="module")
def reserved() -> Run:
    """The trace with a pool set aside and no hint given."""
    return decode(trace(), SLOTS, HINTS)


def test_without_hints_every_decision_is_the_policy_s() -> None:
    """Which record lies in which slot after every token, as a model of the policy says."""
    picks = trace()
    run = decode(picks, SLOTS, PagerPolicy(), equal_heat=True)
    want = model(picks, SLOTS, PagerPolicy())
    for token, (got, expected) in enumerate(zip(run.where, want, strict=True)):
        assert (got == expected).all(), f"token {token}"
    assert (run.where[WARM] >= 0).sum() == SLOTS - TRANSIT
    assert run.missed > 0


def test_a_pool_costs_no_more_hits_than_its_share_of_slots(reserved: Run) -> None:
    """It is as if there were so many slots fewer, and nothing else."""
    whole, smaller = decode(trace(), SLOTS, PagerPolicy()), decode(trace(), SLOTS - POOL, PagerPolicy())
    assert reserved.resident == smaller.resident
    assert (reserved.hits, reserved.missed) == (smaller.hits, smaller.missed)
    assert len(reserved.resident[-1]) == SLOTS - TRANSIT - POOL
    assert whole.hits * (1 - POOL / (SLOTS - TRANSIT)) <= reserved.hits <= whole.hits


def test_perfect_hints_spare_the_copies_of_what_they_bring(reserved: Run) -> None:
    """In a full and hot cache copies are begun, each of them is picked, and what stays in slots is what would stay without them."""
    picks = trace()
    run = decode(picks, SLOTS, HINTS, picks)
    hints = run.hints
    assert run.started_late > 0.2 * TOKENS
    assert hints.used > 0
    assert (hints.used + hints.late, hints.dropped) == (hints.started, 0)
    assert run.resident == reserved.resident
    assert run.missed == reserved.missed - run.started_late
    assert run.hits == reserved.hits + run.started_late
    brought_in_steps = hints.late * STRIDE
    assert reserved.bytes_copied - run.started_late * STRIDE <= run.bytes_copied
    assert run.bytes_copied <= reserved.bytes_copied - run.started_late * STRIDE + brought_in_steps
    assert run.bytes_copied < reserved.bytes_copied


def test_wrong_hints_cost_bytes_and_nothing_else(reserved: Run) -> None:
    """None is picked, and every decision is what it would be without them."""
    picks = trace()
    wrong = (picks + EXPERTS // 2) % EXPERTS
    for token, layer in np.ndindex(TOKENS, LAYERS):
        wrong[token, layer, np.isin(wrong[token, layer], picks[token, layer])] = -1
    run = decode(picks, SLOTS, HINTS, wrong)
    assert run.started_late > 0
    assert (run.hints.used, run.hints.late) == (0, 0)
    assert run.hints.dropped == run.hints.started
    assert run.resident == reserved.resident
    assert (run.hits, run.missed, run.bytes_copied) == (reserved.hits, reserved.missed, reserved.bytes_copied)
