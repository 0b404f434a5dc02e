"""The plan of a start on a GPU: right sizes, and a refusal with figures for each thing that can be short."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench import slice_checkpoint
from services.common.errors import ConfigError
from services.gpu_worker.backends import cpu_arena
from services.gpu_worker.backends.exl3 import plan
from services.gpu_worker.backends.exl3.plan import GIB, MIB, Machine, Need
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.model_config import TextConfig
from services.gpu_worker.settings import GpuWorkerSettings
from tests.support import random_checkpoint
from tests.support.random_checkpoint import Recipe

NEED = Need(107 * GIB, 4 * GIB, 6 * GIB, 2 * GIB, GIB, GIB, 9_474_048, 12_096)
ENOUGH = Machine(24_564 * MIB, 23_000 * MIB, 120 * GIB, 110 * GIB, None)


def flash() -> TextConfig:
    document = slice_checkpoint.config_document(42)
    return TextConfig.from_document(json.loads(json.dumps(document)), "config.json")


def test_sizes_of_the_real_model() -> None:
    """Eight streams' states took 1.14 GiB on a GPU with the real shapes; 131,072 tokens of eleven layers' keys."""
    config = flash()
    assert plan.state_bytes(config, 8) / GIB == pytest.approx(1.14, abs=0.04)
    per_token = 512 + 2 * 128 + 128 / config.index_kpool
    assert plan.cache_bytes(config, 131_072) == 11 * 131_072 * per_token * 2


def test_what_is_counted_where(tmp_path: Path) -> None:
    """Routed experts are the arena's, the embedding the host's, vision and prediction head nobody's, the rest VRAM's."""
    checkpoint = Checkpoint(
        random_checkpoint.write(tmp_path / "m", Recipe(num_layers=3, num_experts=8, text={"num_nextn_predict_layers": 1}))
    )
    shapes = cpu_arena.expert_shapes(checkpoint)
    need = plan.need_of(checkpoint, shapes, GpuWorkerSettings.load({"GLM53_EC_RESERVE_GB": "0.5", "GLM53_EC_ELASTIC_GB": "3"}))
    assert need.elastic == 3 * GIB
    assert need.arena == need.slot * need.records == shapes[0].record_bytes * 16
    assert need.reserve == GIB // 2
    sizes = {name: checkpoint.files.entry(name).num_bytes for name in checkpoint.files.names}
    embedding = sizes.pop("model.language_model.embed_tokens.weight")
    assert need.host == plan.HOST_BYTES + embedding
    assert need.kept == 64 * MIB
    assert plan.need_of(checkpoint, shapes, GpuWorkerSettings.load({"GLM53_PREFIX_CACHE_MB": "0"})).kept == 0
    left_out = sum(size for name, size in sizes.items() if ".experts." in name or "visual" in name or ".layers.3." in name)
    assert left_out > 0
    assert need.weights == sum(sizes.values()) - left_out


def test_a_machine_that_has_it_all_is_not_refused() -> None:
    """And the plan names every part."""
    plan.refuse(NEED, ENOUGH, forced=False)
    text = "\n".join(plan.lines(NEED, ENOUGH))
    parts = (
        "107.0 GiB records of 12096 experts",
        "4.00 GiB beside them, 0.00 GiB for kept states",
        "120.0 GiB can be had, 110.0 GiB of it in shared",
        "6.00 GiB weights",
        "2.00 GiB key-value",
        "1.00 GiB recurrent",
        "22.46 GiB of 23.99 GiB are free",
        "at most 1412 of 12096",
    )
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("short", "told", "param"),
    [
        ({"vram_total": 16_384 * MIB}, r"the GPU has 16384 MiB of VRAM, 23000 are needed: .*GLM53_FORCE_VRAM=1", "GLM53_FORCE_VRAM"),
        ({"vram_free": 9 * GIB}, r"9\.00 GiB of VRAM are free, 10\.01 GiB are needed with a single expert", "GLM53_CACHE_TOKENS"),
        (
            {"shm": 64 * GIB, "shm_dir": "/mnt/shm"},
            r"/mnt/shm has 64\.0 GiB free, .* need 107\.0 GiB\. .* 108 GiB: .*--shm-size=108g .*size=108G /mnt/shm on bare metal; plan",
            "GLM53_SHM_DIR",
        ),
        ({"memory": 108 * GIB}, r"108\.0 GiB of host memory can be had, 111\.0 GiB are needed", "GLM53_SHM_DIR"),
    ],
)
def test_what_is_short_is_named_with_the_plan(short: dict[str, Any], told: str, param: str) -> None:
    """Both figures, the way out, and the whole plan in one message."""
    with pytest.raises(ConfigError, match=told) as refused:
        plan.refuse(NEED, dataclasses.replace(ENOUGH, **short), forced=False)
    assert refused.value.param == param
    assert refused.value.message.count("plan: ") == 3


def test_kept_states_are_planned_and_told() -> None:
    """They count to what host memory must hold; a budget for less than one says so and what it means."""
    need = dataclasses.replace(NEED, kept=8 * GIB)
    with pytest.raises(ConfigError, match=r"118\.0 GiB of host memory can be had, 119\.0 GiB are needed: .*GLM53_PREFIX_CACHE_MB"):
        plan.refuse(need, dataclasses.replace(ENOUGH, memory=118 * GIB), forced=False)
    one = plan.state_bytes(flash(), 1)
    assert 140 * MIB < one < 150 * MIB
    assert "none, GLM53_PREFIX_CACHE_MB=64 is less than one (one takes 14" in plan.kept_states(one, 64)
    assert plan.kept_states(100 * MIB, 1024) == "kept states: at most 10 (GLM53_PREFIX_CACHE_MB=1024; one takes 100.0 MiB)"
    assert plan.kept_states(one, 0).startswith("kept states: none (GLM53_PREFIX_CACHE_MB=0")
    assert "as many as there are pages" in plan.kept_states(0, 1)


def test_what_slots_lend_is_told() -> None:
    """At most what is allowed, never more than the slots have; nothing where every expert fits or lending is off."""
    lending = dataclasses.replace(NEED, elastic=10 * GIB)
    assert list(plan.lines(lending, ENOUGH))[-1].endswith(
        "of 12096 experts, 9.0 MiB each, of which a long prefill is lent what it needs, at most 10.00 GiB (GLM53_EC_ELASTIC_GB)"
    )
    small = dataclasses.replace(ENOUGH, vram_free=NEED.vram + 100 * NEED.slot)
    assert "100 of 12096" in list(plan.lines(lending, small))[-1]
    assert "at most 0.88 GiB (GLM53_EC_ELASTIC_GB)" in list(plan.lines(lending, small))[-1]
    assert list(plan.lines(NEED, ENOUGH))[-1].endswith("9.0 MiB each, before activations")
    assert list(plan.lines(lending, dataclasses.replace(ENOUGH, vram_free=200 * GIB)))[-1] == (
        "slots: at most 12096 of 12096 experts, 9.0 MiB each, before activations"
    )
    with pytest.raises(ConfigError, match=r"plan: .* lent what it needs, at most 10\.00 GiB"):
        plan.refuse(lending, dataclasses.replace(ENOUGH, vram_total=16_384 * MIB), forced=False)


def test_a_small_gpu_can_be_forced_but_not_past_what_it_has() -> None:
    """The rule of thumb gives way, arithmetic does not."""
    small = dataclasses.replace(ENOUGH, vram_total=16_384 * MIB, vram_free=16_000 * MIB)
    plan.refuse(NEED, small, forced=True)
    with pytest.raises(ConfigError, match="of VRAM are free"):
        plan.refuse(NEED, dataclasses.replace(small, vram_free=8 * GIB), forced=True)


def test_records_that_are_there_already_need_no_more_memory() -> None:
    """A re-attached arena's bytes are neither free nor available any more."""
    full = dataclasses.replace(ENOUGH, shm=3 * GIB, memory=13 * GIB)
    with pytest.raises(ConfigError):
        plan.refuse(NEED, full, forced=False)
    plan.refuse(NEED, dataclasses.replace(full, arena_there=107 * GIB), forced=False)


