"""Drawing from a row as long as the model's vocabulary: against the definition in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.sampling import by_definition
from services.gpu_worker import draw
from services.gpu_worker.logprobs import largest
from services.gpu_worker.request import SamplingParams
from services.gpu_worker.sampling import Sampler, Seen

VOCAB = 154_880


def row(seed: int, spread: float = 3.0, size: int = VOCAB) -> NDArray[np.float32]:
    return (spread * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 40},
    {"top_k": 20_000},
    {"top_p": 0.9},
    {"temperature": 0.5, "top_p": 0.5},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"temperature": 2.0, "min_p": 0.3, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 300, "top_p": 0.8, "min_p": 0.001},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [VOCAB, VOCAB + 1, 131, 64, 1])
def test_a_draw_is_that_of_the_definition(kind: dict[str, Any], size: int) -> None:
    """For numbers all over [0, 1) the token is the one that the running sum of exact weights gives, but at the borders between two."""
    params, scores = SamplingParams(**kind), row(size, size=size)
    order, weights = by_definition(scores, params)
    running = np.cumsum(weights)
    near = 0
    uniforms = [0.0, 1 - 2**-53, *np.random.default_rng(7).random(60)]
    for uniform in uniforms:
        token = draw.draw(scores.copy(), params, float(uniform))
        place = int(np.flatnonzero(order == token)[0])
        # In a share of a millionth around its part of the sum.
        slack = 1e-6 * running[-1]
        assert running[place] - weights[place] - slack <= uniform * running[-1] <= running[place] + slack
        near += place != min(int(np.searchsorted(running, uniform * running[-1], side="right")), len(order) - 1)
    assert near <= 3


def test_tokens_that_cannot_come_are_never_drawn() -> None:
    """Whatever is -inf has no weight: in whole blocks, at their borders, and at the end of the row."""
    scores = np.full(VOCAB, -np.inf, np.float32)
    allowed = [63, 64, 127, 5_000, VOCAB - 1]
    scores[allowed] = 0.0
    for kind in ({}, {"top_p": 0.9}, {"top_k": 100}, {"min_p": 0.5}):
        drawn = {draw.draw(scores.copy(), SamplingParams(**kind), u) for u in (0.0, 0.19, 0.2, 0.41, 0.61, 0.81, 1 - 2**-53)}
        assert drawn <= set(allowed)
        assert {63, VOCAB - 1} <= drawn


@pytest.mark.parametrize("count", [1, 20, 64, 1_000, 5_000, VOCAB - 1, VOCAB, VOCAB + 7])
@pytest.mark.parametrize("values", ["all different", "many ties", "all equal", "one column", "masked", "nothing left"])
def test_the_largest_are_found_with_ties_by_index(count: int, values: str) -> None:
    """As a whole sort finds them."""
    made = {
        "all different": row(1),
        "many ties": np.round(row(2)),
        "all equal": np.zeros(VOCAB, np.float32),
        "one column": np.where(np.arange(VOCAB) % (VOCAB // 32) == 3, np.float32(5), np.float32(0)),
        "masked": np.where(np.arange(VOCAB) % 5_003 == 7, row(6), np.float32(-np.inf)),
        "nothing left": np.full(VOCAB, -np.inf, np.float32),
    }[values]
    want = np.lexsort((np.arange(VOCAB), -made))[:count]
    assert np.array_equal(largest(made, count), want)


@pytest.mark.parametrize("size", [VOCAB, 500])
def test_what_a_mask_bars_is_not_sorted(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Behind a grammar's mask nearly the whole row ties with the last place; sorting all of it would take longer than the step."""
    ranked = []
    sort = np.lexsort
    monkeypatch.setattr(np, "lexsort", lambda keys: (ranked.append(len(keys[0])), sort(keys))[1])
    scores = np.full(size, -np.inf, np.float32)
    scores[[3, 77, 400]] = 1.0, 2.0, 2.0
    assert largest(scores, 64)[:4].tolist() == [77, 400, 3, 0]
    assert ranked == [64]


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e-5])
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"temperature": 1e-300}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_the_smallest_penalty_lets_no_barred_token_through(penalty: float, kind: dict[str, Any]) -> None:
    """Scores stay numbers: the seen token with the largest score comes."""
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[5, 6, 7, 8]] = 0.0, 2.0, 3.0, 4.0
    sampler = Sampler(SamplingParams(seed=1, repetition_penalty=penalty, **kind), (5, 6, 7, 9), frozenset(), VOCAB)
    with np.errstate(all="raise", under="ignore"):
        assert sampler.choose(logits) == 7


def test_a_row_is_left_alone_and_two_requests_do_not_mix() -> None:
    """Memory is used again from token to token and request to request; nobody sees another's."""
    one, two = row(3), row(4)
    before = one.copy(), two.copy()
    alone = [Sampler(SamplingParams(seed=1, top_p=0.9), (), frozenset(), VOCAB).choose(one) for _ in range(1)]
    first, second = (Sampler(SamplingParams(seed=1, top_p=0.9), (), frozenset(), VOCAB) for _ in range(2))
    assert [first.choose(one), second.choose(two)][0] == alone[0]
    assert np.array_equal(one, before[0])
    assert np.array_equal(two, before[1])


def test_seen_tokens_are_counted_however_many_they_are() -> None:
    """Prompt and output, each token once, with its count; room grows."""
    seen = Seen([5, 3, 5])
    for token in [*range(1000, 1200), 3, 1000]:
        seen.add(token)
    ids, counts = seen.tokens()
    found = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    assert len(ids) == len(found) == 202
    assert (found[5], found[3], found[1000], found[1199]) == (2, 2, 2, 1)


def test_penalties_change_what_was_seen_alone() -> None:
    """The same scores as penalties over a whole row of counts."""
    logits = row(5)
    best = [int(i) for i in np.argsort(-logits)[:3]]
    sampler = Sampler(SamplingParams(temperature=0.0, frequency_penalty=0.25, presence_penalty=0.5), (), frozenset(), VOCAB)
    counts = np.zeros(VOCAB, np.float32)
    for _ in range(12):
        want = int((logits - (np.float32(0.25) * counts + np.float32(0.5) * (counts > 0))).argmax())
        assert sampler.choose(logits) == want
        counts[want] += 1
    assert counts[best[0]] > 1
