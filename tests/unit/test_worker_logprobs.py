"""Log-probabilities of a row of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.logprobs import RowLogprobs, largest

VOCAB = 500


def row(seed: int, spread: float = 20.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 3e4, -3e4])
def test_they_are_the_log_softmax(offset: float) -> None:
    """Normalised, and torch's in fp64 but for the rounding of what a reader gets, however large the logits; the row stays as it is."""
    logits = row(8) + np.float32(offset)
    before = logits.copy()
    logprobs = RowLogprobs(logits)
    found = np.array([logprobs.of(token) for token in range(VOCAB)])
    assert np.exp(found).sum() == pytest.approx(1.0, abs=1e-6)
    assert np.abs(found - torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()).max() < 1e-6
    assert (logits == before).all()


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=30), count=st.integers(0, 40))
def test_the_most_likely_come_first_and_the_lower_id_among_equals(values: list[int], count: int) -> None:
    """The order of a stable sort, and each token's rank is its place in it."""
    logits = np.array(values, np.float32)
    logprobs = RowLogprobs(logits)
    order = sorted(range(len(values)), key=lambda token: -values[token])
    ranked = logprobs.ranked(count)
    assert [entry.token_id for entry in ranked] == order[:count]
    assert [entry.logprob for entry in ranked] == [logprobs.of(token) for token in order[:count]]
    assert [logprobs.rank(token) for token in order] == list(range(1, len(values) + 1))
    if count:
        assert list(largest(logits, min(count, len(values)))) == order[:count]
