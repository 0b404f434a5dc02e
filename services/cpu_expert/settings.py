"""Settings of cpu_expert."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from services.common.settings import ServiceSettings


class CpuExpertSettings(ServiceSettings):
    """Settings of the process that computes the CPU lane."""

    service: ClassVar[str] = "cpu_expert"

    ct_cpus: str = Field(
        "",
        validation_alias="GLM53_CT_CPUS",
        description="Logical CPUs of the kernel's threads, e.g. 0-7,16; empty: not pinned.",
    )
    ct_threads: int = Field(
        0,
        validation_alias="GLM53_CT_THREADS",
        ge=0,
        le=1024,
        description="Threads of the kernel; 0: one per CPU of GLM53_CT_CPUS, else one for small experts, all CPUs but two for big ones.",
    )
    ct_isa: Literal["auto", "scalar", "avx2", "avx512bw", "avx512vbmi", "avxvnni"] = Field(
        "auto", validation_alias="GLM53_CT_ISA", description="Instruction set of the expert kernels."
    )

    @field_validator("ct_cpus")
    @classmethod
    def _readable(cls, value: str) -> str:
        parse_cpus(value)
        return value

    @property
    def cpus(self) -> list[int]:
        """The pinned CPUs in the order given."""
        return parse_cpus(self.ct_cpus)


def parse_cpus(text: str) -> list[int]:
    """[0, 1, 2, 16] of "0-2,16". Raises ValueError naming the part that is not a CPU or a range."""
    cpus: list[int] = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"{part!r} is neither a CPU number nor a range like 0-7")
        cpus.extend(range(int(first), int(last if dash else first) + 1))
    if len(set(cpus)) != len(cpus):
        raise ValueError("a CPU is named twice")
    return cpus
