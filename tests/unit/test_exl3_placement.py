"""Slots, heat and cache pages of the GPU backend: plain arithmetic, so everything about them is tested here."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.gpu_worker.backends import select
from services.gpu_worker.backends.base import chunk_end
from services.gpu_worker.backends.exl3 import heat_file
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS, PagesExhausted, PageTable, pages_for
from services.gpu_worker.backends.exl3.placement import NONE, Move, Placement, PlacementOptions, runs


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def step(placement: Placement, *picked: int) -> list[Move]:
    """One decode step whose copies land at once."""
    placement.touch(ids(*picked))
    moves = placement.plan(ids(*picked))
    for move in moves:
        assert placement.landed(move.slot, move.record)
    return moves


def test_a_record_is_admitted_at_its_kth_touch() -> None:
    """Not at the touches before."""
    placement = Placement(10, 4, PlacementOptions(admit_after=3))
    assert step(placement, 7) == []
    assert step(placement, 7) == []
    assert step(placement, 7) == [Move(7, 0, NONE)]
    assert placement.slot(7) == 0


def test_a_record_is_no_hit_before_its_last_byte_landed() -> None:
    """Planned is not resident, and a slot that was given away in between does not become resident by an old copy."""
    placement = Placement(10, 1, PlacementOptions(admit_after=1))
    placement.touch(ids(3))
    (move,) = placement.plan(ids(3))
    assert placement.slot(3) == NONE
    assert placement.slots_used == 0
    placement.vacate([0], remember=False)
    placement.put(5, 0)
    assert not placement.landed(move.slot, 3)
    assert placement.slot(5) == 0


def test_the_coldest_goes_and_never_what_the_step_used() -> None:
    """A hot newcomer takes the place of the coldest record; one that is no hotter takes none."""
    placement = Placement(10, 2, PlacementOptions(admit_after=1))
    for _ in range(200):
        step(placement, 0, 1)
    for _ in range(3):
        step(placement, 0)
    assert step(placement, 2) == []  # 1 is still hotter than a record that came once
    for _ in range(200):
        step(placement, 0, 2)
    assert placement.slot(2) != NONE
    assert placement.slot(1) == NONE
    assert placement.slot(0) != NONE


def test_admissions_of_a_step_are_bounded() -> None:
    """A burst of new records is spread over steps."""
    placement = Placement(100, 100, PlacementOptions(admit_after=1, max_admissions=5))
    everything = tuple(range(40))
    assert len(step(placement, *everything)) == 5
    assert len(step(placement, *everything)) == 5


def test_what_a_prefill_displaced_comes_back() -> None:
    """Without being picked again, hottest first, into free slots."""
    placement = Placement(20, 6, PlacementOptions(admit_after=1, max_admissions=2))
    for _ in range(4):
        step(placement, 0, 1, 2, 3, 4, 5)
    step(placement, 5)
    assert sorted(placement.vacate(range(2, 6), remember=True)) == sorted(
        {0, 1, 2, 3, 4, 5} - {placement.record_in(0), placement.record_in(1)}
    )
    for _ in range(3):
        step(placement, placement.record_in(0))
    assert placement.slots_used == 6


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 30))
def test_slots_and_records_always_agree(seed: int, num_slots: int, steps: int) -> None:
    """Whatever is picked, landed late or vacated: every record is in at most one slot, both directions agree."""
    draw = random.Random(seed)
    num_records = num_slots + draw.randint(0, 20)
    placement = Placement(num_records, num_slots, PlacementOptions(admit_after=1, max_admissions=3))
    flying: list[Move] = []
    for _ in range(steps):
        picked = ids(*draw.sample(range(num_records), draw.randint(1, min(6, num_records))))
        placement.touch(picked)
        flying += placement.plan(picked)
        if draw.random() < 0.2:
            placement.vacate(draw.sample(range(num_slots), draw.randint(0, num_slots)), remember=draw.random() < 0.5)
        while flying and draw.random() < 0.7:
            move = flying.pop(0)
            placement.landed(move.slot, move.record)
        held = placement.residents()
        assert len({record for _, record in held}) == len(held) == placement.slots_used
        assert all(placement.slot(record) == slot == placement.resident(record, 1)[0] for slot, record in held)
        assert sum(placement.slot(record) != NONE for record in range(num_records)) == len(held)


def test_heat_survives_a_restart_and_belongs_to_one_checkpoint(tmp_path: Path) -> None:
    """Saved and read back; another checkpoint's, a damaged and a missing file give nothing and say why."""
    path, mine, other = tmp_path / "heat", b"a" * 32, b"b" * 32
    placement = Placement(6, 2)
    for _ in range(3):
        step(placement, 1, 4)
    assert "does not exist yet" in heat_file.load(path, mine, 6)[1]
    heat_file.save(path, mine, placement.read_heat())
    heat, why = heat_file.load(path, mine, 6)
    assert why == ""
    assert heat is not None
    restarted = Placement(6, 2)
    restarted.write_heat(*heat)
    assert np.allclose(restarted.heat(np.arange(6)), placement.heat(np.arange(6)))
    assert "another checkpoint" in heat_file.load(path, other, 6)[1]
    assert "another checkpoint" in heat_file.load(path, mine, 7)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "damaged" in heat_file.load(path, mine, 6)[1]


