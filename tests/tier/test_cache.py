"""Cache policy and planner: what is admitted, what is evicted, which lane a miss takes."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.python.cache_sim import CachePolicy, simulate, synthetic_trace
from tests.tier.harness import EXPERTS, LAYERS, TOP_K, Batch, Stage, cpu_expert, forward, random_batch

SMALL = {"num_layers": 6, "experts_per_layer": 64, "top_k": 4}


def hit_ratios(trace: np.ndarray, slots: int, warm: int) -> dict[CachePolicy, float]:
    return {policy: simulate(policy, trace, 64, slots, warm_tokens=warm).hit_ratio for policy in CachePolicy}


@pytest.mark.parametrize("seed", range(3))
def test_heat_beats_clock_and_lru_and_nothing_beats_belady(seed: int) -> None:
    """On the synthetic routing trace our policy hits more often than CLOCK and LRU; the one that knows the future bounds them all."""
    ratio = hit_ratios(synthetic_trace(1200, seed=seed, **SMALL), slots=96, warm=600)
    assert ratio[CachePolicy.HEAT] > max(ratio[CachePolicy.CLOCK], ratio[CachePolicy.LRU]) + 0.03
    assert max(ratio.values()) == ratio[CachePolicy.BELADY]


def test_a_change_of_subject_is_followed() -> None:
    """Half way popularity changes completely: old heat must not hold the slots, CLOCK is still beaten."""
    trace = np.concatenate([synthetic_trace(600, seed=1, **SMALL), synthetic_trace(600, seed=2, **SMALL)])
    ratio = hit_ratios(trace, slots=96, warm=600)
    assert ratio[CachePolicy.HEAT] > ratio[CachePolicy.CLOCK]


def test_the_simulators_agree_with_a_plain_lru() -> None:
    """The C++ LRU counts what a dozen lines of Python count."""
    trace = synthetic_trace(200, seed=4, **SMALL)
    order: list[tuple[int, int]] = []
    hits = 0
    for token in trace:
        for layer, picks in enumerate(token):
            for expert in picks:
                key = (layer, int(expert))
                if key in order:
                    hits += 1
                    order.remove(key)
                elif len(order) == 30:
                    order.pop(0)
                order.append(key)
    got = simulate(CachePolicy.LRU, trace, 64, 30)
    assert (got.hits, got.picks) == (hits, trace.size)


def test_slots_for_everything_miss_only_at_first() -> None:
    """With a slot per record every policy misses each record's first touches only."""
    trace = synthetic_trace(300, seed=5, **SMALL)
    distinct = len({(layer, int(e)) for token in trace for layer, picks in enumerate(token) for e in picks})
    for policy in (CachePolicy.CLOCK, CachePolicy.LRU, CachePolicy.BELADY):
        assert simulate(policy, trace, 64, 6 * 64).hits >= trace.size - distinct
    assert simulate(CachePolicy.HEAT, trace, 64, 6 * 64, admit_after=1).hits == trace.size - distinct


def test_the_trace_is_what_it_says() -> None:
    """Picks are distinct within a step, popularity is skewed more with depth, and about a third of the picks repeat."""
    trace = synthetic_trace(400, seed=6, **SMALL)
    assert all(len(set(picks.tolist())) == 4 for token in trace for picks in token)
    shares = [np.sort(np.bincount(trace[:, layer].ravel(), minlength=64))[-8:].sum() / trace[:, layer].size for layer in (0, 5)]
    assert shares[1] > shares[0] + 0.1
    repeats = np.mean([np.isin(trace[t, 0], trace[t - 1, 0]).mean() for t in range(1, 400)])
    assert 0.33 < repeats < 0.5


@pytest.mark.parametrize(
    ("trace", "message"), [(np.zeros((2, 2), np.uint16), "expected uint16"), (np.full((1, 2, 2), 9, np.uint16), "expert 9 of 8")]
)
def test_a_bad_trace_is_refused(trace: np.ndarray, message: str) -> None:
    """Wrong shape or a pick out of range is named."""
    with pytest.raises(ValueError, match=message):
        simulate(CachePolicy.HEAT, trace, 8, 4)


