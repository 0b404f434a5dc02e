"""States of a request."""

from __future__ import annotations

import itertools
import threading

import pytest

from services.gpu_worker.mailbox import Mailbox
from services.gpu_worker.request import (
    ALLOWED,
    TERMINAL,
    Admitted,
    Event,
    Request,
    RequestSpec,
    RequestState,
    SamplingParams,
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
