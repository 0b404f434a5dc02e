"""A chunk of prompt and the tail behind it in one pass, layer by layer, so that a layer's experts are staged once for both.

A recurrent state can be kept at a page's end alone, so a prompt's last full page ends a pass, and what is left of the prompt, less than a
page, is another one. Whoever has 64 rows or more picks nearly every expert: as a pass of its own the tail would bring all of them over
the link again. Here every layer computes the chunk first and then the tail, each with its own parameters: the same kernels with the same
shapes and inputs as in two passes, and so the same bits.

Between its two parts a layer's recurrent state is the one at the page's end. It can be copied then, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass
class Part:
    """One of the two.

    Attributes:
        ids: int64 [1, tokens], in host memory.
        params: exllamav3's parameters of a pass, its own for each part.
    """

    ids: Any
    params: dict[str, Any]


def why_not(model: Any, state_class: type) -> str:
    """Why a loaded model's passes cannot be joined, or "".

    Args:
        model: exllamav3's.
        state_class: the recurrent state whose position no layer reads while it computes. A layer that reads one would take the tail's
            rows for the chunk's.
    """
    if model.recurrent_state_cls is None:
        return "it has no recurrent layers"
    if model.recurrent_state_cls is not state_class:
        return f"its layers read the position of a {model.recurrent_state_cls.__name__}"
    if any(module.caps.get("prefetch_ids") for module in model):
        return "it has layers that read a pass's tokens ahead"
    if not any((index, instance) == model.last_kv_module_idx_instance for _, instance, index in model.fwd_modules):
        return "its last layer with a cache is not known"
    return ""


class StateAtPageEnd:
    """Copies a stream's recurrent state layer by layer, as exllamav3's own stash of a whole state looks.

    Args:
        state: the stream's, of the class that `why_not` was given.
        cache: exllamav3's.
        position: tokens before the page's end.
    """

    def __init__(self, state: Any, cache: Any, position: int) -> None:
        self._state, self._cache = state, cache
        self.stashed: dict[Any, Any] = {"position": position, "checkpoint_size": state.checkpoint_size}

    def copy(self, module: Any, instance: int) -> None:
        """Copies what the module's recurrent layers hold now. Waits for the device, as `Layer.stash` does."""
        for layer in module.all_recurrent_modules():
            key = (layer.layer_idx, instance)
            self.stashed[key] = self._cache.get_recurrent_layer(key).stash(self._state.slot)


def run(
    model: Any,
    chunk: Part,
    tail: Part,
    part_follows: Callable[[], AbstractContextManager[None]],
    after_chunk: Callable[[Any, int], None],
) -> Any:
    """Both parts through the model.

    Args:
        model: loaded, and `why_not` has nothing against it.
        chunk: ends where a page does.
        tail: begins there.
        part_follows: entered while a module computes the chunk; see `ExpertStore`.
        after_chunk: called with (module, instance) when a module has computed the chunk and not yet the tail.

    Returns:
        the tail's logits, as `Model.forward` returns them; the chunk's are not computed. States are advanced by both parts.
    """
    # Late: importing exllamav3 loads (or compiles) its extension.
    from exllamav3.cache.recurrent_util import advance_recurrent_states

    x = model.prepare_inputs(chunk.ids, chunk.params)
    y = model.prepare_inputs(tail.ids, tail.params)
    chunk_ended = False
    for module, instance, index in model.fwd_modules:
        if not chunk_ended:
            # As in exllamav3's own prefill the chunk ends inside the last layer with a cache: nothing behind its attention is read again.
            chunk_ended = (index, instance) == model.last_kv_module_idx_instance
            chunk.params |= {"layer_instance": instance, "prefill": chunk_ended}
            with part_follows():
                x = module.forward(module.prepare_for_device(x, chunk.params), chunk.params)
            if chunk_ended:
                x = None
            after_chunk(module, instance)
        tail.params["layer_instance"] = instance
        if module.caps.get("logits_output") and (rows := tail.params.get("last_tokens_only")):
            y = y[..., -rows:, :].contiguous()
        y = module.forward(module.prepare_for_device(y, tail.params), tail.params)
    for part in (chunk, tail):
        advance_recurrent_states(part.ids, part.params, model)
    return y
