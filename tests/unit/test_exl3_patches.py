"""The patches' logic over fakes of exllamav3's objects; what they do to the real ones is tested on a GPU (tests/gpu)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from services.common.errors import ConfigError
from services.gpu_worker.patches import dispatch, expert_load, guard, pointer_tables, pool_words
from services.gpu_worker.patches.expert_load import MoeLayer, Place
from services.gpu_worker.patches.replace import Replacements

SOURCE = """
import os

def deco(f):
    return f

class Outer:
    @deco
    def method(self):
        # a comment counts
        return 1

def free():
    return 2
"""


def target(qualname: str, source: str = SOURCE) -> guard.Target:
    return guard.Target("pkg.mod", qualname, guard.fingerprint(source, qualname))


def test_a_fingerprint_covers_decorators_and_comments_and_nothing_else() -> None:
    """It changes with any line of the function, and with no line outside of it."""
    before = guard.fingerprint(SOURCE, "Outer.method")
    assert guard.fingerprint(SOURCE.replace("    @deco\n", ""), "Outer.method") != before
    assert guard.fingerprint(SOURCE.replace("# a comment counts", "# another"), "Outer.method") != before
    assert guard.fingerprint(SOURCE.replace("return 2", "return 3"), "Outer.method") == before
    assert guard.fingerprint(SOURCE.replace("\n", "  \n"), "Outer.method") == before


def test_another_version_is_refused_by_name() -> None:
    """Both versions are named, and the fix."""
    with pytest.raises(ConfigError, match=r"exllamav3 1\.6\.5 is installed, this build needs 1\.5\.1: run make this"):
        guard.check("exllamav3", "1.6.5", "1.5.1", [target("free")], lambda _module: SOURCE, "make this")


def test_every_changed_function_is_named() -> None:
    """A changed and a missing function are both in the message; the unchanged one is not."""
    changed = SOURCE.replace("return 1", "return 9").replace("def free", "def gone")
    with pytest.raises(ConfigError) as refused:
        guard.check("p", "1", "1", [target("Outer.method"), target("free"), target("deco")], lambda _module: changed, "make this")
    assert "pkg.mod.Outer.method (" in refused.value.message
    assert "pkg.mod.free (missing" in refused.value.message
    assert "pkg.mod.deco" not in refused.value.message
    assert refused.value.message.endswith(". Remove it (`python -m pip uninstall p` in this environment), then run make this")


def test_the_known_source_passes() -> None:
    """No error for what was read."""
    guard.check("p", "1", "1", [target("Outer.method"), target("free")], lambda _module: SOURCE, "make this")


class Base:
    def inherited(self) -> str:
        return "base"


def test_undo_restores_own_and_inherited_attributes() -> None:
    """An inherited attribute is inherited again, an own one has its value again, whatever was set in between."""
    thing = Base()
    thing.own = 1  # type: ignore[attr-defined]
    with Replacements() as replaced:
        replaced.set(thing, "inherited", lambda: "patched")
        replaced.set(thing, "own", 2)
        replaced.set(thing, "own", 3)
        assert (thing.inherited(), thing.own) == ("patched", 3)  # type: ignore[attr-defined]
    assert vars(thing) == {"own": 1}
    assert thing.inherited() == "base"


def test_a_misspelt_attribute_is_refused() -> None:
    """Replacing what is not there would patch nothing."""
    with pytest.raises(AttributeError, match="inherrited"):
        Replacements().set(Base(), "inherrited", None)


class FakeTensors:
    """The checkpoint as exllamav3 sees it: every expert is stored with the mul1 codebook."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.read: list[str] = []

    def has_tensor(self, name: str) -> bool:
        return name in self.names

    def get_tensor(self, name: str, device: str, optional: bool = False) -> str:
        self.read.append(name)
        return f"{name}@{device}"


class FakeLinear:
    def __init__(self, key: str, tensors: FakeTensors) -> None:
        self.key, self.alt_key = key, None
        self.config = types.SimpleNamespace(stc=tensors)
        self.in_features, self.out_features, self.out_dtype = 256, 128, None
        self.inner: Any = None
        self.quant_type = None

    def load_exl3(self, key: str) -> bool:
        raise AssertionError("stock's loader would read the expert into VRAM")


