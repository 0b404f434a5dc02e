"""On a GPU: a prompt's last chunk and its tail in one pass have the bits of two, and bring each layer's experts once."""

from __future__ import annotations

import pytest

from services.gpu_worker.backends import select
from tests.gpu import programs
from tests.gpu.joined_passes import LENGTHS, STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PROBLEM = select.gpu_problem()
SIDES = 4  # two ways of admission, few slots and all


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
def test_a_joined_tail_changes_no_bit() -> None:
    """Logits of prompts, of the steps after them and of those behind the kept state, and states; on the shipped checkpoint."""
    result = programs.result_of("tests.gpu.joined_passes", timeout_s=580)
    assert result["joined_tail_from"] > 0
    rows = result["rows"]
    assert [row["length"] for row in rows] == [*LENGTHS] * SIDES
    assert [row["name"] for row in rows if not (row["equal"] and row["states_equal"])] == []
    assert all(row["steps"] > STEPS for row in rows)
    # Apart, a tail of 64 rows or more is staged as the chunk before it is.
    staged = [row for row in rows if row["staged_apart"] and row["length"] in (511, 1000, 4196)]
    assert len(staged) == 3 * SIDES / 2
    assert [row["name"] for row in staged if not 0 < row["staged_joined"] < row["staged_apart"]] == []
