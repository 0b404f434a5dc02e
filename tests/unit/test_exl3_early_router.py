"""Guesses of the next layer's picks, over fakes of exllamav3's modules whose kernels are torch on the CPU, and their place in a step.

That no bit of the real kernels' results changes is compared on a GPU (tests/gpu/test_early_router.py).
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from kernels.python.pager import HINT_WIDTH
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.patches import decode_blocks, early_router
from services.gpu_worker.patches.decode_blocks import DECODE, MAX_ROWS
from services.gpu_worker.patches.early_router import EarlyRouters
from services.gpu_worker.patches.expert_load import MoeLayer
from services.gpu_worker.patches.replace import Replacements
from tests.unit import test_exl3_decode_blocks as base
from tests.unit.test_exl3_decode_blocks import HIDDEN, Block, Dense, FakeExt

EXPERTS, TOP_K = 20, 2


class Ext(FakeExt):
    """With the router's kernel, and a list of the memory that kernels wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    def hc_mix(self, streams: Any, *arguments: Any) -> None:
        super().hc_mix(streams, *arguments)
        self.written += [made.data_ptr() for made in arguments[-4:]]

    def rms_norm(self, x: Any, weight: Any, y: Any, *arguments: Any) -> None:
        super().rms_norm(x, weight, y, *arguments)
        self.written.append(y.data_ptr())

    def routing_ds3_nogroup(
        self, y: Any, gate: Any, scores: Any, bias: Any, ids: Any, weights: Any, factor: float, gate_t: Any, act: int, i8: Any, sb: Any
    ) -> None:
        self.calls.append("route")
        assert (y.dtype, scores.dtype, ids.dtype, weights.dtype, act) == (torch.float16, torch.float16, torch.int64, torch.float16, 0)
        assert (gate_t.shape, i8, sb) == ((EXPERTS, HIDDEN), "i8", "sb")
        scores.copy_(y @ gate)
        keys = scores.float().sigmoid() + bias.float()
        best = torch.argsort(keys, dim=1, descending=True, stable=True)[:, : ids.shape[1]]
        chosen = scores.float().sigmoid().gather(1, best)
        ids.copy_(best)
        weights.copy_(chosen * factor / chosen.sum(1, keepdim=True))
        self.written += [made.data_ptr() for made in (scores, ids, weights)]


class Config:
    """A RoutingCFG: what stock makes at its first use is not there yet."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.gate_tensor = torch.randn((HIDDEN, EXPERTS), generator=draw).half()
        self.e_score_correction_bias = torch.randn(EXPERTS, generator=draw)
        self.routed_scaling_factor = 2.5
        self.gate_tensor_t: Any = None
        self.e_score_bias_h: Any = None
        self.gate_i8 = self.gate_sb = ""

    def ready(self) -> None:
        self.gate_tensor_t, self.gate_i8, self.gate_sb = self.gate_tensor.T.contiguous(), "i8", "sb"
        self.e_score_bias_h = self.e_score_correction_bias.half()


class Routed(base.Experts):
    """Experts whose router writes where stock's does: into buffers that all layers share."""

    buffers: dict[int, Any]

    def __init__(self, ext: Ext, seed: int) -> None:
        super().__init__()
        self.ext, self.router_type = ext, "dots"
        self.num_experts = self.num_local_experts = EXPERTS
        self.routing_cfg: Any = Config(seed)
        self.cpu_split_first = 0
        self.between: Any = lambda rows: None

    def routing_fn(self, rows: int, config: Any, y: Any, params: Any) -> Any:
        params["routed"] = params.get("routed", 0) + 1  # some of stock's do
        config.ready()
        if rows not in Routed.buffers:
            Routed.buffers[rows] = (
                torch.empty((rows, EXPERTS), dtype=torch.float16),
                torch.empty((rows, TOP_K), dtype=torch.int64),
                torch.empty((rows, TOP_K), dtype=torch.float16),
            )
        scores, ids, weights = Routed.buffers[rows]
        self.ext.routing_ds3_nogroup(
            y, config.gate_tensor, scores, config.e_score_bias_h, ids, weights, 2.5, config.gate_tensor_t, 0, config.gate_i8, config.gate_sb
        )
        return ids, weights

    def cpu_split_submit(self, y: Any, rows: int, selected: Any, weights: Any) -> Any:
        self.calls.append(selected.tolist())
        self.between(rows)
        return None, None


