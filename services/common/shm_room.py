"""What is said of a file system of shared memory that is too small, with the way to enlarge it for each way of running.

In one place: the worker and `glm53 doctor` must not send anybody to two different fixes.
"""

from __future__ import annotations

GIB = 1 << 30
# Control region, job buffers and what a file system needs for itself.
SLACK_BYTES = 64 << 20


def too_small(shm_dir: str, free_bytes: int, need_bytes: int) -> str:
    """The finding: both sizes."""
    return f"{shm_dir} has {size_in_words(free_bytes)} free, the expert records need {size_in_words(need_bytes)}"


def how_to_enlarge(shm_dir: str, need_bytes: int) -> str:
    """The fix.

    Args:
        need_bytes: of the expert records.
    """
    size = -(-(need_bytes + SLACK_BYTES) // GIB)
    return (
        f"Make it at least {size} GiB: SHM_SIZE in compose's .env, sizeLimit of the volume shm on Kubernetes, --shm-size={size}g for a"
        f" single container, mount -o remount,size={size}G {shm_dir} on bare metal."
    )


def size_in_words(num_bytes: int) -> str:
    """A size for people: "106.7 GiB", "61 MiB"."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 4 else f"{num_bytes >> 20} MiB"
