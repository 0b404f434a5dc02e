"""Threads that a setting asks for, against the CPUs that there are for them."""

from __future__ import annotations

from collections.abc import Collection


def too_many(setting: str, threads: int, cpus: Collection[int], where: str = "this process may use") -> str:
    """What to say of more threads than CPUs, "" when there are enough. It computes what it should, only slower: no reason to refuse.

    Args:
        setting: the one that asks for them.
        where: what the CPUs are.
    """
    if threads <= len(cpus):
        return ""
    count = f"{len(cpus)} CPU{'' if len(cpus) == 1 else 's'}"
    return f"{setting}={threads}, but {where} {count}: threads without one hold up the others in every step; lower it or unset it"
