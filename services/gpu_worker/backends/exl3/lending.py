"""What a start decides about slots that are lent to long prefills (slots.py): whether any are, and what a prefill takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kernels.python.errors import KernelError
from kernels.python.slot_memory import CHUNK_BYTES, SlotMemory
from services.common.errors import ConfigError
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS, pages_for
from services.gpu_worker.backends.exl3.slots import ActivationNeed, ElasticSlots, kept_by_torch

log = logging.getLogger(__name__)

GIB = 1 << 30


def pays(asked: int, free: int, reserve: int, most: int, stride: int, num_records: int) -> bool:
    """True when more slots are wanted than fit beside what torch keeps for prefills.

    Args:
        asked: GLM53_EC_MAX_SLOTS, 0 for as many as fit.
        free: bytes of VRAM after the warm-up.
        reserve: bytes of it that stay free.
        most: bytes that slots may lend.
        stride: bytes of a slot.
        num_records: experts of the model.
    """
    return most > 0 and (free - reserve) // stride < min(num_records, asked or num_records)


def make(num_slots: int, stride: int, device: int, *, most: int, reserve: int, chunk_bytes: int = CHUNK_BYTES) -> ElasticSlots:
    """Takes the memory of so many slots of `stride` bytes; arguments as those of `ElasticSlots`.

    Raises:
        ConfigError: the device has too little, or a driver without virtual memory.
    """
    try:
        memory = SlotMemory(num_slots * stride, device, chunk_bytes)
    except KernelError as error:
        raise ConfigError(f"{error}. GLM53_EC_ELASTIC_GB=0 does without memory that is lent", param="GLM53_EC_ELASTIC_GB") from error
    tensor = torch.as_tensor(memory, device=f"cuda:{device}").view(num_slots, stride)
    return ElasticSlots(memory, tensor, most=most, reserve=reserve, spare=lambda: spare_bytes(device))


def spare_bytes(device: int) -> int:
    """VRAM that torch can have: what is free, and what it holds and does not use."""
    return int(torch.cuda.mem_get_info(device)[0]) + kept_by_torch(device)


def guess(most: int, reserve: int, chunk: int) -> ActivationNeed:
    """Without a warm-up nothing is measured: a whole chunk gets all that may be lent, a shorter pass its share."""
    return ActivationNeed({1: (most + reserve) // chunk, chunk: most + reserve})


def measure(model: Any, cache: Any, chunk: int, context: int, begin: Callable[[int], None]) -> ActivationNeed:
    """What prefills take where they take most: at the end of the longest stream. Tables of experts are whole, and nothing is measured yet.

    Args:
        model, cache: exllamav3's.
        chunk: most tokens of a pass.
        context: most tokens of a stream, at most the cache's.
        begin: called with the number of rows before a pass.

    Raises:
        ConfigError: a pass does not fit into what may be lent.
    """
    need = ActivationNeed()
    found = {}
    for rows in sorted({min(PAGE_TOKENS, chunk, context), min(chunk, context)}, reverse=True):
        try:
            found[rows] = _take(model, cache, rows, (context - rows) // PAGE_TOKENS * PAGE_TOKENS, begin)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a prefill of {rows} tokens needs more VRAM than slots may lend: raise GLM53_EC_ELASTIC_GB, or lower GLM53_CHUNK_SIZE "
                f"({str(error).splitlines()[0]})",
                param="GLM53_EC_ELASTIC_GB",
            ) from error
        log.info("a prefill of %d tokens takes %.2f GiB of VRAM for its activations", rows, found[rows] / GIB)
    need.known = found
    return need


def _take(model: Any, cache: Any, rows: int, start: int, begin: Callable[[int], None]) -> int:
    """Bytes that torch takes from the device for a pass of so many rows behind `start` tokens."""
    # A state's tensors are inference tensors, which may be written in this mode alone.
    with torch.inference_mode():
        states = [cache.get_new_state()] if model.get_recurrent_layers() else None
    params = {
        "attn_mode": "flash_attn",
        "block_table": torch.tensor([list(range(pages_for(start + rows)))], dtype=torch.int32),
        "cache": cache,
        "cache_seqlens": torch.tensor([start], dtype=torch.int32),
        "recurrent_states": states,
        "indexed_embeddings": [],
        "last_tokens_only": 1,
    }
    ids = torch.randint(0, model.config.vocab_size, (1, rows), generator=torch.Generator().manual_seed(0))
    try:
        with torch.inference_mode():
            begin(rows)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held, used = int(torch.cuda.memory_reserved()), int(torch.cuda.memory_allocated())
            model.forward(ids, params)
            torch.cuda.synchronize()
            # What torch held already and did not use need not be there the next time.
            return max(int(torch.cuda.max_memory_reserved()) - held, int(torch.cuda.max_memory_allocated()) - used)
    finally:
        with torch.inference_mode():
            for state in states or ():
                state.free()
