"""What a start decides about slots that are lent to long prefills, without a GPU."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from kernels.python.errors import KernelError
from services.common.errors import ConfigError
from services.gpu_worker.backends.exl3 import lending
from services.gpu_worker.settings import ELASTIC_GB, GpuWorkerSettings

MIB, GIB = 1 << 20, 1 << 30


def test_slots_lend_only_where_more_of_them_are_wanted_than_fit() -> None:
    """Not where every expert fits, nor where as many fit as are asked for, nor when nothing may be lent."""
    assert lending.pays(0, 100 * MIB, 20 * MIB, GIB, 8 * MIB, 50)
    assert lending.pays(11, 100 * MIB, 20 * MIB, GIB, 8 * MIB, 50)
    assert not lending.pays(10, 100 * MIB, 20 * MIB, GIB, 8 * MIB, 50)
    assert not lending.pays(0, 420 * MIB, 20 * MIB, GIB, 8 * MIB, 50)
    assert not lending.pays(0, 100 * MIB, 20 * MIB, 0, 8 * MIB, 50)
    assert lending.pays(0, 10 * MIB, 20 * MIB, GIB, 8 * MIB, 50)


def test_the_setting_has_one_default() -> None:
    """And 0 is allowed: nothing is lent."""
    assert GpuWorkerSettings.load({}).ec_elastic_gb == ELASTIC_GB
    assert GpuWorkerSettings.load({"GLM53_EC_ELASTIC_GB": "0"}).ec_elastic_gb == 0


def test_without_a_warm_up_a_pass_gets_its_share_of_what_may_be_lent() -> None:
    """A whole chunk everything."""
    need = lending.guess(9 * GIB, GIB, 8192)
    assert need.of(8192) == 10 * GIB
    assert need.of(4096) == pytest.approx(5 * GIB, rel=0.01)
    assert need.of(8) == pytest.approx(10 * GIB / 1024, rel=0.01)


def test_a_device_that_has_too_little_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the figures and the way without."""

    def refuse(*_arguments: Any) -> None:
        raise KernelError("96 MiB of device memory were asked for for expert slots, 20 of 24 MiB are free")

    monkeypatch.setattr(lending, "SlotMemory", refuse)
    with pytest.raises(ConfigError, match=r"20 of 24 MiB are free\. GLM53_EC_ELASTIC_GB=0 does without") as refused:
        lending.make(12, 8 * MIB, 0, most=GIB, reserve=GIB)
    assert refused.value.param == "GLM53_EC_ELASTIC_GB"


class Torch:
    """torch's allocator: a pass of the model takes what it takes a row, and keeps it until the cache is emptied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept, self.cached, self.peak, self.held = 500, 0, 0, 0
        self.limit = 1 << 60
        for name, function in {
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset,
            "memory_reserved": lambda *_: self.kept + self.held + self.cached,
            "memory_allocated": lambda *_: self.kept,
            "max_memory_reserved": lambda *_: max(self.kept + self.held, self.peak),
            "max_memory_allocated": lambda *_: self.peak,
            "synchronize": lambda *_: None,
            "mem_get_info": lambda _device: (1000, 2000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def empty_cache(self) -> None:
        self.cached = 0

    def reset(self) -> None:
        self.peak = self.kept + self.cached

    def take(self, num_bytes: int) -> None:
        if num_bytes > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more text.")
        self.cached = max(self.cached, num_bytes)
        self.peak = max(self.peak, self.kept + self.cached)


class Model:
    """Notes its passes; each takes 10 bytes a row and 100 more."""

    config = types.SimpleNamespace(vocab_size=50)

    def __init__(self, memory: Torch) -> None:
        self.memory = memory
        self.passes: list[tuple[int, int, int]] = []
        self.states = 0

    def get_recurrent_layers(self) -> list[int]:
        return [1]

    def get_new_state(self) -> Any:
        # The real one zeroes inference tensors, which torch refuses elsewhere.
        assert torch.is_inference_mode_enabled()
        self.states += 1
        return types.SimpleNamespace(free=self._free)

    def _free(self) -> None:
        self.states -= 1

    def forward(self, ids: torch.Tensor, params: dict[str, Any]) -> None:
        assert int(ids.max()) < 50
        assert len(params["recurrent_states"]) == 1
        self.passes.append((ids.shape[1], int(params["cache_seqlens"]), params["block_table"].shape[1]))
        self.memory.take(100 + 10 * ids.shape[1])


def test_needs_are_measured_at_the_end_of_the_longest_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole chunk and a page, each from an empty cache of torch's, after the slots were told; states are given back."""
    model = Model(Torch(monkeypatch))
    began: list[int] = []
    need = lending.measure(model, model, 8192, 32_768, began.append)
    assert model.passes == [(8192, 24_576, 128), (256, 32_512, 128)]
    assert began == [8192, 256]
    assert need.known == {8192: 100 + 81_920, 256: 100 + 2560}
    assert model.states == 0
    assert lending.spare_bytes(0) == 1000 + 100 + 2560
    model.passes.clear()
    model.memory.held = 1 << 30  # torch holds and does not use it now: the need is the same
    assert lending.measure(model, model, 8192, 700, began.append).known == {700: 7100, 256: 2660}
    assert model.passes == [(700, 0, 3), (256, 256, 2)]


def test_a_chunk_that_needs_more_than_may_be_lent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to change; the state is given back."""
    memory = Torch(monkeypatch)
    memory.limit = 5000
    model = Model(memory)
    with pytest.raises(
        ConfigError, match=r"a prefill of 8192 tokens needs more VRAM than slots may lend: raise GLM53_EC_ELASTIC_GB"
    ) as refused:
        lending.measure(model, model, 8192, 32_768, lambda _rows: None)
    assert "Tried to allocate 2 GiB" in refused.value.message
    assert "And more text" not in refused.value.message
    assert model.states == 0
