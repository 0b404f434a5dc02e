"""Log-probabilities in the two shapes that OpenAI gives them."""

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


def chat_entry(token: pb.Token) -> dict[str, Any]:
    """One entry of `choices[].logprobs.content`."""
    return {
        "token": token_text(token.piece),
        "logprob": finite(token.logprob),
        "bytes": list(token.piece),
        "top_logprobs": [{"token": token_text(top.piece), "logprob": finite(top.logprob), "bytes": list(top.piece)} for top in token.top],
    }


class CompletionLogprobs:
    """Collects `choices[].logprobs` of /v1/completions."""

    def __init__(self) -> None:
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
            "tokens": [token_text(token.piece) for token in tokens],
            # The first token of a prompt follows nothing and has none.
            "token_logprobs": [finite(token.logprob) if token.HasField("logprob") else None for token in tokens],
            "top_logprobs": [_top(token) if token.HasField("logprob") else None for token in tokens],
            "text_offset": offsets,
        }


def _top(token: pb.Token) -> dict[str, float]:
    """The most likely tokens and the chosen one."""
    found = {token_text(top.piece): finite(top.logprob) for top in token.top}
    return {token_text(token.piece): finite(token.logprob)} | found
