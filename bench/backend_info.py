"""What a backend says of itself when a bench, not the worker, makes it."""

from __future__ import annotations

from services.gpu_worker.backends.base import BackendInfo
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS


def gpu_info(vocab_size: int, max_context: int, max_streams: int, chunk: int, mode: str = "exact") -> BackendInfo:
    """Of the GPU backend; why things are as they are nobody asks here.

    Args:
        max_context: tokens of a stream.
        chunk: prompt tokens of one pass.
        mode: exact or fast.
    """
    return BackendInfo(
        vocab_size=vocab_size,
        max_context=max_context,
        max_streams=max_streams,
        device="cuda",
        device_reason="",
        mode=mode,
        mode_reason="",
        kernel_variant="",
        kernel_reason="",
        arithmetic_version=0,
        abi_version=0,
        arena="",
        chunk_size=chunk,
        page_tokens=PAGE_TOKENS,
    )
