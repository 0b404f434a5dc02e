"""The forward pass of glm5_next on the CPU: the dense part in kernels/cpu/text_ops*, the routed experts wherever the tier engine puts them.

It computes what transformers' glm5_next computes (within 1e-3 in the logits, which tests hold it to) with one difference that the
checkpoint format asks for: SwiGLU clamps after the activation. Selecting keys by the indexer is left out, because the served context never
exceeds index_topk, where the selection keeps every key.

The layers are written down once, as a list of calls; a pass runs the list without Python. So the engine's thread takes the GIL a few times
a token, and not after each of a hundred calls, while the threads that talk to clients want it too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.python import text_ops, text_pass
from kernels.python.text_pass import Op, TextPass
from services.gpu_worker.backends.cpu_state import StreamState
from services.gpu_worker.backends.cpu_weights import KdaLayer, Layer, MlaLayer, Mlp, Moe, Packed, TextWeights

Array = NDArray[np.float32]


class RoutedExperts(Protocol):
    """What evaluates the routed experts: kernels.python.tier.TierEngine, or a test's own arithmetic.

    One that has `native() -> kernels.python.text_pass.Experts` is called without Python.
    """

    def forward_ptr(self, layer: int, rows: int, top_k: int, x: int, sel: int, weights: int, *, prefill: bool, out: int) -> None:
        """out[t] = sum_k weights[t, k] * expert[sel[t, k]](x[t]).

        Args:
            layer: the arena's layer index.
            rows: tokens.
            top_k: picks of a token.
            x: address of fp32 [rows, hidden].
            sel: address of int64 [rows, top_k].
            weights: address of fp32 [rows, top_k].
            prefill: more than decode steps: the CPU lane stays out.
            out: address of fp32 [rows, hidden], written.
        """
        ...


class Buffer:
    """Scratch memory whose address is looked up once."""

    __slots__ = ("address", "array")

    def __init__(self, *shape: int, dtype: type = np.float32) -> None:
        self.array: NDArray[np.float32] = np.zeros(shape, dtype)
        self.address = text_ops.address(self.array)


class Workspace:
    """Scratch for a pass of up to `tokens` rows."""

    def __init__(self, weights: TextWeights, tokens: int) -> None:
        config = weights.config
        streams, hidden = config.hc_mult, config.hidden_size
        kda = config.linear_num_heads * config.linear_head_dim
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        wide_in = max([layer.attention.inputs.outputs for layer in weights.layers])
        inter = max(config.intermediate_size, config.moe_intermediate_size * config.n_shared_experts)
        self.tokens = tokens
        self.streams = Buffer(tokens, streams, hidden)
        self.post = Buffer(tokens, streams)
        self.comb = Buffer(tokens, streams, streams)
        self.x = Buffer(tokens, hidden)
        self.y = Buffer(tokens, hidden)
        self.proj = Buffer(tokens, wide_in)
        self.forget = Buffer(tokens, kda)
        self.gate = Buffer(tokens, kda)
        self.query = Buffer(tokens, heads * rank)
        self.mixed = Buffer(tokens, max(kda, heads * rank))
        self.gate_up = Buffer(tokens, 2 * inter)
        self.inner = Buffer(tokens, inter)
        self.selected = Buffer(tokens, config.num_experts_per_tok, dtype=np.int64)
        self.weights = Buffer(tokens, config.num_experts_per_tok)
        self.routed = Buffer(tokens, hidden)


def segments_of(states: Sequence[StreamState], counts: NDArray[np.int64]) -> text_pass.Segments:
    """Where the rows of a pass belong.

    Args:
        states: the streams.
        counts: int64, new tokens of each.
    """
    past = np.array([state.length for state in states], np.int64)
    if len(states) == 1:
        return text_pass.Segments(counts, past, *(table[:, None] for table in states[0].tables))
    tables = zip(*(state.tables for state in states), strict=True)
    return text_pass.Segments(counts, past, *(np.stack(kind, axis=1) for kind in tables))


class CpuTextModel:
    """Forward passes over streams.

    Args:
        weights: the packed dense part.
        experts: evaluates the routed experts.
        max_tokens: most rows in one pass.
    """

    def __init__(self, weights: TextWeights, experts: RoutedExperts, max_tokens: int) -> None:
        self.weights = weights
        self.config = weights.config
        self.max_tokens = max_tokens
        self._work = Workspace(weights, max_tokens)
        native = getattr(experts, "native", None)
        self._pass = TextPass(native() if native is not None else text_pass.from_python(_by_keyword(experts)))
        for layer in weights.layers:
            self._layer(layer)
        self._head()

    @property
    def progress(self) -> int:
        """Grows with every call of a pass: what a watchdog looks at."""
        return self._pass.progress

    def forward(
        self, states: Sequence[StreamState], token_ids: Sequence[Sequence[int]], *, prefill: bool, all_logits: bool = False
    ) -> Array:
        """Appends tokens to streams.

        Args:
            states: the streams.
            token_ids: for each stream at least one token.
            prefill: the routed experts' CPU lane stays out.
            all_logits: logits of every row instead of each stream's last.

        Returns:
            fp32 [rows, vocab_size], a new array.

        Raises:
            ValueError: more rows than `max_tokens`, or a stream's context is full. The states are unchanged.
        """
        lengths = [len(ids) for ids in token_ids]
        total = sum(lengths)
        if not 0 < total <= self.max_tokens or min(lengths) < 1:
            raise ValueError(f"a pass takes 1..{self.max_tokens} tokens and at least one per stream, got {lengths}")
        for state, length in zip(states, lengths, strict=True):
            state.reserve(length)
        ids = np.array(token_ids[0] if len(token_ids) == 1 else [token for ids in token_ids for token in ids], np.int64)
        self._work.streams.array[:total] = self.weights.embed[ids][:, None, :]
        logits = np.empty((total if all_logits else len(states), self.weights.head.outputs), np.float32)
        self._pass.run(segments_of(states, np.array(lengths, np.int64)), logits, prefill=prefill, all_rows=all_logits)
        for state, length in zip(states, lengths, strict=True):
            state.length += length
        return logits[:, : self.config.vocab_size]

    def _layer(self, layer: Layer) -> None:
        """Writes a layer's calls down."""
        add, work, config = self._pass.add, self._work, self.config
        streams, post, comb = work.streams.address, work.post.address, work.comb.address
        add(Op.HYPER_MIX, ctypes.addressof(layer.attn_site), streams, work.x.address, post, comb)
        if isinstance(layer.attention, KdaLayer):
            self._kda(layer.attention)
        else:
            self._mla(layer.attention)
        add(Op.HYPER_APPLY, config.hc_mult, config.hidden_size, post, comb, work.y.address, None, streams)
        add(Op.HYPER_MIX, ctypes.addressof(layer.ffn_site), streams, work.x.address, post, comb)
        if isinstance(layer.mlp, Moe):
            self._moe(layer.mlp)
            second = work.routed.address
        else:
            self._mlp(layer.mlp)
            second = None
        add(Op.HYPER_APPLY, config.hc_mult, config.hidden_size, post, comb, work.y.address, second, streams)

    def _linear(self, packed: Packed, x: int, ldx: int, y: int, ldy: int) -> None:
        self._pass.add(Op.LINEAR, x, ldx, packed.address, packed.inputs, packed.outputs, y, ldy)

    def _kda(self, layer: KdaLayer) -> None:
        work, config = self._work, self.config
        dim, width = config.linear_head_dim, config.linear_num_heads * config.linear_head_dim
        ld = layer.inputs.outputs
        proj = work.proj.address
        forget, gate = proj + 4 * 3 * width, proj + 4 * (3 * width + dim)
        self._linear(layer.inputs, work.x.address, config.hidden_size, proj, ld)
        self._linear(layer.forget, forget, ld, work.forget.address, width)
        self._linear(layer.gate, gate, ld, work.gate.address, width)
        self._pass.add(
            Op.KDA,
            ctypes.addressof(layer.weights),
            proj,
            ld,
            work.forget.address,
            width,
            gate + 4 * dim,
            ld,
            work.gate.address,
            width,
            layer.index,
            work.mixed.address,
        )
        self._linear(layer.out, work.mixed.address, width, work.y.address, config.hidden_size)

    def _mla(self, layer: MlaLayer) -> None:
        work, config, add = self._work, self.config, self._pass.add
        heads, rank, q_rank = config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
        ld, q_a = layer.inputs.outputs, work.proj.address
        latent = q_a + 4 * q_rank
        self._linear(layer.inputs, work.x.address, config.hidden_size, q_a, ld)
        add(Op.RMS_NORM, q_a, ld, layer.q_norm.ctypes.data, config.rms_norm_eps, q_rank, q_a, ld)
        add(Op.RMS_NORM, latent, ld, layer.kv_norm.ctypes.data, config.rms_norm_eps, rank, latent, ld)
        self._linear(layer.query, q_a, ld, work.query.address, heads * rank)
        add(
            Op.MLA,
            heads,
            rank,
            config.qk_nope_head_dim**-0.5,
            work.query.address,
            latent,
            ld,
            layer.index,
            work.mixed.address,
        )
        self._linear(layer.out, work.mixed.address, heads * rank, work.y.address, config.hidden_size)

    def _mlp(self, mlp: Mlp) -> None:
        work, hidden = self._work, self.config.hidden_size
        self._linear(mlp.gate_up, work.x.address, hidden, work.gate_up.address, 2 * mlp.inter)
        self._swiglu(mlp.inter)
        self._linear(mlp.down, work.inner.address, mlp.inter, work.y.address, hidden)

    def _swiglu(self, inter: int) -> None:
        """The one place where dense and shared MLPs activate: the clamp stands AFTER the activation, as the checkpoint's runtime has it.

        transformers clamps the gate before SiLU; the two differ only where a gate exceeds swiglu_limit.
        """
        self._pass.add(Op.SWIGLU, self._work.gate_up.address, inter, self.config.swiglu_limit, self._work.inner.address)

    def _moe(self, moe: Moe) -> None:
        work, config = self._work, self.config
        self._pass.add(
            Op.ROUTE,
            work.x.address,
            moe.gate.address,
            moe.bias.ctypes.data,
            config.hidden_size,
            moe.gate.outputs,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
            int(config.norm_topk_prob),
            work.selected.address,
            work.weights.address,
        )
        self._mlp(moe.shared)
        self._pass.add(
            Op.EXPERTS,
            moe.index,
            config.num_experts_per_tok,
            work.x.address,
            work.selected.address,
            work.weights.address,
            work.routed.address,
        )

    def _head(self) -> None:
        work, config, head = self._work, self.config, self.weights.head
        self._pass.add(
            Op.LOGITS,
            work.streams.address,
            config.hc_mult,
            config.hidden_size,
            self.weights.norm.ctypes.data,
            config.rms_norm_eps,
            work.x.address,
            head.address,
            head.inputs,
            head.outputs,
        )


def _by_keyword(experts: RoutedExperts) -> Callable[[int, int, int, int, int, int, bool, int], None]:
    def call(layer: int, rows: int, top_k: int, x: int, selected: int, weights: int, prefill: bool, out: int) -> None:
        experts.forward_ptr(layer, rows, top_k, x, selected, weights, prefill=prefill, out=out)

    return call
