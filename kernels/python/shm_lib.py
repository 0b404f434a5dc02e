"""ctypes signatures of the shared-memory and tier functions (expert_region.h, expert_tier.h), and handles that close themselves."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from kernels.python import lib


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels' library with the signatures of every glm53_* function."""
    library = lib.load()
    pointer, text, boolean = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    signatures: dict[str, tuple[list[Any], Any]] = {
        "glm53_error_code": ([], ctypes.c_int),
        "glm53_error_text": ([], text),
        "abi_layout_hash": ([], u64),
        "abi_now_ns": ([], u64),
        "glm53_arena_create": ([text, pointer, u32, u32, text], pointer),
        "glm53_arena_adopt": ([text, pointer, u32, u32, text], pointer),
        "glm53_arena_attach": ([text, u64], pointer),
        "glm53_arena_record": ([pointer, u64], pointer),
        "glm53_arena_finish": ([pointer, u64, u64], boolean),
        "glm53_arena_seal": ([pointer], boolean),
        "glm53_arena_check": ([pointer, u64], boolean),
        "glm53_arena_rewrite_begin": ([pointer, u64], boolean),
        "glm53_arena_rewrite_end": ([pointer, u64], boolean),
        "glm53_arena_generation_of": ([pointer, u64], u32),
        "glm53_arena_field": ([pointer, text], u64),
        "glm53_arena_header": ([pointer], pointer),
        "glm53_arena_shape": ([pointer, u32], pointer),
        "glm53_arena_unlink": ([pointer], boolean),
        "glm53_arena_close": ([pointer], None),
        "glm53_region_create": ([text, pointer, u32, u32, u32, u32], pointer),
        "glm53_region_attach": ([text, u64], pointer),
        "glm53_region_field": ([pointer, text], u64),
        "glm53_region_header": ([pointer], pointer),
        "glm53_region_current": ([pointer], boolean),
        "glm53_region_unlink": ([pointer], boolean),
        "glm53_region_close": ([pointer], None),
        "glm53_tier_create": ([pointer, pointer, text], pointer),
        "glm53_tier_forward": ([pointer, u32, u32, u32, pointer, pointer, pointer, boolean, pointer], boolean),
        "glm53_tier_lane_up": ([pointer], boolean),
        "glm53_tier_stats": ([pointer], text),
        "glm53_tier_verify": ([pointer], text),
        "glm53_tier_repair": ([pointer, pointer, u64, pointer], boolean),
        "glm53_tier_close": ([pointer], None),
        "glm53_server_attach": ([text, text, text], pointer),
        "glm53_server_step": ([pointer, u64], ctypes.c_int),
        "glm53_server_run": ([pointer, u32], ctypes.c_int),
        "glm53_server_state": ([pointer], ctypes.c_int),
        "glm53_server_drain": ([pointer], None),
        "glm53_server_beat": ([pointer, u64], None),
        "glm53_server_current": ([pointer], boolean),
        "glm53_server_stats": ([pointer], text),
        "glm53_server_close": ([pointer, boolean], None),
        "glm53_lane_create": ([pointer, u64, u64], pointer),
        "glm53_lane_tick": ([pointer, u64], boolean),
        "glm53_lane_submit": ([pointer, u32, u32, pointer, u32, pointer, u32, pointer, pointer, u64], u64),
        "glm53_lane_poll": ([pointer, u64, u64, pointer, pointer, pointer], ctypes.c_int),
        "glm53_lane_release": ([pointer, u32], None),
        "glm53_lane_abort": ([pointer, u64], None),
        "glm53_lane_epoch": ([pointer], u64),
        "glm53_lane_free_buffers": ([pointer], u32),
        "glm53_lane_reason": ([pointer], text),
        "glm53_lane_close": ([pointer], None),
        "glm53_simulate_cache": ([u32, pointer, u32, u32, u32, u32, u32, text, pointer], ctypes.c_int),
    }
    for name, (argument_types, result_type) in signatures.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = result_type
    return library


class Handle:
    """A native object that is closed when the last user lets go of it: a view of mapped memory is a user too."""

    def __init__(self, pointer: int, close: Any) -> None:
        self.pointer = pointer
        self._close = close

    def __del__(self) -> None:
        pointer, self.pointer = self.pointer, 0
        if pointer:
            self._close(pointer)