def test_heat_is_never_saved_over_another_file(tmp_path: Path) -> None:
    """One that came there after the start is reported and stays; what a worker on the CPU saved is replaced."""
    path, problems = tmp_path / "heat", list[str]()
    keeper = heat_file.HeatKeeper(path, b"c" * 32, Placement(3, 1).read_heat, problems.append)
    path.write_text("diary")
    keeper.close()
    assert path.read_text() == "diary"
    assert len(problems) == 1
    assert "it has 5 bytes that are no heat file of ours" in problems[0]
    path.write_bytes(b"G53heat1 and so on")
    keeper.close()
    assert heat_file.load(path, b"c" * 32, 3)[1] == ""
    assert len(problems) == 1


def test_heat_is_saved_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    """Not at every step; a folder that is gone is reported, and serving goes on."""
    placement, problems = Placement(3, 1), list[str]()
    path = tmp_path / "heat"
    keeper = heat_file.HeatKeeper(path, b"c" * 32, placement.read_heat, problems.append)
    keeper.tick(100.0)
    keeper.tick(101.0)
    assert not path.exists()
    keeper.tick(101.0 + heat_file.SAVE_EVERY_S)
    keeper.close()
    assert heat_file.load(path, b"c" * 32, 3)[1] == ""
    gone = heat_file.HeatKeeper(tmp_path / "no" / "heat", b"c" * 32, placement.read_heat, problems.append)
    gone.close()
    assert len(problems) == 1
    assert "cannot be saved" in problems[0]


def test_runs_join_neighbours() -> None:
    """Consecutive numbers are one copy."""
    assert runs([3, 4, 5, 9, 11, 12], 8) == [(3, 3), (9, 1), (11, 2)]
    assert runs([3, 4, 5, 6, 7, 9], 2) == [(3, 2), (5, 2), (7, 1), (9, 1)]
    assert runs([], 8) == []


def test_pages_grow_come_back_and_run_out() -> None:
    """Growing takes nothing when it cannot take enough."""
    table = PageTable(3)
    first: list[int] = []
    second: list[int] = []
    table.grow(first, PAGE_TOKENS + 1)
    assert first == [0, 1]
    table.grow(first, PAGE_TOKENS + 2)
    assert first == [0, 1]
    with pytest.raises(PagesExhausted, match="2 cache pages are needed, 1 of 3 are free"):
        table.grow(second, 2 * PAGE_TOKENS)
    assert (second, table.num_free) == ([], 1)
    table.release(first)
    assert (first, table.num_free) == ([], 3)
    assert [pages_for(n) for n in (0, 1, PAGE_TOKENS, PAGE_TOKENS + 1)] == [0, 1, 1, 2]


def cuts(total: int, size: int, page: int) -> list[int]:
    """Ends of all passes of a prompt."""
    ends = [0]
    while ends[-1] < total:
        ends.append(chunk_end(ends[-1], total, size, page))
    return ends[1:]