class FakeCompiled:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def run_bszN(self, *args: Any) -> None:
        self.calls.append("bszN")

    def run_single_expert(self, state: Any, expert: int) -> None:
        self.calls.append(f"single {expert}")

    def run_single_expert_dq(self, state: Any, expert: int, *buffers: Any) -> None:
        self.calls.append(f"dq {expert} {len(buffers)}")


class FakeBlock:
    """A BlockSparseMLP of two experts."""

    def __init__(self, key: str, tensors: FakeTensors, *, gated: bool = True) -> None:
        self.key, self.gated = key, gated
        self.gates, self.ups, self.downs = (
            [FakeLinear(f"{key}.experts.{e}.{p}_proj", tensors) for e in range(2)] for p in ("gate", "up", "down")
        )
        self.num_experts = self.num_local_experts = 2
        self.cpu_split_first = None
        self.cpu_offload = False
        self.bc: Any = FakeCompiled()

    def cpu_split_submit(self, *args: Any) -> tuple[str, str]:
        return "stock", "stock"

    def cpu_split_combine(self, *args: Any) -> str:
        return "stock"


def make_model(*, gated: bool = True) -> tuple[Any, FakeTensors]:
    names = {
        f"l{i}.experts.{e}.{p}_proj.{t}" for i in range(2) for e in range(2) for p in ("gate", "up", "down") for t in ("trellis", "mul1")
    }
    tensors = FakeTensors(names)
    blocks = [types.SimpleNamespace(mlp=FakeBlock(f"l{i}", tensors, gated=gated)) for i in range(2)]
    dense = types.SimpleNamespace(mlp=object())
    return types.SimpleNamespace(fwd_modules=[(m, 0, i) for i, m in enumerate([dense, *blocks])]), tensors


def test_experts_load_as_views_and_nothing_of_theirs_is_read() -> None:
    """Each linear gets the views of its own place and its codebook's marker; the checkpoint is not read."""
    model, tensors = make_model()
    layers = expert_load.find_moe_layers(model, FakeBlock)
    made: list[dict[str, Any]] = []

    def linear_class(config: Any, inputs: int, outputs: int, **parts: Any) -> dict[str, Any]:
        made.append(parts)
        return parts

    with Replacements() as replaced:
        expert_load.install(
            replaced, layers, linear_class, lambda place, part: (place, part), lambda place, name: name if name == "mul1" else None
        )
        linear = layers[1].mlp.downs[0]
        assert linear.load_exl3(linear.key) is True
        assert linear.inner["trellis"] == (Place(1, 0, "down"), "trellis")
        assert linear.inner["svh"] == (Place(1, 0, "down"), "svh")
        assert linear.inner["mul1"] == "mul1"
        assert linear.inner["mcg"] is None
        assert linear.quant_type == "exl3"
    assert tensors.read == []
    with pytest.raises(AssertionError, match="stock's loader"):
        linear.load_exl3(linear.key)


def test_models_without_supported_experts_are_refused_by_name() -> None:
    """No such block at all, and a block without gates, are told apart."""
    model, _ = make_model()
    with pytest.raises(ConfigError, match="SimpleNamespace has no Base"):
        expert_load.find_moe_layers(model, Base)
    with pytest.raises(ConfigError, match="l0: experts without a gate projection"):
        expert_load.find_moe_layers(make_model(gated=False)[0], FakeBlock)


def test_all_tables_of_experts_become_parts_of_one_tensor() -> None:
    """The tables keep their contents, a write to the shared tensor is seen through them, other linears' tables stay their own."""
    model, tensors = make_model()
    layers = expert_load.find_moe_layers(model, FakeBlock)

    class Tables:
        def __init__(self, device: Any, linears: list[Any], allow_bias: bool) -> None:
            start = 1 + sum(linears[0].key.encode())
            self.ptrs_trellis, self.ptrs_suh, self.ptrs_svh = (torch.arange(2) + start * k for k in (1, 2, 3))

    module = types.SimpleNamespace(MultiLinear=Tables)
    shared = torch.zeros(2, len(pointer_tables.ROWS), 2, dtype=torch.int64)
    with Replacements() as replaced:
        pointer_tables.install(replaced, module, expert_load.places(layers), shared)
        up = module.MultiLinear("cuda", layers[1].mlp.ups, True)
        other = module.MultiLinear("cuda", [FakeLinear("shared_expert", tensors)], True)
    assert module.MultiLinear is Tables
    row = pointer_tables.row_of("up", "svh")
    assert torch.equal(up.ptrs_svh, Tables("", layers[1].mlp.ups, True).ptrs_svh)
    shared[1, row, 1] = 77
    assert up.ptrs_svh[1] == 77
    assert shared.count_nonzero() == 6
    assert other.ptrs_svh.untyped_storage().data_ptr() != shared.untyped_storage().data_ptr()


