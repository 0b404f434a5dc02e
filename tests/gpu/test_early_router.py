"""On a GPU: hints change no bit of a decode step, and come from the next layer's own router."""

from __future__ import annotations

import json

import pytest

from services.gpu_worker.backends import select
from tests.gpu import programs
from tests.gpu.early_passes import STEPS, STREAMS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PROBLEM = select.gpu_problem()


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
def test_hints_change_no_bit_and_are_used() -> None:
    """The shipped checkpoint in both modes, one stream and four: logits of all passes, records that came ahead, guesses as stock's."""
    result = programs.result_of("tests.gpu.early_passes", timeout_s=500)
    rows = result["rows"]
    print(json.dumps(result, indent=1))  # noqa: T201 - the guesses' quality, where the test is asked to show it
    assert [(row["mode"], row["streams"]) for row in rows] == [
        (mode, streams) for mode in ("in_step", *(() if result["no_fast"] else ("fast",))) for streams in STREAMS
    ]
    assert [row for row in rows if row["passes"] != STEPS + row["streams"] or row["equal"] != row["passes"] or row["bad"]] == []
    assert [row for row in rows if row["hint_records_started"] == 0] == []
    assert [row for row in rows if not 0 < row["hint_records_used"] <= row["hint_records_started"]] == []
    assert [row for row in rows if row["guesses"] < 1 or row["as_stock"] != row["guesses"] or row["as_float64"] < 0.8] == []
    assert [row for row in rows if row["recall"] <= result["chance"]] == []
