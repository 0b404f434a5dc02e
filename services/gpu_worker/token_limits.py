"""What a client lets the model say: a list of tokens that may come, and words that never may.

A word is a sequence of token ids. Where the output ends with all of its tokens but the last, the last one cannot come; so the whole
sequence never stands in an output, whatever other sequences have its text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.request import SamplingParams


class _Node:
    """What can follow a beginning that some words share."""

    def __init__(self) -> None:
        self.following: dict[int, _Node] = {}
        self.barred: NDArray[np.int64] = np.empty(0, np.int64)  # tokens that would complete a word here


class TokenLimits:
    """One request's limits; used by the engine's thread only.

    Args:
        allowed: the only tokens that may come; empty for all.
        bad_words: token ids of each word, at least one.
        vocab_size: columns of a row.
    """

    def __init__(self, allowed: Sequence[int], bad_words: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._never: NDArray[np.bool_] = np.full(vocab_size, bool(allowed))
        self._never[np.asarray(allowed, np.int64)] = False
        self._root = _Node()
        last: dict[_Node, list[int]] = {}
        for word in bad_words:
            last.setdefault(self._beginning(word), []).append(word[-1])
        for node, tokens in last.items():
            node.barred = np.asarray(tokens, np.int64)
        self._never[self._root.barred] = True
        self._begun: list[_Node] = []  # beginnings of words that the output ends with

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> TokenLimits | None:
        """The limits that a request asks for, None when it asks for none."""
        if not params.allowed_token_ids and not params.bad_words:
            return None
        return cls(params.allowed_token_ids, params.bad_words, vocab_size)

    def apply(self, scores: NDArray[np.float32]) -> None:
        """Takes out of scores [vocab_size] what must not come now."""
        scores[self._never] = -np.inf
        for node in self._begun:
            scores[node.barred] = -np.inf

    def observe(self, token: int) -> None:
        """Takes note of the token that came."""
        nodes = [self._root, *self._begun]
        self._begun = [node.following[token] for node in nodes if token in node.following]

    def _beginning(self, word: Sequence[int]) -> _Node:
        """Where all tokens of a word but the last lead."""
        node = self._root
        for token in word[:-1]:
            node = node.following.setdefault(token, _Node())
        return node
