"""Log-probabilities in the shapes that OpenAI gives them."""

from __future__ import annotations

import math
from typing import Any

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb

# What OpenAI's servers write for "as good as impossible"; -inf is no JSON.
_LOWEST = -9999.0


def token_text(piece: bytes) -> str:
    """A token's text; bytes that are no characters of their own are spelled out."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    """`logprob` as a number that JSON can hold."""
    return max(logprob, _LOWEST) if math.isfinite(logprob) else _LOWEST


def token_name(token_id: int, piece: bytes, *, by_id: bool) -> str:
    """What a token is called in log-probabilities: its text, or with `return_tokens_as_token_ids` its id."""
    return f"token_id:{token_id}" if by_id else token_text(piece)


def chat_entry(token: pb.Token, *, by_id: bool = False) -> dict[str, Any]:
    """One entry of `choices[].logprobs.content`."""
    return {
        "token": token_name(token.id, token.piece, by_id=by_id),
        "logprob": finite(token.logprob),
        "bytes": list(token.piece),
        "top_logprobs": [
            {"token": token_name(top.token_id, top.piece, by_id=by_id), "logprob": finite(top.logprob), "bytes": list(top.piece)}
            for top in token.top
        ],
    }


def prompt_entry(token: pb.Token, top: int) -> dict[str, Any] | None:
    """One entry of vLLM's `prompt_logprobs`: the prompt's own token and the `top` most likely, by id; None for a prompt's first token."""
    if not token.HasField("logprob"):
        return None
    own = {str(token.id): _ranked(token.logprob, token.rank, token.piece)}
    return own | {str(entry.token_id): _ranked(entry.logprob, rank, entry.piece) for rank, entry in enumerate(token.top[:top], 1)}


def _ranked(logprob: float, rank: int, piece: bytes) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(piece)}


class TextLogprobs:
    """Tells which tokens made a text. A token may bring no text yet (half of a character, white space that may stand before a call) or none
    at all (a tag, a call); what brings none stands before the text that follows."""

    def __init__(self) -> None:
        self._waiting: list[pb.Token] = []

    def add(self, token: pb.Token) -> None:
        """One more token, before the text that it may bring."""
        if token.piece:
            self._waiting.append(token)

    def take(self, text: str) -> list[dict[str, Any]]:
        """Entries of the tokens that made `text`, which has come just now."""
        left, first = len(text.encode()), len(self._waiting)
        while first and left > 0:
            first -= 1
            left -= len(self._waiting[first].piece)
        found = [chat_entry(token) for token in self._waiting[first:]]
        self._waiting.clear()
        return found

    def drop(self) -> None:
        """What waits has become something else than text."""
        self._waiting.clear()


class CompletionLogprobs:
    """Collects `choices[].logprobs` of /v1/completions.

    Args:
        top: how many of the most likely tokens are shown; tokens of a prompt may come with more.
        by_id: tokens are named by their ids.
    """

    def __init__(self, top: int, *, by_id: bool = False) -> None:
        self._top_count = top
        self._by_id = by_id
        self._tokens: list[pb.Token] = []
        self._offsets: list[int] = []

    def add(self, token: pb.Token, offset: int) -> None:
        """One more token, whose text begins at character `offset` of the completion."""
        self._tokens.append(token)
        self._offsets.append(offset)

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        tokens, offsets = self._tokens, self._offsets
        self._tokens, self._offsets = [], []
        return {
            "tokens": [self._name(token.id, token.piece) for token in tokens],
            # The first token of a prompt follows nothing and has none.
            "token_logprobs": [finite(token.logprob) if token.HasField("logprob") else None for token in tokens],
            "top_logprobs": [self._top(token) if token.HasField("logprob") else None for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: pb.Token) -> dict[str, float]:
        """The most likely tokens and the chosen one."""
        found = {self._name(top.token_id, top.piece): finite(top.logprob) for top in token.top[: self._top_count]}
        return {self._name(token.id, token.piece): finite(token.logprob)} | found

    def _name(self, token_id: int, piece: bytes) -> str:
        return token_name(token_id, piece, by_id=self._by_id)