class World:
    """A dense block and three with experts; `decode` runs a step and keeps what was guessed and picked."""

    def __init__(self, *, early: bool) -> None:
        Routed.buffers = {}
        self.ext = Ext()
        self.experts = [Routed(self.ext, seed) for seed in range(3)]
        self.blocks = [Block(self.ext, Dense(), 0.25), *(Block(self.ext, mlp, 0.5 / 2**i) for i, mlp in enumerate(self.experts))]
        self.model = types.SimpleNamespace(fwd_modules=[(types.SimpleNamespace(key="head"), 0, 0), *((b, 0, 0) for b in self.blocks)])
        self.layers = [MoeLayer(index, mlp, EXPERTS) for index, mlp in enumerate(self.experts)]
        self.replaced = Replacements()
        assert decode_blocks.install(self.replaced, self.model, self.ext, base.Experts) == (4, [])
        self.guesses: list[Any] = []
        self.params: dict[str, Any] = {}
        self.routers: EarlyRouters | None = None
        if early:
            self.routers, reasons = early_router.install(self.replaced, self.model, self.ext, self.layers)
            assert reasons == []
            for layer in self.layers:
                layer.mlp.between = lambda rows, index=layer.index: self._guess(index, rows)

    def _guess(self, layer: int, rows: int) -> None:
        assert self.routers is not None
        before = len(self.ext.calls)
        ids = self.routers.guess(layer, rows)
        self.guesses.append((layer, None if ids is None else ids.clone(), self.ext.calls[before:]))

    def decode(self, rows: int, seed: int, layers: int = 4) -> torch.Tensor:
        x = torch.randn((rows, 1, 4, HIDDEN), generator=torch.Generator().manual_seed(seed))
        self.params = {DECODE: rows}
        with torch.inference_mode():
            for block in self.blocks[:layers]:
                x = block.forward(x, self.params)
        return x


@pytest.mark.parametrize("rows", [1, 2, 4, MAX_ROWS])
def test_guesses_change_no_bit(rows: int) -> None:
    """Results, picks and params with guesses in every step are those without; the first step's guesses wait for the routers."""
    plain, guessing = World(early=False), World(early=True)
    for seed in range(3):
        assert torch.equal(plain.decode(rows, seed), guessing.decode(rows, seed))
        assert plain.params == guessing.params
    assert [mlp.calls for mlp in plain.experts] == [mlp.calls for mlp in guessing.experts]
    kernels = [(layer, ids is not None, calls) for layer, ids, calls in guessing.guesses]
    made = [(0, True, ["mix", "norm", "route"]), (1, True, ["mix", "norm", "route"]), (2, False, [])]
    assert kernels == [(layer, False, []) for layer in range(3)] + made + made


@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
def test_a_guess_is_the_next_layer_s_router_on_the_streams_that_are_there(rows: int) -> None:
    """Mix, norm and router of the layer after, by plain torch, on the streams that went into this layer's experts; the best first."""
    world = World(early=True)
    world.decode(rows, 0)
    seen: list[torch.Tensor] = []
    assert world.routers is not None
    hold = world.routers.hold
    world.routers.hold = lambda streams: (seen.append(streams.clone()), hold(streams))[1]  # type: ignore[method-assign,func-returns-value]
    world.guesses.clear()
    world.decode(rows, 1)
    ext = Ext()
    for layer, ids, _ in world.guesses[:2]:
        block = world.blocks[layer + 2]
        y = block.mlp_norm.forward(block.mlp_hc.mix(seen[layer][:, None], {})[2], {}).view(rows, HIDDEN)
        made = block.mlp.routing_cfg
        want = torch.empty((rows, HINT_WIDTH), dtype=torch.int64)
        scores, weights = torch.empty((rows, EXPERTS)).half(), torch.empty((rows, HINT_WIDTH)).half()
        ext.routing_ds3_nogroup(
            y, made.gate_tensor, scores, made.e_score_bias_h, want, weights, 2.5, made.gate_tensor_t, 0, made.gate_i8, made.gate_sb
        )
        assert torch.equal(ids, want)


