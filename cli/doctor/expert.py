"""Checks of cpu_expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cli.doctor import hardware, network, sharedmem
from cli.doctor.findings import Finding, fail, ok
from cli.doctor.machine import Machine
from services.common.errors import ConfigError
from services.common.ops_http import split_address
from services.cpu_expert import placement
from services.cpu_expert.settings import CpuExpertSettings

OWN = 48 << 20  # measured: what it takes with the small checkpoint


def check(env: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    """Settings, CPUs, shared memory."""
    if unbuilt := list(sharedmem.kernels()):
        yield from unbuilt
        return
    try:
        settings = CpuExpertSettings.load(env)
        placement.check(settings)
    except ConfigError as error:
        yield fail("settings", error.message, _fix(error.param))
        return
    yield ok("settings", f"kernel {settings.ct_isa}, CPUs {settings.ct_cpus}")
    yield from hardware.cpu(machine, env.get("GLM53_MODE", "auto"))
    yield from hardware.cpu_quota(machine)
    yield from hardware.memory_limit(machine, OWN, "EXPERT_MEMORY in compose's .env, limits.memory of cpu-expert on Kubernetes")
    if settings.http_address:
        yield from network.listen("GLM53_EXPERT_HTTP", *split_address(settings.http_address), network.probe_endpoint)
    yield from sharedmem.folder(settings.shm_dir)
    yield from sharedmem.version(settings.shm_dir, settings.instance)


def _fix(setting: str | None) -> str:
    fixes = {
        "GLM53_CT_CPUS": "Name CPUs of the container's cpuset, or leave it at auto.",
        "GLM53_CT_ISA": "Leave it at auto; without AVX2 use GLM53_MODE=exact.",
    }
    return fixes.get(setting or "", "")
