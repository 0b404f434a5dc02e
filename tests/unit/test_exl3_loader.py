"""What the GPU backend decides at start: slots, chunk, context, mode; Triton's saved choices."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape, Variant
from services.common.errors import ConfigError
from services.gpu_worker.backends import select
from services.gpu_worker.backends.exl3 import fast_setup, loader, records, resolve
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.patches import triton_tuners
from services.gpu_worker.settings import GpuWorkerSettings
from tools import triton_pin

MIB = 1 << 20
find = triton_tuners.find


def test_slots_take_what_vram_is_left() -> None:
    """Free less reserve, at most what was asked for and what there is, each with its reason."""
    assert loader.resolve_slots(0, 100 * MIB, 20 * MIB, 8 * MIB, 50) == (10, "100 MiB free, 20 MiB reserve")
    assert loader.resolve_slots(4, 100 * MIB, 20 * MIB, 8 * MIB, 50) == (4, "GLM53_EC_MAX_SLOTS")
    assert loader.resolve_slots(40, 100 * MIB, 20 * MIB, 8 * MIB, 50) == (10, "100 MiB free, 20 MiB reserve")
    assert loader.resolve_slots(0, 100 * MIB, 20 * MIB, MIB, 50) == (50, "every expert fits")


def test_too_little_vram_is_refused_with_the_figures() -> None:
    """Free, reserve, an expert's size, and what to lower."""
    with pytest.raises(
        ConfigError,
        match=r"25 MiB of VRAM are free .* 20 MiB are kept in reserve: not one expert of 8\.0 MiB fits\. Lower GLM53_CACHE_TOKENS",
    ):
        loader.resolve_slots(0, 25 * MIB, 20 * MIB, 8 * MIB, 50)


def test_the_first_records_are_spread_over_all_layers() -> None:
    """Every layer gets its share, no record twice, all of them when there is room for all."""
    assert loader.spread(4, 12) == [0, 3, 6, 9]
    assert loader.spread(12, 12) == list(range(12))
    assert len(set(loader.spread(7, 100))) == 7


def test_a_gpu_prefills_in_large_chunks_unless_told_otherwise() -> None:
    """8192 by default, the setting when it is given, never less than a page."""
    assert loader.resolve_chunk(GpuWorkerSettings.load({})) == 8192
    assert loader.resolve_chunk(GpuWorkerSettings.load({"GLM53_CHUNK_SIZE": "512"})) == 512
    with pytest.raises(ConfigError, match="GLM53_CHUNK_SIZE=100 is less than a cache page of 256"):
        loader.resolve_chunk(GpuWorkerSettings.load({"GLM53_CHUNK_SIZE": "100"}))


def test_the_context_is_bounded_by_model_and_cache() -> None:
    """What is refused names the smaller of the two."""
    config: Any = types.SimpleNamespace(max_position_embeddings=65_536)
    assert loader.resolve_context(0, 131_072, config) == 32_768
    assert loader.resolve_context(0, 1024, config) == 1024
    assert loader.resolve_context(50_000, 131_072, config) == 50_000
    with pytest.raises(ConfigError, match="more than GLM53_CACHE_TOKENS 1024"):
        loader.resolve_context(2048, 1024, config)
    with pytest.raises(ConfigError, match="max_position_embeddings 65536"):
        loader.resolve_context(70_000, 131_072, config)


def test_modes_that_a_gpu_does_not_serve_are_refused() -> None:
    """By name."""
    for mode in ("nvme", "nvme-exact"):
        with pytest.raises(ConfigError, match=f"GLM53_MODE={mode} is not served on the GPU: use auto, exact or fast"):
            loader.resolve_mode(mode, "")


def test_fast_falls_back_to_exact_and_says_why() -> None:
    """A mode that was asked for and cannot be served is named with its reason; so is what auto takes."""
    assert loader.resolve_mode("exact", "")[0] == "exact"
    assert loader.resolve_mode("auto", "") == ("fast", "auto: measured faster than exact on this kind of GPU")
    assert loader.resolve_mode("auto", "this GPU has 75") == ("exact", "auto: this GPU has 75")
    assert loader.resolve_mode("fast", "") == ("fast", "asked for")
    assert loader.resolve_mode("fast", "this GPU has 75") == ("exact", "fast was asked for and is not possible: this GPU has 75")


