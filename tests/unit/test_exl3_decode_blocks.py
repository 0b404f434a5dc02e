"""Decode steps with less Python in them, over fakes of exllamav3's modules whose kernels are torch on the CPU.

That the real kernels give stock's bits this way is compared on a GPU (tests/gpu/test_exl3_exact.py, bench/gpu_exact.py).
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from services.gpu_worker.patches import decode_blocks
from services.gpu_worker.patches.decode_blocks import DECODE, MAX_ROWS
from services.gpu_worker.patches.replace import Replacements

HIDDEN, EXPERTS, TOP_K = 8, 5, 2


class FakeExt:
    """The kernels' arguments and places of results; arithmetic that tells every argument apart."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def hc_mix_num_chunks(self, rows: int, length: int) -> int:
        assert length == 4 * HIDDEN
        return 3

    def hc_mix(
        self,
        streams: Any,
        fn: Any,
        base: Any,
        scale: Any,
        eps: float,
        hc_eps: float,
        iters: int,
        partials: Any,
        post: Any,
        comb: Any,
        out: Any,
    ) -> None:
        self.calls.append("mix")
        rows = len(streams)
        assert (streams.shape, partials.shape, out.dtype) == ((rows, 4, HIDDEN), (rows, 3, 25), torch.float16)
        assert fn.dtype == torch.float16
        post.copy_(streams.mean(2) * scale[0] + eps)
        comb.copy_(streams.mean((1, 2))[:, None, None] + base[:16].view(4, 4) + hc_eps * iters)
        out.copy_((streams.sum(1) * fn[0, 0].float()).tanh())  # bounded: three layers must not overflow

    def rms_norm(
        self, x: Any, weight: Any, y: Any, eps: float, bias: float, scale: float, heads: bool, residual: bool, groups: int
    ) -> None:
        self.calls.append("norm")
        assert (heads, residual, groups) == (False, False, 1)
        y.copy_((x.float() + eps) * scale * (weight.float() + bias) / 4)

    def hc_apply(self, x: Any, y: Any, post: Any, comb: Any) -> None:
        self.calls.append("apply")
        assert (x.shape[1:], y.shape, y.is_contiguous()) == ((4, HIDDEN), (len(x), HIDDEN), True)
        x.copy_(post[:, :, None] * y.float()[:, None] + comb.transpose(1, 2) @ x)


class HyperConnection:
    def __init__(self, ext: FakeExt, seed: float) -> None:
        self.ext = ext
        self.hc_mult, self.hidden_size, self.sinkhorn_iters = 4, HIDDEN, 3
        self.hc_eps, self.rms_eps = 0.01, 0.02
        self.fn, self.fn_h = torch.full((24, 4 * HIDDEN), seed), None
        self.base, self.scale = torch.linspace(0, seed, 24), torch.tensor([seed, 1.0, 2.0])

    def mix(self, streams: Any, params: Any) -> Any:
        """As exllamav3's: new tensors for every call."""
        rows = streams.shape[0] * streams.shape[1]
        at = [torch.empty(shape) for shape in ((rows, 3, 25), (rows, 4), (rows, 4, 4))]
        out = torch.empty((rows, HIDDEN), dtype=torch.float16)
        fixed = (self.base, self.scale, self.rms_eps, self.hc_eps, self.sinkhorn_iters)
        self.ext.hc_mix(streams.view(rows, 4, HIDDEN), self.fn.half(), *fixed, at[0], at[1], at[2], out)
        return at[1], at[2], out.view(*streams.shape[:2], HIDDEN)

    def apply_(self, x: Any, y: Any, post: Any, comb: Any) -> Any:
        rows = x.shape[0] * x.shape[1]
        self.ext.hc_apply(x.view(rows, 4, HIDDEN), y.view(rows, HIDDEN), post, comb)
        return x


