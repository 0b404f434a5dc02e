"""On a GPU: a prefill that is broken off between two layers leaves nothing that a later pass would see."""

from __future__ import annotations

import pytest

from services.gpu_worker.backends import select
from tests.gpu import programs
from tests.gpu.broken_passes import LENGTHS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PROBLEM = select.gpu_problem()
SIDES, PLACES = 4, 3  # two ways of admission, few slots and all; layers, or more where the middle is not among the first


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
def test_a_prefill_that_is_broken_off_changes_no_bit_of_what_follows() -> None:
    """The step of another stream behind it and the whole prompt behind that, chunk alone or joined; on the shipped checkpoint."""
    rows = programs.result_of("tests.gpu.broken_passes", timeout_s=580)["rows"]
    assert len(rows) >= SIDES * PLACES * len(LENGTHS)
    assert [row["name"] for row in rows if not (row["equal"] and row["states_equal"] and row["beside_equal"])] == []
