"""Which record is in which slot, and which record should get one. Plain arithmetic: no device, no clock.

A record is (layer, expert) as one number, layer * experts + expert. Heat is how likely a record is to be wanted in the next decode step:
a slow count (long-run popularity) and a fast one (what the last tokens used). As in kernels/tier/heat.h the slow count is taken by the
length of its history, and forgotten when picks suddenly have much less of the chance that they used to have. Slots are shared by all
layers, so a layer with a skewed popularity gets more of them. Prefill neither heats nor evicts anything for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NONE = -1
EARLIER = 0.5  # of a long history
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PlacementOptions:
    """How the cache behaves."""

    admit_after: int = 1  # a record gets a slot at its k-th touch
    max_admissions: int = 48  # per decode step: what the link copies beside one step without delaying it much
    margin: float = 1.0  # a newcomer must be this much hotter than the record it replaces
    slow_half_life: float = 400.0  # decode steps
    fast_half_life: float = 10.0
    fast_weight: float = 1.0
    forget_below: float = 0.85  # picks that have less than this share of their usual chance may be of another subject; 0: never


@dataclass(frozen=True)
class Move:
    """A record that is to be copied into a slot. `evicted` was there, or NONE."""

    record: int
    slot: int
    evicted: int


def _added(mean: tuple[float, float], kept: float, value: float) -> tuple[float, float]:
    return mean[0] * kept + value * (1 - kept), mean[1] * kept + 1 - kept


class SubjectChange:
    """Says when picks stop being those that are expected."""

    RECENT, USUAL = 0.5 ** (1 / 2), 0.5 ** (1 / 60)  # what is left of a mean after a step
    NOISE = (1 - RECENT) / (1 + RECENT)  # of one step's variance, what is left in the recent mean
    SIGMAS = 4.5
    LEAST = 20  # steps before which nothing is usual yet

    def __init__(self, below: float) -> None:
        self._below = below
        self._begin()

    def _begin(self) -> None:
        self._recent = self._usual = self._variance = (0.0, 0.0)  # sum and weight
        self._steps = 0

    def step(self, chance: float) -> bool:
        """True: another subject, and it starts anew. chance: what the step's picks had on average, before it touched them."""
        if self._below <= 0:
            return False
        self._recent, self._usual = _added(self._recent, self.RECENT, chance), _added(self._usual, self.USUAL, chance)
        recent, usual, variance = (total / weight if weight else 0.0 for total, weight in (self._recent, self._usual, self._variance))
        self._variance = _added(self._variance, self.USUAL, (chance - usual) ** 2)
        self._steps += 1
        varies = (usual - recent) ** 2 <= self.SIGMAS**2 * self.NOISE * variance
        if self._steps < self.LEAST or recent >= self._below * usual or varies:
            return False
        self._begin()
        return True