SHORT = {"g": "gate", "u": "up", "d": "down"}


class ReconstructBlock:
    """A block that has made tables of scales for its reconstruct path itself, with the addresses of the moment."""

    def __init__(self, key: str, table: torch.Tensor, *, folded: bool = True) -> None:
        self.key, self.bc, self.support_quant_paths = key, object(), True
        self.probes: list[Any] = []
        rows = dict(zip(pointer_tables.ROWS, table, strict=True))
        tables = {p: {f"ptrs_{t}": rows[f"{p}_{t}"] for t in ("trellis", "suh", "svh")} for p in SHORT.values()}
        self.multi_gate, self.multi_up, self.multi_down = (types.SimpleNamespace(**tables[p]) for p in ("gate", "up", "down"))
        own = {short: (rows[f"{p}_suh"].clone(), rows[f"{p}_svh"].clone()) for short, p in SHORT.items()}
        self.state: Any = types.SimpleNamespace(folded=folded, scale_ptrs=own)

    def _batch_recon_layer(self, probe: Any) -> Any:
        self.probes.append(probe)
        return self.state


def shared_table() -> torch.Tensor:
    rows = len(pointer_tables.ROWS)
    return torch.arange(2 * rows * 3).reshape(2, rows, 3)


def test_scales_of_the_reconstruct_path_are_rows_of_the_shared_tables() -> None:
    """Each projection's own two, in every layer: a record that moves later takes them along. The probe is the layer's."""
    shared = shared_table()
    blocks = [ReconstructBlock(f"l{layer}", shared[layer]) for layer in range(2)]
    pointer_tables.share_reconstruct_scales([MoeLayer(i, block, 3) for i, block in enumerate(blocks)], lambda mlp: f"row of {mlp.key}")
    assert [block.probes for block in blocks] == [["row of l0"], ["row of l1"]]
    shared += 1_000
    for layer, block in enumerate(blocks):
        assert list(block.state.scale_ptrs) == list(SHORT)
        for short, projection in SHORT.items():
            for part, scales in zip(("suh", "svh"), block.state.scale_ptrs[short], strict=True):
                assert scales.data_ptr() == shared[layer, pointer_tables.row_of(projection, part)].data_ptr()
                assert scales.tolist() == shared[layer, pointer_tables.row_of(projection, part)].tolist()


def test_scales_that_are_held_by_value_are_left_alone() -> None:
    """They are right wherever the record goes. A layer without the path has none."""
    shared = shared_table()
    by_value, without = ReconstructBlock("l0", shared[0], folded=False), ReconstructBlock("l1", shared[1])
    own, without.state = dict(by_value.state.scale_ptrs), None
    pointer_tables.share_reconstruct_scales([MoeLayer(0, by_value, 3), MoeLayer(1, without, 3)], lambda _mlp: None)
    assert all(by_value.state.scale_ptrs[short] is own[short] for short in SHORT)
    assert without.probes == [None]


@pytest.mark.parametrize(("name", "value"), [("bc", None), ("multi_up", None), ("support_quant_paths", False)])
def test_a_layer_that_loaded_into_other_paths_is_refused_by_name(name: str, value: object) -> None:
    """Its experts would read addresses that nobody keeps right."""
    shared = shared_table()
    blocks = [ReconstructBlock(f"l{layer}", shared[layer]) for layer in range(2)]
    setattr(blocks[1], name, value)
    with pytest.raises(ConfigError, match="l1: its experts do not run through the EXL3 kernels"):
        pointer_tables.share_reconstruct_scales([MoeLayer(i, block, 3) for i, block in enumerate(blocks)], lambda _mlp: None)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def before_experts(self, layer: int, rows: int, selected: Any) -> None:
        self.calls.append(("before", layer, rows, selected))

    def after_experts(self, layer: int) -> None:
        self.calls.append(("after", layer))

    def before_single_expert(self, layer: int, expert: int) -> None:
        self.calls.append(("single", layer, expert))

    def decode_step(self, layer: Any, stock: Any) -> Any:
        return stock


