"""exllamav3's forward pass in small: modules, pages, per-layer recurrent states, experts behind a store. Every bit depends on every other.

A value of the residual stream is one integer a token. A recurrent layer digests all values of its stream in their order; an attention
layer writes them to its pages and digests what it finds there; an expert layer asks the store, and reads what the tables lead to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from services.gpu_worker.backends.exl3.experts import DECODE_ROWS
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from tests.unit.test_exl3_experts import EXPERTS, TOP_K, World

VOCAB = 40
STATE_BYTES = 1000
Trace = tuple[str, int, int]  # (module, first position, tokens)


def digest(value: int, before: int = 0) -> int:
    return zlib.crc32(value.to_bytes(8, "little"), before)


class LayerState:
    """A recurrent layer's states, one of each slot."""

    def __init__(self, slots: int) -> None:
        self.digests = [0] * slots

    def stash(self, slot: int, position: int = 0) -> int:
        del position
        return self.digests[slot]


class State:
    """A stream's place in all recurrent layers."""

    def __init__(self, cache: Cache, slot: int, position: int, stashed: dict[Any, Any] | None) -> None:
        self.cache, self.slot, self.position, self.last_history = cache, slot, position, 0
        self.checkpoint_size = STATE_BYTES
        for key, layer in cache.recurrent_layers.items():
            layer.digests[slot] = stashed[key] if stashed is not None else 0

    def stash(self) -> dict[Any, Any]:
        layers = {key: layer.stash(self.slot) for key, layer in self.cache.recurrent_layers.items()}
        return {"position": self.position, "checkpoint_size": self.checkpoint_size, **layers}

    def free(self) -> None:
        self.cache.slots.append(self.slot)


class Cache:
    """Pages and slots, as exllamav3's cache has them."""

    def __init__(self, model: Model, pages: int, slots: int) -> None:
        self.max_num_tokens = pages * PAGE_TOKENS
        self.slots = list(range(slots))
        self.pages = {m.layer_idx: np.full((pages, PAGE_TOKENS), -1, np.int64) for m in model.blocks if not m.recurrent}
        self.recurrent_layers = {(m.layer_idx, 0): LayerState(slots) for m in model.blocks if m.recurrent}

    def get_new_state(self) -> State:
        return State(self, self.slots.pop(), 0, None)

    def new_from_stashed(self, stashed: dict[Any, Any], position: int) -> State:
        assert position == stashed["position"]
        return State(self, self.slots.pop(), position, stashed)

    def get_recurrent_layer(self, key: tuple[int, int]) -> LayerState:
        return self.recurrent_layers[key]


class Module:
    """What all modules have."""

    recurrent = False
    layer_idx = -1

    def __init__(self, name: str, model: Model, **caps: bool) -> None:
        self.name, self.model, self.caps = name, model, caps

    def prepare_for_device(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        del params
        return x

    def all_recurrent_modules(self) -> list[Module]:
        return [self] if self.recurrent else []

    def note(self, x: torch.Tensor, params: dict[str, Any]) -> list[int]:
        starts: list[int] = params["cache_seqlens"].tolist()
        assert params["layer_instance"] == 0
        self.model.trace += [(self.name, start, x.shape[1]) for start in starts]
        self.model.before(self.name, starts[0])
        return starts


class Embedding(Module):
    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        self.note(x, params)
        return (x + 7).unsqueeze(-1)


class Block(Module):
    """Attention or a recurrent layer, then experts where it has them."""

    def __init__(self, model: Model, layer_idx: int, *, recurrent: bool, moe: int | None) -> None:
        super().__init__(f"block {layer_idx}", model)
        self.layer_idx, self.recurrent, self.moe = layer_idx, recurrent, moe

    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        starts, tables = self.note(x, params), params["block_table"].tolist()
        rows = [self._mix(*row, params) for row in zip(x[..., 0].tolist(), tables, starts, params["recurrent_states"], strict=True)]
        if params.get("prefill"):
            return x
        out = torch.tensor(rows).unsqueeze(-1)
        if self.moe is not None:
            self.model.experts(self.moe, out.shape[0] * out.shape[1])
        return out

    def _mix(self, values: list[int], table: list[int], start: int, state: State, params: dict[str, Any]) -> list[int]:
        out = []
        for position, value in enumerate(values, start):
            if self.recurrent:
                layer = state.cache.recurrent_layers[self.layer_idx, 0]
                layer.digests[state.slot] = seen = digest(value, layer.digests[state.slot])
            else:
                pages = params["cache"].pages[self.layer_idx]
                pages[table[position // PAGE_TOKENS], position % PAGE_TOKENS] = value
                used = pages[table[: position // PAGE_TOKENS + 1]].ravel()[: position + 1]
                seen = zlib.crc32(used.tobytes())
            out.append(digest(value, seen))
        return out


class Head(Module):
    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        self.note(x, params)
        draws = [[np.random.default_rng(value).random(VOCAB, np.float32) for value in row] for row in x[..., 0].tolist()]
        return torch.from_numpy(np.array(draws))


class Model:
    """Four blocks, three of them with experts.

    Args:
        world: the experts' store, and kernels that check what they read.
    """

    recurrent_state_cls = State
    last_kv_module_idx_instance = (4, 0)

    def __init__(self, world: World) -> None:
        self.world = world
        self.trace: list[Trace] = []
        self.before: Callable[[str, int], None] = lambda _name, _position: None
        kinds = ((True, None), (False, 0), (True, 1), (False, 2))
        self.blocks = [Block(self, layer, recurrent=recurrent, moe=moe) for layer, (recurrent, moe) in enumerate(kinds)]
        self.modules = [Embedding("embedding", self), *self.blocks, Head("head", self, logits_output=True)]
        self.fwd_modules = [(module, 0, index) for index, module in enumerate(self.modules)]

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules)

    def get_recurrent_layers(self) -> list[Block]:
        return [block for block in self.blocks if block.recurrent]

    def prepare_inputs(self, ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        assert len(params["recurrent_states"]) == ids.shape[0]
        return ids

    def forward(self, ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        x = self.prepare_inputs(ids, params)
        for module, instance, _ in self.fwd_modules:
            params["layer_instance"] = instance
            if module.caps.get("logits_output") and (rows := params.get("last_tokens_only")):
                x = x[..., -rows:, :].contiguous()
            x = module.forward(x, params)
        advance_recurrent_states(ids, params, self)
        return x

    def experts(self, layer: int, rows: int) -> None:
        picks = torch.arange(rows * TOP_K).reshape(rows, TOP_K) % EXPERTS
        self.world.store.before_experts(layer, rows, picks)
        for expert in range(EXPERTS) if rows > DECODE_ROWS else picks.unique().tolist():
            self.world.read(layer, expert)
            if rows > DECODE_ROWS:
                self.world.read_tensors(layer, expert)
        self.world.store.after_experts(layer)


def advance_recurrent_states(ids: torch.Tensor, params: dict[str, Any], model: Model) -> None:
    del model
    for state in params["recurrent_states"]:
        state.position += ids.shape[1]
