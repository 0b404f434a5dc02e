"""Hints to the device pager against the simulated GPU: records come ahead of their step, and no kernel reads a byte that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python.errors import KernelError
from kernels.python.pager import HINT_WIDTH, HintCounters, PagerPolicy
from tests.tier.harness import wait_until
from tests.tier.simulated_gpu import COMPUTE, COPY
from tests.tier.test_pager import EXPERTS, LAYERS, ROWS, STRIDE, TOP_K, World

CHUNK = 96  # of a record of 256 bytes: three copies, the last one shorter
HINT_WORD, LANDED_WORD = 4 * 56, 4 * 60
NOTHING = [-1] * TOP_K  # picks of a step that wants no record
POLICY = PagerPolicy(hint_records=4, hint_chunk=CHUNK)

Ids = npt.NDArray[np.int64]
Guess = Callable[[Ids], Ids]  # [rows, top_k] picks of the next layer -> [rows, width] ids


class HintedWorld(World):
    """A world whose steps give hints."""

    closing = False

    def step(self, layer: int, picks: list[list[int]], hint: list[list[int]] | None = None) -> None:
        """Enqueues a layer step, a hint for the next layer in its middle, and its kernel."""
        selected = np.array(picks, np.int64)
        self.kept.append(selected)
        self.pager.ask(layer, len(selected), selected.ctypes.data, COMPUTE)
        if hint is not None:
            ids = np.array(hint, np.int64)
            self.kept.append(ids)
            self.pager.hint(layer + 1, len(ids), ids.ctypes.data, ids.shape[1], COMPUTE)
        self.pager.wait(COMPUTE)
        experts = sorted(set(selected.ravel().tolist()) - {-1})
        self.gpu.enqueue(COMPUTE, "run", lambda: self.kernel(layer, experts))

    def gate(self, opens: Callable[[], bool]) -> None:
        """What is enqueued behind it runs once `opens` says so; the pager's thread waits for its request meanwhile."""
        self.gpu.enqueue(COMPUTE, "wait", lambda: self.closing or opens())

    def pause(self, seconds: float, chunks: int) -> None:
        """The compute stream has something else to do for so long, or until so many chunks have landed meanwhile."""
        begun: list[tuple[float, int]] = []

        def over() -> bool:
            begun.append((time.monotonic(), self.chunks_landed()))
            return begun[-1][0] - begun[0][0] >= seconds or begun[-1][1] - begun[0][1] >= chunks

        self.gate(over)

    def until_landed(self, chunks: int) -> None:
        """The device is busy with something else until so many chunks have landed since the world was made."""
        self.gate(lambda: self.chunks_landed() >= chunks)

    def until_hinted(self, records: int) -> None:
        """The device is busy until hints that were looked at have named so many records since the world was made."""
        self.gate(lambda: self.hints().hinted == records)

    def run(self, layer: int, picks: list[list[int]], hint: list[list[int]] | None = None) -> None:
        """The same, and waits until the device is through."""
        self.step(layer, picks, hint)
        self.gpu.synchronize()

    def decode_with(self, draw: random.Random, rows: int, guess: Guess) -> None:
        """One decode step of all layers, with pauses between layers in which copies may or may not get through."""
        picks = [[draw.sample(range(EXPERTS), TOP_K) for _ in range(rows)] for _ in range(LAYERS)]
        for layer in range(LAYERS):
            following = picks[layer + 1] if layer + 1 < LAYERS else None
            self.step(layer, picks[layer], None if following is None else guess(np.array(following, np.int64)).tolist())
            self.pause(draw.choice((0, 0, 0.001, 0.05)), chunks=draw.randint(1, 9))
        self.gpu.synchronize()
        self.kept.clear()

    def hints(self) -> HintCounters:
        return self.pager.hint_counters()

    def chunks_landed(self) -> int:
        return int(self.words[LANDED_WORD : LANDED_WORD + 4].view(np.uint32)[0])

    def chunks_sent(self) -> int:
        """Copies of hints that were put on the copy stream."""
        return sum(kind == "word" and at == self.words.ctypes.data + LANDED_WORD for kind, at, _ in self.gpu.asked)

    def check_slots(self) -> None:
        """Every record that the pager calls resident lies in its slot, whole."""
        for record, slot in enumerate(self.pager.where().tolist()):
            assert slot < 0 or (self.slots[slot] == self.host[record]).all(), f"record {record} in slot {slot}"

    def check_counters(self) -> None:
        """Every copy that was begun was accounted for; call it when no hint is open."""
        hints, counters = self.hints(), self.pager.counters()
        assert hints.started == hints.used + hints.late + hints.dropped
        assert hints.started <= hints.hinted
        assert hints.bytes_copied <= STRIDE * hints.started
        assert counters.missed == counters.admitted + counters.transit + counters.in_place
        whole = STRIDE * (counters.admitted + counters.transit)
        assert whole <= counters.bytes_copied <= whole + STRIDE * hints.late