class Placement:
    """Slots and heat.

    Args:
        num_records: layers * experts.
        num_slots: records that fit into the device.
        options: the policy.
    """

    def __init__(self, num_records: int, num_slots: int, options: PlacementOptions | None = None) -> None:
        if not 0 <= num_slots <= num_records:
            raise ValueError(f"num_slots is {num_slots}, need 0..{num_records}")
        self.options = options or PlacementOptions()
        self.num_records, self.num_slots = num_records, num_slots
        self.usable = num_slots  # the slots behind it get no record
        self._slot_of = np.full(num_records, NONE, np.int64)
        self._record_in = np.full(num_slots, NONE, np.int64)
        self._landing = np.zeros(num_slots, np.bool_)
        self._slow = np.zeros(num_records, np.float64)
        self._fast = np.zeros(num_records, np.float64)
        self._touches = np.zeros(num_records, np.int64)
        self._gain = 1 - 0.5 ** (1 / self.options.slow_half_life)  # what a touch adds to the slow count
        self._history = 0.0  # what the slow count of a record would be that every step touched
        self._change = SubjectChange(self.options.forget_below)
        self._wanted: list[int] = []  # records that lost their slot to a prefill
        self.admissions = self.evictions = 0

    # ---- what is where -----------------------------------------------------------------------------------------------------------

    def slot(self, record: int) -> int:
        """The slot that holds the whole record, or NONE."""
        slot = int(self._slot_of[record])
        return NONE if slot == NONE or self._landing[slot] else slot

    def resident(self, first: int, count: int) -> NDArray[np.int64]:
        """Slots of `count` records from `first` on, NONE where a record is not whole in one: int64 [count]."""
        slots = self._slot_of[first : first + count].copy()
        held = slots != NONE
        slots[held] = np.where(self._landing[slots[held]], NONE, slots[held])
        return slots

    def record_in(self, slot: int) -> int:
        """The record that is whole in the slot, or NONE."""
        return NONE if self._landing[slot] else int(self._record_in[slot])

    @property
    def slots_used(self) -> int:
        """Slots with a whole record."""
        return int(np.count_nonzero((self._record_in != NONE) & ~self._landing))

    def residents(self) -> list[tuple[int, int]]:
        """(slot, record) of every slot with a whole record."""
        return [(int(s), int(self._record_in[s])) for s in np.flatnonzero((self._record_in != NONE) & ~self._landing)]

    # ---- decode ------------------------------------------------------------------------------------------------------------------

    def touch(self, records: Ids) -> None:
        """One decode step used these records, each named once."""
        options = self.options
        slow, fast = 0.5 ** (1 / options.slow_half_life), 0.5 ** (1 / options.fast_half_life)
        self._slow *= slow
        self._fast *= fast
        self._history = self._history * slow + self._gain
        if len(records) and self._change.step(float(self._popularity(records).mean())):
            self._slow[:], self._history = 0, self._gain
        # Scaled so that both counts are chances per step.
        self._slow[records] += self._gain
        self._fast[records] += 1 - fast
        self._touches[records] += 1

    def heat(self, records: Ids) -> NDArray[np.float64]:
        """How likely each record is to be used in the next step."""
        result: NDArray[np.float64] = self._popularity(records) + self.options.fast_weight * self._fast[records]
        return result

    def _popularity(self, records: Ids) -> NDArray[np.float64]:
        # With one more step that touched nothing: no chance is known to be 1.
        result: NDArray[np.float64] = self._slow[records] / (self._history + self._gain)
        return result

    def read_heat(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(popularity, fast): the two parts of every record's heat, fast without its weight."""
        return self._popularity(np.arange(self.num_records)).astype(np.float32), self._fast.astype(np.float32)

    def write_heat(self, slow: NDArray[np.float32], fast: NDArray[np.float32]) -> None:
        """Goes on with the heat of an earlier run, which weighs half of what a long history does."""
        self._slow[:], self._fast[:] = slow * EARLIER, fast
        self._history = EARLIER - self._gain if slow.any() else 0.0
        self._change = SubjectChange(self.options.forget_below)

    def plan(self, picked: Ids) -> list[Move]:
        """Moves for the misses of a step, hottest first; the slots count as landing from now on.

        Args:
            picked: records that the step used; none of them is evicted.
        """
        # Whole arrays: this runs between two steps, while the device has nothing to do.
        wanted = self._candidates(picked)
        free = np.flatnonzero(self._record_in[: self.usable] == NONE)
        moves = [self._land(int(record), int(slot)) for record, slot in zip(wanted, free, strict=False)]
        rest = wanted[len(moves) :]
        if len(rest) == 0:
            return moves
        victims = self._victims(picked, len(rest))
        rest = rest[: len(victims)]
        hotter = self.heat(rest) > self.options.margin * self.heat(victims)
        # Newcomers get colder, victims hotter: the first pair that does not pay is the last.
        pays = int(np.argmin(hotter)) if not hotter.all() else len(rest)
        slots = self._slot_of[victims[:pays]]
        return moves + [self._land(int(record), int(slot)) for record, slot in zip(rest[:pays], slots, strict=True)]

    def _candidates(self, picked: Ids) -> Ids:
        """Records that are to get a slot, hottest first."""
        missing = picked[self._slot_of[picked] == NONE]
        missing = missing[self._touches[missing] >= self.options.admit_after]
        back = [record for record in self._wanted if self._slot_of[record] == NONE]
        every = np.unique(np.concatenate([missing, np.array(back, np.int64)]))
        chosen: Ids = every[np.lexsort((every, -self.heat(every)))][: self.options.max_admissions]
        taken = set(chosen.tolist())
        self._wanted = [record for record in back if record not in taken]
        return chosen

    def _victims(self, picked: Ids, count: int) -> Ids:
        """The coldest records that may lose their slot, coldest first."""
        held = self._record_in[(self._record_in != NONE) & ~self._landing]
        held = held[~np.isin(held, picked)]
        heat = self.heat(held)
        if count < len(held):
            chosen = np.argpartition(heat, count)[:count]
            held, heat = held[chosen], heat[chosen]
        result: Ids = held[np.argsort(heat, kind="stable")]
        return result

    def _land(self, record: int, slot: int) -> Move:
        evicted = int(self._record_in[slot])
        if evicted != NONE:
            self._slot_of[evicted] = NONE
            self.evictions += 1
        self._record_in[slot], self._slot_of[record], self._landing[slot] = record, slot, True
        self.admissions += 1
        return Move(record, slot, evicted)

    def landed(self, slot: int, record: int) -> bool:
        """The last byte of `record` is in the slot. False when the slot was given to something else meanwhile."""
        if not self._landing[slot] or self._record_in[slot] != record:
            return False
        self._landing[slot] = False
        return True

    # ---- prefill, tests ----------------------------------------------------------------------------------------------------------

    def vacate(self, slots: Iterable[int], *, remember: bool) -> list[int]:
        """Empties slots; returns the records that were whole in them.

        Args:
            remember: they come back with the next decode steps.
        """
        lost = []
        for slot in slots:
            record = int(self._record_in[slot])
            if record == NONE:
                continue
            if not self._landing[slot]:
                lost.append(record)
            if remember:
                self._wanted.append(record)
            self._slot_of[record], self._record_in[slot], self._landing[slot] = NONE, NONE, False
        return lost

    def limit(self, usable: int) -> None:
        """Slots from there on get no record until a higher limit is set.

        Raises:
            ValueError: one of them holds a record, or there are fewer slots.
        """
        if not 0 <= usable <= self.num_slots or (self._record_in[usable:] != NONE).any():
            raise ValueError(f"slots from {usable} of {self.num_slots} on are to hold nothing, and they do or are not there")
        self.usable = usable

    def put(self, record: int, slot: int) -> None:
        """Says that a record is whole in an empty slot.

        Raises:
            ValueError: the slot or the record is taken.
        """
        if slot >= self.usable:
            raise ValueError(f"slot {slot} may not be used: {self.usable} may")
        if self._record_in[slot] != NONE or self._slot_of[record] != NONE:
            raise ValueError(f"slot {slot} or record {record} is taken")
        self._record_in[slot], self._slot_of[record] = record, slot


def runs(numbers: Iterable[int], most: int) -> list[tuple[int, int]]:
    """Ascending numbers as (first, count) of consecutive ones, at most so many in one."""
    result: list[tuple[int, int]] = []
    for number in numbers:
        if result and sum(result[-1]) == number and result[-1][1] < most:
            result[-1] = (result[-1][0], result[-1][1] + 1)
        else:
            result.append((number, 1))
    return result
