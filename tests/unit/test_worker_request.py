"""States of a request."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from services.common.errors import EngineFailed
from services.gpu_worker.mailbox import HOLD_S, Mailbox
from services.gpu_worker.reader import EventReader
from services.gpu_worker.request import (
    ALLOWED,
    TERMINAL,
    Admitted,
    Event,
    Failed,
    Request,
    RequestSpec,
    RequestState,
    SamplingParams,
    Tokens,
)


class ListSink:
    """Keeps every event."""

    full = False

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)

    def stalled_s(self, now: float) -> float:
        return 0.0


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestState, RequestState)))
def test_only_allowed_transitions(old: RequestState, new: RequestState) -> None:
    """A request moves along the table and nowhere else."""
    request = Request(RequestSpec("r", (1,), SamplingParams()), ListSink(), state=old)
    if new in ALLOWED[old]:
        request.advance(new)
        assert request.state is new
    else:
        with pytest.raises(RuntimeError, match=f"{old.name} -> {new.name}"):
            request.advance(new)


def test_terminal_states() -> None:
    """The terminal states are the three that lead nowhere."""
    assert {RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED} == TERMINAL


def test_mailbox_notifies_once_per_filling_and_reports_space() -> None:
    """A reader is woken when something comes into the empty mailbox, and the engine when a full one was emptied."""
    woken, space, now = [], [], [0.0]
    box = Mailbox(2, lambda: woken.append(1), lambda: space.append(1), clock=lambda: now[0])
    event = Admitted(0.0, 0)
    box.put(event)
    assert not box.full
    box.put(event)
    assert box.full
    assert len(woken) == 1
    now[0] = 5.0
    assert box.stalled_s(now[0]) == 5.0
    assert box.take() == [event, event]
    assert len(space) == 1
    assert box.stalled_s(now[0]) == 0.0
    box.put(event)
    assert len(woken) == 2
    assert box.take() == [event]
    assert len(space) == 1


def test_mailbox_loses_no_wake_up() -> None:
    """A reader that sleeps until it is notified gets every event, however its emptying and the engine's filling interleave."""
    wake = threading.Event()
    box = Mailbox(4, wake.set, lambda: None)
    total, taken = 20_000, 0

    def read() -> None:
        nonlocal taken
        while taken < total:
            assert wake.wait(20), f"no wake-up after {taken} events"
            wake.clear()
            taken += len(box.take())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(total):
        box.put(Admitted(0.0, 0))
    reader.join(30)
    assert taken == total


def test_a_resting_reader_is_told_before_an_event_is_too_old() -> None:
    """Events of a fast stream are held back together, none of them for longer than HOLD_S; the last event is not held back at all."""
    woken, now = [], [0.0]
    box = Mailbox(100, lambda: woken.append(now[0]), lambda: None, clock=lambda: now[0])
    gap = 0.3 * HOLD_S

    def put(event: Event) -> None:
        now[0] += gap
        box.put(event)

    put(Tokens(()))
    assert len(woken) == 1
    box.take()
    box.resting = True
    for _ in range(3):
        put(Tokens(()))
    assert len(woken) == 1
    assert box.oldest_at == pytest.approx(2 * gap)
    put(Tokens(()))
    assert len(woken) == 2  # the next one would come when the oldest is 1.2 HOLD_S old
    assert len(box.take()) == 4
    put(Failed(EngineFailed("gone")))
    assert len(woken) == 3


def test_a_resting_reader_is_told_of_a_full_mailbox() -> None:
    """The engine waits for it."""
    woken = []
    box = Mailbox(2, lambda: woken.append(1), lambda: None, clock=lambda: 0.0)
    box.resting = True
    box.put(Tokens(()))
    assert not woken
    box.put(Tokens(()))
    assert woken


async def _spaced(mailbox: Mailbox, gaps: list[float]) -> None:
    for gap in gaps:
        await asyncio.sleep(gap)
        mailbox.put(Tokens(()))


async def test_a_fast_stream_is_read_a_few_tokens_at_a_time_and_a_slow_one_at_once() -> None:
    """The first token goes out alone; tokens 1 ms apart come together; tokens 30 ms apart come one by one."""
    reader = EventReader(100, lambda: None)
    fast = asyncio.create_task(_spaced(reader.mailbox, [0.001] * 40))
    sizes = []
    while sum(sizes) < 40:
        sizes.append(len(await reader.take()))
    await fast
    assert sizes[0] == 1
    assert len(sizes) <= 25
    slow = asyncio.create_task(_spaced(reader.mailbox, [0.03] * 5))
    began = asyncio.get_running_loop().time()
    assert [len(await reader.take()) for _ in range(5)] == [1] * 5
    assert asyncio.get_running_loop().time() - began < 1
    await slow


async def test_the_last_event_ends_a_rest() -> None:
    """Whoever waits for the end of a fast stream does not wait for more tokens."""
    reader = EventReader(100, lambda: None)
    for _ in range(2):
        reader.mailbox.put(Tokens(()))
        await reader.take()
    assert reader.mailbox.resting
    reader.mailbox.put(Failed(EngineFailed("gone")))
    assert isinstance((await reader.take())[0], Failed)