def test_hints_are_taken_where_steps_bring_what_is_missing() -> None:
    """A number in `fast` and in exact with in_step; auto is on in exact alone, and off everywhere that no step brings anything."""
    assert [loader.resolve_hints(asked, "exact", brings=True) for asked in ("auto", "off", 1, 8)] == [3, 0, 1, 8]
    assert [loader.resolve_hints(asked, "fast", brings=True) for asked in ("auto", "off", 1, 8)] == [0, 0, 1, 8]
    assert [loader.resolve_hints(asked, "exact", brings=False) for asked in ("auto", "off")] == [0, 0]
    with pytest.raises(ConfigError, match=r"GLM53_EC_HINTS=3 needs .*GLM53_MODE=fast, or exact with GLM53_EC_ADMISSION=in_step; or unset"):
        loader.resolve_hints(3, "exact", brings=False)


def staging(monkeypatch: pytest.MonkeyPatch, events: list[Any], refused: str = "") -> Any:
    """A loaded model of 3 x 10 experts of 8 MiB, whose hooks and slots are written down."""

    def make(slots: int, stride: int, _device: int, **limits: int) -> str:
        if refused:
            raise ConfigError(refused)
        events.append((slots, stride, limits))
        return "memory"

    def make_store(_loaded: Any, slots: int, top_k: int, options: ExpertOptions, into: Any, elastic: str) -> Any:
        owner = types.SimpleNamespace(hook="stock")
        into.set(owner, "hook", "ours")
        events.append((slots, top_k, options.admit, options.on_demand, elastic))
        return types.SimpleNamespace(close=lambda: events.append(f"closed, hook {owner.hook}"))

    monkeypatch.setattr(loader.lending, "make", make)
    monkeypatch.setattr(loader, "make_store", make_store)
    return types.SimpleNamespace(records=types.SimpleNamespace(num_experts=10, stride=8 * MIB))


