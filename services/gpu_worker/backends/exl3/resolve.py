"""What the worker's settings come to on a GPU, and which of them are refused. Without torch: `glm53 doctor` asks here, too."""

from __future__ import annotations

from typing import Literal

from services.common.errors import ConfigError
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.model_config import TextConfig
from services.gpu_worker.patches import triton_tuners
from services.gpu_worker.settings import GpuWorkerSettings

DEFAULT_CONTEXT = 32_768
DEFAULT_CHUNK = 8192
# Records of a layer that a guess brings ahead. At the recall that is known a step of exact is 1.05 times as quick with them at one stream
# and 1.03 at four, one of fast 1.06 and 1.00 (docs/results/gpu_fast.json, hint_*), and in another boot 0.97 and 0.92.
AUTO_HINTS = {"exact": 3, "fast": 0}
AUTO_IN_STEP = True  # docs/results/gpu_exact_slice.json: a step of one stream is 18 % shorter, one of four 10 %


def check(settings: GpuWorkerSettings) -> None:
    """Refuses what no GPU could do; which mode `auto` and `fast` come to is left open here.

    Raises:
        ConfigError: names the setting.
    """
    resolve_mode(settings.mode, "")
    resolve_chunk(settings)
    triton_tuners.check(settings.triton_pin)
    if settings.mode == "exact":
        resolve_hints(settings.ec_hints, "exact", brings=runs_in_step(settings))
        resolve_copy(settings.ec_copy, brings=runs_in_step(settings))


def runs_in_step(settings: GpuWorkerSettings) -> bool:
    """True when decode steps of `exact` copy what is missing before they compute."""
    return settings.ec_admission == "in_step" or (settings.ec_admission == "auto" and AUTO_IN_STEP)


def resolve_mode(mode: str, problem: str) -> tuple[Literal["exact", "fast"], str]:
    """The mode that is served, and why.

    Args:
        mode: GLM53_MODE.
        problem: why decode cannot, or for `auto` should not, run on the integer kernels, or "".

    Raises:
        ConfigError: a mode that the GPU backend does not have.
    """
    if mode == "auto":
        return ("exact", f"auto: {problem}") if problem else ("fast", "auto: measured faster than exact on this kind of GPU")
    if mode == "exact":
        return "exact", "asked for"
    if mode == "fast":
        return ("exact", f"fast was asked for and is not possible: {problem}") if problem else ("fast", "asked for")
    raise ConfigError(f"GLM53_MODE={mode} is not served on the GPU: use auto, exact or fast", param="GLM53_MODE")


def resolve_hints(asked: str | int, mode: str, *, brings: bool) -> int:
    """Most records that a hint brings ahead, 0 for no hints.

    Args:
        asked: GLM53_EC_HINTS.
        mode: that is served.
        brings: decode steps copy what is missing before they compute.

    Raises:
        ConfigError: hints were asked for, and nothing would take them.
    """
    if asked == "off" or (asked == "auto" and not brings):
        return 0
    if not brings:
        raise ConfigError(
            f"GLM53_EC_HINTS={asked} needs decode steps that copy what is missing: GLM53_MODE=fast, or exact with "
            "GLM53_EC_ADMISSION=in_step; or unset it",
            param="GLM53_EC_HINTS",
        )
    return AUTO_HINTS[mode] if asked == "auto" else int(asked)


def resolve_copy(asked: Literal["auto", "engine", "gather"], *, brings: bool) -> Literal["auto", "engine", "gather"]:
    """How steps copy what is missing; the copy engine where none does.

    Args:
        asked: GLM53_EC_COPY.
        brings: decode steps copy what is missing before they compute.

    Raises:
        ConfigError: a gather was asked for, and no step would make one.
    """
    if brings:
        return asked
    if asked == "gather":
        raise ConfigError(
            "GLM53_EC_COPY=gather needs decode steps that copy what is missing: GLM53_MODE=fast, or exact with "
            "GLM53_EC_ADMISSION=in_step; or unset it",
            param="GLM53_EC_COPY",
        )
    return "engine"


def resolve_chunk(settings: GpuWorkerSettings) -> int:
    """Prompt tokens of one pass.

    Raises:
        ConfigError: less than a page.
    """
    if not settings.is_set("chunk_size"):
        return DEFAULT_CHUNK
    if settings.chunk_size < PAGE_TOKENS:
        raise ConfigError(
            f"GLM53_CHUNK_SIZE={settings.chunk_size} is less than a cache page of {PAGE_TOKENS} tokens: raise it", param="GLM53_CHUNK_SIZE"
        )
    return settings.chunk_size


def resolve_context(asked: int, cache_tokens: int, config: TextConfig) -> int:
    """Most tokens of a stream.

    Raises:
        ConfigError: more than the model or the cache has.
    """
    limit, name = min((config.max_position_embeddings, "the checkpoint's max_position_embeddings"), (cache_tokens, "GLM53_CACHE_TOKENS"))
    if asked > limit:
        raise ConfigError(f"GLM53_CONTEXT_TOKENS={asked} is more than {name} {limit}: lower it", param="GLM53_CONTEXT_TOKENS")
    return asked or min(DEFAULT_CONTEXT, limit)
