"""Which backend serves: the GPU's where exllamav3 and a GPU are there, else the CPU's."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Literal

from services.common.errors import ConfigError
from services.common.threads import too_many
from services.gpu_worker.backends import cpu
from services.gpu_worker.backends.base import Backend
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches import upstream
from services.gpu_worker.settings import GpuWorkerSettings

log = logging.getLogger(__name__)

MISSING = f"{upstream.PACKAGE} is not installed"


def load(settings: GpuWorkerSettings, checkpoint: Checkpoint, note: Callable[[float, str], None]) -> Backend:
    """The backend for this machine and these settings, loaded.

    Raises:
        Glm53Error: the checkpoint, a setting or the machine does not fit.
    """
    device, reason = choose(settings.device, gpu_problem)
    if device == "cuda":
        # Late: this imports torch and exllamav3.
        from services.gpu_worker.backends.exl3 import loader

        return loader.load(settings, checkpoint, note, reason)
    check_for_cpu(settings)
    if warning := too_many("GLM53_BACKEND_THREADS", settings.backend_threads, os.sched_getaffinity(0)):
        log.warning("%s", warning)
    return cpu.load(settings, checkpoint, note, reason)


def check_for_cpu(settings: GpuWorkerSettings) -> None:
    """Refuses what only a GPU could do.

    Raises:
        ConfigError: names the setting.
    """
    if settings.ec_hints not in ("auto", "off"):
        raise ConfigError(
            f"GLM53_EC_HINTS={settings.ec_hints} is for a GPU, which experts are brought to, and this worker computes on the CPU: unset it",
            param="GLM53_EC_HINTS",
        )
    if settings.ec_copy == "gather":
        raise ConfigError(
            "GLM53_EC_COPY=gather is for a GPU, whose multiprocessors would read experts, and this worker computes on the CPU: unset it",
            param="GLM53_EC_COPY",
        )


def choose(asked: Literal["auto", "cpu", "cuda"], problem: Callable[[], str]) -> tuple[Literal["cpu", "cuda"], str]:
    """The device, and why.

    Args:
        asked: GLM53_DEVICE.
        problem: why the GPU cannot serve, or "". Called only when the answer matters.

    Raises:
        ConfigError: the GPU was asked for and cannot serve.
    """
    if asked == "cpu":
        return "cpu", "asked for"
    found = problem()
    if asked == "cuda":
        if found:
            remedy = "scripts/install.sh --gpu installs it" if found == MISSING else "nvidia-smi shows which there are"
            raise ConfigError(f"GLM53_DEVICE=cuda: {found}. {remedy}; GLM53_DEVICE=cpu or auto serves without", param="GLM53_DEVICE")
        return "cuda", "asked for"
    return ("cpu", f"auto: {found}") if found else ("cuda", "auto: exllamav3 and an NVIDIA GPU are there")


def gpu_problem() -> str:
    """Why the GPU backend cannot run here, or ""."""
    if not upstream.installed():
        return MISSING
    # Only where exllamav3 is: importing torch takes seconds.
    import torch

    return "" if torch.cuda.is_available() else "torch finds no NVIDIA GPU"