def spread_batch(rng: np.random.Generator) -> Batch:
    """Two rows that pick all eight experts of layer 0 once."""
    batch = random_batch(rng, rows=2, layer=0)
    batch.sel[:] = np.arange(EXPERTS).reshape(2, TOP_K)
    return batch


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({"ct_a_us": 0, "ct_b_us": 0, "min_cpu_experts": 0}, EXPERTS),  # a free lane takes everything
        ({"ct_a_us": 1e8, "min_cpu_experts": 0}, 0),  # a hopeless one takes nothing
        ({"ct_a_us": 1e8, "min_cpu_experts": 1}, 1),  # but the path is kept alive where that is asked for
        ({"ct_a_us": 1e8, "min_cpu_experts": None}, 1),  # the CPU device asks for it by default
        ({"ct_a_us": 0, "ct_b_us": 1000, "ct_tzc_us": 1000, "min_cpu_experts": 0}, EXPERTS // 2),  # two equal lanes end together
    ],
)
def test_the_lanes_are_balanced_by_cost(made: Stage, costs: dict[str, float], expected: int) -> None:
    """The number of misses in the CPU lane follows from the costs of both lanes."""
    with made.engine(backend="in_process", num_slots=0, **costs) as engine:
        forward(engine, spread_batch(np.random.default_rng(1)))
        assert engine.stats()["experts"]["cpu"] == expected


def test_the_default_keeps_the_cpu_lane_alive_now_and_then(made: Stage) -> None:
    """Where the lane gains nothing, the CPU device still gives it one miss in every 31st step of a layer."""
    with made.engine(backend="in_process", num_slots=0, ct_a_us=1e8, min_cpu_experts=None) as engine:
        for _ in range(63):
            forward(engine, spread_batch(np.random.default_rng(1)))
        assert engine.stats()["experts"]["cpu"] == 3


def test_the_coldest_misses_take_the_cpu_lane(made: Stage) -> None:
    """Experts that are picked all the time stay on the device, newcomers go to the CPU lane."""
    rng = np.random.default_rng(2)
    with made.engine(backend="in_process", num_slots=4, ct_a_us=1e8, min_cpu_experts=1, admit_after=2) as engine:
        batch = random_batch(rng, rows=1, layer=0)
        for _ in range(20):
            batch.sel[:] = [0, 1, 2, 3]
            forward(engine, batch)
        before = engine.stats()
        batch.sel[:] = [0, 1, 2, 7]
        forward(engine, batch)
        after = engine.stats()
    assert after["picks"]["cpu"] - before["picks"]["cpu"] == 1
    assert after["picks"]["hit"] - before["picks"]["hit"] == 3


def test_a_cpu_lane_pick_can_be_promoted(made: Stage) -> None:
    """One miss per step always goes to the CPU lane; it still gets a slot at its k-th touch, so that a warm cache has no misses left."""
    rng = np.random.default_rng(3)
    with made.engine(backend="in_process", num_slots=LAYERS * EXPERTS, min_cpu_experts=1, ct_a_us=1e8) as engine:
        batch = random_batch(rng, rows=1, layer=0)
        for _ in range(10):
            forward(engine, batch)
        before = engine.stats()
        forward(engine, batch)
        after = engine.stats()
    assert after["picks"]["hit"] - before["picks"]["hit"] == TOP_K
    assert before["admissions"] == TOP_K


def test_the_lane_is_priced_when_it_comes_up_and_by_every_job(made: Stage) -> None:
    """Before the first step the round trip has been measured, and every job corrects the price; both stay sane."""
    with made.engine(num_slots=0) as engine:
        prior = engine.stats()
        assert prior["ct_a_us"] == 60
        with cpu_expert(made):
            assert engine.wait_lane(20)
            measured = engine.stats()
            assert (measured["ct_a_us"], measured["ct_scale"]) != (prior["ct_a_us"], prior["ct_scale"])
            assert measured["picks"]["cpu"] == measured["cpu_expert_bytes"] == 0
            rng = np.random.default_rng(4)
            for _ in range(60):
                forward(engine, random_batch(rng))
            corrected = engine.stats()
    assert (corrected["ct_a_us"], corrected["ct_scale"]) != (measured["ct_a_us"], measured["ct_scale"])
    assert min(corrected["ct_a_us"], corrected["ct_scale"]) >= 0
    assert corrected["picks"]["cpu"] > 0
