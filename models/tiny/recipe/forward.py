"""A training forward pass over transformers' Glm5Next modules: same function, static shapes, few kernels.

It reads the parameters of a stock Glm5NextForConditionalGeneration, so what is trained here loads there unchanged.
Differences from the stock forward: no cache, right padding only, experts evaluated densely by two matrix products,
KDA in chunks of 16 with its inner products factored, no DSA indexer (it selects every key below index_topk).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from . import kernels

CHUNK = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def mix_weights(flat: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Hyper-connection weights of flat streams [T, 4 * D]: pre [T, 4], post [T, 4], comb [T, 4, 4] before Sinkhorn."""
    logits = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(logits[:, :4] * scale[0] + base[:4]) + hc_eps
    post = 2 * torch.sigmoid(logits[:, 4:8] * scale[1] + base[4:8])
    comb = torch.softmax((logits[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4), dim=-1) + hc_eps
    return pre, post, comb


def short_conv(qkv: Tensor, taps: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Causal depthwise convolution of [B, S, 3 * H * D] with taps [3 * H * D, 4], SiLU, unit-length query and key."""
    length = qkv.shape[1]
    padded = F.pad(qkv, (0, 0, 3, 0))
    mixed = padded[:, :length] * taps[:, 0]
    for i in range(1, 4):
        mixed = mixed + padded[:, i : i + length] * taps[:, i]
    query, key, value = (t.unflatten(-1, (heads, dim)) for t in F.silu(mixed).float().split(heads * dim, dim=-1))
    query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) * dim**-0.5
    return query, key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6), value


def forget_gate(raw: Tensor, dt_bias: Tensor, a_log: Tensor, bound: float, heads: int) -> Tensor:
    """Log decay [B, S, H, D] from the gate's projection [B, S, H * D]."""
    return bound * torch.sigmoid(a_log.exp().view(-1, 1) * (raw.float() + dt_bias).unflatten(-1, (heads, -1)))


def chunk_factors(query: Tensor, key: Tensor, value: Tensor, total: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Decay-scaled inputs of one chunk [..., C, D] whose cumulative log decay is `total`."""
    # exp(total_i - total_j) is split at the chunk's middle: a decay of -5 per token keeps both factors below e^40.
    middle = total[:, :, CHUNK // 2 - 1 : CHUNK // 2]
    last = total[:, :, -1:]
    up, from_start = (total - middle).exp(), total.exp()
    return (
        query * up, key * (middle - total).exp(), key * beta * up, value * beta, key * beta * from_start,
        key * (last - total).exp(), last.squeeze(2).exp(), query * from_start,
    )  # fmt: skip


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps) * torch.sigmoid(gate.float())


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert_activation(hidden: Tensor, weights: Tensor, limit: float) -> Tensor:
    """SwiGLU of every expert [T, E, 2, I], scaled by routing weights [T, E]; returns [T, E * I]."""
    return (swiglu(hidden[:, :, 0], hidden[:, :, 1], limit) * weights.unsqueeze(-1).to(hidden.dtype)).flatten(1)


@dataclass(frozen=True)
class Ops:
    """The element-wise pieces; `compiled` fuses each into a few kernels."""

    rms_norm: Callable[..., Tensor] = rms_norm
    mix_weights: Callable[..., tuple[Tensor, Tensor, Tensor]] = mix_weights
    short_conv: Callable[..., tuple[Tensor, Tensor, Tensor]] = short_conv
    forget_gate: Callable[..., Tensor] = forget_gate
    chunk_factors: Callable[..., tuple[Tensor, ...]] = chunk_factors
    gated_norm: Callable[..., Tensor] = gated_norm
    swiglu: Callable[..., Tensor] = swiglu
    expert_activation: Callable[..., Tensor] = expert_activation

    @staticmethod
    def compiled() -> Ops:
        plain = Ops()
        return Ops(**{f.name: torch.compile(getattr(plain, f.name), dynamic=True) for f in fields(plain)})


@dataclass
class Precision:
    """How matrix products are computed.

    `prepared` maps a parameter's id to the tensor that stands for it in this step: the trainer puts copies in the
    compute dtype there, with the noise that stands for 3-bit rounding. `touched` records (parameter, is quantised) on use.
    """

    dtype: torch.dtype = torch.float32
    ops: Ops = field(default_factory=Ops)
    prepared: dict[int, Tensor] = field(default_factory=dict)
    touched: dict[int, tuple[Tensor, bool]] = field(default_factory=dict)

    def weight(self, w: Tensor, quantised: bool = True) -> Tensor:
        """A matrix as this step sees it."""
        self.touched.setdefault(id(w), (w, quantised))
        ready = self.prepared.get(id(w))
        return w.to(self.dtype) if ready is None else ready

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.weight(w))

    def exact(self, x: Tensor, w: Tensor) -> Tensor:
        """A matrix that the conversion leaves in 16 bits (or at 6 bits, the head)."""
        return F.linear(x.to(self.dtype), self.weight(w, quantised=False))


def mix(hc: Any, streams: Tensor, eps: float, p: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """Hyper-connection of [T, 4, D] streams: (post [T, 4], comb [T, 4, 4], collapsed [T, D])."""
    pre, post, comb = p.ops.mix_weights(streams.flatten(1), hc.fn, hc.base, hc.scale, eps, hc.hc_eps)
    comb = kernels.sinkhorn(comb, hc.hc_sinkhorn_iters, hc.hc_eps)
    return post, comb, kernels.collapse(pre, streams)


def kda(attn: Any, x: Tensor, p: Precision) -> Tensor:
    """Kimi delta attention over x [B, S, D], S a multiple of 16."""
    batch, length, _ = x.shape
    heads, dim = attn.num_heads, attn.head_dim
    x = x.to(p.dtype)
    qkv = torch.cat([p.linear(x, m.weight) for m in (attn.q_proj, attn.k_proj, attn.v_proj)], dim=-1)
    query, key, value = p.ops.short_conv(qkv, attn.conv1d.weight.squeeze(1).to(qkv.dtype), heads, dim)
    gate = attn.forget_gate
    raw = p.exact(p.exact(x, gate.f_a_proj.weight), gate.f_b_proj.weight)
    decay = p.ops.forget_gate(raw, gate.dt_bias, gate.A_log, gate.safe_gate_lower_bound, heads)
    beta = torch.sigmoid(p.exact(x, attn.b_proj.weight).float()).unsqueeze(-1)
    out = _chunked_delta(query, key, value, decay, beta, p)
    out_gate = p.exact(p.exact(x, attn.g_a_proj.weight), attn.g_b_proj.weight).unflatten(-1, (heads, dim))
    out = p.ops.gated_norm(out, attn.o_norm.weight, out_gate, attn.o_norm.variance_epsilon)
    return p.linear(out.reshape(batch, length, heads * dim), attn.o_proj.weight)


def _chunked_delta(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, p: Precision) -> Tensor:
    """The gated delta rule on [B, S, H, D] inputs (beta [B, S, H, 1]) from a zero state."""
    batch, length, heads, dim = query.shape

    def chunked(t: Tensor) -> Tensor:  # -> [N, B * H, C, D]
        t = t.reshape(batch, length // CHUNK, CHUNK, heads, -1).permute(1, 0, 3, 2, 4)
        return t.reshape(length // CHUNK, batch * heads, CHUNK, -1)

    query, key, value, decay, beta = (chunked(t) for t in (query, key, value, decay, beta))
    query_up, key_down, key_up, value_in, key_in, key_out, chunk_decay, query_in = p.ops.chunk_factors(
        query, key, value, decay.cumsum(dim=-2), beta
    )
    key_down = key_down.transpose(-1, -2)
    within = (query_up @ key_down).tril()
    inverse = kernels.UnitLowerInverse.apply(-(key_up @ key_down).tril(-1))
    states, v_new = kernels.ChunkScan.apply(inverse @ value_in, inverse @ key_in, key_out, chunk_decay)
    out = query_in @ states + within @ v_new
    out = out.reshape(length // CHUNK, batch, heads, CHUNK, dim).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, length, heads, dim)


def mla(attn: Any, x: Tensor, p: Precision) -> Tensor:
    """NoPE multi-head latent attention over x [B, S, D], causal."""
    batch, length, _ = x.shape
    heads, nope = attn.num_heads, attn.qk_nope_head_dim
    eps = attn.q_a_layernorm.variance_epsilon
    latent_q = p.ops.rms_norm(p.linear(x, attn.q_a_proj.weight), attn.q_a_layernorm.weight, eps)
    query = p.linear(latent_q, attn.q_b_proj.weight).view(batch, length, heads, -1).transpose(1, 2)
    latent = p.ops.rms_norm(p.linear(x, attn.kv_a_proj_with_mqa.weight), attn.kv_a_layernorm.weight, eps)
    kv = p.exact(latent, attn.kv_b_proj.weight).view(batch, length, heads, -1).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, kv[..., :nope], kv[..., nope:], is_causal=True, scale=attn.scaling)
    return p.linear(out.transpose(1, 2).reshape(batch, length, -1), attn.o_proj.weight)


def mlp(module: Any, x: Tensor, p: Precision) -> Tensor:
    gate, up = p.linear(x, module.gate_proj.weight), p.linear(x, module.up_proj.weight)
    return p.linear(p.ops.swiglu(gate, up, module.swiglu_limit), module.down_proj.weight)


def moe(module: Any, x: Tensor, p: Precision, load: Tensor | None) -> Tensor:
    """The MoE block on x [T, D]; every expert sees every token, unrouted ones with weight 0. Adds picks to load [E]."""
    router, experts = module.gate, module.experts
    scores = F.linear(x.float(), router.weight).sigmoid()
    picks = (scores.detach() + router.e_score_correction_bias).topk(router.top_k, dim=-1).indices
    chosen = torch.zeros_like(scores).scatter(1, picks, 1.0)
    weights = scores * chosen
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    if load is not None:
        load += chosen.detach().sum(0)
    num, inner = experts.num_experts, experts.intermediate_dim
    hidden = F.linear(x.to(p.dtype), p.weight(experts.gate_up_proj).flatten(0, 1)).view(-1, num, 2, inner)
    hidden = p.ops.expert_activation(hidden, weights, experts.swiglu_limit)
    down = p.weight(experts.down_proj).transpose(1, 2).reshape(num * inner, -1)
    return hidden @ down + mlp(module.shared_experts, x, p)


def hidden_states(model: Any, ids: Tensor, p: Precision, loads: list[Tensor] | None = None) -> Tensor:
    """Final normed hidden states [B, S, D] of ids [B, S] (right-padded)."""
    text = model.model.language_model
    eps = model.config.text_config.rms_norm_eps
    batch, length = ids.shape
    streams = F.embedding(ids, text.embed_tokens.weight).view(-1, 1, text.config.hidden_size).expand(-1, kernels.STREAMS, -1).contiguous()
    sparse = iter(loads) if loads is not None else None
    for layer in text.layers:
        post, comb, x = mix(layer.attn_hc, streams, eps, p)
        x = p.ops.rms_norm(x, layer.input_layernorm.weight, eps).view(batch, length, -1)
        y = kda(layer.self_attn, x, p) if layer.block_type == "linear_attention" else mla(layer.self_attn, x, p)
        streams = kernels.expand(post, comb, y.flatten(0, 1), streams)
        post, comb, x = mix(layer.ffn_hc, streams, eps, p)
        x = p.ops.rms_norm(x, layer.post_attention_layernorm.weight, eps)
        routed = hasattr(layer.mlp, "experts")
        y = moe(layer.mlp, x, p, next(sparse) if sparse is not None else None) if routed else mlp(layer.mlp, x, p)
        streams = kernels.expand(post, comb, y, streams)
    return p.ops.rms_norm(streams.mean(1), text.norm.weight, eps).view(batch, length, -1)


def logits_at(model: Any, ids: Tensor, positions: Tensor, p: Precision, loads: list[Tensor] | None = None) -> Tensor:
    """Logits [K, V] in fp32 at flat positions [K] of ids [B, S]."""
    hidden = hidden_states(model, ids, p, loads).flatten(0, 1)
    return p.exact(hidden.index_select(0, positions), model.lm_head.weight).float()
