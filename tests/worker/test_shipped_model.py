"""The shipped checkpoint on the cpu model, against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from services.gateway.prompt import ChatTemplate, Thinking
from services.gateway.tokenizer import PromptTokenizer
from services.gpu_worker.backends import cpu_weights
from services.gpu_worker.backends.cpu_model import CpuTextModel
from services.gpu_worker.backends.cpu_state import StateShape, StreamState
from services.gpu_worker.checkpoint import Checkpoint
from tests.support.pool_experts import PoolExperts
from tests.support.random_checkpoint import TINY
from tests.support.transformers_oracle import Oracle

pytestmark = pytest.mark.skipif(not (TINY / "model.safetensors").exists(), reason="the checkout has no weights of the shipped model")

QUESTIONS = ("What is the capital of France?", "What is 17+25?", "Sort these words: pear apple fig", "你好")


@pytest.fixture(scope="module")
def answered() -> list[tuple[list[int], np.ndarray]]:
    """(token ids of prompt and greedy answer, our logits of every position) for some questions."""
    checkpoint = Checkpoint(TINY)
    weights = cpu_weights.load(checkpoint, lambda _fraction, _what: None)
    model, shape = CpuTextModel(weights, PoolExperts(checkpoint), 256), StateShape.of(weights, 1024)
    template = ChatTemplate((TINY / "chat_template.jinja").read_text(), PromptTokenizer((TINY / "tokenizer.json").read_bytes()))
    out = []
    for question in QUESTIONS:
        ids = list(template.prompt([{"role": "user", "content": question}], [], Thinking("max")).token_ids)
        stream = StreamState(shape)
        rows = [model.forward([stream], [ids], prefill=True, all_logits=True)]
        while ids[-1] not in checkpoint.config.eos_token_ids and len(ids) < 250:
            ids.append(int(rows[-1][-1].argmax()))
            rows.append(model.forward([stream], [ids[-1:]], prefill=False))
        out.append((ids, np.concatenate(rows)))
    return out


@pytest.mark.parametrize(("affine", "bound"), [(True, 1e-3), (False, 4e-3)], ids=["arithmetic's weights", "GPU's rounded weights"])
def test_logits_are_those_of_transformers(answered: list[tuple[list[int], np.ndarray]], affine: bool, bound: float) -> None:
    """On real answers, logits are within 1e-3 of transformers with the experts dequantised as docs/arithmetic.md defines their weights, and
    within a few thousandths where the weights are rounded to fp16 first, as a GPU's decoder does; every greedy choice agrees."""
    checkpoint = Checkpoint(TINY)
    oracle = Oracle(checkpoint, json.loads((TINY / "config.json").read_text())["text_config"], affine_experts=affine)
    for ids, ours in answered:
        expected = oracle.logits(ids)
        assert np.abs(ours - expected).max() <= bound
        assert (ours.argmax(-1) == expected.argmax(-1)).mean() > 0.995