class RMSNorm:
    span_heads, unweighted, groups = False, False, 1
    rms_norm_eps, constant_bias, constant_scale = 0.03, 0.5, 2.0

    def __init__(self, ext: FakeExt, seed: float) -> None:
        self.ext, self.weight = ext, torch.linspace(seed, 1, HIDDEN).half()

    def forward(self, x: Any, params: Any) -> Any:
        y = torch.empty_like(x.view(-1, HIDDEN))
        fixed = (self.rms_norm_eps, self.constant_bias, self.constant_scale, False, False, 1)
        self.ext.rms_norm(x.view(-1, HIDDEN), self.weight, y, *fixed)
        return y.view_as(x)


class Attention:
    """Remembers the stream: a result depends on how often it was called."""

    def __init__(self) -> None:
        self.seen = 0

    def forward(self, y: Any, params: Any) -> Any:
        self.seen += 1
        return y.float() * self.seen


class Dense:
    def forward(self, y: Any, params: Any) -> Any:
        return y.float().flip(-1)


class Experts:
    """A BlockSparseMLP: its forward pass is what stock's does at a step of so few rows."""

    def __init__(self) -> None:
        self.key, self.hidden_size, self.expert_size, self.intermediate_size = "mlp", HIDDEN, HIDDEN, 16
        self.num_experts = self.num_local_experts = EXPERTS
        self.bc: Any = types.SimpleNamespace(run_bszN=self._run)
        self.is_quantized, self.bc_sh_exp, self.shared_experts = True, True, object()
        self.routing_gate, self.routing_cfg = object(), "config"
        self.alt_residual_channel = self.cpu_offload = self.tp_reduce = False
        self.config = types.SimpleNamespace(infer_params=types.SimpleNamespace(no_reconstruct=False))
        self.experts_cfg = types.SimpleNamespace(out_bszn=torch.full((MAX_ROWS, HIDDEN), 9.0))
        self.cpu_split_first: int | None = None
        self.calls: list[Any] = []

    def routing_fn(self, rows: int, config: Any, y: Any, params: Any) -> Any:
        assert config == "config"
        order = torch.argsort(y.float()[:, :EXPERTS], dim=1, stable=True)
        return order[:, :TOP_K], torch.ones(rows, TOP_K).half() / 2

    def _run(self, y: Any, selected: Any, weights: Any) -> None:
        gain = (selected.float() * weights.float()).sum(1, keepdim=True)
        self.experts_cfg.out_bszn[: len(y)] = y.float() * gain

    def cpu_split_submit(self, y: Any, rows: int, selected: Any, weights: Any) -> Any:
        self.calls.append(("submit", rows, selected.tolist()))
        return "partial", "pending"

    def cpu_split_combine(self, final: Any, partial: Any, pending: Any, shape: Any) -> Any:
        self.calls.append(("combine", partial, pending, tuple(shape)))
        return final

    def forward(self, x: Any, params: Any, out_dtype: Any = None) -> Any:
        self.calls.append("stock")
        y = x.view(-1, HIDDEN)
        selected, weights = self.routing_fn(len(y), self.routing_cfg, y, params)
        if len(y) > MAX_ROWS:
            return y.float().view_as(x) * selected.sum()
        self.bc.run_bszN(y, selected, weights)
        return self.cpu_split_combine(self.experts_cfg.out_bszn[: len(y)].view(x.shape), None, None, x.shape)


class Block:
    """A TransformerBlock with hyper-connections."""

    attn_post_norm = mlp_post_norm = attn_resid_scalar = mlp_resid_scalar = layer_scalar_f = out_dtype = None
    device = torch.device("cpu")

    def __init__(self, ext: FakeExt, mlp: Any, seed: float) -> None:
        self.key, self.attn, self.mlp = f"block {seed}", Attention(), mlp
        self.attn_hc, self.mlp_hc = HyperConnection(ext, seed), HyperConnection(ext, seed + 0.125)
        self.attn_norm, self.mlp_norm = RMSNorm(ext, seed), RMSNorm(ext, -seed)
        self.stock_calls = 0

    def forward(self, x: Any, params: Any, out_dtype: Any = None) -> Any:
        self.stock_calls += 1
        for mixer, norm, inner in ((self.attn_hc, self.attn_norm, self.attn), (self.mlp_hc, self.mlp_norm, self.mlp)):
            post, comb, y = mixer.mix(x, params)
            y = inner.forward(norm.forward(y, params), params)
            x = mixer.apply_(x, y, post, comb)
        return x