def test_passes_are_cut_where_exllamav3_cuts_them() -> None:
    """Whole pages, the rest but for the last token, the last token."""
    assert cuts(1000, 2048, 256) == [768, 999, 1000]
    assert cuts(4096, 2048, 256) == [2048, 3840, 4095, 4096]
    assert cuts(257, 8192, 256) == [256, 257]
    assert cuts(256, 8192, 256) == [255, 256]
    assert cuts(1, 8192, 256) == [1]
    assert cuts(1000, 300, 0) == [300, 600, 900, 1000]


@given(st.integers(1, 5000), st.sampled_from([16, 256, 300, 2048]))
def test_every_pass_computes_something_and_fits(total: int, size: int) -> None:
    """Ends rise to the prompt's end in passes of at most `size` tokens, the last of one token."""
    ends = [0, *cuts(total, size, 256)]
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    assert all(1 <= length <= size for length in lengths)
    assert lengths[-1] == 1


def test_the_device_is_chosen_with_a_reason() -> None:
    """Auto takes the GPU when nothing speaks against it; asking for a GPU that is not there is refused with what is missing."""
    assert select.choose("auto", lambda: "") == ("cuda", "auto: exllamav3 and an NVIDIA GPU are there")
    assert select.choose("auto", lambda: "exllamav3 is not installed") == ("cpu", "auto: exllamav3 is not installed")
    assert select.choose("cpu", lambda: pytest.fail("not looked at")) == ("cpu", "asked for")
    assert select.choose("cuda", lambda: "") == ("cuda", "asked for")
    with pytest.raises(ConfigError, match=r"GLM53_DEVICE=cuda: torch finds no NVIDIA GPU\. nvidia-smi shows"):
        select.choose("cuda", lambda: "torch finds no NVIDIA GPU")


def test_a_gpu_backend_that_is_not_installed_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is there, and knows the option."""
    monkeypatch.setattr(select.upstream, "installed", lambda: False)
    with pytest.raises(ConfigError, match=r"GLM53_DEVICE=cuda: exllamav3 is not installed\. scripts/install\.sh --gpu installs it"):
        select.choose("cuda", select.gpu_problem)
    assert "--gpu" in (Path(__file__).parents[2] / "scripts" / "install.sh").read_text()


def test_popularity_is_of_a_history_however_short() -> None:
    """A record of every step, and one of every other, are as likely after ten steps as after a thousand."""
    placement = Placement(10, 2)
    for number in range(10):
        placement.touch(ids(0, 1 + number % 2))
    assert placement.read_heat()[0][:3] == pytest.approx([10 / 11, 5 / 11, 5 / 11], abs=0.01)


@pytest.mark.parametrize(("below", "forgets"), [(0.85, True), (0.0, False)])
def test_another_subject_makes_it_forget_the_last_one(below: float, forgets: bool) -> None:
    """Records of the old one lose their slots to what is picked now; a subject that stays is never forgotten."""
    placement = Placement(24, 6, PlacementOptions(forget_below=below))
    rng = np.random.default_rng(0)
    for _ in range(100):
        step(placement, *rng.permutation(6)[:4].tolist())
    assert placement.read_heat()[0][:6].sum() == pytest.approx(4, abs=0.05)
    for _ in range(6):
        step(placement, *(6 + rng.permutation(18)[:4]).tolist())
    assert (placement.read_heat()[0][:6] == 0).all() == forgets


def test_what_an_earlier_run_knew_weighs_half_of_a_long_history() -> None:
    """A step then takes twice the share of it that it takes of a long one."""
    placement = Placement(10, 2)
    gain = 1 - 0.5 ** (1 / PlacementOptions().slow_half_life)
    placement.write_heat(np.full(10, 0.25, np.float32), np.zeros(10, np.float32))
    placement.touch(ids(3))
    history = (0.5 - gain) * (1 - gain) + 2 * gain
    assert placement.read_heat()[0][3] == pytest.approx((0.125 * (1 - gain) + gain) / history)
    assert placement.read_heat()[0][4] == pytest.approx(0.125 * (1 - gain) / history)
