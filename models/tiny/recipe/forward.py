"""A training forward pass over transformers' Glm5Next modules: same function, static shapes, few kernels.

It reads the parameters of a stock Glm5NextForConditionalGeneration, so what is trained here loads there unchanged.
Differences from the stock forward: no cache, right padding only, experts evaluated densely by two matrix products,
KDA in chunks of 16 with its inner products factored, no DSA indexer (it selects every key below index_topk).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from . import kernels

CHUNK = 16


@dataclass
class Precision:
    """How matrix products are computed: dtype, and the noise that stands for 3-bit rounding.

    noise is the standard deviation of weight noise relative to the weight's own, applied to matrices that the
    conversion quantises.
    """

    dtype: torch.dtype = torch.float32
    noise: Tensor | None = None

    def weight(self, w: Tensor) -> Tensor:
        """A matrix as this step sees it."""
        if self.noise is not None:
            scale = w.detach().flatten(-2).std(dim=-1)[..., None, None] if w.dim() > 2 else w.detach().std()
            w = w + torch.randn_like(w) * (scale * self.noise)
        return w.to(self.dtype)

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.weight(w))

    def exact(self, x: Tensor, w: Tensor) -> Tensor:
        """A matrix that stays fp16 in the checkpoint: no noise."""
        return F.linear(x.to(self.dtype), w.to(self.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def mix(hc: Any, streams: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Hyper-connection weights for [T, 4, D] streams: (post [T, 4], comb [T, 4, 4], collapsed [T, D])."""
    flat = streams.flatten(1)
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    logits = F.linear(flat, hc.fn) * scale
    gains = torch.cat([hc.scale[i].expand(width) for i, width in enumerate((4, 4, 16))])
    logits = logits * gains + hc.base
    pre = torch.sigmoid(logits[:, :4]) + hc.hc_eps
    post = 2 * torch.sigmoid(logits[:, 4:8])
    comb = torch.softmax(logits[:, 8:].reshape(-1, 4, 4), dim=-1) + hc.hc_eps
    comb = kernels.sinkhorn(comb, hc.hc_sinkhorn_iters, hc.hc_eps)
    return post, comb, kernels.collapse(pre, streams)


def kda(attn: Any, x: Tensor, p: Precision) -> Tensor:
    """Kimi delta attention over x [B, S, D], S a multiple of 16."""
    batch, length, _ = x.shape
    heads, dim = attn.num_heads, attn.head_dim
    qkv = torch.cat([p.linear(x, m.weight) for m in (attn.q_proj, attn.k_proj, attn.v_proj)], dim=-1)
    padded = F.pad(qkv, (0, 0, 3, 0))
    taps = attn.conv1d.weight.squeeze(1).to(qkv.dtype)
    qkv = F.silu(sum(padded[:, i : i + length] * taps[:, i] for i in range(4))).float()
    query, key, value = (t.unflatten(-1, (heads, dim)) for t in qkv.split(heads * dim, dim=-1))
    gate = attn.forget_gate
    raw = p.exact(p.exact(x, gate.f_a_proj.weight), gate.f_b_proj.weight).float() + gate.dt_bias
    decay = gate.safe_gate_lower_bound * torch.sigmoid(gate.A_log.exp().view(-1, 1) * raw.unflatten(-1, (heads, dim)))
    beta = torch.sigmoid(p.exact(x, attn.b_proj.weight).float()).unsqueeze(-1)
    query, key = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (query, key))
    out = _chunked_delta(query * dim**-0.5, key, value, decay, beta)
    out_gate = p.exact(p.exact(x, attn.g_a_proj.weight), attn.g_b_proj.weight).float().unflatten(-1, (heads, dim))
    out = rms_norm(out, attn.o_norm.weight, attn.o_norm.variance_epsilon) * torch.sigmoid(out_gate)
    return p.linear(out.reshape(batch, length, heads * dim), attn.o_proj.weight)