def test_the_warm_up_has_slots_to_stage_prefills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers' experts, in memory that is not torch's; it is gone before the real slots are counted, and the hooks after it."""
    events: list[Any] = []
    with loader.staging_slots(staging(monkeypatch, events), 4, 1000 * MIB):
        events.append("warm")
    assert events == [(20, 8 * MIB, {"most": 0, "reserve": 0}), (20, 4, False, False, "memory"), "warm", "closed, hook ours"]
    events.clear()
    with pytest.raises(OSError), loader.staging_slots(staging(monkeypatch, events), 4, 96 * MIB):
        raise OSError
    assert [events[0][0], events[-1]] == [6, "closed, hook ours"]


@pytest.mark.parametrize(("free", "refused"), [(31 * MIB, ""), (1000 * MIB, "no virtual memory")])
def test_without_room_or_virtual_memory_the_warm_up_reads_in_place(monkeypatch: pytest.MonkeyPatch, free: int, refused: str) -> None:
    """A start does not fail for it."""
    events: list[Any] = []
    with loader.staging_slots(staging(monkeypatch, events, refused), 4, free):
        events.append("warm")
    assert events == ["warm"]


def test_how_many_hints_is_read_from_the_environment() -> None:
    """auto, off, or a number up to eight; anything else is refused at start."""
    read = [GpuWorkerSettings.load({"GLM53_EC_HINTS": text}).ec_hints for text in ("auto", "off", "3")]
    assert read == ["auto", "off", 3]
    assert GpuWorkerSettings.load({}).ec_hints == "auto"
    for text in ("0", "9", "-1", "on", "2.5"):
        with pytest.raises(ConfigError, match="GLM53_EC_HINTS"):
            GpuWorkerSettings.load({"GLM53_EC_HINTS": text})


def test_a_worker_without_a_gpu_takes_no_hints() -> None:
    """It is told so before anything is loaded."""
    checkpoint: Any = None
    settings = GpuWorkerSettings.load({"GLM53_EC_HINTS": "2", "GLM53_DEVICE": "cpu"})
    with pytest.raises(ConfigError, match="GLM53_EC_HINTS=2 is for a GPU"):
        select.load(settings, checkpoint, lambda _fraction, _what: None)


@pytest.mark.parametrize(
    ("mode", "capability", "lacks", "problem"),
    [
        ("auto", (9, 0), "", ""),
        ("auto", (8, 6), "", "fast has run on compute capability 90 alone, this GPU has 86; GLM53_MODE=fast takes it"),
        ("auto", (9, 0), "4.5 bits", "4.5 bits"),
        ("fast", (8, 6), "", ""),
        ("fast", (8, 6), "4.5 bits", "4.5 bits"),
        ("exact", (8, 6), "4.5 bits", ""),
    ],
)
def test_auto_takes_fast_where_it_was_measured(
    mode: str, capability: tuple[int, int], lacks: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only there; who asks for it gets it wherever it runs."""
    monkeypatch.setattr(fast_setup.torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(fast_setup, "why_not", lambda shapes, found: lacks)
    assert fast_setup.problem([], mode) == problem


def test_the_settings_reach_the_lane(tmp_path: Path) -> None:
    """Overrides, timeout and instruction set; without cpu_expert there is no control region."""
    settings = GpuWorkerSettings.load(
        {
            "GLM53_CT_A": "1.5",
            "GLM53_CT_B": "2.5",
            "GLM53_CT_TZC": "3.5",
            "GLM53_CT_TIMEOUT_MS": "123",
            "GLM53_CT_ISA": "scalar",
            "GLM53_EXPERT_BACKEND": "in_process",
            "GLM53_SHM_DIR": str(tmp_path),
        }
    )
    arena: Any = None
    setup = fast_setup.make(settings, arena, 8)
    assert setup.region is None
    assert (setup.options.costs.ct_a_us, setup.options.costs.ct_b_us, setup.options.costs.ct_tzc_us) == (1.5, 2.5, 3.5)
    assert setup.options.job_timeout_ms == 123
    assert setup.options.variant == Variant.SCALAR
    assert not list(tmp_path.iterdir())


class FakeConfig:
    def __init__(self, **values: int) -> None:
        self._values = values

    def all_kwargs(self) -> dict[str, int]:
        return self._values


class FakeTuner:
    def __init__(self) -> None:
        self.configs = [FakeConfig(BLOCK=16, num_warps=4), FakeConfig(BLOCK=64, num_warps=8)]
        self.cache: dict[Any, FakeConfig] = {}


def modules() -> tuple[dict[str, Any], FakeTuner, FakeTuner]:
    plain, wrapped = FakeTuner(), FakeTuner()
    found = {
        "exllamav3.a": types.SimpleNamespace(kernel=plain, number=3, again=plain),
        "exllamav3.b": types.SimpleNamespace(heuristics=types.SimpleNamespace(fn=wrapped)),
        "other": types.SimpleNamespace(kernel=FakeTuner()),
    }
    return found, plain, wrapped


def test_tuners_are_found_once_and_under_heuristics() -> None:
    """In the package's modules alone."""
    found, plain, wrapped = modules()
    assert triton_tuners.find(FakeTuner, found) == {"exllamav3.a.kernel": plain, "exllamav3.b.heuristics": wrapped}


def test_choices_come_back_on_the_same_gpu_only(tmp_path: Path) -> None:
    """Saved, loaded into fresh tuners; another GPU's, a damaged and a missing file say why they give nothing."""
    path = tmp_path / "pins.json"
    assert triton_tuners.load(path, {}, "H200")[1].endswith("does not exist yet")
    found, plain, _ = modules()
    plain.cache[(128, "fp16", True)] = plain.configs[1]
    assert triton_tuners.save(path, triton_tuners.find(FakeTuner, found), "H200") == 1
    fresh, again, _ = modules()
    assert triton_tuners.load(path, triton_tuners.find(FakeTuner, fresh), "H200") == (1, "")
    assert again.cache == {(128, "fp16", True): again.configs[1]}
    assert triton_tuners.load(path, {}, "RTX 3090") == (0, f"{path} was made on H200, this is RTX 3090")
    path.write_text("{")
    assert "cannot be read" in triton_tuners.load(path, {}, "H200")[1]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("[]", "cannot be read"),
        ('{"version": 2, "gpu": "H200", "kernels": {}}', "has version 2, this build writes 1"),
        ('{"version": 1, "kernels": {}}', "cannot be read"),
        ('{"version": 1, "gpu": 7, "kernels": {}}', "names no GPU"),
        ('{"version": 1, "gpu": "H200", "kernels": []}', "cannot be read"),
        ('{"version": 1, "gpu": "H200", "kernels": {"k": {"__import__(\'os\')": {}}}}', "is no key"),
        ('{"version": 1, "gpu": "H200", "kernels": {"k": {"[1]": {}}}}', "is no key"),
        ('{"version": 1, "gpu": "H200", "kernels": {"k": {"(1,)": 3}}}', "has no settings"),
    ],
)
def test_a_damaged_file_pins_nothing(tmp_path: Path, document: str, problem: str) -> None:
    """Whatever is wrong with it, it is told, and the worker tunes as without it."""
    path = tmp_path / "pins.json"
    path.write_text(document)
    count, why = triton_tuners.load(path, {"k": FakeTuner()}, "H200")
    assert count == 0
    assert problem in why


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> FakeTuner:
    """The one tuner that a start finds; its choices are what the start has pinned."""
    found, plain, _ = modules()
    fake_triton(monkeypatch)
    monkeypatch.setattr(loader.importlib, "import_module", lambda _name: None)
    monkeypatch.setattr(loader.triton_tuners, "find", lambda tuner_class: find(tuner_class, found))
    return plain


