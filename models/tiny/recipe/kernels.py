# ruff: noqa: N803  (Triton constants are upper case)
"""The hyper-connection and KDA pieces of the training step that stock autograd runs too slowly.

Each has a plain PyTorch reference; the Triton versions are used on CUDA and give the same values and gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installs have no triton; the references below are used
    triton = None

STREAMS = 4


def sinkhorn_reference(comb: Tensor, iters: int, eps: float) -> Tensor:
    """Make [T, 4, 4] positive matrices doubly stochastic: columns first, then (rows, columns) iters - 1 times."""
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def collapse_reference(pre: Tensor, streams: Tensor) -> Tensor:
    """[T, 4] weights and [T, 4, D] streams -> [T, D]."""
    return (pre.unsqueeze(-1) * streams).sum(dim=-2)


def expand_reference(post: Tensor, comb: Tensor, y: Tensor, streams: Tensor) -> Tensor:
    """Put a sublayer's output y [T, D] back: post [T, 4] * y + comb^T [T, 4, 4] @ streams [T, 4, D]."""
    return post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ streams


if triton is not None:

    @triton.jit
    def _sinkhorn_forward(x_ptr, y_ptr, sums_ptr, num, eps, HALVES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        at = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        ok = (t < num)[:, None, None]
        x = tl.load(x_ptr + at, mask=ok, other=1.0)
        sum_at = t[:, None] * (HALVES * 4) + i[None, :]
        for half in range(HALVES):
            if half % 2 == 0:
                s = tl.sum(x, axis=1) + eps
                x = x / s[:, None, :]
            else:
                s = tl.sum(x, axis=2) + eps
                x = x / s[:, :, None]
            tl.store(sums_ptr + sum_at + half * 4, s, mask=(t < num)[:, None])
        tl.store(y_ptr + at, x, mask=ok)

    @triton.jit
    def _sinkhorn_backward(y_ptr, sums_ptr, dy_ptr, dx_ptr, num, HALVES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        at = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        ok = (t < num)[:, None, None]
        y = tl.load(y_ptr + at, mask=ok, other=1.0)
        d = tl.load(dy_ptr + at, mask=ok, other=0.0)
        sum_at = t[:, None] * (HALVES * 4) + i[None, :]
        for step in range(HALVES):
            half = HALVES - 1 - step
            s = tl.load(sums_ptr + sum_at + half * 4, mask=(t < num)[:, None], other=1.0)
            if half % 2 == 0:
                d = (d - tl.sum(d * y, axis=1)[:, None, :]) / s[:, None, :]
                y = y * s[:, None, :]
            else:
                d = (d - tl.sum(d * y, axis=2)[:, :, None]) / s[:, :, None]
                y = y * s[:, :, None]
        tl.store(dx_ptr + at, d, mask=ok)

    @triton.jit
    def _collapse_forward(pre_ptr, s_ptr, y_ptr, D: tl.constexpr):  # type: ignore
        t = tl.program_id(0).to(tl.int64)
        h = tl.arange(0, 4)
        c = tl.arange(0, D)
        s = tl.load(s_ptr + t * 4 * D + h[:, None] * D + c[None, :])
        pre = tl.load(pre_ptr + t * 4 + h)
        tl.store(y_ptr + t * D + c, tl.sum(s * pre[:, None], axis=0))

    @triton.jit
    def _collapse_backward(pre_ptr, s_ptr, dy_ptr, dpre_ptr, ds_ptr, D: tl.constexpr):  # type: ignore
        t = tl.program_id(0).to(tl.int64)
        h = tl.arange(0, 4)
        c = tl.arange(0, D)
        at = t * 4 * D + h[:, None] * D + c[None, :]
        s = tl.load(s_ptr + at)
        pre = tl.load(pre_ptr + t * 4 + h)
        dy = tl.load(dy_ptr + t * D + c)
        tl.store(dpre_ptr + t * 4 + h, tl.sum(s * dy[None, :], axis=1))
        tl.store(ds_ptr + at, pre[:, None] * dy[None, :])

    @triton.jit
    def _expand_forward(post_ptr, comb_ptr, y_ptr, s_ptr, out_ptr, D: tl.constexpr):  # type: ignore
        t = tl.program_id(0).to(tl.int64)
        h = tl.arange(0, 4)
        c = tl.arange(0, D)
        y = tl.load(y_ptr + t * D + c).to(tl.float32)
        post = tl.load(post_ptr + t * 4 + h)
        out = post[:, None] * y[None, :]
        for i in tl.static_range(4):
            s = tl.load(s_ptr + t * 4 * D + i * D + c)
            w = tl.load(comb_ptr + t * 16 + i * 4 + h)
            out += w[:, None] * s[None, :]
        tl.store(out_ptr + t * 4 * D + h[:, None] * D + c[None, :], out)

    @triton.jit
    def _expand_backward(post_ptr, comb_ptr, y_ptr, s_ptr, do_ptr, dpost_ptr, dcomb_ptr, dy_ptr, ds_ptr, D: tl.constexpr):  # type: ignore
        t = tl.program_id(0).to(tl.int64)
        h = tl.arange(0, 4)
        c = tl.arange(0, D)
        do = tl.load(do_ptr + t * 4 * D + h[:, None] * D + c[None, :])
        y = tl.load(y_ptr + t * D + c).to(tl.float32)
        post = tl.load(post_ptr + t * 4 + h)
        tl.store(dpost_ptr + t * 4 + h, tl.sum(do * y[None, :], axis=1))
        tl.store(dy_ptr + t * D + c, tl.sum(do * post[:, None], axis=0))
        for i in tl.static_range(4):
            s = tl.load(s_ptr + t * 4 * D + i * D + c)
            w = tl.load(comb_ptr + t * 16 + i * 4 + h)
            tl.store(dcomb_ptr + t * 16 + i * 4 + h, tl.sum(do * s[None, :], axis=1))
            tl.store(ds_ptr + t * 4 * D + i * D + c, tl.sum(do * w[:, None], axis=0))


class _Sinkhorn(Function):
    @staticmethod
    def forward(ctx: Any, comb: Tensor, iters: int, eps: float) -> Tensor:
        num, halves, block = comb.shape[0], 2 * iters - 1, 64
        comb = comb.contiguous()
        out = torch.empty_like(comb)
        sums = torch.empty(num, halves, 4, device=comb.device)
        _sinkhorn_forward[(triton.cdiv(num, block),)](comb, out, sums, num, eps, HALVES=halves, BLOCK=block)
        ctx.save_for_backward(out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        out, sums = ctx.saved_tensors
        num, halves, block = out.shape[0], sums.shape[1], 64
        result = torch.empty_like(out)
        _sinkhorn_backward[(triton.cdiv(num, block),)](out, sums, grad.contiguous(), result, num, HALVES=halves, BLOCK=block)
        return result, None, None


class _Collapse(Function):
    @staticmethod
    def forward(ctx: Any, pre: Tensor, streams: Tensor) -> Tensor:
        num, _, dim = streams.shape
        pre = pre.contiguous()
        out = torch.empty(num, dim, device=streams.device)
        _collapse_forward[(num,)](pre, streams, out, D=dim)
        ctx.save_for_backward(pre, streams)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        pre, streams = ctx.saved_tensors
        dpre, dstreams = torch.empty_like(pre), torch.empty_like(streams)
        _collapse_backward[(streams.shape[0],)](pre, streams, grad.contiguous(), dpre, dstreams, D=streams.shape[2])
        return dpre, dstreams


class _Expand(Function):
    @staticmethod
    def forward(ctx: Any, post: Tensor, comb: Tensor, y: Tensor, streams: Tensor) -> Tensor:
        post, comb, y = post.contiguous(), comb.contiguous(), y.contiguous()
        out = torch.empty_like(streams)
        _expand_forward[(streams.shape[0],)](post, comb, y, streams, out, D=streams.shape[2])
        ctx.save_for_backward(post, comb, y, streams)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        post, comb, y, streams = ctx.saved_tensors
        dpost, dcomb, dy, dstreams = (torch.empty_like(x) for x in (post, comb, y, streams))
        _expand_backward[(streams.shape[0],)](post, comb, y, streams, grad.contiguous(), dpost, dcomb, dy, dstreams, D=streams.shape[2])
        return dpost, dcomb, dy, dstreams


def sinkhorn(comb: Tensor, iters: int, eps: float) -> Tensor:
    if comb.is_cuda:
        return _Sinkhorn.apply(comb, iters, eps)  # type: ignore[no-any-return]
    return sinkhorn_reference(comb, iters, eps)


def collapse(pre: Tensor, streams: Tensor) -> Tensor:
    if streams.is_cuda:
        return _Collapse.apply(pre, streams)  # type: ignore[no-any-return]
    return collapse_reference(pre, streams)


def expand(post: Tensor, comb: Tensor, y: Tensor, streams: Tensor) -> Tensor:
    if streams.is_cuda:
        return _Expand.apply(post, comb, y, streams)  # type: ignore[no-any-return]
    return expand_reference(post, comb, y.float(), streams)


class UnitLowerInverse(Function):
    """(I - A)^-1 for strictly lower triangular A [..., C, C], C a power of two, in full fp32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        with _full_precision():
            size = a.shape[-1]
            power = a
            result = a + torch.eye(size, device=a.device)
            covered = 2
            while covered < size:  # (I + A)(I + A^2)(I + A^4)...: A is nilpotent
                power = power @ power
                result = result + result @ power
                covered *= 2
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        with _full_precision():
            transposed = result.transpose(-1, -2)
            return (transposed @ grad @ transposed).tril(-1)


class _full_precision:  # noqa: N801  (a context manager used like a function)
    """No tf32 inside."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *exc: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


class ChunkScan(Function):
    """The sequential part of KDA: one 128 x 128 state per (row, head) carried from chunk to chunk.

    forward(v [N, R, C, D], k_in [N, R, C, D], k_out [N, R, C, D], decay [N, R, D]) returns
    (states [N, R, D, D] before each chunk, v_new [N, R, C, D]) with
    v_new[n] = v[n] - k_in[n] @ state[n] and state[n+1] = decay[n] * state[n] + k_out[n]^T @ v_new[n].
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, k_in: Tensor, k_out: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        num, rows, _, dim = v.shape
        states = torch.empty(num, rows, dim, dim, device=v.device)
        v_new = torch.empty_like(v)
        states[0].zero_()
        for n in range(num):
            torch.baddbmm(v[n], k_in[n], states[n], alpha=-1, out=v_new[n])
            if n + 1 < num:
                torch.baddbmm(states[n] * decay[n].unsqueeze(-1), k_out[n].transpose(1, 2), v_new[n], out=states[n + 1])
        ctx.save_for_backward(k_in, k_out, decay, states, v_new)
        return states, v_new

    @staticmethod
    def backward(ctx: Any, g_states: Tensor, g_v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        k_in, k_out, decay, states, v_new = ctx.saved_tensors
        num = k_in.shape[0]
        g_next = torch.zeros_like(states)  # gradient of the state after each chunk
        g_new = torch.empty_like(v_new)
        for n in reversed(range(num)):
            torch.baddbmm(g_v[n], k_out[n], g_next[n], out=g_new[n])
            if n > 0:
                carried = torch.addcmul(g_states[n], decay[n].unsqueeze(-1), g_next[n])
                torch.baddbmm(carried, k_in[n].transpose(1, 2), g_new[n], alpha=-1, out=g_next[n - 1])
        g_k_in = -(g_new @ states.transpose(-1, -2))
        g_k_out = v_new @ g_next.transpose(-1, -2)
        g_decay = (states * g_next).sum(dim=-1)
        return g_new, g_k_in, g_k_out, g_decay
