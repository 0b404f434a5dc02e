"""Settings of cpu_expert."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from kernels.python.host import parse_cpus
from services.common.ops_http import OptionalAddress
from services.common.settings import ServiceSettings


class CpuExpertSettings(ServiceSettings):
    """Settings of the process that computes the CPU lane."""

    service: ClassVar[str] = "cpu_expert"

    ct_cpus: str = Field(
        "auto",
        validation_alias="GLM53_CT_CPUS",
        description="Logical CPUs that the kernel's threads are pinned to, e.g. 2-7,16. auto: one of each physical core but two; on four"
        " cores or fewer, and for small experts, threads are not pinned. none: not pinned.",
    )
    ct_threads: int = Field(
        0,
        validation_alias="GLM53_CT_THREADS",
        ge=0,
        le=1024,
        description="Threads of the kernel; 0: one per CPU of GLM53_CT_CPUS, else one for small experts, all cores but two for big ones.",
    )
    ct_isa: Literal["auto", "scalar", "avx2", "avx512bw", "avx512vbmi", "avxvnni"] = Field(
        "auto", validation_alias="GLM53_CT_ISA", description="Instruction set of the expert kernels."
    )
    ct_numa_node: int = Field(
        -1,
        validation_alias="GLM53_CT_NUMA_NODE",
        ge=-1,
        le=1023,
        description="Memory node of the expert records and of cpu_expert's threads and buffers; -1: wherever the system puts them.",
    )

    http_address: OptionalAddress = Field(
        "",
        validation_alias="GLM53_EXPERT_HTTP",
        description="host:port where cpu_expert answers /metrics, /health/live and /health/ready; empty: nowhere.",
    )

    @field_validator("ct_cpus")
    @classmethod
    def _readable(cls, value: str) -> str:
        if value not in ("auto", "none"):
            parse_cpus(value)
        return value

    @property
    def cpus(self) -> list[int]:
        """The CPUs that GLM53_CT_CPUS lists, in the order given; empty for auto and none."""
        return [] if self.ct_cpus in ("auto", "none") else parse_cpus(self.ct_cpus)