def pins_of(path: Path, gpu: str, chosen: int) -> Path:
    """A file in which the tuner has chosen that configuration for one key."""
    found, plain, _ = modules()
    plain.cache[(64,)] = plain.configs[chosen]
    path.parent.mkdir(exist_ok=True)
    triton_tuners.save(path, find(FakeTuner, found), gpu)
    return path


def test_a_start_takes_its_own_pins_before_those_that_are_shipped(
    tmp_path: Path, tuned: FakeTuner, caplog: pytest.LogCaptureFixture
) -> None:
    """The setting's file; without it, or where it is of no use, the file of this GPU's name; else it is told that there is none."""
    caplog.set_level("INFO")
    own = tmp_path / "own.json"
    shipped = pins_of(triton_tuners.shipped("NVIDIA H200", tmp_path / "pins"), "NVIDIA H200", 0)
    assert shipped.name == "nvidia-h200.json"
    assert triton_tuners.shipped("NVIDIA GeForce RTX 4090").name == "nvidia-geforce-rtx-4090.json"
    first, second = tuned.configs
    for name in ("", str(own)):  # not given, or not made yet
        pins = loader.TritonPins(name, "NVIDIA H200", shipped.parent)
        assert tuned.cache.pop((64,)) is first
        tuned.cache[(64,)] = first
        pins.save()
        assert not own.exists()  # nothing new was chosen
        tuned.cache.clear()
    assert f"pinned by {shipped}; {own} does not exist yet" in caplog.text
    pins_of(own, "NVIDIA H200", 1)
    loader.TritonPins(str(own), "NVIDIA H200", shipped.parent)
    assert tuned.cache.pop((64,)) is second
    pins_of(own, "RTX 3090", 1)
    loader.TritonPins(str(own), "NVIDIA H200", shipped.parent)
    assert tuned.cache.pop((64,)) is first
    assert f"{own} was made on RTX 3090, this is NVIDIA H200" in caplog.text
    pins_of(shipped, "NVIDIA H200 NVL", 0)
    pins = loader.TritonPins("", "NVIDIA H200", shipped.parent)
    assert tuned.cache == {}
    assert "there is no pin for NVIDIA H200, so Triton's kernels are tuned anew" in caplog.text
    assert "was made on NVIDIA H200 NVL, this is NVIDIA H200" in caplog.text
    tuned.cache[(8,)] = first
    pins.save()  # no file is named for them


