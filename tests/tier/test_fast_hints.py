"""Hints in `fast`: the oracle's bits whatever they say and whoever computes, and records that were begun never go to the CPU lane."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python.fast_pager import FastCosts, Forced
from kernels.python.pager import HINT_WIDTH, PagerPolicy
from tests.tier.fast_world import FastWorld
from tests.tier.harness import EXPERTS, HIDDEN, LAYERS, TOP_K, Stage, cpu_expert, wait_until
from tests.tier.simulated_gpu import COMPUTE, COPY
from tests.tier.test_fast_pager import Decoding, served, world

POLICY = PagerPolicy(hint_records=3, hint_chunk=8192)

Ids = npt.NDArray[np.int64]


def guessing(seed: int, recall: float) -> Callable[[Ids], Ids]:
    """Ids of which about that share is picked; the others may be no expert."""
    rng = np.random.default_rng(seed)

    def guess(picks: Ids) -> Ids:
        width = int(rng.integers(1, HINT_WIDTH + 1))
        right = picks[np.arange(len(picks))[:, None], rng.integers(0, TOP_K, (len(picks), width))]
        wrong = rng.choice([*range(EXPERTS), -1, EXPERTS, 1 << 50], (len(picks), width))
        return np.ascontiguousarray(np.where(rng.random((len(picks), width)) < recall, right, wrong), np.int64)

    return guess


def check_counters(w: FastWorld) -> None:
    """Every copy that was begun was accounted for, and every pick counted once; call it when no hint is open."""
    hints, stats, counters = w.pager.hint_counters(), w.pager.fast_stats(), w.pager.counters()
    assert hints.started == hints.used + hints.late + hints.dropped
    assert hints.started <= hints.hinted
    assert sum(stats["picks"].values()) == counters.picks
    if not stats["picks"]["cpu"]:
        assert stats["picks"]["hit"] == counters.hits
        assert counters.missed == counters.admitted + counters.transit + counters.in_place


def check_slots(w: FastWorld, made: Stage) -> None:
    """Every record that the pager calls resident lies in its slot, whole."""
    for record, slot in enumerate(w.pager.where().tolist()):
        if slot >= 0:
            want = made.arena.record(record // EXPERTS, record % EXPERTS)
            assert (w.slots[slot, : want.size] == want).all()


@pytest.mark.parametrize("recall", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("forced", list(Forced))
def test_every_placement_gives_the_reference_bits_under_hints(made: Stage, forced: Forced, recall: float) -> None:
    """Slots that hints fill and empty beside transit slots, host memory and cpu_expert: the oracle's bits."""
    with cpu_expert(made), world(made, int(forced), 9, 2, policy=POLICY) as w:
        assert w.wait_lane()
        w.guess = guessing(int(forced), recall)
        w.pager.force(forced, seed=5)
        for step in range(30):
            w.decode()
            if step % 9 == 4:
                first = int(w.rng.integers(0, 10))
                w.pager.vacate(first, int(w.rng.integers(0, 10 - first)))
                w.pager.flush(COMPUTE)
                w.gpu.synchronize()
                check_slots(w, made)
        check_counters(w)
        check_slots(w, made)
        hints = w.pager.hint_counters()
        assert hints.started > 0
        assert recall < 1 or hints.used + hints.late == hints.started
        assert w.pager.fast_stats()["recomputed_picks"] == 0


@pytest.mark.parametrize(("num_slots", "num_transit"), [(0, 0), (1, 0), (4, 4), (LAYERS * EXPERTS, 0)])
def test_any_number_of_slots_gives_the_reference_bits_under_hints(made: Stage, num_slots: int, num_transit: int) -> None:
    """From none to one for every record."""
    with world(made, num_slots, num_slots, num_transit, policy=POLICY) as w:
        w.guess = guessing(num_slots, 0.6)
        for _ in range(25):
            w.decode()
        check_counters(w)
        check_slots(w, made)
        assert (w.pager.hint_counters().started > 0) or num_slots < LAYERS * EXPERTS


def test_killed_servers_cost_no_bit_under_hints(made: Stage) -> None:
    """kill -9 in mid-step while records come ahead of theirs: every answer keeps its bits, and the lane comes back."""
    with world(made, 11, 7, 2, policy=POLICY) as w:
        w.guess = guessing(11, 0.6)
        background = Decoding(w)
        for _ in range(2):
            with cpu_expert(made) as server:
                assert wait_until(lambda: w.pager.lane_up, 60)
                w.pager.force(Forced.RANDOM, seed=3)
                before = served(w)
                assert wait_until(lambda before=before: served(w) > before, 60)
                server.kill()
                assert wait_until(lambda: not w.pager.lane_up, 60)
                assert background.more(5)
        background.join()
        check_slots(w, made)
        assert w.pager.fast_stats()["aborts"] >= 1
        assert w.pager.hint_counters().started > 0