@pytest.fixture
def open_world() -> Iterator[Callable[..., HintedWorld]]:
    """Makes worlds; those are closed whatever the test did."""
    worlds: list[HintedWorld] = []

    def make(num_slots: int, num_transit: int = 0, policy: PagerPolicy = POLICY, seed: int = 0) -> HintedWorld:
        worlds.append(HintedWorld(seed, num_slots, num_transit, policy))
        return worlds[-1]

    yield make
    for world in worlds:
        world.closing = True
        world.gpu.release(COPY)
        world.close()


def guessing(draw: random.Random, recall: float) -> Guess:
    """Ids of which that share is picked; among the rest are ids that are no expert, and ids that were named before."""

    def guess(picks: Ids) -> Ids:
        width = draw.randint(1, HINT_WIDTH)
        ids = np.empty((len(picks), width), np.int64)
        others = sorted(set(range(EXPERTS)) - set(picks.ravel().tolist())) or [-1]
        for row in range(len(picks)):
            for rank in range(width):
                wrong = draw.choice([draw.choice(others), draw.choice(others), -1, EXPERTS, 1 << 40, -(1 << 62)])
                ids[row, rank] = draw.choice(picks[row].tolist()) if draw.random() < recall else wrong
        return ids

    return guess


@pytest.mark.parametrize("recall", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("num_slots", "num_transit"), [(0, 0), (1, 0), (3, 3), (6, 2), (20, 4), (LAYERS * EXPERTS, 0)])
def test_kernels_read_the_right_bytes_whatever_hints_say(
    open_world: Callable[..., HintedWorld], num_slots: int, num_transit: int, recall: float
) -> None:
    """Right guesses, wrong ones and nonsense, few slots and many, 1 to 8 rows, slots taken away in between: no byte is ever wrong."""
    draw = random.Random(num_slots + 100 * int(2 * recall))
    world = open_world(num_slots, num_transit, seed=num_slots)
    for step in range(40):
        world.decode_with(draw, draw.choice((1, 1, 2, ROWS)), guessing(draw, recall))
        if step % 8 == 3:
            first = draw.randint(0, num_slots)
            world.pager.vacate(first, draw.randint(0, num_slots - first))
            world.read_everything()
            world.check_slots()
        if step % 8 == 7:
            usable = draw.randint(num_transit, num_slots)
            world.pager.vacate(usable, num_slots - usable)
            world.pager.limit(usable)
            world.slots[usable:] = 0xEE
        if step % 8 == 1:
            world.pager.limit(num_slots)
    assert world.gpu.problems == []
    world.check_slots()
    world.check_counters()
    hints = world.hints()
    if num_slots == 20:
        assert (hints.used > 0, hints.dropped > 0) == (recall > 0, recall < 1)
    elif num_slots - num_transit < 4:
        assert hints.started == 0  # a quarter of the slots: none


@pytest.mark.parametrize("guess_right", [True, False])
def test_a_random_mixture_is_right_with_other_chunks(open_world: Callable[..., HintedWorld], guess_right: bool) -> None:
    """One chunk for a record, and a byte or two of it at a time, over a link of a third of the rate."""
    for chunk, derate in ((STRIDE, 1), (4 * STRIDE, 2), (31, 3)):
        draw = random.Random(chunk)
        world = open_world(12, 2, dataclasses.replace(POLICY, hint_chunk=chunk, link_derate=derate), seed=chunk)
        for _ in range(25):
            world.decode_with(draw, draw.randint(1, ROWS), guessing(draw, float(guess_right)))
        assert world.gpu.problems == []
        assert world.hints().started > 0
        world.check_slots()
        world.check_counters()


def test_what_a_hint_brought_in_time_is_a_hit(open_world: Callable[..., HintedWorld]) -> None:
    """Guessed right and whole before the request: the step copies nothing, and finds its records in slots."""
    world = open_world(16)
    world.step(0, [NOTHING], [[5, 6, 7, 8]])
    world.until_landed(4 * 3)
    world.run(1, [[5, 6, 7, 8]])
    counters = world.pager.counters()
    assert world.gpu.problems == []
    assert world.hints() == HintCounters(4, 4, 4, 0, 0, 4 * STRIDE)
    assert (counters.hits, counters.missed, counters.bytes_copied) == (4, 0, 0)
    assert world.reads_on_host == 0
    # There were free slots, so they stay, in the slots that they lie in.
    assert (world.pager.where()[EXPERTS + 5 : EXPERTS + 9] >= 0).all()
    world.check_slots()
    world.check_counters()


