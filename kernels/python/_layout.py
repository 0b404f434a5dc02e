"""Generated from kernels/include/expert_abi.h by kernels/tests/emit_layout.c: do not edit."""

from __future__ import annotations

import ctypes
from typing import Any

ABI_VERSION = 1
LAYOUT_HASH = 0x0D19966BE1AA669A


class AbiWord(ctypes.Structure):
    """AbiWord of expert_abi.h."""

    _fields_ = [
        ("value", ctypes.c_uint64),
        ("pad", ctypes.c_uint8 * 56),
    ]


class AbiBell(ctypes.Structure):
    """AbiBell of expert_abi.h."""

    _fields_ = [
        ("value", ctypes.c_uint32),
        ("pad", ctypes.c_uint8 * 60),
    ]


class AbiArenaHeader(ctypes.Structure):
    """AbiArenaHeader of expert_abi.h."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("abi_version", ctypes.c_uint32),
        ("arithmetic_version", ctypes.c_uint32),
        ("layout_hash", ctypes.c_uint64),
        ("total_bytes", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("state", ctypes.c_uint32),
        ("num_layers", ctypes.c_uint32),
        ("experts_per_layer", ctypes.c_uint32),
        ("record_stride", ctypes.c_uint32),
        ("num_slots", ctypes.c_uint64),
        ("shapes_offset", ctypes.c_uint64),
        ("generations_offset", ctypes.c_uint64),
        ("checksums_offset", ctypes.c_uint64),
        ("records_offset", ctypes.c_uint64),
        ("checkpoint_hash", ctypes.c_uint8 * 32),
        ("reserved", ctypes.c_uint8 * 128),
    ]


class AbiCtlHeader(ctypes.Structure):
    """AbiCtlHeader of expert_abi.h."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("abi_version", ctypes.c_uint32),
        ("arithmetic_version", ctypes.c_uint32),
        ("layout_hash", ctypes.c_uint64),
        ("total_bytes", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("arena_generation", ctypes.c_uint64),
        ("ring_len", ctypes.c_uint32),
        ("num_buffers", ctypes.c_uint32),
        ("max_rows", ctypes.c_uint32),
        ("max_picks", ctypes.c_uint32),
        ("max_experts", ctypes.c_uint32),
        ("hidden", ctypes.c_uint32),
        ("jobs_offset", ctypes.c_uint64),
        ("job_stride", ctypes.c_uint64),
        ("experts_offset", ctypes.c_uint64),
        ("pick_row_offset", ctypes.c_uint64),
        ("pick_out_offset", ctypes.c_uint64),
        ("dones_offset", ctypes.c_uint64),
        ("buffers_offset", ctypes.c_uint64),
        ("buffer_stride", ctypes.c_uint64),
        ("out_offset", ctypes.c_uint64),
        ("reserved", ctypes.c_uint8 * 112),
        ("state", AbiWord),
        ("worker_beat", AbiWord),
        ("epoch", AbiWord),
        ("abort_epoch", AbiWord),
        ("quit", AbiWord),
        ("job_head", AbiWord),
        ("doorbell", AbiBell),
        ("worker_asleep", AbiBell),
        ("server_id", AbiWord),
        ("server_state", AbiWord),
        ("server_beat", AbiWord),
        ("ack_epoch", AbiWord),
        ("job_tail", AbiWord),
        ("done_bell", AbiBell),
        ("server_asleep", AbiBell),
        ("server_picks", AbiWord),
        ("server_variant", AbiWord),
        ("server_threads", AbiWord),
    ]


