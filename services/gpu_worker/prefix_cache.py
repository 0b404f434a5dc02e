"""Remembers the state of streams after a prompt or an answer, so that the next turn of a conversation computes only what is new.

Linear attention cannot be rolled back, so a state is useful only where its whole token sequence is the beginning of a new prompt.
States are kept at two points where that happens: just before a prompt's last token, and at the end of an answer; or, on a GPU, at the end
of the last page that a prompt fills. Keys (who asks) do not
share states: how long an answer takes must not tell what others asked. Results do not change: a kept state has the bits that computing
it again gives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.gpu_worker.backends.base import Snapshot

# Shorter beginnings are computed again faster than they are worth keeping.
MIN_TOKENS = 32


@dataclass(frozen=True)
class KeptState:
    """A state and the tokens that led to it."""

    key_id: str
    tokens: tuple[int, ...]
    snapshot: Snapshot


class PrefixCache:
    """Least recently used states within a bound of memory. Used by the engine's thread alone.

    Args:
        max_bytes: memory that all kept states may take together; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._states: OrderedDict[tuple[str, int, int], KeptState] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._states)

    def wants(self, key_id: str, tokens: Sequence[int]) -> bool:
        """True when the state after `tokens` is worth a snapshot."""
        return self._max_bytes > 0 and len(tokens) >= MIN_TOKENS and _place(key_id, tuple(tokens)) not in self._states

    def keep(self, key_id: str, tokens: tuple[int, ...], snapshot: Snapshot) -> None:
        """Keeps a state; the longest unused ones make room."""
        if snapshot.num_bytes > self._max_bytes:
            snapshot.release()
            return
        place = _place(key_id, tokens)
        self._drop(place)
        self._states[place] = KeptState(key_id, tokens, snapshot)
        self.num_bytes += snapshot.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._states)))

    def make_room(self) -> bool:
        """Gives up one state that holds memory which streams can use, of these the one that was used longest ago; False when none does."""
        place = next((place for place, kept in self._states.items() if kept.snapshot.holds_memory), None)
        if place is None:
            return False
        self._drop(place)
        return True

    def find(self, key_id: str, prompt: tuple[int, ...]) -> KeptState | None:
        """The state of the longest kept beginning of a prompt; at least one token of the prompt is always left to compute."""
        lengths = sorted({length for key, length, _ in self._states if key == key_id and length < len(prompt)}, reverse=True)
        for length in lengths:
            place = _place(key_id, prompt[:length])
            kept = self._states.get(place)
            if kept is not None and kept.tokens == prompt[:length]:
                self._states.move_to_end(place)
                return kept
        return None

    def _drop(self, place: tuple[str, int, int]) -> None:
        kept = self._states.pop(place, None)
        if kept is not None:
            self.num_bytes -= kept.snapshot.num_bytes
            kept.snapshot.release()


def _place(key_id: str, tokens: tuple[int, ...]) -> tuple[str, int, int]:
    return key_id, len(tokens), hash(tokens)