def ends_with_the_copies(world: World, call: Callable[[], object]) -> None:
    """The call waits until the copy stream goes on."""
    called = threading.Thread(target=call)
    called.start()
    called.join(0.1)
    assert called.is_alive()
    world.gpu.release(COPY)
    called.join(30)
    assert not called.is_alive()


def hold_with_chunks_under_way(
    world: HintedWorld, hint: list[int], layer: int, picks: list[int], then: list[int] | None = None
) -> threading.Event:
    """Layer 0's records 1 to 4 are in slots, and the copy stream stands with the first two chunks of a hint for layer 1 on it.

    When the event is set the device goes on, with a step of `layer` in which the hint `then` is given.
    """
    world.run(0, [[1, 2, 3, 4]])
    world.gpu.hold(COPY)
    world.step(0, [[1, 2, 3, 4]], [hint])
    goes_on = threading.Event()
    world.gate(goes_on.is_set)
    world.step(layer, [picks], None if then is None else [then])
    assert wait_until(lambda: world.chunks_sent() == 2)
    return goes_on


def test_a_request_never_waits_for_more_than_two_chunks(open_world: Callable[..., HintedWorld]) -> None:
    """With the copy engine busy two chunks are sent and no more; a request that comes then has its copies right behind them.

    The record that is half way is finished first, the other misses follow, then the table and the reply.
    """
    world = open_world(16)
    goes_on = hold_with_chunks_under_way(world, [5, 6, 7, 8], 1, [5, 7, 9, 10])
    time.sleep(0.05)
    assert world.chunks_sent() == 2
    sent = len(world.gpu.asked)
    goes_on.set()
    reply = world.words.ctypes.data + 4 * 32
    assert wait_until(lambda: any(kind == "word" and at == reply for kind, at, _ in world.gpu.asked[sent:]))
    first, *others, table, word = world.gpu.asked[sent:]
    assert (first[0], first[2]) == ("copy", STRIDE - 2 * CHUNK)
    assert (first[1] - world.slots.ctypes.data) % STRIDE == 2 * CHUNK
    assert [(kind, size) for kind, _, size in others] == [("copy", STRIDE)] * 3
    assert (table[0], word[0]) == ("copy", "word")
    world.gpu.release(COPY)
    world.gpu.synchronize()
    assert world.gpu.problems == []
    assert world.hints() == HintCounters(4, 1, 0, 1, 0, 2 * CHUNK)
    assert world.pager.counters().missed == 4 + 3
    world.check_slots()
    world.check_counters()


def test_at_no_time_more_than_two_chunks_are_under_way(open_world: Callable[..., HintedWorld]) -> None:
    """Whatever the order of the streams: each chunk is sent when all but one of those before it have landed."""
    world = open_world(20, 2, dataclasses.replace(POLICY, hint_records=8, hint_chunk=32))
    most, landed_word = 0, world.words.ctypes.data + LANDED_WORD

    def look(kind: str, at: int) -> bool:
        nonlocal most
        if kind == "word" and at == landed_word:
            most = max(most, world.chunks_sent() + 1 - world.chunks_landed())
        return False

    world.gpu.refuse = look
    draw = random.Random(8)
    deadline = time.monotonic() + 60
    while world.chunks_sent() < 100:
        assert time.monotonic() < deadline
        world.decode_with(draw, 2, guessing(draw, 0.5))
    assert most == 2
    assert world.gpu.problems == []