class AbiJob(ctypes.Structure):
    """AbiJob of expert_abi.h."""

    _fields_ = [
        ("seq", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("layer", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("num_experts", ctypes.c_uint32),
        ("num_picks", ctypes.c_uint32),
        ("x_dtype", ctypes.c_uint32),
        ("buffer", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("pad", ctypes.c_uint8 * 16),
    ]


class AbiJobExpert(ctypes.Structure):
    """AbiJobExpert of expert_abi.h."""

    _fields_ = [
        ("arena_slot", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),
        ("first_pick", ctypes.c_uint32),
        ("num_picks", ctypes.c_uint32),
    ]


class AbiDone(ctypes.Structure):
    """AbiDone of expert_abi.h."""

    _fields_ = [
        ("seq", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("status", ctypes.c_uint32),
        ("num_picks", ctypes.c_uint32),
        ("claimed_ns", ctypes.c_uint64),
        ("done_ns", ctypes.c_uint64),
        ("pad", ctypes.c_uint8 * 24),
    ]


# (offset, size) of every field as the compiler has them; "" is the structure itself.
EXPECTED: dict[type[Any], dict[str, tuple[int, int]]] = {
    AbiWord: {
        "": (0, 64),
        "value": (0, 8),
        "pad": (8, 56),
    },
    AbiBell: {
        "": (0, 64),
        "value": (0, 4),
        "pad": (4, 60),
    },
    AbiArenaHeader: {
        "": (0, 256),
        "magic": (0, 8),
        "abi_version": (8, 4),
        "arithmetic_version": (12, 4),
        "layout_hash": (16, 8),
        "total_bytes": (24, 8),
        "generation": (32, 8),
        "state": (40, 4),
        "num_layers": (44, 4),
        "experts_per_layer": (48, 4),
        "record_stride": (52, 4),
        "num_slots": (56, 8),
        "shapes_offset": (64, 8),
        "generations_offset": (72, 8),
        "checksums_offset": (80, 8),
        "records_offset": (88, 8),
        "checkpoint_hash": (96, 32),
        "reserved": (128, 128),
    },
    AbiCtlHeader: {
        "": (0, 1408),
        "magic": (0, 8),
        "abi_version": (8, 4),
        "arithmetic_version": (12, 4),
        "layout_hash": (16, 8),
        "total_bytes": (24, 8),
        "generation": (32, 8),
        "arena_generation": (40, 8),
        "ring_len": (48, 4),
        "num_buffers": (52, 4),
        "max_rows": (56, 4),
        "max_picks": (60, 4),
        "max_experts": (64, 4),
        "hidden": (68, 4),
        "jobs_offset": (72, 8),
        "job_stride": (80, 8),
        "experts_offset": (88, 8),
        "pick_row_offset": (96, 8),
        "pick_out_offset": (104, 8),
        "dones_offset": (112, 8),
        "buffers_offset": (120, 8),
        "buffer_stride": (128, 8),
        "out_offset": (136, 8),
        "reserved": (144, 112),
        "state": (256, 64),
        "worker_beat": (320, 64),
        "epoch": (384, 64),
        "abort_epoch": (448, 64),
        "quit": (512, 64),
        "job_head": (576, 64),
        "doorbell": (640, 64),
        "worker_asleep": (704, 64),
        "server_id": (768, 64),
        "server_state": (832, 64),
        "server_beat": (896, 64),
        "ack_epoch": (960, 64),
        "job_tail": (1024, 64),
        "done_bell": (1088, 64),
        "server_asleep": (1152, 64),
        "server_picks": (1216, 64),
        "server_variant": (1280, 64),
        "server_threads": (1344, 64),
    },
    AbiJob: {
        "": (0, 64),
        "seq": (0, 8),
        "epoch": (8, 8),
        "layer": (16, 4),
        "num_rows": (20, 4),
        "num_experts": (24, 4),
        "num_picks": (28, 4),
        "x_dtype": (32, 4),
        "buffer": (36, 4),
        "flags": (40, 4),
        "reserved": (44, 4),
        "pad": (48, 16),
    },
    AbiJobExpert: {
        "": (0, 16),
        "arena_slot": (0, 4),
        "generation": (4, 4),
        "first_pick": (8, 4),
        "num_picks": (12, 4),
    },
    AbiDone: {
        "": (0, 64),
        "seq": (0, 8),
        "epoch": (8, 8),
        "status": (16, 4),
        "num_picks": (20, 4),
        "claimed_ns": (24, 8),
        "done_ns": (32, 8),
        "pad": (40, 24),
    },
}
