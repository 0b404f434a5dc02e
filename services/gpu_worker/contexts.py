"""The memory of contexts: what a request's stream reserves, and the states of earlier prompts that it may begin with.

Owned by the engine's thread. Who gives memory up when it is short is the engine loop's decision.
"""

from __future__ import annotations

from services.gpu_worker.backends.base import Backend, Snapshot, Stream
from services.gpu_worker.prefix_cache import PrefixCache
from services.gpu_worker.request import Request


class Contexts:
    """Streams of requests, and kept states.

    Args:
        backend: has the memory.
        kept_bytes: bound on what kept states take; 0 keeps none.
        max_rq_tokens: tokens of an answer that memory is reserved for from the start.
    """

    def __init__(self, backend: Backend, kept_bytes: int, max_rq_tokens: int) -> None:
        self._backend = backend
        # Where not a single snapshot fits none is made either.
        self._prefixes = PrefixCache(kept_bytes if backend.info.snapshot_bytes <= kept_bytes else 0)
        self._max_rq_tokens = max_rq_tokens

    @property
    def num_kept(self) -> int:
        """States that are kept."""
        return len(self._prefixes)

    @property
    def kept_bytes(self) -> int:
        """Memory that kept states take."""
        return self._prefixes.num_bytes

    def reserve(self, request: Request) -> int:
        """Tokens that a request's stream has memory for from the start: the prompt, what was produced, and some of what may come."""
        have, left = len(request.spec.prompt) + request.num_generated, request.spec.sampling.max_tokens - request.num_generated
        return min(have + min(left, self._max_rq_tokens), self._backend.info.max_context)

    def open(self, request: Request) -> None:
        """Opens the request's stream, from a kept state where one fits."""
        spec = request.spec
        # The newest token is not in the stream yet: the next decode step puts it there.
        request.feed = spec.prompt + tuple(request.output_ids[:-1])
        # Prompt scores need every position's logits: nothing can be skipped.
        kept = self._prefixes.find(spec.key_id, request.feed) if spec.prompt_scores is None else None
        request.stream = self._backend.open_stream(kept.snapshot if kept is not None else None)
        request.num_prefilled = len(kept.tokens) if kept is not None else 0

    def extend(self, stream: Stream, num_tokens: int) -> bool:
        """Makes room for so many tokens in a stream. Kept states give theirs up for it, first those that were used longest ago."""
        while not self._backend.extend(stream, num_tokens):
            if not self._prefixes.make_room():
                return False
        return True

    def kept_length(self, request: Request) -> int:
        """Tokens of a request's feed after which the state is kept: it serves the same prompt again, and longer ones. 0 for nowhere.

        Without pages that is before the last token, which then goes alone. With pages it is where the last full one ends, and chunks do
        anyway; but a scored prompt is computed in other pieces than a prompt otherwise is, and so has other bits.
        """
        last, page = len(request.feed) - 1, self._backend.info.page_tokens
        if not page:
            return last
        return last // page * page if request.spec.prompt_scores is None else 0

    def wants(self, request: Request, tokens: tuple[int, ...]) -> bool:
        """True when the state after these tokens would be kept."""
        return self._prefixes.wants(request.spec.key_id, tokens)

    def keep(self, request: Request, tokens: tuple[int, ...]) -> None:
        """Keeps the state of the request's stream, which holds exactly `tokens`."""
        if self.wants(request, tokens):
            self.keep_snapshot(request, tokens, self._backend.snapshot(stream_of(request)))

    def keep_snapshot(self, request: Request, tokens: tuple[int, ...], snapshot: Snapshot | None) -> None:
        """Keeps a state of the request's stream that was made when it held exactly `tokens`; None is none."""
        if snapshot is not None:
            self._prefixes.keep(request.spec.key_id, tokens, snapshot)


def stream_of(request: Request):  # type: ignore[no-untyped-def]
    """The stream of a request that runs."""
    assert request.stream is not None
    return request.stream
