"""What the engine knows about whatever computes logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class BackendLostError(RuntimeError):
    """The backend cannot go on: every later call would fail too. Any other exception concerns only the streams of the failed call."""


class PassBrokenOff(Exception):
    """A prefill pass ended between two layers because nobody wants it any more. Its stream can only be closed, nothing else is changed."""


@dataclass(frozen=True)
class BackendInfo:
    """Facts that do not change while the worker lives."""

    vocab_size: int
    max_context: int  # tokens, prompt and completion together
    max_streams: int  # most streams that are open at once
    device: str
    device_reason: str
    mode: str  # fast, exact
    mode_reason: str
    kernel_variant: str
    kernel_reason: str
    arithmetic_version: int
    abi_version: int
    arena: str  # "loaded" or "re-attached", with its reason
    chunk_size: int = 0  # prompt tokens of one pass; 0: what the settings say
    page_tokens: int = 0  # chunks end where pages of so many tokens do, and a prompt's last token goes alone; 0: anywhere
    snapshot_bytes: int = 0  # memory of one snapshot where all take the same; 0: it grows with the stream
    # With pages: a prompt's tail of at least so many tokens is computed in one pass with the chunk before it (`prefill_joined`), for less
    # than both cost apart; 0: none is.
    joined_tail_from: int = 0


@dataclass(frozen=True)
class VerifyReport:
    """Result of re-reading every record and slot."""

    records_checked: int
    records_bad: int
    slots_checked: int
    slots_bad: int


def chunk_end(start: int, total: int, size: int, page_tokens: int) -> int:
    """Where the prefill pass that begins at `start` ends.

    With pages the cuts are exllamav3's own: whole pages while there are any, then what is left but for the last token, then that token
    alone. Equal cuts give equal bits.

    Args:
        start: tokens of the prompt that are computed.
        total: tokens of the prompt.
        size: most tokens of a pass.
        page_tokens: of `BackendInfo`.
    """
    last = total - 1
    if not page_tokens or start >= last:
        return min(start + size, total)
    end = min((start + size) // page_tokens * page_tokens, last)
    if end <= start:
        end = min(start + size, last)
    boundary = last // page_tokens * page_tokens
    return boundary if start < boundary < end else end


def tail_end(end: int, total: int, size: int, info: BackendInfo) -> int:
    """Where the tail ends that goes in one pass with the chunk of prompt that ends at `end`; `end` itself where there is none.

    That is the rest of the prompt behind its last full page, but for the last token. It is never cut: in pieces it would have other bits.

    Args:
        end: of the chunk, as `chunk_end` gave it.
        total: tokens of the prompt.
        size: most tokens of a pass; the tail, too, has no more.
    """
    last = total - 1
    if not info.joined_tail_from or not info.page_tokens or end != last // info.page_tokens * info.page_tokens:
        return end
    return last if info.joined_tail_from <= last - end <= size else end


class Stream(Protocol):
    """One open stream. Opaque to the engine but for its length."""

    @property
    def length(self) -> int:
        """Tokens that the stream's state holds."""
        ...


class Snapshot(Protocol):
    """A stream's state at one moment, from which streams can be opened."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes beside the streams'."""
        ...

    @property
    def holds_memory(self) -> bool:
        """True when releasing it gives streams memory that they do not have yet."""
        ...

    def release(self) -> None:
        """Gives up what it holds of the streams' memory. Called once; no stream is opened from it afterwards."""
        ...


class Backend(Protocol):
    """Computes next-token logits for streams. All methods but `progress`, `stats` and `verify` are called from the engine's thread only."""

    info: BackendInfo

    @property
    def progress(self) -> int:
        """Grows while the backend computes; a watchdog compares two readings. Callable from any thread."""
        ...

    @property
    def streams_free(self) -> int:
        """How many more streams can be opened, as far as their number goes."""
        ...

    @property
    def memory_tokens(self) -> tuple[int, int]:
        """(tokens of context in use, tokens reserved) over all open streams."""
        ...

    def fits(self, num_tokens: int) -> bool:
        """True when a stream of so many tokens can be opened now and has all its memory at once.

        What only snapshots hold counts as free: the engine releases them where `extend` finds too little.
        """
        ...

    def open_stream(self, snapshot: Snapshot | None = None) -> Stream:
        """Opens an empty stream, or one that continues a snapshot.

        Raises:
            RuntimeError: none is free; the engine asks `streams_free` first.
        """
        ...

    def extend(self, stream: Stream, num_tokens: int) -> bool:
        """Takes memory until the stream can hold so many tokens. False when there is too little: then nothing was taken."""
        ...

    def snapshot(self, stream: Stream) -> Snapshot | None:
        """The stream's state as it is now, or None where this backend cannot continue from it (in the middle of a page)."""
        ...

    def close_stream(self, stream: Stream) -> None:
        """Gives the stream's memory back. Every stream is closed exactly once, also after a failed call."""
        ...

    def prefill(self, stream: Stream, token_ids: Sequence[int], *, all_logits: bool) -> Logits:
        """Appends a chunk of prompt.

        Args:
            token_ids: at least one token, at most the chunk size that the backend was made with.
            all_logits: logits after every token instead of after the last.

        Returns:
            fp32 [len(token_ids) or 1, vocab_size], owned by the caller.
        """
        ...

    def prefill_joined(
        self, stream: Stream, token_ids: Sequence[int], tail: Sequence[int], *, keep: bool
    ) -> tuple[Logits, Snapshot | None]:
        """Appends a chunk of prompt and the tail behind it. All bits are those of two `prefill` calls.

        Args:
            token_ids: the chunk; it ends where a page does.
            tail: at least one token, less than a page.
            keep: also take a snapshot of the stream as it is between the two.

        Returns:
            logits after the tail's last token, fp32 [1, vocab_size], owned by the caller, and the snapshot.
        """
        ...

    def decode(self, streams: Sequence[Stream], token_ids: Sequence[int]) -> Logits:
        """Appends one token to each stream: fp32 [len(streams), vocab_size], owned by the caller."""
        ...

    def check_idle(self) -> None:
        """Raises RuntimeError when streams or memory are in use although no stream is open."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters of the tiers, JSON-ready. Callable from any thread."""
        ...

    def verify(self) -> VerifyReport:
        """Re-reads every record and every slot against its checksum. Callable from any thread; stops no request."""
        ...

    def close(self) -> None:
        """Ends threads and gives memory back."""
        ...


@runtime_checkable
class BreaksOff(Protocol):
    """A backend whose prefill passes take so long that they can be broken off between two layers. Its decode steps never are."""

    def break_off_when(self, unwanted: Callable[[], bool]) -> None:
        """From now on every prefill pass asks `unwanted` before each layer, in its own thread, and raises PassBrokenOff where it says True.

        `unwanted` must be quick, and speak of the pass that runs.
        """
        ...


def prefill_apart(
    backend: Backend, stream: Stream, token_ids: Sequence[int], tail: Sequence[int], *, keep: bool
) -> tuple[Logits, Snapshot | None]:
    """`Backend.prefill_joined` in two passes: for backends, models and tails that gain nothing from one."""
    backend.prefill(stream, token_ids, all_logits=False)
    snapshot = backend.snapshot(stream) if keep else None
    try:
        return backend.prefill(stream, tail, all_logits=False), snapshot
    except BaseException:
        if snapshot is not None:
            snapshot.release()
        raise