def test_new_choices_are_merged_into_those_that_are_shipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By kernel and key, sorted, told in numbers; a file that cannot be used changes nothing."""
    folder = tmp_path / "pins"
    new = pins_of(tmp_path / "new.json", "NVIDIA H200", 1)
    folder.mkdir()
    assert triton_pin.main([str(new), "--folder", str(folder)]) == 0
    target = folder / "nvidia-h200.json"
    assert capsys.readouterr().out == f"NVIDIA H200: 1 choices, 1 of them new, 0 changed, in {target}\n"
    key, kernel = "(64,)", "exllamav3.a.kernel"
    settings = {"BLOCK": 16, "num_warps": 4}
    triton_tuners.write(new, "NVIDIA H200", {kernel: {key: settings, "(9,)": settings}, "exllamav3.0": {"(1,)": settings}})
    assert triton_pin.main([str(new), "--folder", str(folder)]) == 0
    assert "3 choices, 2 of them new, 1 changed" in capsys.readouterr().out
    gpu, choices = triton_tuners.read(target)
    assert gpu == "NVIDIA H200"
    assert choices == {"exllamav3.0": {"(1,)": settings}, kernel: {key: settings, "(9,)": settings}}
    assert list(choices) == sorted(choices)
    before = target.read_text()
    for text in ("{", '{"version": 1, "gpu": "NVIDIA H200", "kernels": {}}'):
        new.write_text(text)
        assert triton_pin.main([str(new), "--folder", str(folder)]) == 1
        assert str(new) in capsys.readouterr().err
    assert target.read_text() == before


def test_every_shipped_file_can_be_used() -> None:
    """Whatever is in the folder is of the GPU that its name says, and as sorted as it is written."""
    files = sorted(triton_tuners.SHIPPED.glob("*.json"))
    assert (triton_tuners.SHIPPED / "README.md").exists()
    for path in files:
        gpu, choices = triton_tuners.read(path)
        assert triton_tuners.shipped(gpu) == path
        assert triton_pin.count(choices) > 0
        names = [(kernel, key) for kernel, of in choices.items() for key in of]
        assert names == sorted(names)


def fake_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module triton whose tuner is FakeTuner."""
    autotuner = types.ModuleType("triton.runtime.autotuner")
    autotuner.Autotuner = FakeTuner  # type: ignore[attr-defined]
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", autotuner)