class OwnDecode(Recorder):
    """Runs layer 1's decode steps itself."""

    def decode_step(self, layer: Any, stock: Any) -> Any:
        if layer.index != 1:
            return stock

        def run(y: Any, selected: Any, weights: Any) -> None:
            self.calls.append(("own", y, selected, weights))
            stock(y, selected, "no weights")

        return run


def test_dispatch_tells_every_layer_and_changes_no_result() -> None:
    """Both ends of a layer and the paths that read tensors are reported with the layer's index; undo leaves stock's methods."""
    model, _ = make_model()
    layers = expert_load.find_moe_layers(model, FakeBlock)
    recorder, mlp = Recorder(), layers[1].mlp
    compiled = mlp.bc
    with Replacements() as replaced:
        dispatch.install(replaced, layers, recorder)
        assert mlp.cpu_split_first == 0
        assert mlp.cpu_split_submit("y", 3, "sel", "w") == (None, None)
        mlp.bc.run_bszN("y", "sel", "w")
        mlp.bc.run_single_expert("state", 4)
        mlp.bc.run_single_expert_dq("state", 5, 1, 2, 3, 4)
        assert mlp.cpu_split_combine("final", None, None, (1,)) == "final"
        assert mlp.bc.calls == ["bszN", "single 4", "dq 5 4"]
    assert recorder.calls == [("before", 1, 3, "sel"), ("single", 1, 4), ("single", 1, 5), ("after", 1)]
    assert mlp.cpu_split_first is None
    assert mlp.bc is compiled
    assert mlp.cpu_split_combine("final") == "stock"


def test_a_residency_may_run_decode_steps_itself() -> None:
    """Its function takes the place of stock's, which it may still call; other layers and other kernels stay stock's."""
    model, _ = make_model()
    layers = expert_load.find_moe_layers(model, FakeBlock)
    residency = OwnDecode()
    with Replacements() as replaced:
        dispatch.install(replaced, layers, residency)
        layers[0].mlp.bc.run_bszN("y", "sel", "w")
        assert residency.calls == []
        assert layers[0].mlp.bc.calls == ["bszN"]
        layers[1].mlp.bc.run_bszN("y", "sel", "w")
        assert residency.calls == [("own", "y", "sel", "w")]
        assert layers[1].mlp.bc.calls == ["bszN"]


class FakeTorch(types.ModuleType):
    """Notes what is made on a device."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.made: list[tuple[Any, ...]] = []
        self.int32 = torch.int32
        self.tensor = lambda data, dtype=None, device=None, **more: self.made.append(("tensor", data, dtype, str(device), more))
        self.full = lambda shape, value, dtype=None, device=None: self.made.append(("full", shape, value, dtype, str(device)))

    def __getattr__(self, name: str) -> str:
        if name == "late":
            return "made when asked for"
        raise AttributeError(name)


def test_one_number_for_a_device_needs_no_copy_that_waits() -> None:
    """It is filled in by a kernel; every other tensor is torch's own; undo gives the module torch back."""
    real = FakeTorch()
    module = types.SimpleNamespace(torch=real)
    cuda = torch.device("cuda", 0)
    with Replacements() as replaced:
        pool_words.install(replaced, module)
        seen = module.torch
        seen.tensor([7], dtype=torch.int32, device=cuda)
        for data, more in (([7], {}), ([7, 8], {"device": cuda}), ([True], {"device": cuda}), ([1.5], {"device": cuda})):
            seen.tensor(data, dtype=torch.int32, **more)
        seen.tensor([7], device=cuda)
        assert (seen.int32, seen.late) == (torch.int32, "made when asked for")
    assert module.torch is real
    assert real.made[0] == ("full", (1,), 7, torch.int32, "cuda:0")
    assert [made[0] for made in real.made[1:]] == ["tensor"] * 5
    assert real.made[1] == ("tensor", [7], torch.int32, "None", {})


def test_the_number_is_the_one_that_torch_makes() -> None:
    """Of the same type, shape and value, on the real torch."""
    seen = pool_words.Torch(torch)
    device = types.SimpleNamespace(type="cuda")
    made = seen.full((1,), 123_456, dtype=torch.int32)
    assert torch.equal(made, torch.tensor([123_456], dtype=torch.int32))
    assert seen.float32 is torch.float32
    assert torch.equal(seen.tensor([1, 2]), torch.tensor([1, 2]))
    with pytest.raises((TypeError, RuntimeError)):
        seen.tensor([1], dtype=torch.int32, device=device)