@pytest.mark.parametrize("chunk", [CHUNK, STRIDE // 2])
def test_a_record_that_is_not_picked_leaves_with_chunks_under_way(open_world: Callable[..., HintedWorld], chunk: int) -> None:
    """Incomplete, or all sent and none landed: what the next hint brings comes to the same slot, behind those chunks."""
    world = open_world(5, policy=dataclasses.replace(POLICY, hint_chunk=chunk))
    goes_on = hold_with_chunks_under_way(world, [5, 6, 7, 8], 1, [9, 9, 9, 9], then=[3])
    world.until_landed(2 + -(-STRIDE // chunk))
    world.step(2, [[3, 3, 3, 3]])
    goes_on.set()
    assert wait_until(lambda: world.hints().dropped == 1)
    before = len(world.gpu.asked)
    world.gpu.release(COPY)
    world.gpu.synchronize()
    assert world.gpu.problems == []
    assert world.hints() == HintCounters(5, 2, 1, 0, 1, 2 * chunk + STRIDE)
    places = [at for kind, at, size in world.gpu.asked if kind == "copy" and size == chunk]
    assert places[0] == places[2] == next(at for kind, at, _ in world.gpu.asked[before:] if kind == "copy")
    world.check_slots()
    world.check_counters()


def test_a_complete_record_that_is_not_picked_leaves_at_once(open_world: Callable[..., HintedWorld]) -> None:
    """Its step is over: it is in no slot, and its slot is there for the next hint."""
    world = open_world(5)
    world.run(0, [[1, 2, 3, 4]])
    for record in (5, 6):
        world.step(0, [[1, 2, 3, 4]], [[record]])
        world.until_landed(3 * (record - 4))
        world.run(1, [NOTHING])
        assert world.hints() == HintCounters(record - 4, record - 4, 0, 0, record - 4, STRIDE * (record - 4))
    assert sorted(np.flatnonzero(world.pager.where() >= 0).tolist()) == [1, 2, 3, 4]
    world.run(1, [[5, 5, 6, 6]])
    assert world.pager.counters().hits == 2 * 4
    assert world.gpu.problems == []


def test_last_bytes_that_are_under_way_hold_the_reply_back(open_world: Callable[..., HintedWorld]) -> None:
    """Picked, all chunks sent and none landed: nothing is copied for it, yet its step goes on behind them."""
    world = open_world(5, policy=dataclasses.replace(POLICY, hint_chunk=STRIDE // 2))
    hold_with_chunks_under_way(world, [5], 1, [5, 5, 5, 5]).set()
    assert wait_until(lambda: world.hints().late == 1)
    time.sleep(0.02)
    assert world.reads == 2 * 4 * len(world.table[0])
    world.gpu.release(COPY)
    world.gpu.synchronize()
    assert world.gpu.problems == []
    assert world.hints() == HintCounters(1, 1, 0, 1, 0, STRIDE)
    assert world.pager.counters().missed == 4


SIX = [[1, 2, 3, 4], [9, 10, 1, 2]]  # picks of layer 0 that fill what a world of eight slots has beside a pool of two


def refuse_slots(world: HintedWorld) -> None:
    """From now on every copy into a slot fails: what is not there is read on the host."""
    slots = range(world.slots.ctypes.data, world.slots.ctypes.data + world.slots.nbytes)
    world.gpu.refuse = lambda kind, at: kind == "copy" and at in slots


def test_in_a_full_and_hot_cache_a_record_comes_for_its_step_alone(open_world: Callable[..., HintedWorld]) -> None:
    """It is read in its slot and drives nobody out; afterwards the tables lead to the host again."""
    world = open_world(8)
    for _ in range(6):
        world.run(0, SIX)
    where = world.pager.where()
    reads_on_host = world.reads_on_host
    world.step(0, SIX, [[7, 8]])
    world.until_landed(2 * 3)
    world.run(1, [[7, 8, 7, 8]])
    assert world.hints() == HintCounters(2, 2, 2, 0, 0, 2 * STRIDE)
    assert world.reads_on_host == reads_on_host
    assert (world.pager.where() == where).all()
    refuse_slots(world)
    world.run(1, [[7, 8, 7, 8]])
    assert world.reads_on_host == reads_on_host + 2 * len(world.table[0])
    assert (world.pager.where() == where).all()
    assert world.gpu.problems == []
    world.slots[sorted(set(range(8)) - set(where.tolist()))] = 0xEE
    world.read_everything()
    assert world.gpu.problems == []


def test_a_record_that_is_hot_enough_keeps_the_slot_it_lies_in(open_world: Callable[..., HintedWorld]) -> None:
    """The coldest record's slot takes its place in the pool without a copy; that record is read on the host at its layer's turn."""
    world = open_world(8)
    world.run(0, SIX)
    for _ in range(30):
        world.run(0, [[1, 2, 3, 4]])
    before = world.pager.where()
    admitted = world.pager.counters().admitted
    world.step(0, [[1, 2, 3, 4]], [[7]])
    world.until_landed(3)
    world.run(1, [[7, 7, 7, 7]])
    after = world.pager.where()
    assert world.pager.counters().admitted == admitted
    assert after[EXPERTS + 7] not in before
    assert np.flatnonzero(after != before).tolist() == [9, EXPERTS + 7]
    assert world.hints() == HintCounters(1, 1, 1, 0, 0, STRIDE)
    # Two slots are the pool's: the one that was not used, and then the one that was the cold record's.
    sent = len(world.gpu.asked)
    world.step(1, [[7, 7, 7, 7]], [[5, 6]])
    world.until_landed(3 * 3)
    world.run(2, [NOTHING])
    places = {(at - world.slots.ctypes.data) // STRIDE for kind, at, size in world.gpu.asked[sent:] if kind == "copy" and size == CHUNK}
    assert places == set(range(8)) - set(after.tolist())
    assert before[9] in places
    refuse_slots(world)
    reads_on_host = world.reads_on_host
    world.run(0, [[9, 1, 2, 3]])
    assert world.reads_on_host == reads_on_host + len(world.table[0])
    assert world.gpu.problems == []
    world.check_slots()


def test_what_the_running_step_reads_is_left_alone(open_world: Callable[..., HintedWorld]) -> None:
    """Its kernels have not run yet when the next hint is looked at; with all of the pool theirs that hint begins nothing."""
    world = open_world(8)
    for _ in range(6):
        world.run(0, SIX)
    reads_on_host = world.reads_on_host
    world.step(0, SIX, [[7, 8]])
    world.until_landed(2 * 3)
    goes_on = threading.Event()
    picks, ids = np.array([[7, 8, 7, 8]], np.int64), np.array([[5, 6]], np.int64)
    world.pager.ask(1, 1, picks.ctypes.data, COMPUTE)
    world.pager.hint(2, 1, ids.ctypes.data, 2, COMPUTE)
    world.pager.wait(COMPUTE)
    world.gate(goes_on.is_set)
    world.gpu.enqueue(COMPUTE, "run", lambda: world.kernel(1, [7, 8]))
    world.step(2, [NOTHING])
    assert wait_until(lambda: world.hints().hinted == 4)
    time.sleep(0.02)
    goes_on.set()
    world.gpu.synchronize()
    assert world.gpu.problems == []
    assert world.hints() == HintCounters(4, 2, 2, 0, 0, 2 * STRIDE)
    assert world.reads_on_host == reads_on_host


def test_a_hint_brings_no_more_than_there_is_room_for(open_world: Callable[..., HintedWorld]) -> None:
    """A pool of two slots, three records."""
    world = open_world(8, policy=dataclasses.replace(POLICY, hint_chunk=STRIDE))
    world.step(0, [NOTHING], [[5, 6, 7]])
    world.until_landed(2)
    world.pause(0.03, chunks=99)
    world.run(1, [[5, 6, 5, 6]])
    assert world.hints() == HintCounters(3, 2, 2, 0, 0, 2 * STRIDE)
    assert world.gpu.problems == []


def test_a_hint_from_before_a_call_for_an_idle_device_is_void(open_world: Callable[..., HintedWorld]) -> None:
    """Also one that nobody had looked at yet."""
    world = open_world(8)
    goes_on = threading.Event()
    picks, ids = np.array([[1, 2, 3, 4]], np.int64), np.array([[5, 6]], np.int64)
    world.pager.ask(0, 1, picks.ctypes.data, COMPUTE)
    world.gate(goes_on.is_set)
    world.pager.hint(1, 1, ids.ctypes.data, 2, COMPUTE)
    world.pager.wait(COMPUTE)
    assert wait_until(lambda: world.pager.counters().steps == 1)
    world.pager.vacate(4, 4)
    go_ahead = threading.Event()
    world.gate(go_ahead.is_set)
    world.step(1, [NOTHING])
    goes_on.set()
    time.sleep(0.05)
    go_ahead.set()
    world.gpu.synchronize()
    assert world.hints() == HintCounters(0, 0, 0, 0, 0, 0)
    assert world.chunks_sent() == 0


def test_named_records_that_are_in_slots_are_hits(open_world: Callable[..., HintedWorld]) -> None:
    """A hint drives nobody out, those least that it names itself, however cold."""
    world = open_world(8)
    world.run(1, [[5, 6, 5, 6]])
    for _ in range(3):
        world.run(1, [NOTHING])
    world.step(0, [NOTHING], [[7, 8, 6, 5]])
    world.until_landed(2 * 3)
    world.run(1, [[5, 6, 6, 5]])
    assert world.hints() == HintCounters(2, 2, 0, 0, 2, 2 * STRIDE)
    assert world.pager.counters().hits == 4
    assert world.gpu.problems == []


def test_ids_count_once_and_by_rank(open_world: Callable[..., HintedWorld]) -> None:
    """Twice named is once brought; what is no expert is skipped; the first of every row come before the second of any."""
    world = open_world(24)
    world.step(0, [[1, 2, 3, 4]] * 3, [[5, 5, 9], [EXPERTS, 5, 10], [6, -1, 11]])
    world.until_landed(4 * 3)
    world.run(1, [[5, 6, 9, 10]])
    assert world.hints() == HintCounters(5, 4, 4, 0, 0, 4 * STRIDE)
    assert world.pager.counters().hits == 4
    world.step(0, [[1, 2, 3, 4]], [[5, 6, 9, 8]])
    world.gate(lambda: world.hints().hinted == 6)
    world.run(1, [[5, 6, 9, 10]])
    assert world.gpu.problems == []


def test_what_a_step_would_not_admit_comes_for_the_step_alone(open_world: Callable[..., HintedWorld]) -> None:
    """With admission on the third touch a record is brought for its first two, too, and stays from the third on."""
    world = open_world(8, policy=dataclasses.replace(POLICY, admit_after=3))
    for touch in (1, 2, 3):
        world.step(0, [NOTHING], [[7]])
        world.until_landed(3 * touch)
        world.run(1, [[7, 7, -1, -1]])
        assert world.hints() == HintCounters(touch, touch, touch, 0, 0, touch * STRIDE)
        assert (world.pager.where()[EXPERTS + 7] >= 0) == (touch == 3)
    assert world.reads_on_host == 0
    assert world.gpu.problems == []


def test_a_derated_link_copies_every_chunk_several_times(open_world: Callable[..., HintedWorld]) -> None:
    """As every other copy; the counters tell what a whole link would have moved."""
    world = open_world(8, policy=dataclasses.replace(POLICY, link_derate=3))
    world.step(0, [NOTHING], [[5, 6]])
    world.until_landed(2 * 3)
    world.run(1, [[5, 6, -1, -1]])
    slots = range(world.slots.ctypes.data, world.slots.ctypes.data + world.slots.nbytes)
    assert sum(kind == "copy" and at in slots for kind, at, _ in world.gpu.asked) == 3 * 6
    assert world.hints() == HintCounters(2, 2, 2, 0, 0, 2 * STRIDE)


def test_a_hint_whose_step_never_comes_ends_with_the_next_one(open_world: Callable[..., HintedWorld]) -> None:
    """A pass that is begun anew: whole or not, what was brought is gone."""
    world = open_world(8)
    hold_with_chunks_under_way(world, [5, 6, 7, 8], 0, [1, 2, 3, 4]).set()
    assert wait_until(lambda: world.pager.counters().steps == 3)
    world.gpu.release(COPY)
    world.gpu.synchronize()
    assert world.hints() == HintCounters(4, 1, 0, 0, 1, 2 * CHUNK)
    world.step(0, [[1, 2, 3, 4]], [[5]])
    world.until_landed(2 + 3)
    world.run(0, [[1, 2, 3, 4]])
    assert world.hints() == HintCounters(5, 2, 0, 0, 2, 2 * CHUNK + STRIDE)
    before = world.pager.counters()
    world.run(1, [[5, 6, 7, 8]])
    assert world.pager.counters().hits == before.hits
    assert world.gpu.problems == []
    world.check_slots()


def with_the_pool_at_the_end(world: HintedWorld) -> None:
    """Of ten slots that hold records of layer 0 the last two become the pool: those records are the coldest."""
    slow = np.zeros(LAYERS * EXPERTS, np.float32)
    for record in range(10):
        world.slots[record] = world.host[record]
        world.pager.put(record, record)
        slow[record] = 1 - 0.05 * record
    world.pager.set_heat(slow, np.zeros_like(slow))
    world.pager.flush(COMPUTE)
    world.run(0, [[1, 2, 3, 4]])
    assert np.flatnonzero(world.pager.where() >= 0).tolist() == list(range(8))


@pytest.mark.parametrize("call", ["vacate", "limit", "flush", "put"])
def test_calls_for_an_idle_device_wait_for_chunks_and_end_the_hint(open_world: Callable[..., HintedWorld], call: str) -> None:
    """After them no byte arrives any more: slots may lose their memory or get other bytes. The next step has a pool again."""
    world = open_world(10)
    with_the_pool_at_the_end(world)
    goes_on = hold_with_chunks_under_way(world, [5, 6, 7, 8], 0, [1, 2, 3, 4])
    calls: dict[str, Callable[[], None]] = {
        "vacate": lambda: world.pager.vacate(7, 3),
        "limit": lambda: world.pager.limit(8),
        "flush": lambda: world.pager.flush(COMPUTE),
        "put": lambda: world.pager.put(2 * EXPERTS + 3, 9),
    }
    ends_with_the_copies(world, calls[call])
    world.slots[8:] = 0xEE
    if call == "put":
        world.slots[9] = world.host[2 * EXPERTS + 3]
    time.sleep(0.02)
    assert (world.slots[8:9] == 0xEE).all()
    assert call == "put" or (world.slots[9] == 0xEE).all()
    assert world.hints() == HintCounters(4, 1, 0, 0, 1, 2 * CHUNK)
    goes_on.set()
    world.gpu.synchronize()
    world.read_everything()
    assert world.gpu.problems == []
    world.check_slots()
    landed = world.chunks_landed()
    world.step(0, [[1, 2, 3, 4]], [[5, 6]])
    world.until_landed(landed + 2 * 3)
    world.run(1, [[5, 6, 7, 8]])
    assert world.gpu.problems == []
    assert (world.hints().started, world.hints().used) == (3, 2)
    assert call != "limit" or ((world.slots[8:] == 0xEE).all() and world.pager.where().max() < 8)
    world.check_slots()


def test_slots_that_lost_their_memory_and_got_it_back_are_used_again(open_world: Callable[..., HintedWorld]) -> None:
    """The pool shrinks with the limit, down to nothing, and grows with it; no byte goes where there is no memory."""
    world = open_world(16, 2)
    started = 0
    for usable, room in ((16, 3), (10, 2), (5, 0), (2, 0), (12, 2), (16, 3)):
        world.pager.vacate(usable, 16 - usable)
        world.pager.limit(usable)
        world.slots[usable:] = 0xEE
        world.run(0, [[1, 2, 3, 4]])
        landed, hinted = world.chunks_landed(), world.hints().hinted
        world.step(0, [[1, 2, 3, 4]], [[5, 6, 7, 8]])
        world.until_landed(landed + 3 * room)
        world.until_hinted(hinted + 4)
        world.run(1, [NOTHING])
        world.run(2, [[9, 10, 11, 0]])
        assert world.hints().started == started + room
        started += room
        assert (world.slots[usable:] == 0xEE).all()
        world.check_slots()
    assert world.gpu.problems == []


def test_a_flush_takes_what_hints_brought_out_of_the_tables(open_world: Callable[..., HintedWorld]) -> None:
    """Whole and waiting for its step, or read by the last one: kernels of every layer read it on the host from then on."""
    world = open_world(8, policy=dataclasses.replace(POLICY, admit_after=9))
    world.step(0, [NOTHING], [[7]])
    world.until_landed(3)
    world.run(1, [[7, 7, 7, 7]])
    world.step(0, [NOTHING], [[5]])
    world.until_landed(2 * 3)
    opened = threading.Event()
    world.gate(opened.is_set)
    world.step(0, [NOTHING])
    assert wait_until(lambda: world.chunks_landed() == 2 * 3)
    world.pager.flush(COMPUTE)
    opened.set()
    world.gpu.synchronize()
    assert world.hints() == HintCounters(2, 2, 1, 0, 1, 2 * STRIDE)
    world.step(0, [NOTHING], [[7]])
    world.until_landed(3 * 3)
    world.run(1, [[7, 7, 7, 7]])
    world.pager.flush(COMPUTE)
    world.gpu.synchronize()
    world.slots[:] = 0xEE
    world.read_everything()
    assert (world.pager.where() == -1).all()
    assert world.gpu.problems == []


@pytest.mark.parametrize("kind", ["copy", "word"])
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_refused_chunk_leaves_no_half_record(open_world: Callable[..., HintedWorld], kind: str, after: int) -> None:
    """The driver fails at any point of a hint: every step is answered and reads right bytes, and the counters report the failure."""
    world = open_world(12, 2)
    world.run(0, [[1, 2, 3, 4]])
    seen = 0
    slots = range(world.slots.ctypes.data, world.slots.ctypes.data + world.slots.nbytes)

    def refuse(what: str, at: int) -> bool:
        nonlocal seen
        ours = what == kind and (at in slots if kind == "copy" else at == world.words.ctypes.data + LANDED_WORD)
        seen += ours
        return ours and seen > after

    world.gpu.refuse = refuse
    world.step(0, [[1, 2, 3, 4]], [[5, 6, 7, 8]])
    world.gate(lambda: seen > after)
    for _ in range(3):
        world.run(1, [[5, 6, 7, 8]])
        world.run(0, [[1, 2, 3, 4]], [[5, 6, 7, 8]])
    world.run(1, [NOTHING])
    assert world.gpu.problems == []
    world.check_slots()
    hints = world.hints()
    assert hints.started == hints.used + hints.late + hints.dropped > 0
    with pytest.raises(KernelError, match="a copy to the GPU failed"):
        world.pager.counters()


def test_a_record_that_cannot_be_finished_is_fetched_like_any_other(open_world: Callable[..., HintedWorld]) -> None:
    """Its slot is free again; the pick is read in place."""
    world = open_world(12)
    goes_on = hold_with_chunks_under_way(world, [5, 6, 7, 8], 1, [5, 5, 5, 5])
    slots = range(world.slots.ctypes.data, world.slots.ctypes.data + world.slots.nbytes)
    world.gpu.refuse = lambda kind, at: kind == "copy" and at in slots
    goes_on.set()
    assert wait_until(lambda: world.hints().dropped == 1)
    world.gpu.release(COPY)
    world.gpu.synchronize()
    assert world.gpu.problems == []
    assert world.pager.where()[EXPERTS + 5] == -1
    assert world.reads_on_host == len(world.table[0])


def test_closing_waits_for_chunks_under_way(open_world: Callable[..., HintedWorld]) -> None:
    """Who closes the pager frees the slots: nothing is written to them afterwards."""
    world = open_world(8)
    hold_with_chunks_under_way(world, [5, 6, 7, 8], 0, NOTHING).set()
    assert wait_until(lambda: world.hints().dropped == 1)
    ends_with_the_copies(world, world.pager.close)
    assert world.chunks_landed() == 2


def pager_tasks() -> set[pathlib.Path]:
    """Threads of this process that are a pager's; those that end meanwhile are not."""
    found = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() == "pager":
                found.add(task)
    return found


def test_a_hint_that_nothing_follows_is_worked_on_for_a_moment(open_world: Callable[..., HintedWorld]) -> None:
    """The host has not enqueued the next layer yet: copies begin all the same; when they do not get on the pager's thread sleeps."""
    others = pager_tasks()  # of pagers that tests before have not closed
    world = open_world(8)

    def copies_begin() -> bool:
        world.run(1, [NOTHING])
        before = world.hints().started
        world.run(0, [[1, 2, 3, 4]], [[5, 6, 7, 8]])
        time.sleep(0.02)
        begun = world.hints().started > before
        world.pager.vacate(4, 4)
        return begun

    assert wait_until(copies_begin)
    world.gpu.hold(COPY)
    world.step(0, [[1, 2, 3, 4]], [[5, 6, 7, 8]])
    (task,) = pager_tasks() - others
    time.sleep(0.2)
    before = int((task / "schedstat").read_text().split()[0])
    time.sleep(0.5)
    assert int((task / "schedstat").read_text().split()[0]) - before < 10_000_000


def test_wrong_calls_are_refused_by_name(open_world: Callable[..., HintedWorld]) -> None:
    """Out of turn, out of range, twice, or where there are no hints; none of them leaves a trace."""
    world = open_world(4)
    ids = np.zeros((ROWS, HINT_WIDTH + 1), np.int64).ctypes.data
    with pytest.raises(ValueError, match="no step was asked for"):
        world.pager.wait(COMPUTE)
    with pytest.raises(ValueError, match="between the two halves"):
        world.pager.hint(1, 1, ids, 1, COMPUTE)
    picks = np.zeros((1, TOP_K), np.int64)
    world.pager.ask(0, 1, picks.ctypes.data, COMPUTE)
    for layer, rows, width, problem in (
        (0, 1, 1, "between the two halves"),
        (2, 1, 1, "between the two halves"),
        (LAYERS, 1, 1, "layer: out of range"),
        (1, 0, 1, "rows: out of range"),
        (1, ROWS + 1, 1, "rows: out of range"),
        (1, 1, 0, "width: out of range"),
        (1, 1, HINT_WIDTH + 1, "width: out of range"),
    ):
        with pytest.raises(ValueError, match=problem):
            world.pager.hint(layer, rows, ids, width, COMPUTE)
    world.pager.hint(1, ROWS, ids, HINT_WIDTH, COMPUTE)
    with pytest.raises(ValueError, match="the step has one"):
        world.pager.hint(1, 1, ids, 1, COMPUTE)
    world.pager.wait(COMPUTE)
    with pytest.raises(ValueError, match="between the two halves"):
        world.pager.hint(1, 1, ids, 1, COMPUTE)
    world.gpu.synchronize()
    for policy, problem in ((PagerPolicy(hint_records=1, hint_chunk=0), "hint_chunk is 0"),):
        with pytest.raises(ValueError, match=problem):
            open_world(4, policy=policy)
    none = open_world(4, policy=PagerPolicy())
    none.pager.ask(0, 1, picks.ctypes.data, COMPUTE)
    with pytest.raises(ValueError, match="without hint_records"):
        none.pager.hint(1, 1, ids, 1, COMPUTE)
    none.pager.wait(COMPUTE)
    none.gpu.synchronize()
    assert none.hints() == HintCounters(0, 0, 0, 0, 0, 0)
