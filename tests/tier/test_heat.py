"""Heat: how likely a record is to be wanted soon, and when what was known of it is forgotten."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from bench import routing_trace, slice_traces
from kernels.python.cache_sim import CachePolicy, simulate
from kernels.python.pager import PagerPolicy
from tests.tier.simulated_gpu import COMPUTE
from tests.tier.test_pager import EXPERTS, LAYERS, TOP_K, World

OLD, NEW = range(6), range(6, EXPERTS)
ROUNDS, CHANGE = 70, 45


def subjects(seed: int) -> npt.NDArray[np.int64]:
    """Picks of one stream that are of other experts from CHANGE on: [rounds, layers, top_k]."""
    rng = np.random.default_rng(seed)
    return np.array([[rng.permutation(OLD if at < CHANGE else NEW)[:TOP_K] for _ in range(LAYERS)] for at in range(ROUNDS)])


class Popularity:
    """The slow part of heat, from its description."""

    def __init__(self, policy: PagerPolicy) -> None:
        self._below, self._kept = policy.forget_below, 0.5 ** (1 / policy.slow_half_life)
        self._means: list[list[float]] = []
        self.forgotten: list[int] = []  # rounds before which it happened
        self._clear()

    def _clear(self) -> None:
        self._counts, self._history, self._chances = np.zeros((LAYERS, EXPERTS)), 0.0, []  # type: ignore[var-annotated]

    def _mean(self, values: list[float], half_life: float) -> float:
        weights = 0.5 ** (np.arange(len(values))[::-1] / half_life)
        return float(np.average(values, weights=weights))

    def _changed(self) -> bool:
        if len(self._chances) < 20:
            return False
        recent, usual = self._mean(self._chances, 2), self._mean(self._chances, 60)
        squares = [(chance - self._mean(self._chances[: i + 1], 60)) ** 2 for i, chance in enumerate(self._chances[:-1])]
        left = (1 - 0.5**0.5) / (1 + 0.5**0.5)
        return recent < self._below * usual and (usual - recent) ** 2 > 4.5**2 * left * self._mean(squares, 60)

    @property
    def now(self) -> npt.NDArray[np.float64]:
        result: npt.NDArray[np.float64] = self._counts / (self._history + 1 - self._kept)
        return result

    def round(self, number: int, picks: npt.NDArray[np.int64]) -> None:
        if self._changed():
            self._clear()
            self.forgotten.append(number)
        self._counts *= self._kept
        self._history = self._history * self._kept + 1 - self._kept
        rows = np.arange(LAYERS)[:, None]
        self._chances.append(float(self.now[rows, picks].mean()))
        self._counts[rows, picks] += 1 - self._kept


@pytest.mark.parametrize(("below", "forgets"), [(0.85, True), (0.5, True), (0.0, False)])
def test_popularity_is_what_its_description_says_after_every_step(below: float, forgets: bool) -> None:
    """Picks per step of a history however short; none of it is left soon after picks are of another subject, where that is wanted."""
    policy = PagerPolicy(forget_below=below)
    world, model, picks = World(1, 8, 0, policy), Popularity(policy), subjects(1)
    try:
        for number, layers in enumerate(picks):
            model.round(number, layers)
            for layer, row in enumerate(layers):
                world.pager.step(layer, 1, row.ctypes.data, COMPUTE)
            world.gpu.synchronize()
            got = world.pager.heat()[0].reshape(LAYERS, EXPERTS)
            assert got == pytest.approx(model.now, rel=1e-4), f"round {number}"
        assert (len(model.forgotten) == 1) == forgets
        if forgets:
            assert CHANGE < model.forgotten[0] <= CHANGE + 5
        assert (got[:, OLD] == 0).all() == forgets
    finally:
        world.close()


def test_a_young_table_knows_what_is_popular() -> None:
    """A record of every step is as likely after ten steps as after a thousand; one of every other step is half as likely."""
    world = World(2, 8, 0)
    try:
        for number in range(10):
            picks = np.array([[0, 1 + number % 2, 3 + number % 4, 7 + number % 5]], np.int64)
            world.pager.step(0, 1, picks.ctypes.data, COMPUTE)
            world.gpu.synchronize()
        popularity = world.pager.heat()[0]
        assert popularity[:3] == pytest.approx([10 / 11, 5 / 11, 5 / 11], abs=0.01)
    finally:
        world.close()


def test_what_an_earlier_run_knew_weighs_half_of_a_long_history() -> None:
    """A step takes a share of what was known that is twice a touch's gain; what nobody knows anything of begins anew."""
    policy = PagerPolicy()
    gain = 1 - 0.5 ** (1 / policy.slow_half_life)
    world = World(3, 8, 0, policy)
    try:
        popularity = np.zeros(LAYERS * EXPERTS, np.float32)
        popularity[:EXPERTS] = 0.25
        world.pager.set_heat(popularity, np.zeros_like(popularity))
        assert (world.pager.heat()[0] == popularity).all()
        picks = np.arange(TOP_K, dtype=np.int64)[None]
        for layer in (0, 1):
            world.pager.step(layer, 1, picks.ctypes.data, COMPUTE)
            world.gpu.synchronize()
        known, young = world.pager.heat()[0].reshape(LAYERS, EXPERTS)[:2]
        history = (0.5 - gain) * (1 - gain) + 2 * gain
        assert known[:TOP_K] == pytest.approx((0.125 * (1 - gain) + gain) / history, rel=1e-4)
        assert known[TOP_K:] == pytest.approx(0.125 * (1 - gain) / history, rel=1e-4)
        assert young[:TOP_K] == pytest.approx(0.5)
    finally:
        world.close()


