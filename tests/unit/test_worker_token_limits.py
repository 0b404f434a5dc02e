"""Tokens that may come, and words that never may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gpu_worker import draw
from services.gpu_worker.convert import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, RequestLimits, spec_of
from services.gpu_worker.request import SamplingParams, ThinkingBudget
from services.gpu_worker.sampling import Sampler

VOCAB = 12
ENDS = frozenset({0, 1})
LIMITS = RequestLimits(100, 64, 1.0, 1.0, 0, 30.0)


def sampler(ends: frozenset[int] = ENDS, budget: ThinkingBudget | None = None, **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), (1,), ends, VOCAB, budget)  # type: ignore[arg-type]


def rows(seed: int, count: int) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((count, VOCAB))).astype(np.float32)


def holds(output: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(output[i : i + len(word)]) == word for i in range(len(output)))


words = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), max_size=8).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    bad=words,
    allowed=st.just(()) | st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True).map(tuple),
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 0.7, 5.0]),
    more=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.integers(1, 12),
            "top_p": st.sampled_from([0.2, 0.9]),
            "min_p": st.just(0.1),
            "min_tokens": st.integers(0, 30),
            "repetition_penalty": st.just(1.5),
            "presence_penalty": st.just(-1.0),
            "logit_bias": st.just(((2, 100.0), (7, -100.0))),
        },
    ),
)
def test_no_output_has_a_bad_word_or_a_token_that_is_not_allowed(
    bad: tuple[tuple[int, ...], ...], allowed: tuple[int, ...], seed: int, temperature: float, more: dict[str, object]
) -> None:
    """Whatever the other parameters: an output keeps to both limits, and where they leave nothing the request ends with an error."""
    chooser = sampler(bad_words=bad, allowed_token_ids=allowed, seed=seed, temperature=temperature, **more)
    output: list[int] = []
    for row in rows(seed, 30):
        if any(not any(holds([*output, token], word) for word in bad) for token in allowed or range(VOCAB)):
            output.append(chooser.choose(row))
            continue
        with pytest.raises(InvalidRequest) as caught:
            chooser.choose(row)
        assert caught.value.param == ("allowed_token_ids" if allowed else "bad_words")
        break
    assert not any(holds(output, word) for word in bad)
    assert set(output) <= set(allowed or range(VOCAB))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_word_changes_nothing_but_its_last_token(seed: int) -> None:
    """Greedy takes the best token that completes no word: the beginning of a word is free, and so is its last token elsewhere."""
    word = (3, 4, 3)
    chooser = sampler(bad_words=(word,), temperature=0.0)
    output: list[int] = []
    for row in rows(seed, 40):
        row[[3, 4]] += 4.0
        best = [int(i) for i in np.argsort(-row)]
        expected = next(token for token in best if tuple([*output, token][-3:]) != word)
        output.append(chooser.choose(row))
        assert output[-1] == expected


def test_words_that_overlap_are_all_kept_out() -> None:
    """The end of one word is the beginning of another, and of itself."""
    row = np.zeros(VOCAB, np.float32)
    row[5], row[6] = 9.0, 8.0
    chooser = sampler(bad_words=((5, 5, 5), (5, 6, 5, 5)), temperature=0.0)
    assert [chooser.choose(row) for _ in range(9)] == [5, 5, 6, 5, 6, 5, 6, 5, 6]


def test_end_tokens_come_before_their_time_only_where_nothing_else_may() -> None:
    """min_tokens keeps end tokens out; when only end tokens are allowed one of them comes."""
    row = rows(5, 1)[0]
    both = sampler(allowed_token_ids=(0, 7), temperature=0.0, min_tokens=2)
    row[[0, 7]] = 9.0, -9.0
    assert [both.choose(row) for _ in range(3)] == [7, 7, 0]
    assert sampler(allowed_token_ids=(0, 1), temperature=0.0, min_tokens=2).choose(row) == 0


def test_forced_tokens_count_as_output() -> None:
    """A word may begin with what the thinking budget forced."""
    row = np.zeros(VOCAB, np.float32)
    row[[3, 4]] = 9.0, 8.0
    chooser = sampler(budget=ThinkingBudget(1, 9, (9,)), bad_words=((9, 3),), temperature=0.0)
    assert [chooser.choose(row) for _ in range(4)] == [3, 9, 4, 3]


def test_a_draw_at_the_very_end_takes_no_token_of_zero_weight() -> None:
    """The largest number below 1 times a sum can round up to the sum."""
    above = 1 + 2**-52
    assert draw.of_few(np.array([above, above, above]), 1 - 2**-53) == 0
    assert draw.of_few(np.array([0.0, 1.0, 2.0]), 0.5) == 2
    assert draw.of_few(np.array([0.0, 1.0, 2.0]), 0.0) == 1


def request(**sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="r", prompt_token_ids=[5], sampling=pb.SamplingParams(max_tokens=4, **sampling))  # type: ignore[arg-type]


def seq(*ids: int) -> pb.TokenSequence:
    return pb.TokenSequence(token_ids=ids)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"allowed_token_ids": [3, 100]}, "allowed_token_ids[1]"),
        ({"bad_words": [seq(3), seq()]}, "bad_words[1]"),
        ({"bad_words": [seq(*[3] * (MAX_BAD_WORD_TOKENS + 1))]}, "bad_words[0]"),
        ({"bad_words": [seq(3, 100)]}, "bad_words[0][1]"),
        ({"bad_words": [seq(3)] * (MAX_BAD_WORDS + 1)}, "bad_words"),
    ],
)
def test_limits_are_checked_where_they_enter(sampling: dict[str, object], param: str) -> None:
    """Ids in the vocabulary, words of at least one token, and bounds."""
    with pytest.raises(InvalidRequest) as caught:
        spec_of(request(**sampling), LIMITS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("limits", "param"),
    [({"allowed_token_ids": [3]}, "allowed_token_ids"), ({"bad_words": [seq(4, 9, 3)]}, "bad_words")],
)
@pytest.mark.parametrize("who", ["budget", "grammar"])
def test_what_ends_the_reasoning_must_be_allowed(limits: dict[str, object], param: str, who: str) -> None:
    """A thinking budget or a grammar that waits for a token cannot be combined with limits that forbid the token."""
    asked = request(**limits)
    if who == "budget":
        asked.thinking_budget.CopyFrom(pb.ThinkingBudget(budget=1, end_token_id=9, forced_token_ids=[9]))
    else:
        asked.grammar.CopyFrom(pb.Grammar(any_json_object=True, after_token_id=9))
    with pytest.raises(InvalidRequest, match="ends the reasoning") as caught:
        spec_of(asked, LIMITS)
    assert caught.value.param == param


def test_limits_reach_the_engine_once_each() -> None:
    """Duplicates are dropped."""
    spec = spec_of(request(allowed_token_ids=[9, 3, 9], bad_words=[seq(3, 4), seq(5), seq(3, 4)]), LIMITS)
    assert (spec.sampling.allowed_token_ids, spec.sampling.bad_words) == ((3, 9), ((3, 4), (5,)))


def test_prompt_scores_have_as_many_alternatives_as_the_larger_count() -> None:
    """`prompt_top` and `logprobs` are asked for by different fields of the API."""
    asked = request(logprobs=2)
    asked.prompt_logprobs, asked.prompt_top = True, 5
    scores = spec_of(asked, LIMITS).prompt_scores
    assert scores is not None
    assert scores.top == 5
    asked.prompt_top = 101
    with pytest.raises(InvalidRequest) as caught:
        spec_of(asked, LIMITS)
    assert caught.value.param == "prompt_top"
