"""A device whose streams hold their work back: copies, table writes and reads run late or early, in any order that the waits allow.

What a stream is given stays in its line. The first of a line may run when nothing that it waits for is open; which line goes on when, a
`Schedule` says. The host's waits run what leads to them and, of the schedule's own will, anything else. CUDA's rules: an event stands for
its last `record`, one that was never recorded holds nobody up, and pinned memory is read when the copy runs, not when it is asked for.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

Schedule = Callable[["Device"], None]


class Mark:
    """A place in a stream; reached or not."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.reached = stream, False

    def reach(self) -> None:
        self.reached = True


class Stream:
    """A line of work."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.line: deque[tuple[Callable[[], object], Mark | None]] = deque()

    def give(self, work: Callable[[], object], behind: Mark | None = None) -> None:
        """Puts work at the line's end; it runs behind the mark."""
        self.line.append((work, behind))
        self.device.go_on()

    def mark(self) -> Mark:
        mark = Mark(self)
        self.give(mark.reach)
        return mark

    def wait_stream(self, other: Stream) -> None:
        self.give(lambda: None, other.mark())

    def wait_event(self, event: Event) -> None:
        if event.last is not None:
            self.give(lambda: None, event.last)

    def synchronize(self) -> None:
        self.device.finish(self.mark())

    @property
    def ready(self) -> bool:
        return bool(self.line) and (self.line[0][1] is None or self.line[0][1].reached)

    def run_one(self) -> None:
        assert self.ready
        self.line.popleft()[0]()


class Event:
    """Its last record."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.last: Mark | None = None

    def record(self) -> None:
        self.last = self._device.current.mark()

    def query(self) -> bool:
        self._device.go_on()
        return self.last is None or self.last.reached

    def synchronize(self) -> None:
        if self.last is not None:
            self._device.finish(self.last)


class Device:
    """The compute stream and whatever streams are made beside it.

    Args:
        schedule: lets streams go on whenever something happened.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._going = schedule, False
        self.compute = self.current = Stream(self, "compute")
        self.others: list[Stream] = []

    def go_on(self) -> None:
        """What the schedule wants to run now."""
        if not self._going:
            self._going = True
            self._schedule(self)
            self._going = False

    def finish(self, mark: Mark) -> None:
        """The host waits: what leads to the mark runs."""
        while not mark.reached:
            behind = mark.stream.line[0][1]
            if behind is not None and not behind.reached:
                self.finish(behind)
            else:
                mark.stream.run_one()
                self.go_on()

    def synchronize(self) -> None:
        for stream in (self.compute, *self.others):
            stream.synchronize()

    def make_stream(self) -> Stream:
        self.others.append(Stream(self, "copy"))
        return self.others[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Torch's streams and events are this device's from now on, and so is what writes to tensors in a stream's order."""
        copy, index_copy, add = torch.Tensor.copy_, torch.Tensor.index_copy_, torch.add

        def copy_(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            stream = self.current
            stream.give(lambda: copy(tensor, source))
            if not non_blocking:
                stream.synchronize()
            return tensor

        def index_copy_(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            self.current.give(lambda: index_copy(tensor, dim, index, source))
            return tensor

        def add_into(one: torch.Tensor, other: Any, *, out: torch.Tensor) -> torch.Tensor:
            self.current.give(lambda: add(one, other, out=out))
            return out

        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.Tensor, "index_copy_", index_copy_)
        patch.setattr(torch, "add", add_into)
        patch.setattr(torch.cuda, "Stream", lambda *_: self.make_stream())
        patch.setattr(torch.cuda, "Event", lambda *_: Event(self))
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "synchronize", lambda *_: self.synchronize())


def copies_late(device: Device) -> None:
    """Nothing runs before somebody waits for it."""
    del device


def copies_early(device: Device) -> None:
    """The copy streams run as far as they may at once, the compute stream when somebody waits for it."""
    while ready := [stream for stream in device.others if stream.ready]:
        ready[0].run_one()


def at_random(seed: int) -> Schedule:
    """Any stream, at any time, for any while."""
    draw = random.Random(seed)

    def schedule(device: Device) -> None:
        # Some seeds hardly let anything run ahead, others nearly everything.
        while draw.random() < pace and (ready := [s for s in (device.compute, *device.others) if s.ready]):
            stream = draw.choice(ready)
            for _ in range(draw.choice((1, 1, 3, 20))):
                if stream.ready:
                    stream.run_one()

    pace = draw.choice((0.02, 0.2, 0.5))
    return schedule
