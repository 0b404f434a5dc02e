"""How `fast` on a GPU splits a step's misses between the link and the CPU lane, and how well it foretells steps: simulated rates."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.python.fast_pager import forecast, learn, rates, split

KERNEL = (10.0, 5.5)  # an H200's: fixed, per expert
H200_LINK = 188.0  # one 9.4 MB record
RTX3090_LINK = 380.0
ROWS_COST = np.array([1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0, 2.2])


def lane(one_us: float) -> list[float]:
    return list(one_us * ROWS_COST)


@pytest.mark.parametrize("misses", range(1, 9))
@pytest.mark.parametrize(("link", "expert"), [(H200_LINK, 120.0), (RTX3090_LINK, 125.0), (RTX3090_LINK, 400.0), (H200_LINK, 60.0)])
def test_no_other_split_ends_sooner(misses: int, link: float, expert: float) -> None:
    """The longer of the two sides is the shortest that there is, but for the eight percent that a lane must win by."""
    rows = [1] * misses
    chosen, _ = split(8 - misses, rows, kernel_us=KERNEL, link_us=link, job_us=30.0, expert_us=lane(expert))
    times = []
    for count in range(misses + 1):
        left = misses - count
        computed = 8 - misses + left
        device = (KERNEL[0] + KERNEL[1] * computed if computed else 0.0) + (5 + link * left if left else 0.0)
        times.append(max(device, 30.0 + expert * count if count else 0.0))
    assert chosen == int(np.argmin(times)) or (chosen == 0 and min(times) >= 0.92 * times[0])
    assert times[chosen] <= times[0]


def test_two_threads_beside_a_fast_link_get_nothing() -> None:
    """A lane of a few milliseconds an expert never pays: the step is as fast as without it."""
    for misses in range(1, 33):
        chosen, predicted = split(0, [1] * misses, kernel_us=KERNEL, link_us=H200_LINK, job_us=60.0, expert_us=lane(7000.0))
        assert chosen == 0
        assert predicted[1] == 0


def test_a_gain_within_the_noise_is_left_alone() -> None:
    """Five percent do not switch the lane on."""
    alone = KERNEL[0] + KERNEL[1] + 5 + 200.0
    assert split(0, [1], kernel_us=KERNEL, link_us=200.0, job_us=0.95 * alone - 1, expert_us=lane(1.0))[0] == 0
    assert split(0, [1], kernel_us=KERNEL, link_us=200.0, job_us=0.90 * alone - 1, expert_us=lane(1.0))[0] == 1


def test_the_union_of_a_batch_is_planned_by_its_rows() -> None:
    """An expert that many rows use costs the lane more and the link the same: fewer of them go there."""
    alone, _ = split(0, [1] * 20, kernel_us=KERNEL, link_us=H200_LINK, job_us=30.0, expert_us=lane(150.0))
    crowded, _ = split(0, [8] * 20, kernel_us=KERNEL, link_us=H200_LINK, job_us=30.0, expert_us=lane(150.0))
    assert 0 < crowded < alone < 20


def test_a_derated_link_sends_more_to_the_lane() -> None:
    """Half the rate of the link, more misses for the CPU."""
    arguments = {"kernel_us": KERNEL, "job_us": 30.0, "expert_us": lane(150.0)}
    full = split(0, [1] * 16, link_us=H200_LINK, **arguments)[0]  # type: ignore[arg-type]
    half = split(0, [1] * 16, link_us=2 * H200_LINK, **arguments)[0]  # type: ignore[arg-type]
    assert half > full > 0


def test_an_unprobed_lane_gets_nothing() -> None:
    """Before it was timed its cost is not known."""
    assert split(0, [1] * 8, kernel_us=KERNEL, link_us=10_000.0, job_us=None, expert_us=lane(1.0))[0] == 0


def test_a_line_through_the_medians_tells_job_and_expert_apart() -> None:
    """60 us a job and 200 an expert, each size disturbed once by milliseconds and once by a lucky cache."""
    jobs = [(n, 1, 60.0 + 200 * n + noise) for n in (1, 2, 4) for noise in (-50, 0, 0, 0, 9000)]
    job, expert = rates(jobs)
    assert job == pytest.approx(60)
    assert expert[0] == pytest.approx(200)


def test_more_rows_cost_what_they_were_timed_at_and_a_straight_line_between() -> None:
    """Four experts with 2, 4 and 8 rows."""
    jobs = [(1, 1, 150.0), (4, 1, 450.0), (4, 2, 50 + 4 * 120.0), (4, 4, 50 + 4 * 160.0), (4, 8, 50 + 4 * 320.0)]
    job, expert = rates(jobs)
    assert job == pytest.approx(50)
    assert expert == pytest.approx([100, 120, 140, 160, 200, 240, 280, 320])


def test_rows_that_were_not_timed_keep_their_ratio() -> None:
    """A series of jobs with one row halves an expert: every number of rows is halved."""
    job, expert = rates([(1, 1, 110.0), (2, 1, 210.0), (4, 1, 410.0)], (3673.0, lane(200.0)))
    assert job == pytest.approx(10)
    assert expert == pytest.approx(lane(100.0))


def test_timings_that_would_make_a_job_cost_less_than_nothing_give_a_line_through_the_origin() -> None:
    """One expert so quick that the line would begin below zero; and jobs of one size, which say nothing of the job by itself."""
    job, expert = rates([(1, 1, 50.0), (4, 1, 800.0)])
    assert job == 0
    assert expert[0] == pytest.approx((50 + 4 * 800) / 17)
    assert rates([(1, 1, 70.0), (1, 1, 80.0)])[0] == 0
    assert rates([(1, 1, 70.0), (1, 1, 80.0)])[1][0] == pytest.approx(75)


def test_without_a_job_of_one_row_nothing_is_known_that_was_not_known_before() -> None:
    """The rates stay."""
    assert rates([(4, 2, 500.0)], (60.0, lane(200.0))) == (60.0, lane(200.0))


def test_one_late_job_hardly_makes_the_lane_dearer() -> None:
    """One of fifty jobs took 10 ms; a job of three experts still costs what the others took, within a few percent."""
    steady = [(n, 60.0 + 200 * n) for n in (1, 2, 3, 4)] * 12
    job, expert = learn([*steady[:24], (2, 10_000.0), *steady[24:]], (60.0, lane(200.0)))
    assert job + 3 * expert[0] == pytest.approx(660, rel=0.05)
    assert job < 100


def test_one_late_job_after_the_probe_leaves_the_lane_in_use() -> None:
    """The very first job takes 10 ms: three misses beside a link of 188 us each are still split."""
    job, expert = learn([(2, 10_000.0)], (60.0, lane(120.0)))
    assert job < 200
    assert split(5, [1] * 3, kernel_us=KERNEL, link_us=H200_LINK, job_us=job, expert_us=expert)[0] > 0


def test_jobs_that_keep_coming_late_make_the_lane_dear() -> None:
    """Three times as slow from now on: after fifty jobs that is what is foretold."""
    job, expert = learn([(n, 3 * (60.0 + 200 * n)) for n in (1, 2, 3, 4)] * 12, (60.0, lane(200.0)))
    assert job + 3 * expert[0] == pytest.approx(3 * 660, rel=0.15)


LAYERS = 6


def requests(steps: int, rest_us: np.ndarray, expert_us: np.ndarray, predicted_us: np.ndarray, rows: int = 1) -> tuple[int, float]:
    """Whole decode steps: [steps, layers] each."""
    period = (rest_us + expert_us).ravel()
    now = 1_000_000 + np.concatenate([[0.0], np.cumsum(period)[:-1]]) * 1000
    layer = np.tile(np.arange(LAYERS), steps)
    return forecast(LAYERS, layer, np.full(layer.size, rows), now.astype(np.uint64), predicted_us.ravel())  # type: ignore[arg-type]


def test_a_steady_machine_is_foretold_exactly() -> None:
    """What the costs say plus what the rest of a layer always takes; the first steps of a batch size teach and do not count."""
    rng = np.random.default_rng(1)
    expert = rng.uniform(50, 500, (100, LAYERS))
    steps, error = requests(100, np.full((100, LAYERS), 120.0), expert, expert)
    assert steps == 100 - 16
    assert error < 0.1


def test_wrong_costs_show_as_an_error() -> None:
    """Experts that take twice what was foretold, by varying amounts: the error says so, it is not fitted away."""
    rng = np.random.default_rng(2)
    expert = rng.uniform(0, 1000, (300, 1)) * np.ones((1, LAYERS))
    steps, error = requests(300, np.full((300, LAYERS), 100.0), expert, expert / 2)
    assert steps == 284
    assert error > 10


def test_gaps_and_mixed_batches_do_not_count() -> None:
    """Prefills between, layers left out, another number of rows: no step is made of such pieces."""
    layer = np.tile([0, 1, 2, 4, 5], 40)
    rows = np.ones(layer.size)
    now = 1_000_000 + np.arange(layer.size) * 100_000
    assert forecast(LAYERS, layer, rows, now, np.full(layer.size, 50.0))[0] == 0  # type: ignore[arg-type]
    layer = np.tile(np.arange(LAYERS), 40)
    rows = np.where(layer == 3, 2, 1)
    now = 1_000_000 + np.arange(layer.size) * 100_000
    assert forecast(LAYERS, layer, rows, now, np.full(layer.size, 50.0))[0] == 0  # type: ignore[arg-type]
