"""From the worker's settings to what `fast` needs on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from kernels.python import segments
from kernels.python.arena import Arena
from kernels.python.errors import KernelError
from kernels.python.expert import ExpertShape, Variant
from kernels.python.fast_pager import FastCosts, FastOptions
from kernels.python.region import Region
from services.common.errors import ConfigError
from services.gpu_worker.backends.exl3.fast import FastSetup, why_not
from services.gpu_worker.settings import GpuWorkerSettings

log = logging.getLogger(__name__)


def problem(shapes: Sequence[ExpertShape]) -> str:
    """Why this GPU and checkpoint cannot serve `fast`, or ""; what it says is logged."""
    major, minor = torch.cuda.get_device_capability()
    found = why_not(shapes, f"{major}{minor}")
    if found:
        log.warning("GLM53_MODE=fast is served as exact: %s", found)
    return found


def make(settings: GpuWorkerSettings, arena: Arena, top_k: int) -> FastSetup:
    """The control region for cpu_expert, and the options.

    Args:
        settings: the worker's settings.
        arena: sealed.
        top_k: picks of a token.

    Raises:
        ConfigError: there is no room for the region.
    """
    region = None
    if settings.expert_backend == "shm":
        try:
            region = Region.create(segments.ctl_path(settings.shm_dir, settings.instance), arena, top_k=top_k)
        except KernelError as error:
            raise ConfigError(f"GLM53_SHM_DIR={settings.shm_dir} cannot hold the control region: {error}", param="GLM53_SHM_DIR") from error
    costs = FastCosts(ct_a_us=settings.ct_a, ct_b_us=settings.ct_b, ct_tzc_us=settings.ct_tzc)
    return FastSetup(region, FastOptions(costs, settings.ct_timeout_ms, variant=Variant[settings.ct_isa.upper()]))
