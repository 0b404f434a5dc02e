"""Grammars that take long do not keep others from theirs without an end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.common.errors import InvalidRequest, QueueFull
from services.gpu_worker.compiling import GrammarQueue
from services.gpu_worker.grammar import Grammar, GrammarSource


class Slow:
    """Compiles what begins with slow when it is let go, refuses bad, and anything else at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.running = 0

    def compile(self, source: GrammarSource) -> Grammar:
        self.running += 1
        if source.text == "slow":
            assert self.go.wait(20)
        if source.text == "bad":
            raise InvalidRequest("bad", param="grammar")
        return Grammar(source, None)


def source(text: str) -> GrammarSource:
    return GrammarSource("regex", text)


async def test_two_slow_grammars_hold_a_third_up_for_so_long_only() -> None:
    """It hears when to come back; a client that leaves does not let more of them run than may."""
    compiler = Slow()
    queue = GrammarQueue(compiler, at_once=2, wait_s=0.2)
    slow = [asyncio.create_task(queue.compiled(source("slow"))) for _ in range(2)]
    while compiler.running < 2:
        await asyncio.sleep(0.01)
    slow[0].cancel()
    with pytest.raises(QueueFull) as caught:
        await queue.compiled(source("a"))
    assert caught.value.retry_after_s
    assert compiler.running == 2
    compiler.go.set()
    assert (await slow[1]).source.text == "slow"
    for _ in range(5):
        assert (await queue.compiled(source("a"))).source.text == "a"
        with pytest.raises(InvalidRequest):
            await queue.compiled(source("bad"))


async def test_waiting_ones_get_their_turn() -> None:
    """Many at once all come through."""
    compiler = Slow()
    compiler.go.set()
    queue = GrammarQueue(compiler, at_once=2)
    done = await asyncio.gather(*(queue.compiled(source("slow")) for _ in range(50)))
    assert len(done) == compiler.running == 50