def test_pins_are_written_once_by_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first start says that it tunes and saves what it chose; the second has the choices and leaves the file alone."""
    path = tmp_path / "pins.json"
    found, plain, _ = modules()
    fake_triton(monkeypatch)
    imported: list[str] = []
    monkeypatch.setattr(loader.importlib, "import_module", imported.append)
    monkeypatch.setattr(loader.triton_tuners, "find", lambda tuner_class: find(tuner_class, found))
    first = loader.TritonPins(str(path), "H200")
    assert imported == ["exllamav3.vendor.fla"]
    assert "tuned anew" in caplog.text
    plain.cache[(64,)] = plain.configs[1]
    first.save()
    written = path.stat().st_mtime_ns
    plain.cache.clear()
    second = loader.TritonPins(str(path), "H200")
    assert plain.cache == {(64,): plain.configs[1]}
    second.save()
    assert path.stat().st_mtime_ns == written
    loader.TritonPins("", "H200", tmp_path).save()


@pytest.mark.parametrize("other", ["diary", "{", "[]", '{"version": 1}', "[" * 100_000, "\xff"])
def test_pins_are_never_written_over_another_file(tmp_path: Path, tuned: FakeTuner, caplog: pytest.LogCaptureFixture, other: str) -> None:
    """A start refuses it, and a writer leaves it as it is."""
    path = tmp_path / "pins.json"
    path.write_text(other, "latin-1")
    before = path.read_bytes()
    with pytest.raises(
        ConfigError, match=f"GLM53_TRITON_PIN={path} .* it has {len(other)} bytes that are no file of Triton's choices"
    ) as caught:
        resolve.check(GpuWorkerSettings.load({"GLM53_TRITON_PIN": str(path)}))
    assert caught.value.param == "GLM53_TRITON_PIN"
    pins = loader.TritonPins(str(path), "H200")
    tuned.cache[(64,)] = tuned.configs[0]
    pins.save()
    assert f"Triton's choices cannot be saved to {path}" in caplog.text
    assert path.read_bytes() == before


def test_pins_of_another_version_or_gpu_are_written_over(tmp_path: Path) -> None:
    """They are ours, and of no use here; so is a file that is not there, or empty."""
    path = tmp_path / "pins.json"
    resolve.check(GpuWorkerSettings.load({}))
    for text in (
        None,
        "",
        "\0" * 300,
        '{\n "gpu": "H2',
        '{"version": 0, "gpu": "H200", "kernels": {}}',
        '{"version": 1, "gpu": "RTX 3090", "kernels": []}',
    ):
        if text is not None:
            path.write_text(text)
        resolve.check(GpuWorkerSettings.load({"GLM53_TRITON_PIN": str(path)}))
        triton_tuners.write(path, "H200", {})
        assert triton_tuners.read(path) == ("H200", {})


def test_the_first_configuration_can_be_forced() -> None:
    """So that two runs compute with the same kernels."""
    found, plain, wrapped = modules()
    assert triton_tuners.use_first_configurations(triton_tuners.find(FakeTuner, found)) == 2
    assert len(plain.configs) == len(wrapped.configs) == 1


def test_exllamav3_is_imported_beside_what_needs_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread of its own, without its Triton kernels; who imports it next has it, or the reason why nobody can."""
    (tmp_path / "stock_of_the_test.py").write_text("import threading\nby = threading.current_thread().name\n")
    (tmp_path / "broken_of_the_test.py").write_text("raise ImportError('no extension')\n")
    (tmp_path / "kernels_of_the_test.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(loader.upstream, "TUNED", "kernels_of_the_test")
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    for package in ("stock_of_the_test", "broken_of_the_test"):
        monkeypatch.setattr(loader.upstream, "PACKAGE", package)
        loader.import_beside()
        for thread in threading.enumerate():
            if thread.name == "import":
                thread.join(10)
    assert sys.modules.pop("stock_of_the_test").by == "import"
    assert "kernels_of_the_test" not in sys.modules
    assert raised == []
    with pytest.raises(ImportError, match="no extension"):
        importlib.import_module("broken_of_the_test")


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_pass_that_does_not_fit_beside_the_staging_slots_runs_without(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """The slots are gone by then; one that fails without them too is the start's error. Without slots nothing is done twice."""
    events: list[Any] = []
    loaded = staging(monkeypatch, events)

    def warm_up(_loaded: Any, chunk: int, max_streams: int) -> None:
        events.append(("warm", chunk, max_streams))
        if sum(isinstance(event, tuple) and event[0] == "warm" for event in events) <= fails:
            raise ConfigError("a pass failed")

    monkeypatch.setattr(loader, "warm_up", warm_up)
    monkeypatch.setattr(loader, "free_bytes", lambda: 1000 * MIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("emptied"))
    with pytest.raises(ConfigError) if fails == 2 else contextlib.nullcontext():
        loader.warm_up_staged(loaded, 4, 512, 8)
    again = ["emptied", ("warm", 512, 8)] if fails else []
    assert events[2:] == [("warm", 512, 8), "closed, hook ours", *again]
    monkeypatch.setattr(loader, "free_bytes", lambda: 0)
    events.clear()
    fails = 9
    with pytest.raises(ConfigError):
        loader.warm_up_staged(loaded, 4, 512, 8)
    assert events == [("warm", 512, 8)]


def test_records_are_unpinned_when_exllamav3_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few ranges, none of which ends inside a layer; the extension is asked for when all are pinned."""
    arena = Arena.create(str(tmp_path / "arena"), [ExpertShape.create(128, 128, 3)] * 3, 4, bytes(32))
    pinned: list[tuple[int, int]] = []
    calls = {
        "cudaHostRegister": lambda at, size, _flags: pinned.append((at, size)) or 0,
        "cudaHostUnregister": lambda at: pinned.remove(next(one for one in pinned if one[0] == at)),
    }
    monkeypatch.setattr(torch.cuda, "cudart", lambda: types.SimpleNamespace(**calls))
    stride = int(arena.record(0, 1).ctypes.data) - int(arena.record(0, 0).ctypes.data)
    monkeypatch.setattr(records, "MAX_RANGE_BYTES", 9 * stride)
    seen: list[list[tuple[int, int]]] = []

    def extension() -> Any:
        seen.append(list(pinned))
        raise ImportError("no extension")

    shapes = [ExpertShape.create(128, 128, 3)] * 3
    with pytest.raises(ImportError, match="no extension"):
        records.PinnedRecords(arena, shapes, 0, extension)
    base = int(arena.record(0, 0).ctypes.data)
    assert seen == [[(base, 8 * stride), (base + 8 * stride, 4 * stride)]]
    assert pinned == []
    arena.unlink()
