"""The hit rates of the pager itself, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bench import pager_rates, routing_trace, slice_traces
from bench.pager_rates import Roles
from kernels.python.cache_sim import CachePolicy

DEPTHS, WARM, SLOTS = (0, 15, 30), 60, 98
TIES = 2


def test_with_nothing_in_transit_the_pager_hits_what_counts_say() -> None:
    """Heat, admission and eviction are the simulator's, over a change of subject too; of equally hot records another may go."""
    for trace in (routing_trace.make(2, 2 * WARM, depths=DEPTHS), slice_traces.drifting(2, 2 * WARM, DEPTHS)):
        got = pager_rates.drive(trace, Roles(SLOTS, 0, 0), WARM)
        hits, picks = slice_traces.hits(CachePolicy.HEAT, trace[:, 0], SLOTS, WARM)
        assert got.picks == picks
        assert got.hits == pytest.approx(hits, abs=TIES)
        assert got.in_place > 0


def test_transit_slots_cost_what_a_smaller_cache_costs_and_passing_costs_less() -> None:
    """At one stream, with as many of them as a step can need: nothing is read in place."""
    trace = routing_trace.make(4, 2 * WARM, depths=DEPTHS)
    aside = pager_rates.drive(trace, Roles(SLOTS, 8, 0), WARM)
    passing = pager_rates.drive(trace, Roles(SLOTS, 0, 8), WARM)
    assert (aside.in_place, passing.in_place) == (0, 0)
    assert aside.hits == pytest.approx(slice_traces.hits(CachePolicy.HEAT, trace[:, 0], SLOTS - 8, WARM)[0], abs=TIES)
    assert aside.hits < passing.hits < slice_traces.hits(CachePolicy.HEAT, trace[:, 0], SLOTS, WARM)[0]


def test_a_prompt_that_borrows_the_slots_costs_hits() -> None:
    """They are empty when decoding goes on."""
    trace = routing_trace.make(5, 2 * WARM, depths=DEPTHS)
    whole = pager_rates.drive(trace, Roles(SLOTS), WARM)
    lent = pager_rates.drive(trace, Roles(SLOTS), WARM, lent_at=slice_traces.middle(WARM, 2 * WARM))
    assert lent.picks == whole.picks
    assert lent.hits < whole.hits


def test_the_summary_has_every_trace_s_mean_and_the_least_distance_to_clock() -> None:
    """Of one stream, whose CLOCK is counted; of more only the mean."""
    rows = [
        {"trace": trace, "seed": seed, "streams": streams, "hit_rate": 0.5 + seed / 100, **({"clock": 0.4} if streams == 1 else {})}
        for trace in pager_rates.TRACES
        for streams in (1, 2)
        for seed in (0, 2)
    ]
    summary = pager_rates.summary(rows)
    assert summary["drift_c1_hit_rate"] == summary["drift_c2_hit_rate"] == 0.51
    assert summary["drift_c1_least_points_over_clock"] == 10.0
    assert "drift_c2_least_points_over_clock" not in summary
