"""The forward pass on the CPU: against transformers, and the same bits however tokens are grouped."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from kernels.python import text_ops
from services.gpu_worker.backends import cpu_weights
from services.gpu_worker.backends.cpu_model import CpuTextModel
from services.gpu_worker.backends.cpu_state import StateShape, StreamState
from services.gpu_worker.checkpoint import Checkpoint
from tests.support import random_checkpoint
from tests.support.pool_experts import PoolExperts
from tests.support.random_checkpoint import Recipe
from tests.support.transformers_oracle import Oracle

CHUNK = 64


class Model:
    """A checkpoint as model, without tiers."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.checkpoint = Checkpoint(directory)
        self.weights = cpu_weights.load(self.checkpoint, lambda _fraction, _what: None)
        self.experts = PoolExperts(self.checkpoint)
        self.model = CpuTextModel(self.weights, self.experts, CHUNK)
        self.shape = StateShape.of(self.weights, 4096)

    def stream(self) -> StreamState:
        return StreamState(self.shape)

    def logits(self, ids: list[int], chunk: int = CHUNK, stream: StreamState | None = None) -> np.ndarray:
        """All rows of logits, computed in chunks."""
        stream = stream or self.stream()
        parts = [self.model.forward([stream], [ids[i : i + chunk]], prefill=chunk > 1, all_logits=True) for i in range(0, len(ids), chunk)]
        return np.concatenate(parts)


@pytest.fixture(scope="module")
def calm_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint whose routed experts add little, so that rounding does not flip the router."""
    return random_checkpoint.write(tmp_path_factory.mktemp("calm") / "model", Recipe(seed=5, expert_gain=0.05))


@pytest.fixture(scope="module")
def model(calm_dir: pathlib.Path) -> Model:
    return Model(calm_dir)


@pytest.fixture
def base_isa() -> Iterator[None]:
    """The baseline instruction set instead of the host's best."""
    text_ops.select("base")
    yield
    text_ops.select("auto")


def tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2500, count).tolist()


@pytest.fixture(scope="module")
def oracle(calm_dir: pathlib.Path, model: Model) -> Oracle:
    return Oracle(model.checkpoint, json.loads((calm_dir / "config.json").read_text())["text_config"])


