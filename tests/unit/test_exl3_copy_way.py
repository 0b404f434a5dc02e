"""How missing experts come into slots on a GPU: the setting, the choice, and steps that gather."""

from __future__ import annotations

import ctypes
import logging
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.python.errors import KernelError
from kernels.python.lib import KernelsMissingError
from kernels.python.pager import PagerDriver, PagerLayout, PagerPolicy
from services.common.errors import ConfigError
from services.gpu_worker.backends import select
from services.gpu_worker.backends.exl3 import copy_way, resolve
from services.gpu_worker.backends.exl3.copy_way import CopyWay
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.settings import GpuWorkerSettings
from tests.unit import test_exl3_experts as base
from tests.unit import test_exl3_on_demand as pager_base

host_as_device, driver = base.host_as_device, pager_base.driver
LAYERS, EXPERTS, TOP_K = 3, 12, 8
OFFSETS = np.zeros((LAYERS, 9), np.int64)


def layout(num_slots: int = 5) -> PagerLayout:
    return PagerLayout(LAYERS, EXPERTS, num_slots, 1, 8, TOP_K, 4096, *[0] * 9)


class Machine:
    """What the measurement finds, and what it was asked."""

    def __init__(self) -> None:
        self.rates: tuple[float, float] | KernelError = (50e9, 55e9)
        self.problem = ""
        self.driver = PagerDriver()
        self.asked: list[Any] = []

    def measure(self, _layout: PagerLayout, _offsets: Any, driver: PagerDriver, **how: Any) -> tuple[float, float]:
        assert driver is self.driver
        self.asked.append(how)
        if isinstance(self.rates, KernelError):
            raise self.rates
        return self.rates


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    def synchronize() -> None:
        made.asked.append("synchronized")

    monkeypatch.setattr(copy_way.torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(copy_way, "why_not", lambda: made.problem)
    monkeypatch.setattr(copy_way.cuda_expert, "gather_function", lambda: 1234)
    monkeypatch.setattr(copy_way.pager, "gather_driver", lambda address: made.driver if address == 1234 else None)
    monkeypatch.setattr(copy_way.pager, "copy_rates", made.measure)
    return made


def choose(asked: copy_way.Asked, num_slots: int = 5) -> CopyWay:
    return copy_way.choose(asked, layout(num_slots), OFFSETS, lambda: 77)


def test_auto_gathers_where_that_is_clearly_faster(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Measured on an idle device, beside the stream of the steps, with half of a row's picks; both rates are told."""
    with caplog.at_level(logging.INFO):
        chosen = choose("auto")
    assert chosen.driver is machine.driver
    assert machine.asked == ["synchronized", {"compute_stream": 77, "group": 4, "budget_s": 0.05}]
    assert chosen.stats() == {
        "copy_way": "gather",
        "copy_reason": "auto: measured faster than the copy engine",
        "copy_engine_gb_s": 50.0,
        "copy_gather_gb_s": 55.0,
    }
    said = "missing experts are gathered by the multiprocessors (auto: measured faster than the copy engine; 50.0 GB/s copied, 55.0 GB/s"
    assert said in caplog.text


@pytest.mark.parametrize(("gather", "way"), [(51.4e9, "engine"), (51.6e9, "gather"), (30e9, "engine")])
def test_three_percent_decide(machine: Machine, gather: float, way: str) -> None:
    """A gather that is hardly faster is not worth its multiprocessors; then the pager has no gather at all."""
    machine.rates = (50e9, gather)
    chosen = choose("auto")
    assert chosen.way == way
    assert (chosen.driver is machine.driver) == (way == "gather")
    if way == "engine":
        assert chosen.driver is None
        assert chosen.stats()["copy_reason"] == "auto: a gather is not 3 % faster"
        assert chosen.stats()["copy_gather_gb_s"] == pytest.approx(gather / 1e9, abs=0.01)


def test_a_gather_that_is_asked_for_is_taken_and_measured(machine: Machine) -> None:
    """However slow it is: the rates say so."""
    machine.rates = (50e9, 10e9)
    chosen = choose("gather")
    assert (chosen.way, chosen.reason, chosen.rates, chosen.driver) == ("gather", "asked for", (50.0, 10.0), machine.driver)


def test_nothing_is_measured_for_the_copy_engine(machine: Machine) -> None:
    """The library of GPU kernels is not even looked for."""
    machine.problem = "nobody may ask"
    chosen = choose("engine")
    assert (chosen, machine.asked) == (CopyWay("engine", "asked for"), [])
    assert chosen.stats() == {"copy_way": "engine", "copy_reason": "asked for"}


@pytest.mark.parametrize(("num_slots", "why"), [(LAYERS * EXPERTS, "every one has a slot"), (0, "there are no slots")])
@pytest.mark.parametrize("asked", ["auto", "gather"])
def test_where_no_step_copies_nothing_is_measured(machine: Machine, asked: copy_way.Asked, num_slots: int, why: str) -> None:
    """It is said why."""
    assert choose(asked, num_slots).stats() == {"copy_way": "engine", "copy_reason": f"no step copies an expert: {why}"}
    assert machine.asked == []


@pytest.mark.parametrize("problem", ["libglm53_cuda.so is not built here", "a gather does not run beside a stream that waits"])
def test_where_a_gather_cannot_run_auto_goes_on_and_gather_is_refused(machine: Machine, problem: str) -> None:
    """Because of the installation, or found out by the measurement: the reason is in /stats, or in the refusal with what to do."""
    if "built" in problem:
        machine.problem = problem
    else:
        machine.rates = KernelError(problem)
    assert choose("auto").stats() == {"copy_way": "engine", "copy_reason": f"auto: {problem}"}
    with pytest.raises(ConfigError, match=f"GLM53_EC_COPY=gather cannot be served: {problem}. Use auto or engine") as caught:
        choose("gather")
    assert caught.value.param == "GLM53_EC_COPY"


def test_what_an_installation_lacks_is_refused_before_anything_slow(machine: Machine) -> None:
    """A gather that was asked for; auto finds out later."""
    copy_way.check("gather")
    machine.problem = "no nvcc"
    copy_way.check("auto")
    copy_way.check("engine")
    with pytest.raises(ConfigError, match="GLM53_EC_COPY=gather cannot be served: no nvcc"):
        copy_way.check("gather")


def test_why_a_gpu_cannot_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library, no code for this GPU, a library that does not load: each is a reason and no failure."""
    monkeypatch.setattr(copy_way.torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(copy_way.cuda_expert, "is_built", lambda: False)
    assert "`make kernels` builds it where nvcc is" in copy_way.why_not()
    monkeypatch.setattr(copy_way.cuda_expert, "is_built", lambda: True)
    monkeypatch.setattr(copy_way.cuda_expert, "architectures", lambda: ["86", "90"])
    assert copy_way.why_not() == "libglm53_cuda.so has machine code for compute capabilities 86, 90, this GPU has 75"
    monkeypatch.setattr(copy_way.torch.cuda, "get_device_capability", lambda: (9, 0))
    assert copy_way.why_not() == ""

    def broken() -> list[str]:
        raise KernelsMissingError("rebuild it")

    monkeypatch.setattr(copy_way.cuda_expert, "architectures", broken)
    assert copy_way.why_not() == "rebuild it"


def test_a_library_from_before_there_was_a_gather_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It loads and lacks the function: `auto` goes on with the copy engine and says what to do, where the start would have ended."""
    source, library = tmp_path / "old.c", tmp_path / "libglm53_cuda.so"
    source.write_text("int moe_cuda_shape_check(void* shape) { return shape != 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(copy_way.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(copy_way.cuda_expert, "LIBRARY_PATH", library)
    copy_way.cuda_expert._signatures.cache_clear()
    try:
        assert copy_way.why_not() == f"{library} has no moe_cuda_create: it is of an earlier version, rebuild it with `make kernels`"
    finally:
        copy_way.cuda_expert._signatures.cache_clear()


def test_only_steps_that_bring_what_is_missing_can_gather() -> None:
    """As with hints: asked for in vain it is refused by name; auto and engine are the copy engine there."""
    ways = ("auto", "engine", "gather")
    assert [resolve.resolve_copy(asked, brings=True) for asked in ways] == list(ways)
    assert [resolve.resolve_copy(asked, brings=False) for asked in ("auto", "engine")] == ["engine", "engine"]
    between = {"GLM53_EC_ADMISSION": "between_steps", "GLM53_MODE": "exact"}
    resolve.check(GpuWorkerSettings.load({**between, "GLM53_EC_COPY": "auto"}))
    with pytest.raises(ConfigError, match=r"GLM53_EC_COPY=gather needs .*GLM53_MODE=fast, or exact with GLM53_EC_ADMISSION=in_step"):
        resolve.check(GpuWorkerSettings.load({**between, "GLM53_EC_COPY": "gather"}))


def test_the_setting_is_read_from_the_environment() -> None:
    """auto, engine or gather; anything else is refused with what there is; the CPU has no gather."""
    assert [GpuWorkerSettings.load({"GLM53_EC_COPY": text}).ec_copy for text in ("auto", "engine", "gather")] == [
        "auto",
        "engine",
        "gather",
    ]
    assert GpuWorkerSettings.load({}).ec_copy == "auto"
    with pytest.raises(ConfigError, match=r"GLM53_EC_COPY: .*need auto, engine or gather \(it is sm\)"):
        GpuWorkerSettings.load({"GLM53_EC_COPY": "sm"})
    checkpoint: Any = None
    with pytest.raises(ConfigError, match="GLM53_EC_COPY=gather is for a GPU"):
        select.load(GpuWorkerSettings.load({"GLM53_EC_COPY": "gather", "GLM53_DEVICE": "cpu"}), checkpoint, lambda *_: None)
    for text in ("auto", "engine"):
        select.check_for_cpu(GpuWorkerSettings.load({"GLM53_EC_COPY": text}))


def test_a_stream_that_may_run_kernels_has_a_priority_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy engine's is as it always was."""
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *words, **named: made.append((words, named)))
    for asked in ("engine", "auto", "gather"):
        copy_way.make_stream(torch.device("cpu"), asked)  # type: ignore[arg-type]
    device = torch.device("cpu")
    assert made == [((device,), {}), ((device,), {"priority": -1}), ((device,), {"priority": -1})]


def test_a_store_that_gathers_reads_the_right_bytes(driver: pager_base.ImmediateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the option down to the pager: measured, chosen, every missing record of a step in one gather, and told in the statistics."""
    launches: list[int] = []

    def gather(copies: Any, count: int, size: int, _stream: int) -> int:
        launches.append(count)
        for i in range(count):
            ctypes.memmove(copies[i].to, copies[i].source, size)
        return 0

    table = driver.table
    own = PagerDriver(*(getattr(table, name) for name, _ in PagerDriver._fields_[:-1]), PagerDriver.GATHER(gather))
    # A wait of this driver waits in the calling thread, which here is the one that ends it.
    no_wait, wait = PagerDriver.WORD(lambda *_: 0), PagerDriver.WORD(driver._wait)
    monkeypatch.setattr(base.FakeStream, "__init__", lambda _self, *_words, **_named: None)
    monkeypatch.setattr(copy_way, "why_not", lambda: "")
    monkeypatch.setattr(copy_way.cuda_expert, "gather_function", lambda: 1)
    monkeypatch.setattr(copy_way.pager, "gather_driver", lambda _address: own)
    real_rates = copy_way.pager.copy_rates

    def rates(*arguments: Any, **how: Any) -> tuple[float, float]:
        own.wait_word = no_wait
        found = real_rates(*arguments, **how)
        own.wait_word = wait
        return found

    monkeypatch.setattr(copy_way.pager, "copy_rates", rates)
    monkeypatch.setattr(copy_way, "BUDGET_S", 0.001)
    draw = random.Random(3)
    world = base.World(9, ExpertOptions(on_demand=True, stage_min_rows=9, pager=PagerPolicy(max_copies=6), copy="gather"))
    measured = len(launches)
    assert measured >= 4
    for _ in range(30):
        world.decode(draw, draw.randint(1, 8))
    stats = world.store.stats()
    assert sum(launches[measured:]) == stats["admissions"] + stats["records_in_transit"] > 0
    assert (stats["copy_way"], stats["copy_reason"]) == ("gather", "asked for")
    assert min(stats["copy_engine_gb_s"], stats["copy_gather_gb_s"]) > 0
    report = world.store.verify()
    assert (report.records_bad, report.slots_bad) == (0, 0)
    world.store.close()
