"""A crowd of requests and what else runs on the event loop."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.turnstile import Turnstile


@pytest.mark.parametrize("per_round", [1, 3])
async def test_a_crowd_enters_a_few_at_a_time_and_in_order(per_round: int) -> None:
    """Everything else on the loop has a turn between any two rounds of the crowd."""
    gate, log = Turnstile(per_round), []

    async def newcomer(number: int) -> None:
        await gate.enter()
        log.append(number)

    crowd = [asyncio.create_task(newcomer(i)) for i in range(20)]
    rounds = 0
    while not all(task.done() for task in crowd):
        before = len(log)
        await asyncio.sleep(0)
        assert len(log) - before <= per_round
        rounds += 1
        assert rounds < 100
    assert log == list(range(20))


async def test_a_single_request_does_not_wait() -> None:
    """It enters without giving the loop away."""
    gate = Turnstile(1)
    for _ in range(3):
        entering = gate.enter()
        with pytest.raises(StopIteration):
            entering.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_one_who_leaves_the_crowd_takes_nobodys_turn() -> None:
    """Cancelled while waiting."""
    gate = Turnstile(1)
    crowd = [asyncio.create_task(gate.enter()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in crowd[2:5]:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(crowd[0], crowd[1], crowd[5]), 5)
    assert [task.cancelled() for task in crowd] == [False, False, True, True, True, False]
    await asyncio.wait_for(gate.enter(), 5)
