"""Where the kernel's threads run: how many, pinned to what, on which memory node, and why."""

from __future__ import annotations

import dataclasses
import logging
import os

from kernels.python import expert, host
from services.common.errors import ConfigError
from services.common.threads import too_many
from services.cpu_expert.settings import CpuExpertSettings

log = logging.getLogger(__name__)

BIG_RECORD_BYTES = 1 << 20  # below this a record takes microseconds: more threads would only wake each other


@dataclasses.dataclass(frozen=True)
class Placement:
    """Threads of the kernel, the serving one counted, and the CPUs that they are pinned to (none: not pinned)."""

    threads: int
    cpus: tuple[int, ...]
    reason: str

    @property
    def own_cpu(self) -> int | None:
        """The serving thread's CPU."""
        return self.cpus[0] if self.cpus else None

    @property
    def other_cpus(self) -> tuple[int, ...]:
        """The CPUs of the pool's further threads."""
        return self.cpus[1:] or self.cpus


def check(settings: CpuExpertSettings) -> None:
    """Refuses what this host cannot do before anything is attached, and warns of more threads than it has CPUs for.

    Raises:
        ConfigError: GLM53_CT_ISA, GLM53_CT_CPUS or GLM53_CT_NUMA_NODE names what the host or this process does not have.
    """
    if settings.ct_isa not in ("auto", *expert.variants()):
        raise ConfigError(
            f"GLM53_CT_ISA={settings.ct_isa}: this host cannot run it; it has {', '.join(expert.variants())}", param="GLM53_CT_ISA"
        )
    usable = os.sched_getaffinity(0)
    if missing := sorted(set(settings.cpus) - usable):
        raise ConfigError(
            f"GLM53_CT_CPUS names CPUs {missing} that this process may not use; usable are {sorted(usable)}", param="GLM53_CT_CPUS"
        )
    listed = {"where": "GLM53_CT_CPUS names"} if settings.cpus else {}
    if warning := too_many("GLM53_CT_THREADS", settings.ct_threads, settings.cpus or usable, **listed):
        log.warning("%s", warning)
    node = settings.ct_numa_node
    if node < 0:
        return
    if node not in host.numa_nodes():
        raise ConfigError(f"GLM53_CT_NUMA_NODE={node}: this host has the memory nodes {host.numa_nodes()}", param="GLM53_CT_NUMA_NODE")
    if not host.node_cpus(node) & usable:
        raise ConfigError(f"GLM53_CT_NUMA_NODE={node}: this process may use none of its CPUs", param="GLM53_CT_NUMA_NODE")


def settle_on_node(settings: CpuExpertSettings) -> set[int]:
    """Confines this thread, and those that it starts, to the node that was asked for; returns the CPUs that it may use from now on."""
    node, usable = settings.ct_numa_node, os.sched_getaffinity(0)
    if node < 0:
        return usable
    if len(host.numa_nodes()) == 1:
        log.info("GLM53_CT_NUMA_NODE=%d: this host has one memory node, so there is nothing to place", node)
        return usable
    if not settings.cpus:
        usable &= host.node_cpus(node)
        os.sched_setaffinity(0, usable)
    try:
        host.prefer_node(node)
    except OSError as error:  # a container without CAP_SYS_NICE: buffers are still made by threads that run there
        log.warning("GLM53_CT_NUMA_NODE=%d: %s", node, error)
    log.info("memory node %d: CPUs %s", node, sorted(usable))
    return usable


def place(settings: CpuExpertSettings, record_bytes: int) -> Placement:
    """The threads for records of this size. Call it in a thread that may use all the CPUs of this process."""
    if settings.cpus:
        threads = settings.ct_threads or len(settings.cpus)
        return Placement(threads, tuple(settings.cpus[:threads]), "the CPUs of GLM53_CT_CPUS")
    cores = host.physical_cpus()
    big = record_bytes >= BIG_RECORD_BYTES
    some_left = min(os.sched_getaffinity(0)) not in cores  # cores that the list leaves to gateway and gpu_worker
    if settings.ct_threads:
        threads, reason = settings.ct_threads, "GLM53_CT_THREADS"
    elif not big:
        threads, reason = 1, "small experts"
    elif some_left:
        threads, reason = len(cores), "one per physical core but two"
    else:
        threads, reason = max(1, len(cores) // 2), "half of the few cores"
    if settings.ct_cpus == "none" or not big or not some_left:
        return Placement(threads, (), f"{reason}, not pinned")
    return Placement(threads, tuple(cores[:threads]), reason)