@pytest.mark.parametrize("seed", [31, 32])
def test_the_gpu_s_policy_is_six_points_over_clock_on_every_trace(seed: int) -> None:
    """Steady, over a change of subject, beside a scan: by counts, at the slice's capacity, on seeds that nothing was chosen on."""
    depths = routing_trace.SLICE_DEPTHS
    slots = round(routing_trace.SLOT_SHARE * routing_trace.EXPERTS * len(depths))
    steady = routing_trace.make(seed, 300, depths=depths)[:, 0]
    drifting = slice_traces.drifting(seed, 300, depths)[:, 0]
    for trace, scan in ((steady, False), (steady, True), (drifting, False)):
        rates = slice_traces.rates(trace, slots, 150, scan=scan)
        assert rates["heat"] > rates["clock"] + 0.06


def test_a_change_of_subject_costs_less_than_what_it_would_cost_to_remember() -> None:
    """The counts with and without forgetting, on a trace whose popularity changes half way; on a steady one they are the same."""
    depths = routing_trace.SLICE_DEPTHS

    def hits(trace: slice_traces.Trace, below: float) -> int:
        options = slice_traces.HEAT | {"heat_forget_below": below}
        return simulate(CachePolicy.HEAT, np.ascontiguousarray(trace[:, 0]), routing_trace.EXPERTS, 393, warm_tokens=150, **options).hits

    drifting, steady = slice_traces.drifting(33, 300, depths), routing_trace.make(33, 300, depths=depths)
    assert hits(drifting, 0.85) > 1.05 * hits(drifting, 0.0)
    assert hits(steady, 0.85) == hits(steady, 0.0)


def test_the_simulator_has_the_parameters_of_the_backend() -> None:
    """What is measured by counts is what serves."""
    policy = PagerPolicy()
    served = {
        "admit_after": policy.admit_after,
        "admit_margin": policy.admit_margin,
        "heat_slow_half_life": policy.slow_half_life,
        "heat_fast_half_life": policy.fast_half_life,
        "heat_fast_weight": policy.fast_weight,
        "heat_forget_below": policy.forget_below,
    }
    assert served == slice_traces.HEAT
