"""Re-reads every record of a re-attached arena in the background: a dead worker's memory is believed only after its checksums were."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.python.errors import KernelError
from kernels.python.expert import ExpertShape
from services.common.errors import CheckpointError
from services.gpu_worker.backends.base import BackendLostError
from services.gpu_worker.backends.cpu_arena import fill_record
from services.gpu_worker.checkpoint import Checkpoint

log = logging.getLogger(__name__)

END_WAIT_S = 10.0
# Share of the time that the check computes: the rest of it goes to whoever serves on the same cores.
DUTY = 0.5


class CheckedArena(Protocol):
    """The part of kernels.python.arena.Arena that the check needs."""

    @property
    def num_layers(self) -> int:
        """Layers with routed experts."""
        ...

    @property
    def experts_per_layer(self) -> int:
        """Experts of a layer."""
        ...

    def check(self, layer: int, expert: int) -> bool:
        """True when the record equals its checksum."""
        ...

    def unlink(self) -> None:
        """Takes the arena's name away: no later worker finds it."""
        ...


Repair = Callable[[int, int, NDArray[np.uint8]], None]


class ArenaCheck:
    """A thread that checks an arena once and reloads what is damaged.

    Args:
        arena: re-attached and sealed.
        reload: the true bytes of a record (arena layer, expert), uint8 [record_bytes], from the checkpoint.
        repair: puts these bytes into the arena, between two passes, and empties slots that hold a copy of what was there.
    """

    def __init__(self, arena: CheckedArena, reload: Callable[[int, int], NDArray[np.uint8]], repair: Repair) -> None:
        self._arena = arena
        self._reload = reload
        self._repair = repair
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arena-check", daemon=True)
        self.checked = 0
        self.bad = 0
        self.repaired = 0
        self.done = False
        self.lost: str = ""  # why the arena cannot be served from any more, or ""

    def start(self) -> None:
        """Begins to check."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, which may read the arena until this returns."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(END_WAIT_S)

    def refuse_lost(self) -> None:
        """Raises BackendLostError when a record is damaged for good; the next worker then fills a new arena."""
        if self.lost:
            self._arena.unlink()
            raise BackendLostError(self.lost)

    def stats(self) -> dict[str, int | bool]:
        """checked, bad and repaired records; done when every record was looked at."""
        return {"checked": self.checked, "bad": self.bad, "repaired": self.repaired, "done": self.done}

    def _run(self) -> None:
        began = time.monotonic()
        for layer in range(self._arena.num_layers):
            for expert in range(self._arena.experts_per_layer):
                if self._stop.is_set() or self.lost:
                    return
                start = time.monotonic()
                self._look(layer, expert)
                self.checked += 1
                self._stop.wait((time.monotonic() - start) * (1 / DUTY - 1))
        self.done = True
        log.info(
            "re-attached arena: %d records checked in %.1f s, %d bad, %d reloaded",
            self.checked,
            time.monotonic() - began,
            self.bad,
            self.repaired,
        )

    def _look(self, layer: int, expert: int) -> None:
        if self._arena.check(layer, expert):
            return
        self.bad += 1
        log.error("record of layer %d, expert %d does not equal its checksum: reloading it from the checkpoint", layer, expert)
        try:
            self._repair(layer, expert, self._reload(layer, expert))
        except (CheckpointError, KernelError, OSError, ValueError) as error:
            self.lost = f"the record of layer {layer}, expert {expert} is damaged and cannot be reloaded: {error}"
            log.critical("%s", self.lost)
            return
        self.repaired += 1


def count_in(stats: dict[str, Any], check: ArenaCheck | None) -> dict[str, Any]:
    """A backend's counters with the check's: `arena_check` beside them, what it found bad within `checksum_failures`.

    Args:
        stats: with `checksum_failures`, of whatever else compares checksums.
        check: None where the worker filled the arena itself.
    """
    if check is None:
        return stats
    found = check.stats()
    return {**stats, "checksum_failures": stats["checksum_failures"] + found["bad"], "arena_check": found}


def of_checkpoint(arena: CheckedArena, checkpoint: Checkpoint, shapes: Sequence[ExpertShape], repair: Repair) -> ArenaCheck:
    """The check of an arena whose records are a checkpoint's.

    Args:
        shapes: of every arena layer; arena layer i is the i-th layer with routed experts.
        repair: as ArenaCheck's.
    """

    def reload(layer: int, expert: int) -> NDArray[np.uint8]:
        record = np.empty(shapes[layer].record_bytes, np.uint8)
        fill_record(checkpoint, checkpoint.config.moe_layers[layer], expert, shapes[layer], record)
        return record

    return ArenaCheck(arena, reload, repair)