def test_a_guess_writes_no_memory_that_the_pass_uses() -> None:
    """Neither blocks' workspaces nor routing results, and it is all there before the first step."""
    world = World(early=True)
    world.decode(4, 0)
    own: set[int] = set()
    theirs: set[int] = set()
    guess, ext = world._guess, world.ext

    def watched(layer: int, rows: int) -> None:
        theirs.update(ext.written)
        ext.written.clear()
        guess(layer, rows)
        own.update(ext.written)
        ext.written.clear()

    for layer in world.layers:
        layer.mlp.between = lambda rows, index=layer.index: watched(index, rows)
    world.decode(4, 1)
    theirs.update(ext.written)
    assert len(own) == 8  # partial sums, gates twice, mix, norm, scores, ids, weights
    assert own & theirs == set()
    assert world.routers is not None
    space = world.routers.after[0]._space
    assert space is world.routers.after[1]._space
    assert own <= {t.data_ptr() for at in (space.mixers[3], space.routing[3]) for t in vars(at).values() if isinstance(t, torch.Tensor)}


def test_a_pass_of_another_kind_gets_no_guess() -> None:
    """Streams are held for the step that they are of: neither stock's passes nor other numbers of rows get a guess of them."""
    world = World(early=True)
    world.decode(2, 0)
    world.guesses.clear()
    world.routers.hold(torch.zeros(2, 4, HIDDEN))  # type: ignore[union-attr]  # and the experts fail
    world._guess(0, 3)
    world._guess(0, 2)
    with torch.inference_mode():
        world.blocks[1].forward(torch.randn(2, 1, 4, HIDDEN), {})  # stock's: it tells nobody
    world._guess(0, 2)
    assert [ids for _, ids, _ in world.guesses] == [None] * 3
    world.decode(2, 1)
    world.replaced.undo()
    assert all(vars(block).get("forward") is None for block in world.blocks)


def test_undone_the_blocks_tell_nobody() -> None:
    """A later store without guesses leaves the blocks as they were."""
    world = World(early=False)
    owners: list[Any] = [block.forward.__self__ for block in world.blocks]  # type: ignore[attr-defined]
    with Replacements() as replaced:
        routers, _ = early_router.install(replaced, world.model, world.ext, world.layers)
        assert [owner.early for owner in owners] == [None, routers, routers, None]
    assert [owner.early for owner in owners] == [None] * 4


def stock_router(world: World) -> None:
    world.experts[2].router_type = "ds3"


def unloaded_router(world: World) -> None:
    world.experts[2].routing_cfg = None


def stock_experts(world: World) -> None:
    del world.experts[2].forward


def stock_block(world: World) -> None:
    del world.blocks[2].forward


def lost_layer(world: World) -> None:
    world.model.fwd_modules.pop()


@pytest.mark.parametrize(
    ("change", "guessed", "reason"),
    [
        (stock_router, [0], "block 0.125: its router is of the kind ds3"),
        (unloaded_router, [0], "block 0.125: its router is not loaded"),
        (stock_experts, [0], "block 0.125: its decode steps are launched as exllamav3 does it"),
        (stock_block, [], "block 0.125: the layer before it is launched as exllamav3 does it"),
        (lost_layer, [0], "MoE layer 2: it or the one before it is in no block"),
    ],
)
def test_a_layer_of_another_kind_is_not_guessed(change: Any, guessed: list[int], reason: str) -> None:
    """It is named with the reason; the others are guessed."""
    world = World(early=False)
    change(world)
    with Replacements() as replaced:
        routers, reasons = early_router.install(replaced, world.model, world.ext, world.layers)
    assert sorted(routers.after) == guessed
    assert reasons[-1] == reason


def test_a_store_is_given_the_guesses_and_reasons_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once, when the store is made: how many layers are guessed, and why the others are not."""
    world = World(early=False)
    given: list[Any] = []
    stock_router(world)
    monkeypatch.setitem(sys.modules, "exllamav3", types.ModuleType("exllamav3"))
    monkeypatch.setitem(sys.modules, "exllamav3.ext", types.SimpleNamespace(exllamav3_ext=world.ext))
    loaded: Any = types.SimpleNamespace(model=world.model, layers=world.layers)
    store: Any = types.SimpleNamespace(hint_from=given.append)
    with Replacements() as replaced, caplog.at_level("INFO"):
        loader.guess_early(replaced, loaded, store)
        assert world.blocks[1].forward.__self__.early is given[0].__self__  # type: ignore[attr-defined]
    assert isinstance(given[0].__self__, EarlyRouters)
    assert "early router = 1 of 3 layers guessed" in caplog.text
    assert caplog.text.count("block 0.125: its router is of the kind ds3") == 1
