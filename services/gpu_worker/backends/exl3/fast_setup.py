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

MEASURED = ("90",)  # compute capabilities on which its bits and its speed are known: docs/results/gpu_fast.json


def problem(shapes: Sequence[ExpertShape], mode: str) -> str:
    """Why this GPU and checkpoint cannot serve `fast`, or "".

    Args:
        shapes: of every layer's experts.
        mode: GLM53_MODE. For `auto` a GPU of another kind than those measured is a reason too; what `fast` lacks is logged.
    """
    if mode == "exact":
        return ""
    major, minor = torch.cuda.get_device_capability()
    capability = f"{major}{minor}"
    found = why_not(shapes, capability)
    if found and mode == "fast":
        log.warning("GLM53_MODE=fast is served as exact: %s", found)
    if not found and mode == "auto" and capability not in MEASURED:
        found = f"fast has run on compute capability {' and '.join(MEASURED)} alone, this GPU has {capability}; GLM53_MODE=fast takes it"
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
