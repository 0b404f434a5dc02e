"""`prefill_joined` on the CPU: two passes, for whoever hands over a chunk and its tail together."""

from __future__ import annotations

import numpy as np
import pytest

from services.gpu_worker.backends import cpu
from services.gpu_worker.checkpoint import Checkpoint
from tests.support.pool_experts import PoolExperts
from tests.support.random_checkpoint import TINY

pytestmark = pytest.mark.skipif(not (TINY / "model.safetensors").exists(), reason="the checkout has no weights of the shipped model")


def test_a_chunk_and_its_tail_have_the_bits_of_two_calls() -> None:
    """Logits of the tail and of the steps after it, also behind the snapshot between the two; without `keep` there is none."""
    checkpoint = Checkpoint(TINY)
    backend = cpu.load_without_tiers(checkpoint, PoolExperts(checkpoint), max_context=512, max_streams=4, chunk_size=256)
    prompt = [10 + i % 90 for i in range(90)]
    apart, joined, other = (backend.open_stream() for _ in range(3))
    backend.prefill(apart, prompt[:64], all_logits=False)
    want = [backend.prefill(apart, prompt[64:], all_logits=False), backend.decode([apart], [33])]
    logits, kept = backend.prefill_joined(joined, prompt[:64], prompt[64:], keep=True)
    assert np.array_equal([logits, backend.decode([joined], [33])], want)
    assert kept is not None
    again = backend.open_stream(kept)
    assert again.length == 64
    assert np.array_equal([backend.prefill(again, prompt[64:], all_logits=False), backend.decode([again], [33])], want)
    assert backend.prefill_joined(other, prompt[:64], prompt[64:], keep=False)[1] is None
    assert backend.info.joined_tail_from == 0
