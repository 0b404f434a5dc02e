"""What one pass computes of a prompt: where its chunk ends, whether the prompt's tail goes with it, where its state is kept."""

from __future__ import annotations

from dataclasses import dataclass

from services.gpu_worker.backends.base import Backend, BackendInfo, Logits, Snapshot, chunk_end, tail_end
from services.gpu_worker.contexts import Contexts, stream_of
from services.gpu_worker.request import Request


@dataclass(frozen=True)
class PrefillPass:
    """One pass over a request's feed, in positions of that feed.

    Attributes:
        start: first token.
        end: where the chunk ends.
        until: where the pass ends: at the chunk's end, or at that of the tail which goes with it.
        kept: after how many tokens the state is kept, whichever pass ends there; 0 for nowhere.
        keep_between: the state between chunk and tail is kept.
        scores: logits of every position are wanted.
    """

    start: int
    end: int
    until: int
    kept: int
    keep_between: bool
    scores: bool

    @property
    def is_joined(self) -> bool:
        """True for a chunk and the tail behind it."""
        return self.until > self.end


def next_pass(request: Request, size: int, contexts: Contexts, info: BackendInfo, *, scores: bool) -> PrefillPass:
    """The pass that a request in prefill runs next.

    Args:
        size: most tokens of its chunk, and of its tail.
        scores: logits of every position are wanted.
    """
    start, feed, page = request.num_prefilled, request.feed, info.page_tokens
    if scores and page:
        # Such a backend computes scores page by page anyway, and rows of a whole chunk's logits are gigabytes of host memory.
        size = min(size, page)
    end = chunk_end(start, len(feed), size, page)
    kept = contexts.kept_length(request)
    if start < kept < end and contexts.wants(request, feed[:kept]):
        end = kept
    # Others wait for a chunk and its tail together, but less long than for both apart, and hardly longer than for the chunk alone.
    until = end if scores else tail_end(end, len(feed), size, info)
    keep_between = until > end and end == kept and contexts.wants(request, feed[:end])
    return PrefillPass(start, end, until, kept, keep_between, scores)


def run_pass(backend: Backend, request: Request, part: PrefillPass) -> tuple[Logits, Snapshot | None]:
    """Computes a pass.

    Returns:
        Logits, float32 [rows, vocab]: of every position where scores are wanted, of the last one otherwise; and the state between chunk
        and tail, where it is kept.

    Raises:
        BackendLostError, PassBrokenOff: as `Backend.prefill` does.
    """
    stream, chunk = stream_of(request), request.feed[part.start : part.end]
    if part.is_joined:
        return backend.prefill_joined(stream, chunk, request.feed[part.end : part.until], keep=part.keep_between)
    return backend.prefill(stream, chunk, all_logits=part.scores), None
