"""Sampling, compared with transformers' processors where they do the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.gpu_worker.request import SamplingParams, ThinkingBudget
from services.gpu_worker.sampling import ForcedTokens, Sampler

VOCAB = 500


def row(seed: int, spread: float = 2.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


def sampler(
    suppressed: frozenset[int] = frozenset(), budget: ThinkingBudget | None = None, prompt: tuple[int, ...] = (1,), **params: object
) -> Sampler:
    return Sampler(SamplingParams(**params), prompt, suppressed, VOCAB, budget)  # type: ignore[arg-type]


CASES = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_same_choices_as_transformers(params: dict[str, float]) -> None:
    """The tokens that can be drawn, and how often, are those of transformers' processors in the same order."""
    logits = row(1)
    scores = torch.from_numpy(logits.copy())[None]
    ids = torch.zeros(1, 0, dtype=torch.long)
    for warper in (
        TemperatureLogitsWarper(params["temperature"]) if "temperature" in params else None,
        TopKLogitsWarper(int(params["top_k"])) if "top_k" in params else None,
        TopPLogitsWarper(params["top_p"]) if "top_p" in params else None,
        MinPLogitsWarper(params["min_p"]) if "min_p" in params else None,
    ):
        scores = warper(ids, scores) if warper is not None else scores
    expected = torch.softmax(scores[0], -1).numpy()
    chooser = sampler(seed=3, **params)
    count = 20_000
    drawn = Counter(chooser.choose(logits) for _ in range(count))
    assert set(drawn) <= set(np.flatnonzero(expected > 0))
    share = np.array([drawn[i] / count for i in range(VOCAB)])
    assert np.abs(share - expected).sum() / 2 < 0.04 + 0.5 * np.sqrt((expected > 1e-4).sum() / count)
    assert np.abs(share - expected).max() < 0.015


def test_repetition_penalty_as_transformers() -> None:
    """The repetition penalty covers prompt and output and equals transformers' processor."""
    logits = row(2)
    best = [int(i) for i in np.argsort(-logits)[:4]]
    chooser = sampler(temperature=0.0, repetition_penalty=1.8, prompt=(best[0], best[2]))
    history = [best[0], best[2]]
    for _ in range(6):
        processed = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([history]), torch.from_numpy(logits.copy())[None])
        token = chooser.choose(logits)
        assert token == int(processed[0].argmax())
        history.append(token)


def test_presence_and_frequency_penalties() -> None:
    """Presence counts once, frequency each time, and only the output counts."""
    logits = np.zeros(VOCAB, np.float32)
    logits[:3] = (2.0, 1.5, 0.9)
    assert [sampler(temperature=0.0, presence_penalty=0.7, prompt=(0, 0)).choose(logits)] == [0]
    presence = sampler(temperature=0.0, presence_penalty=0.7)
    assert [presence.choose(logits) for _ in range(4)] == [0, 1, 0, 0]
    frequency = sampler(temperature=0.0, frequency_penalty=0.4)
    assert [frequency.choose(logits) for _ in range(5)] == [0, 0, 1, 0, 1]


def test_greedy_takes_the_best_and_leaves_the_row_alone() -> None:
    """Greedy takes the highest logit, the lower id among equals, and never writes into the caller's row."""
    logits = row(3)
    logits[[7, 9]] = logits.max() + 1
    before = logits.copy()
    assert sampler(temperature=0.0).choose(logits) == 7
    assert sampler(temperature=0.0, logit_bias=((9, 0.5),)).choose(logits) == 9
    assert (logits == before).all()


def test_seed_decides_the_draw() -> None:
    """Equal seeds draw equal tokens; a generator that drew more does not change another."""
    rows = [row(i) for i in range(30)]
    first, second, other = sampler(seed=5), sampler(seed=5), sampler(seed=6)
    for _ in range(50):
        other.choose(rows[0])
    one = [first.choose(r) for r in rows]
    assert one == [second.choose(r) for r in rows]
    assert one != [other.choose(r) for r in rows]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-6])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 1e-300}])
def test_a_tiny_temperature_is_greedy(temperature: float, more: dict[str, float]) -> None:
    """However small the temperature, the best token comes: nothing overflows on the way."""
    logits = row(8)
    assert sampler(temperature=temperature, seed=3, **more).choose(logits) == int(logits.argmax())


def test_minimum_length_suppresses_end_tokens() -> None:
    """Before min_tokens end tokens cannot come, afterwards they can."""
    logits = np.zeros(VOCAB, np.float32)
    logits[42] = 50.0
    chooser = sampler(frozenset({42}), min_tokens=3, seed=1)
    tokens = [chooser.choose(logits) for _ in range(5)]
    assert 42 not in tokens[:3]
    assert tokens[3:] == [42, 42]


def test_ties_are_broken_by_id() -> None:
    """Equally likely tokens are ranked by id, so a draw does not depend on memory order."""
    flat = np.zeros(VOCAB, np.float32)
    assert {sampler(seed=i, top_k=3).choose(flat) for i in range(60)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 90, 91, 6]),  # the budget runs out
        ([1, 90, 3, 4, 5, 6], [1, 90, 3, 4, 5, 6]),  # the model ends by itself
    ],
)
def test_thinking_budget(free: list[int], expected: list[int]) -> None:
    """The forced tokens come exactly once, and not at all when the model ended its thinking in time."""
    forcing = ForcedTokens(ThinkingBudget(3, 90, (90, 91)))
    out = []
    for token in free:
        forced = forcing.next()
        out.append(token if forced is None else forced)
        forcing.observe(out[-1])
    assert out == expected


def test_thinking_budget_of_zero_forces_at_once() -> None:
    """A budget of zero forces the first token."""
    assert sampler(temperature=0.0, budget=ThinkingBudget(0, 90, (90,))).choose(row(1)) == 90