def test_logits_are_those_of_transformers(model: Model, oracle: Oracle) -> None:
    """Prefill in chunks, then decode: every row of logits is within 1e-3 of transformers with dequantised experts."""
    ids = tokens(190)
    expected = oracle.logits(ids)
    stream = model.stream()
    ours = np.concatenate([model.logits(ids[:150], stream=stream), model.logits(ids[150:], chunk=1, stream=stream)])
    assert ours.std() > 1.0
    assert np.abs(ours - expected).max() <= 1e-3
    assert (ours.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.usefixtures("base_isa")
def test_baseline_instruction_set_agrees(model: Model, oracle: Oracle) -> None:
    """Without AVX2 the dense part gives the same logits within 1e-3."""
    assert text_ops.isa() == "base"
    ids = tokens(60, seed=2)
    assert np.abs(model.logits(ids) - oracle.logits(ids)).max() <= 1e-3


@pytest.mark.parametrize("chunk", [1, 3, 8, 31])
def test_chunks_do_not_change_a_bit(model: Model, chunk: int) -> None:
    """A prompt gives the same bits in whatever chunks it is computed, token by token included."""
    ids = tokens(150, seed=3)
    assert (model.logits(ids, chunk) == model.logits(ids)).all()


def test_neighbours_do_not_change_a_bit(model: Model) -> None:
    """Eight streams of different lengths decoded together give each the bits that it gets alone."""
    lengths = (1, 2, 7, 8, 9, 33, 64, 130)
    prompts = [tokens(size, seed=size) for size in lengths]
    steps = np.random.default_rng(9).integers(0, 2500, (12, len(lengths))).tolist()
    together, alone = [model.stream() for _ in prompts], [model.stream() for _ in prompts]
    for stream, twin, prompt in zip(together, alone, prompts, strict=True):
        model.logits(prompt, stream=stream)
        model.logits(prompt, stream=twin)
    for step in steps:
        batched = model.model.forward(together, [[token] for token in step], prefill=False)
        single = [model.model.forward([twin], [[token]], prefill=False)[0] for twin, token in zip(alone, step, strict=True)]
        assert (batched == np.stack(single)).all()


def test_a_stream_leaves_the_batch_without_touching_others(model: Model) -> None:
    """When a stream leaves, the others go on with the same bits."""
    streams, twins = [model.stream() for _ in range(3)], [model.stream() for _ in range(3)]
    for i, (stream, twin) in enumerate(zip(streams, twins, strict=True)):
        model.logits(tokens(20 + i, seed=i), stream=stream)
        model.logits(tokens(20 + i, seed=i), stream=twin)
    model.model.forward(streams, [[1], [2], [3]], prefill=False)
    model.model.forward(twins, [[1], [2], [3]], prefill=False)
    rest = model.model.forward([streams[0], streams[2]], [[4], [5]], prefill=False)
    both = model.model.forward(twins, [[4], [9], [5]], prefill=False)
    assert (rest == both[[0, 2]]).all()


def test_growth_keeps_the_past(model: Model) -> None:
    """A stream that outgrew its first memory gives the bits of one that had the room from the start."""
    ids = tokens(700, seed=6)
    grown, roomy = model.stream(), model.stream()
    roomy.reserve(1024)
    assert roomy.capacity >= 1024
    assert (model.logits(ids, stream=grown) == model.logits(ids, stream=roomy)).all()
    assert grown.capacity < 2 * 1024


def test_a_full_context_is_refused_and_changes_nothing(model: Model) -> None:
    """Tokens beyond the context are refused before anything is computed; the stream stays usable."""
    stream = StreamState(StateShape(**{**model.shape.__dict__, "max_tokens": 20}))
    model.logits(tokens(18), stream=stream)
    with pytest.raises(ValueError, match="exceeds the context of 20"):
        model.model.forward([stream], [[1, 2, 3]], prefill=True)
    assert stream.length == 18
    model.model.forward([stream], [[1, 2]], prefill=False)


def test_too_many_rows_are_refused(model: Model) -> None:
    """A pass takes at most as many rows as its memory was made for, and at least one token per stream."""
    with pytest.raises(ValueError, match=f"1..{CHUNK}"):
        model.model.forward([model.stream()], [tokens(CHUNK + 1)], prefill=True)
    with pytest.raises(ValueError, match="at least one"):
        model.model.forward([model.stream(), model.stream()], [[1], []], prefill=False)


def test_the_routed_experts_matter(model: Model) -> None:
    """Emptying the routed experts' records changes the answer: they are really evaluated."""
    ids = tokens(16, seed=8)
    before = model.logits(ids)
    saved = [records.copy() for records in model.experts.records]
    for records in model.experts.records:
        records[:] = 0
    after = model.logits(ids)
    for records, old in zip(model.experts.records, saved, strict=True):
        records[:] = old
    assert np.abs(before - after).max() > 0.01
    assert (model.logits(ids) == before).all()


def test_clamp_stands_after_the_activation(tmp_path: pathlib.Path) -> None:
    """With gates far beyond the limit, min(silu(g), L) * clamp(u, L) is computed, as an oracle with that order confirms."""
    directory = random_checkpoint.write(tmp_path / "model", Recipe(seed=2, expert_gain=0.02, num_layers=3, text={"swiglu_limit": 0.05}))
    model = Model(directory)
    oracle = Oracle(model.checkpoint, json.loads((directory / "config.json").read_text())["text_config"])
    ids = tokens(40)
    assert np.abs(model.logits(ids) - oracle.logits(ids)).max() <= 1e-3
    gate_up = np.array([[3.0, -8.0, 0.01, 50.0, 0, 0, 0, 0, 9.0, -9.0, 0.02, 0.03, 0, 0, 0, 0]], np.float32)
    out = np.zeros((1, 8), np.float32)
    text_ops.functions().text_swiglu(text_ops.address(gate_up), 8, 0.05, text_ops.address(out), 1)
    gate, up = gate_up[0, :8].astype(np.float64), gate_up[0, 8:].astype(np.float64)
    expected = np.minimum(gate / (1 + np.exp(-gate)), 0.05) * np.clip(up, -0.05, 0.05)
    assert np.abs(out[0] - expected).max() < 1e-7


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(k=4, head_k=8, codebook="mcg", expert_gain=0.05),
        Recipe(k=2, codebook="3inst", expert_gain=0.03, fused_qkv=False),
        Recipe(num_experts=30, num_files=3, expert_gain=0.05),
    ],
    ids=["mcg4", "3inst2 apart", "30 experts in 3 files"],
)
def test_other_codebooks_rates_and_sizes(tmp_path: pathlib.Path, recipe: Recipe) -> None:
    """Other codebooks, bit rates, a number of experts that is no multiple of eight and several files load and agree with transformers."""
    directory = random_checkpoint.write(tmp_path / "model", recipe)
    model = Model(directory)
    oracle = Oracle(model.checkpoint, json.loads((directory / "config.json").read_text())["text_config"])
    ids = tokens(24)
    assert np.abs(model.logits(ids) - oracle.logits(ids)).max() <= 2e-3


def test_softplus_decay(tmp_path: pathlib.Path) -> None:
    """A checkpoint whose linear attention has no lower bound uses the softplus gate and agrees with transformers."""
    recipe = Recipe(num_layers=3, expert_gain=0.02)
    directory = random_checkpoint.write(tmp_path / "model", recipe)
    document = json.loads((directory / "config.json").read_text())
    del document["text_config"]["linear_attn_config"]["gate_lower_bound"]
    (directory / "config.json").write_text(json.dumps(document))
    model = Model(directory)
    assert model.checkpoint.config.linear_lower_bound is None
    text = document["text_config"]
    text["linear_attn_config"]["safe_gate"] = False
    text["linear_lower_bound"] = None
    oracle = Oracle(model.checkpoint, text)
    ids = tokens(40)
    assert np.abs(model.logits(ids) - oracle.logits(ids)).max() <= 1e-3
