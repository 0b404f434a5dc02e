"""Grammars through the whole worker: batches, waiting, refusals."""

from __future__ import annotations

import json
import re

import pytest

from services.common import errors
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.worker.harness import RunningWorker


def test_grammar_constrains_the_output(worker: RunningWorker) -> None:
    """Noise under a grammar is what the grammar says, ends by itself, and the log-probabilities stay those of the model."""
    schema = json.dumps(
        {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"], "additionalProperties": False}
    )
    for fields in ({"json_schema": schema}, {"any_json_object": True, "after_token_id": 0}):
        answer = worker.generate(max_tokens=400, temperature=1.0, seed=3, grammar=pb.Grammar(**fields))
        if answer.finished.reason == pb.FINISH_REASON_GRAMMAR_END:
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert "json_schema" not in fields
    first = worker.generate(max_tokens=1, logprobs=0, grammar=pb.Grammar(regex="[0-9]{3}")).tokens[0]
    free = worker.generate(max_tokens=1, logprobs=100).tokens[0]
    known = {top.token_id: top.logprob for top in free.top}
    assert first.piece.isdigit()
    assert first.logprob <= free.logprob
    assert first.logprob == pytest.approx(known.get(first.id, first.logprob), abs=1e-5)
    assert first.logprob < -0.5, "the log-probability was taken after the mask"


def test_grammars_are_each_requests_own(worker: RunningWorker) -> None:
    """In one batch every request follows its own grammar, and requests without one are what they are alone."""
    patterns = ["a{5}", "(xy){3}", "[0-9]{4}", "q", ""]
    alone = worker.generate().ids
    requests = [worker.request(grammar=pb.Grammar(regex=pattern) if pattern else None, max_tokens=8) for pattern in patterns]
    for pattern, answer in zip(patterns, worker.together(requests), strict=True):
        if pattern:
            assert re.fullmatch(pattern, answer.text.decode()), pattern
            assert answer.finished.reason == pb.FINISH_REASON_GRAMMAR_END
        else:
            assert answer.ids == alone


def test_grammar_waits_for_its_token(worker: RunningWorker) -> None:
    """Before after_token_id the output is free; end tokens cannot end it there."""
    info = worker.stub.Info(pb.InfoRequest())
    budget = pb.ThinkingBudget(budget=5, end_token_id=2546, forced_token_ids=[2546])
    grammar = pb.Grammar(regex="yes|no", after_token_id=2546)
    bias = {int(number): 100.0 for number in info.eos_token_ids}
    answer = worker.generate(max_tokens=50, ignore_eos=False, grammar=grammar, logit_bias=bias)
    assert answer.ids[0] == 2546
    answer = worker.generate(max_tokens=50, grammar=grammar, thinking_budget=budget)
    assert answer.ids.index(2546) <= 5
    assert b"".join(token.piece for token in answer.tokens[answer.ids.index(2546) + 1 :]) in (b"yes", b"no")
    assert answer.finished.reason == pb.FINISH_REASON_GRAMMAR_END


@pytest.mark.parametrize(
    "grammar",
    [
        pb.Grammar(),
        pb.Grammar(any_json_object=False),
        pb.Grammar(regex="("),
        pb.Grammar(lark="start: /("),
        pb.Grammar(json_schema='{"type": "foo"}'),
        pb.Grammar(json_schema="[" * 100_000),
        pb.Grammar(lark="x" * (512 * 1024 + 1)),
    ],
    ids=["no kind", "no object", "regex", "lark", "schema", "nesting", "size"],
)
def test_bad_grammar_is_refused(worker: RunningWorker, grammar: pb.Grammar) -> None:
    """A grammar that cannot be compiled is INVALID_ARGUMENT with the reason, before any event, and the worker lives on."""
    error, events = worker.refused(worker.request(grammar=grammar))
    assert isinstance(error, errors.InvalidRequest)
    assert error.param == "grammar"
    assert not events
    assert len(worker.generate().ids) == 8


def test_forced_tokens_must_not_cross_the_grammar(worker: RunningWorker) -> None:
    """A thinking budget that would force tokens inside the grammar is refused."""
    budget = pb.ThinkingBudget(budget=5, end_token_id=2546, forced_token_ids=[2546])
    error, _ = worker.refused(worker.request(grammar=pb.Grammar(regex="a+"), thinking_budget=budget))
    assert isinstance(error, errors.InvalidRequest)
    assert error.param == "thinking_budget.end_token_id"
