"""From a row of logits to a token.

Order: the grammar's mask, logit bias, allowed tokens and bad words, minimum length, penalties, temperature, top-k, top-p, min-p, draw.
Every request draws from its own generator, one number per token, so neither batching nor neighbours change what it draws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.common.errors import InvalidRequest
from services.gpu_worker import draw
from services.gpu_worker.grammar import Constraint
from services.gpu_worker.request import SamplingParams, ThinkingBudget
from services.gpu_worker.token_limits import TokenLimits

Row = NDArray[np.float32]
# What is divided by a smaller repetition penalty may not be a number of fp32 any more, and then no token could be told from another.
LEAST_PENALTY = 1e-30


class Sampler:
    """Chooses one request's tokens.

    Args:
        params: the request's parameters.
        prompt: token ids, for the repetition penalty.
        suppressed: ids that must not come before `min_tokens` (eos and stop tokens).
        vocab_size: columns of a row.
        budget: the thinking budget, if any.
        constraint: the grammar that the output must follow, if any.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        suppressed: frozenset[int],
        vocab_size: int,
        budget: ThinkingBudget | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._limits = TokenLimits.of(params, vocab_size)
        self._random = random.Random(params.seed)
        self._num_chosen = 0
        self._suppressed = np.array(sorted(suppressed), np.int64)
        self._bias_ids = np.array([i for i, _ in params.logit_bias], np.int64)
        self._bias = np.array([b for _, b in params.logit_bias], np.float32)
        self._forcing = ForcedTokens(budget) if budget is not None else None
        self._seen = Seen(prompt) if params.repetition_penalty != 1.0 else None
        self._counts = Seen() if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 else None
        changed = params.logit_bias or self._limits is not None or self._seen is not None or self._counts is not None
        self._greedy_as_is = params.temperature == 0.0 and not changed

    def choose(self, logits: Row) -> int:
        """The next token for raw logits [vocab_size], which stay unchanged.

        Raises:
            InvalidRequest: the grammar asks for more than its limits allow, or what the request allows leaves no token.
        """
        forced = self._forcing.next() if self._forcing is not None else None
        if forced is not None:
            token = forced
        elif self._constraint is None:
            token = self._pick(logits)
        else:
            allowed = self._constraint.allowed(len(logits))
            token = self._constraint.instead_of(self._pick(logits if allowed is None else _masked(logits, allowed)))
        self._observe(token)
        return token

    def _observe(self, token: int) -> None:
        self._num_chosen += 1
        if self._constraint is not None:
            self._constraint.observe(token)
        if self._limits is not None:
            self._limits.observe(token)
        if self._forcing is not None:
            self._forcing.observe(token)
        for seen in (self._seen, self._counts):
            if seen is not None:
                seen.add(token)

    def _pick(self, logits: Row) -> int:
        params = self._params
        early = self._num_chosen < params.min_tokens and len(self._suppressed) > 0
        if self._greedy_as_is and not early:
            return int(logits.argmax())
        scores = draw.scratch(len(logits))
        np.copyto(scores, logits)
        if len(self._bias_ids):
            scores[self._bias_ids] += self._bias
        if self._limits is not None:
            self._limits.apply(scores)
            if scores.max() == -np.inf:
                raise _nothing_left(params, constrained=self._constraint is not None)
        if early:
            self._suppress(scores)
        self._penalise(scores)
        if params.temperature == 0.0:
            return int(scores.argmax())
        return draw.draw(scores, params, self._random.random())

    def _suppress(self, scores: Row) -> None:
        """Takes end tokens out, unless nothing else may come."""
        ends = scores[self._suppressed]
        scores[self._suppressed] = -np.inf
        if scores.max() == -np.inf:
            scores[self._suppressed] = ends

    def _penalise(self, scores: Row) -> None:
        params = self._params
        if self._seen is not None:
            ids, _ = self._seen.tokens()
            seen, penalty = scores[ids], max(params.repetition_penalty, LEAST_PENALTY)
            scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        if self._counts is not None:
            ids, counts = self._counts.tokens()
            scores[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _nothing_left(params: SamplingParams, *, constrained: bool) -> InvalidRequest:
    names = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
    told = " and ".join([*names, "the output's grammar"] if constrained else names)
    return InvalidRequest(f"{told} leave no token that may come next: allow more of them", param=names[0])


def _masked(logits: Row, allowed: NDArray[np.bool_]) -> Row:
    """Raw logits of the allowed tokens; -inf for the others."""
    return np.where(allowed, logits, np.float32(-np.inf))


class Seen:
    """Tokens and how often they came; what was never seen costs nothing.

    Args:
        tokens: seen already.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._place = {int(token): place for place, token in enumerate(ids)}
        room = max(64, 2 * len(ids))
        self._ids, self._counts = np.zeros(room, np.int64), np.zeros(room, np.float32)
        self._ids[: len(ids)], self._counts[: len(ids)] = ids, counts

    def add(self, token: int) -> None:
        """It came once more."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids, self._counts = (np.concatenate([part, np.zeros_like(part)]) for part in (self._ids, self._counts))
        self._ids[place] = token
        self._counts[place] += 1

    def tokens(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Each token once, with its count."""
        return self._ids[: len(self._place)], self._counts[: len(self._place)]


class ForcedTokens:
    """The thinking budget as a state machine: counts, then forces, then lets go."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._num_seen = 0
        self._num_forced = 0
        self._over = False

    def next(self) -> int | None:
        """The token that must come now, or None when the choice is free."""
        if self._over or self._num_seen - self._num_forced < self._budget.budget:
            return None
        return self._budget.forced_token_ids[self._num_forced]

    def observe(self, token: int) -> None:
        """Takes note of the token that came."""
        if self._over:
            return
        forced = self._num_seen - self._num_forced >= self._budget.budget
        self._num_seen += 1
        self._num_forced += int(forced)
        finished = forced and self._num_forced == len(self._budget.forced_token_ids)
        self._over = finished or (not forced and token == self._budget.end_token_id)