def test_a_low_limit_on_locked_memory_is_told() -> None:
    """A warning: whether pins count differs between systems."""
    assert plan.memlock_warning(NEED, ENOUGH) == ""
    assert plan.memlock_warning(NEED, dataclasses.replace(ENOUGH, memlock=108 * GIB)) == ""
    told = plan.memlock_warning(NEED, dataclasses.replace(ENOUGH, memlock=8 * MIB))
    assert "0.01 GiB, 107.0 GiB are about to be pinned" in told
    assert "ulimit -l unlimited" in told


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    """Real figures, and the arena of the instance that the settings name."""
    settings = GpuWorkerSettings.load({}, shm_dir=str(tmp_path), instance="one")
    machine = plan.read_machine(settings, 1, 2)
    assert (machine.vram_free, machine.vram_total, machine.arena_there) == (1, 2, 0)
    assert machine.memory > 0
    assert machine.shm > 0
    (tmp_path / "glm53-one-arena").write_bytes(b"x" * 1000)
    assert plan.read_machine(settings, 1, 2).arena_there == 1000


def test_the_loader_refuses_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is too small: no arena is made."""
    from services.gpu_worker.backends import cpu
    from services.gpu_worker.backends.exl3 import loader

    checkpoint = Checkpoint(random_checkpoint.write(tmp_path / "m", Recipe(num_layers=3, num_experts=8)))

    def never(*_args: Any) -> None:
        raise AssertionError("an arena was opened")

    monkeypatch.setattr(loader.upstream, "check", lambda: None)
    monkeypatch.setattr(cpu, "open_arena", never)
    monkeypatch.setattr(loader.torch.cuda, "mem_get_info", lambda _device: (12_000 * MIB, 12_288 * MIB))
    settings = GpuWorkerSettings.load({}, shm_dir=str(tmp_path), mode="exact")
    with pytest.raises(ConfigError, match="the GPU has 12288 MiB of VRAM"):
        loader.load(settings, checkpoint, lambda _fraction, _what: None, "test")