def make() -> tuple[Any, FakeExt, list[Block]]:
    ext = FakeExt()
    blocks = [Block(ext, Dense(), 0.25), Block(ext, Experts(), 0.5), Block(ext, Experts(), 0.0625)]
    head = types.SimpleNamespace(key="head")
    return types.SimpleNamespace(fwd_modules=[(m, 0, i) for i, m in enumerate([head, *blocks, head])]), ext, blocks


def run(blocks: list[Block], steps: int, rows: int, decode: bool, tokens: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    results = []
    for _ in range(steps):
        x = torch.randn((rows, tokens, 4, HIDDEN), generator=generator)
        params = {DECODE: rows} if decode else {}
        for block in blocks:
            x = block.forward(x, params)
        results.append(x)
    return results


@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
def test_a_patched_step_has_stocks_bits_and_stocks_kernels(rows: int) -> None:
    """Same values after every step, same kernels in the same order, and none of stock's own forward passes."""
    _, stock_ext, stock = make()
    want = run(stock, 3, rows, decode=False)
    model, ext, blocks = make()
    with Replacements() as replaced:
        assert decode_blocks.install(replaced, model, ext, Experts) == (3, [])
        got = run(blocks, 3, rows, decode=True)
        assert all(x.isfinite().all() for x in want)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert ext.calls == stock_ext.calls == ["mix", "norm", "apply"] * 2 * 3 * 3
        assert [block.stock_calls for block in blocks] == [0, 0, 0]
        assert "stock" not in blocks[1].mlp.calls
    run(blocks, 1, rows, decode=True)
    assert [block.stock_calls for block in blocks] == [1, 1, 1]
    assert "stock" in blocks[1].mlp.calls


def test_batches_of_different_sizes_keep_their_own_memory() -> None:
    """Steps of one and of two rows in turns do not read each other's workspaces."""
    _, _, stock = make()
    model, ext, blocks = make()
    want = [x for rows in (2, 1, 2, 1) for x in run(stock, 1, rows, decode=False)]
    with Replacements() as replaced:
        decode_blocks.install(replaced, model, ext, Experts)
        got = [x for rows in (2, 1, 2, 1) for x in run(blocks, 1, rows, decode=True)]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_other_passes_go_through_stock() -> None:
    """A pass that is not said to be a decode step, and one that wants another type, are stock's."""
    model, ext, blocks = make()
    with Replacements() as replaced:
        decode_blocks.install(replaced, model, ext, Experts)
        run(blocks, 1, 1, decode=False, tokens=12)
        blocks[0].forward(torch.randn(1, 1, 4, HIDDEN), {DECODE: 1}, torch.float16)
    assert [block.stock_calls for block in blocks] == [2, 1, 1]
    assert blocks[1].mlp.calls == ["stock"]


def test_the_seam_of_the_experts_is_kept() -> None:
    """Both ends are called with the router's picks, and what the first gives the second gets; replaced parts count at once."""
    model, ext, blocks = make()
    mlp = blocks[1].mlp
    mlp.cpu_split_first = 0
    with Replacements() as replaced:
        decode_blocks.install(replaced, model, ext, Experts)
        mlp.routing_fn = lambda rows, config, y, params: (torch.tensor([[4, 1]] * rows), torch.ones(rows, TOP_K).half())
        ran: list[Any] = []
        mlp.bc = types.SimpleNamespace(run_bszN=lambda y, selected, weights: ran.append((tuple(y.shape), selected.tolist())))
        y = mlp.forward(torch.zeros((2, 1, HIDDEN), dtype=torch.float16), {DECODE: 2})
    assert mlp.calls == [("submit", 2, [[4, 1], [4, 1]]), ("combine", "partial", "pending", (2, 1, HIDDEN))]
    assert ran == [((2, HIDDEN), [[4, 1], [4, 1]])]
    assert torch.equal(y, torch.full((2, 1, HIDDEN), 9.0))


class Embedding:
    key, multiplier, normalize, out_dtype = "embed", 1.0, False, torch.float32

    def __init__(self) -> None:
        self.embedding = types.SimpleNamespace(weight=torch.nn.Parameter(torch.randn(20, HIDDEN).half()))

    def forward(self, x: Any, params: Any, out_dtype: Any = None) -> Any:
        params["stock"] = True
        return self.embedding.weight[x].to(out_dtype or torch.float32)


@pytest.fixture
def pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory cannot be pinned here."""
    monkeypatch.setattr(decode_blocks, "pinned", torch.empty)


@pytest.mark.usefixtures("pageable")
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS])
def test_tokens_are_looked_up_as_stock_does_it(rows: int) -> None:
    """The same rows as float32, in memory of their own for each number of rows; a prompt goes through stock."""
    model, ext, _ = make()
    embedding = Embedding()
    model.fwd_modules.insert(0, (embedding, 0, 0))
    ids = torch.arange(3, 3 + rows)[:, None]
    want = embedding.forward(ids, {})
    with Replacements() as replaced, torch.inference_mode():
        assert decode_blocks.install(replaced, model, ext, Experts) == (3, [])
        params: dict[str, Any] = {DECODE: rows}
        got = embedding.forward(ids, params)
        assert (got.dtype, got.shape, "stock" in params) == (torch.float32, (rows, 1, HIDDEN), False)
        assert torch.equal(got, want)
        prompt: dict[str, Any] = {}
        assert torch.equal(embedding.forward(ids.T, prompt), want.transpose(0, 1))
        assert prompt == {"stock": True}


@pytest.mark.usefixtures("pageable")
@pytest.mark.parametrize(("name", "value"), [("multiplier", 2.0), ("normalize", True), ("out_dtype", torch.float16)])
def test_an_embedding_that_does_more_stays_stocks(name: str, value: Any) -> None:
    """It is named."""
    model, ext, _ = make()
    embedding = Embedding()
    setattr(embedding, name, value)
    model.fwd_modules.insert(0, (embedding, 0, 0))
    with Replacements() as replaced:
        assert decode_blocks.install(replaced, model, ext, Experts) == (3, ["embed: its rows are scaled, or of another type"])
        assert "forward" not in vars(embedding)


BLOCKS = [
    ("attn_resid_scalar", 2.0, "it has attn_resid_scalar"),
    ("out_dtype", torch.float16, "it has out_dtype"),
    ("mlp_hc", None, "it has no mlp_hc"),
    ("attn_hc", types.SimpleNamespace(hc_mult=4, hidden_size=8), "its mixer is no hyper-connection"),
    ("attn_norm", types.SimpleNamespace(), "its norm is no RMSNorm"),
]
LAYERS = [
    ("bc", None, "no compiled decode kernels"),
    ("latent_in", object(), "it has one of"),
    ("cpu_offload", True, "goes another way"),
    ("num_local_experts", 2, "split over devices"),
    ("bc_sh_exp", False, "its shared expert"),
    ("expert_size", 4, "another width"),
    ("routing_gate", None, "its router is elsewhere"),
]


@pytest.mark.parametrize(("name", "value", "reason"), BLOCKS)
def test_a_block_of_another_kind_stays_stocks(name: str, value: Any, reason: str) -> None:
    """It is named with the reason; the others are patched."""
    model, ext, blocks = make()
    setattr(blocks[1], name, value)
    with Replacements() as replaced:
        patched, reasons = decode_blocks.install(replaced, model, ext, Experts)
        assert "forward" not in vars(blocks[1])
    assert patched == 2
    assert len(reasons) == 1
    assert reasons[0].startswith("block 0.5: ")
    assert reason in reasons[0]


@pytest.mark.parametrize(("name", "value", "reason"), LAYERS)
def test_experts_of_another_kind_stay_stocks(name: str, value: Any, reason: str) -> None:
    """The block around them is patched all the same, and calls stock's forward pass."""
    model, ext, blocks = make()
    setattr(blocks[1].mlp, name, value)
    with Replacements() as replaced:
        patched, reasons = decode_blocks.install(replaced, model, ext, Experts)
        assert "forward" not in vars(blocks[1].mlp)
        assert "forward" in vars(blocks[1])
    assert patched == 3
    assert len(reasons) == 1
    assert reason in reasons[0]
