"""What of the sampled tokens goes out: stop tokens, stop strings across token borders, lengths.

Text is held back only as far as it can still become a stop string.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from services.gpu_worker.detok import TokenTable
from services.gpu_worker.request import FinishReason, OutToken, RankedToken, SamplingParams


@dataclass(frozen=True)
class Ending:
    """Why the output ended."""

    reason: FinishReason
    stop_string: bytes = b""
    stop_token_id: int | None = None


class OutputStream:
    """Takes sampled tokens one by one and gives those that may go out.

    Args:
        params: stop conditions and lengths.
        eos_token_ids: the model's own end tokens.
        tokens: bytes of every token.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], tokens: TokenTable) -> None:
        self._params = params
        self._end_ids = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
        self._tokens = tokens
        self._num_tokens = 0
        hidden = frozenset[int]() if params.show_special_tokens else tokens.special
        self._matcher = StopMatcher(params.stop, keep_stop=params.include_stop_str_in_output, hidden=hidden) if params.stop else None

    def push(self, token_id: int, logprob: float | None = None, top: tuple[RankedToken, ...] = ()) -> tuple[list[OutToken], Ending | None]:
        """One sampled token.

        Args:
            token_id: the token.
            logprob, top: as in OutToken.

        Returns:
            tokens that may go out now, and the ending if this token ended the output.
        """
        self._num_tokens += 1
        special = token_id in self._tokens.added
        if token_id in self._end_ids:
            # Its bytes are no part of the text, whatever was asked for stop strings.
            token = OutToken(token_id, b"", special, logprob, top)
            return [*self.flush(), token], Ending(FinishReason.STOP, stop_token_id=token_id)
        token = OutToken(token_id, self._tokens.pieces[token_id], special, logprob, top)
        out = [token]
        if self._matcher is not None and self._num_tokens > self._params.min_tokens:
            out, stop = self._matcher.push(token)
            if stop is not None:
                return out, Ending(FinishReason.STOP, stop_string=stop)
        if self._num_tokens >= self._params.max_tokens:
            return [*out, *self.flush()], Ending(FinishReason.LENGTH)
        return out, None

    def flush(self) -> list[OutToken]:
        """What was held back for stop strings, when the output ends otherwise."""
        return self._matcher.flush() if self._matcher is not None else []


class StopMatcher:
    """Finds stop strings in the bytes of a token stream, as its reader sees them.

    Args:
        stops: non-empty byte strings.
        keep_stop: the matched string belongs to the output.
        hidden: ids of tokens whose text is not shown: a stop string goes on over them, and ends at one whose whole text it is.
    """

    def __init__(self, stops: tuple[bytes, ...], *, keep_stop: bool = False, hidden: frozenset[int] = frozenset()) -> None:
        self._stops = stops
        self._keep_stop = keep_stop
        self._hidden = hidden
        self._held: deque[OutToken] = deque()
        self._text = b""  # shown bytes of the held tokens

    def push(self, token: OutToken) -> tuple[list[OutToken], bytes | None]:
        """Adds a token; gives the tokens that are free to go and the stop string if one is complete."""
        if token.token_id in self._hidden and token.piece in self._stops:
            return [*self.flush(), *([token] if self._keep_stop else [])], token.piece
        self._held.append(token)
        self._text += self._shown(token)
        match = self._first_match()
        if match is None:
            return self._release(len(self._text) - self._pending()), None
        start, stop = match
        return self._cut(start + len(stop) if self._keep_stop else start), stop

    def flush(self) -> list[OutToken]:
        """Everything held back: nothing can complete a match any more."""
        out = list(self._held)
        self._held.clear()
        self._text = b""
        return out

    def _first_match(self) -> tuple[int, bytes] | None:
        """The match that is complete first; of two that end together, the longer."""
        found = [(self._text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _pending(self) -> int:
        """Length of the longest suffix that is the beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            suffix = self._text[-size:]
            if any(len(stop) > size and stop.startswith(suffix) for stop in self._stops):
                return size
        return 0

    def _release(self, num_bytes: int) -> list[OutToken]:
        """Tokens that lie wholly within the first `num_bytes` bytes."""
        out: list[OutToken] = []
        while self._held and (size := len(self._shown(self._held[0]))) <= num_bytes:
            out.append(self._held.popleft())
            num_bytes -= size
            self._text = self._text[size:]
        return out

    def _shown(self, token: OutToken) -> bytes:
        return b"" if token.token_id in self._hidden else token.piece

    def _cut(self, num_bytes: int) -> list[OutToken]:
        """Tokens up to `num_bytes` bytes; the last one cut there. The rest belongs to the stop string and goes nowhere."""
        out = self._release(num_bytes)
        rest = num_bytes - sum(len(self._shown(token)) for token in out)
        if rest > 0 and self._held:
            out.append(replace(self._held[0], piece=self._held[0].piece[:rest]))
        self._held.clear()
        self._text = b""
        return out