class Steps:
    """Layer steps of one row with given picks; the device's memory of all of them, for as long as this lives."""

    def __init__(self, w: FastWorld) -> None:
        self._w = w
        self._kept: list[npt.NDArray[np.generic]] = []

    def step(self, layer: int, picks: list[int], hint: list[int] | None = None) -> None:
        """Enqueues one, with a hint for the next layer."""
        selected, x = np.array([picks], np.int64), np.ones((1, HIDDEN), np.float16)
        weights, out = np.ones((1, TOP_K), np.float16), np.zeros((1, HIDDEN), np.float32)
        self._kept += [selected, x, weights, out]
        self._w.pager.publish(layer, 1, selected.ctypes.data, x.ctypes.data, COMPUTE)
        if hint is not None:
            ids = np.array([hint], np.int64)
            self._kept.append(ids)
            self._w.pager.hint(layer + 1, 1, ids.ctypes.data, len(hint), COMPUTE)
        self._w.pager.finish(layer, 1, weights.ctypes.data, out.ctypes.data, stream=COMPUTE)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_record_that_was_begun_never_goes_to_the_lane(made: Stage, in_time: bool) -> None:
    """A lane that is far quicker than the link gets the picks that nobody began: whole or half way, the hinted ones are hits."""
    costs = FastCosts(ct_a_us=1, ct_b_us=1, ct_tzc_us=5000)
    policy = dataclasses.replace(POLICY, hint_records=2, hint_chunk=4096)
    with cpu_expert(made), world(made, 5, LAYERS * EXPERTS, 0, costs=costs, policy=policy) as w:
        assert w.wait_lane()
        steps = Steps(w)
        w.pager.force(Forced.NEVER_LANE)
        steps.step(0, [0, 1, 2, 3])
        w.gpu.synchronize()
        w.pager.force(Forced.BY_COST)
        go_on = threading.Event()
        if not in_time:
            w.gpu.hold(COPY)
        steps.step(0, [0, 1, 2, 3], [4, 5])
        w.gpu.enqueue(COMPUTE, "wait", go_on.is_set)
        steps.step(1, [4, 5, 6, 7])
        record_chunks = -(-(made.arena.record(0, 1).ctypes.data - made.arena.record(0, 0).ctypes.data) // 4096)
        landed = w.words[4 * 60 : 4 * 61].view(np.uint32)
        if in_time:
            assert wait_until(lambda: landed[0] == 2 * record_chunks)
        else:
            assert wait_until(lambda: w.pager.hint_counters().started == 1)
        before = w.pager.fast_stats()["picks"]
        go_on.set()
        assert wait_until(lambda: sum(w.pager.fast_stats()["picks"].values()) == sum(before.values()) + 4)
        w.gpu.release(COPY)
        w.gpu.synchronize()
        picks, hints = w.pager.fast_stats()["picks"], w.pager.hint_counters()
        assert w.gpu.problems == []
        assert picks["hit"] - before["hit"] == (2 if in_time else 1)
        assert (hints.used, hints.late, hints.dropped) == ((2, 0, 0) if in_time else (0, 1, 0))
        # The hottest miss comes over the link, or the cache would never learn; the lane has the rest.
        assert picks["cpu"] - before["cpu"] == (1 if in_time else 2)
        check_slots(w, made)


def test_refused_chunks_cost_no_bit(made: Stage) -> None:
    """A copy engine that fails in the middle of a hint: no hang, no wrong bit, no half record."""
    with world(made, 45, 12, 2, lane=False, policy=POLICY) as w:
        w.guess = guessing(45, 0.6)
        for _ in range(3):
            w.decode()
        slots, seen = range(w.slots.ctypes.data, w.slots.ctypes.data + w.slots.nbytes), 0

        def refuse(kind: str, at: int) -> bool:
            nonlocal seen
            seen += kind == "copy" and at in slots
            return kind == "copy" and at in slots and seen % 7 == 0

        w.gpu.refuse = refuse
        for _ in range(15):
            w.decode()
        assert seen > 7
        check_slots(w, made)
