"""One running request's way from logits to events: prompt scores, sampling, stop conditions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.common.errors import EngineFailed
from services.gpu_worker import sampling
from services.gpu_worker.backends.base import Logits
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.grammar import Constraint
from services.gpu_worker.logprobs import RowLogprobs
from services.gpu_worker.output import Ending, OutputStream
from services.gpu_worker.request import Event, FinishReason, OutToken, Request, Tokens


class Generation:
    """The per-request part of the engine's work after a forward pass.

    Args:
        request: the request; its `next_token` and `num_generated` are kept here.
        eos_token_ids: the model's end tokens.
        tokens: bytes of every token.
    """

    def __init__(self, request: Request, eos_token_ids: frozenset[int], tokens: TokenTable) -> None:
        spec = request.spec
        self._request = request
        self._tokens = tokens
        self._scores = spec.prompt_scores
        self._last_row: NDArray[np.float32] | None = None  # logits after the newest prompt token, for scoring the next chunk's first
        self._num_seen = 0  # prompt tokens whose scores went out; a request that was put back computes them again
        self._output = OutputStream(spec.sampling, eos_token_ids, tokens)
        self._constraint = Constraint(spec.grammar, eos_token_ids) if spec.grammar is not None else None
        self._sampler = sampling.Sampler(
            spec.sampling,
            spec.prompt,
            eos_token_ids | spec.sampling.stop_token_ids,
            len(tokens),
            spec.thinking_budget,
            self._constraint,
        )

    @property
    def wants_prompt_scores(self) -> bool:
        """True when prefill must return the logits of every prompt token."""
        return self._scores is not None

    def score_prompt(self, start: int, chunk: Sequence[int], logits: Logits) -> tuple[OutToken, ...]:
        """Prompt tokens of a chunk with their log-probabilities, from the first scored position on.

        Args:
            start: position of the chunk's first token.
            chunk: its tokens.
            logits: fp32 [len(chunk), vocab], row i after token i.

        Raises:
            EngineFailed: a scored position's logits are not finite.
        """
        if self._scores is None:
            return ()
        out: list[OutToken] = []
        for i, token_id in enumerate(chunk):
            if start + i < self._num_seen:
                continue
            row = logits[i - 1] if i > 0 else self._last_row
            if start + i >= self._scores.first or (start + i == 0 and self._scores.first == 1):
                out.append(self._out_token(token_id, row, self._scores.top))
        self._last_row = logits[-1].copy()
        self._num_seen = max(self._num_seen, start + len(chunk))
        return tuple(out)

    def _out_token(self, token_id: int, row: NDArray[np.float32] | None, top: int) -> OutToken:
        """A prompt token; the very first of a prompt has no log-probability."""
        piece, special = self._tokens.pieces[token_id], token_id in self._tokens.added
        if row is None:
            return OutToken(token_id, piece, special)
        _check_finite(row)
        logprobs = RowLogprobs(row)
        return OutToken(token_id, piece, special, logprobs.of(token_id), logprobs.ranked(top), logprobs.rank(token_id))

    def advance(self, row: NDArray[np.float32]) -> tuple[list[Event], Ending | None]:
        """Chooses the next token from raw logits [vocab].

        Returns:
            events to send, and the ending if the generation is over.

        Raises:
            InvalidRequest: the request's grammar asks for more than its limits allow, or nothing that the request allows is left.
            EngineFailed: the logits are not finite. Sampling would still give a token, and the answer would be noise.
        """
        _check_finite(row)
        token_id = self._sampler.choose(row)
        self._request.num_generated += 1
        self._request.next_token = token_id
        self._request.output_ids.append(token_id)
        wanted = self._request.spec.sampling.logprobs
        if wanted < 0:
            out, ending = self._output.push(token_id)
        else:
            logprobs = RowLogprobs(row)
            out, ending = self._output.push(token_id, logprob=logprobs.of(token_id), top=logprobs.ranked(wanted))
        if self._constraint is not None and self._constraint.complete and (ending is None or ending.reason is FinishReason.LENGTH):
            out, ending = [*out, *self._output.flush()], Ending(FinishReason.GRAMMAR_END)
        return [Tokens(tuple(out))] if out else [], ending


def _check_finite(row: NDArray[np.float32]) -> None:
    # The largest of a row with a NaN is NaN.
    if not math.isfinite(row.max()):
        raise EngineFailed("the model's output is not finite: weights or memory are damaged (VerifyTiers tells which)")