def _chunked_delta(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule on [B, S, H, D] inputs (beta [B, S, H, 1]) from a zero state."""
    batch, length, heads, dim = query.shape

    def chunked(t: Tensor) -> Tensor:  # -> [N, B * H, C, D]
        t = t.reshape(batch, length // CHUNK, CHUNK, heads, -1).permute(1, 0, 3, 2, 4)
        return t.reshape(length // CHUNK, batch * heads, CHUNK, -1)

    query, key, value, decay, beta = (chunked(t) for t in (query, key, value, decay, beta))
    total = decay.cumsum(dim=-2)
    # exp(total_i - total_j) is split at the chunk's middle: a decay of -5 per token keeps both factors below e^40.
    middle = total[:, :, CHUNK // 2 - 1 : CHUNK // 2]
    up, down = (total - middle).exp(), (middle - total).exp()
    key_down = (key * down).transpose(-1, -2)
    within = ((query * up) @ key_down).tril()
    inverse = kernels.UnitLowerInverse.apply(-((key * beta * up) @ key_down).tril(-1))
    from_start = total.exp()
    last = total[:, :, -1:]
    states, v_new = kernels.ChunkScan.apply(
        inverse @ (value * beta),
        inverse @ (key * beta * from_start),
        key * (last - total).exp(),
        last.squeeze(2).exp(),
    )
    out = (query * from_start) @ states + within @ v_new
    out = out.reshape(length // CHUNK, batch, heads, CHUNK, dim).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, length, heads, dim)


def mla(attn: Any, x: Tensor, p: Precision) -> Tensor:
    """NoPE multi-head latent attention over x [B, S, D], causal."""
    batch, length, _ = x.shape
    heads, nope = attn.num_heads, attn.qk_nope_head_dim
    eps = attn.q_a_layernorm.variance_epsilon
    latent_q = rms_norm(p.linear(x, attn.q_a_proj.weight), attn.q_a_layernorm.weight, eps)
    query = p.linear(latent_q, attn.q_b_proj.weight).view(batch, length, heads, -1).transpose(1, 2)
    latent = rms_norm(p.linear(x, attn.kv_a_proj_with_mqa.weight), attn.kv_a_layernorm.weight, eps)
    kv = p.exact(latent, attn.kv_b_proj.weight).view(batch, length, heads, -1).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, kv[..., :nope], kv[..., nope:], is_causal=True, scale=attn.scaling)
    return p.linear(out.transpose(1, 2).reshape(batch, length, -1), attn.o_proj.weight)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def mlp(module: Any, x: Tensor, p: Precision) -> Tensor:
    gate, up = p.linear(x, module.gate_proj.weight), p.linear(x, module.up_proj.weight)
    return p.linear(swiglu(gate, up, module.swiglu_limit), module.down_proj.weight)


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
    hidden = swiglu(hidden[:, :, 0], hidden[:, :, 1], experts.swiglu_limit) * weights.unsqueeze(-1).to(p.dtype)
    down = p.weight(experts.down_proj).transpose(1, 2).reshape(num * inner, -1)
    return hidden.flatten(1) @ down + mlp(module.shared_experts, x, p)


def hidden_states(model: Any, ids: Tensor, p: Precision, loads: list[Tensor] | None = None) -> Tensor:
    """Final normed hidden states [B, S, D] of ids [B, S] (right-padded)."""
    text = model.model.language_model
    eps = model.config.text_config.rms_norm_eps
    batch, length = ids.shape
    streams = F.embedding(ids, text.embed_tokens.weight).view(-1, 1, text.config.hidden_size).expand(-1, kernels.STREAMS, -1).contiguous()
    sparse = iter(loads) if loads is not None else None
    for layer in text.layers:
        post, comb, x = mix(layer.attn_hc, streams, eps)
        x = rms_norm(x, layer.input_layernorm.weight, eps).view(batch, length, -1)
        y = kda(layer.self_attn, x, p) if layer.block_type == "linear_attention" else mla(layer.self_attn, x, p)
        streams = kernels.expand(post, comb, y.flatten(0, 1), streams)
        post, comb, x = mix(layer.ffn_hc, streams, eps)
        x = rms_norm(x, layer.post_attention_layernorm.weight, eps)
        if hasattr(layer.mlp, "experts"):
            y = moe(layer.mlp, x, p, next(sparse) if sparse is not None else None)
        else:
            y = mlp(layer.mlp, x, p)
        streams = kernels.expand(post, comb, y, streams)
    return rms_norm(streams.mean(1), text.norm.weight, eps).view(batch, length, -1)


def logits_at(model: Any, ids: Tensor, positions: Tensor, p: Precision, loads: list[Tensor] | None = None) -> Tensor:
    """Logits [K, V] in fp32 at flat positions [K] of ids [B, S]."""
    hidden = hidden_states(model, ids, p, loads).flatten(0, 1)
    return p.exact(hidden.index_select(0, positions), model.lm_head.weight).float()
