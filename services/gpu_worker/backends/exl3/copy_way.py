"""How decode steps bring missing records into slots: by the copy engine, or gathered by the multiprocessors (kernels/cuda/gather.cu).

Which of them is faster depends on the GPU and its link, so `auto` measures both at start. A gather takes multiprocessors from the kernels
beside it: it is taken only where it is clearly faster. The measurement makes the gather's first launch too, which loads its code: in a
step, while the device waits, that would stand in the driver for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.python import cuda_expert, pager
from kernels.python.errors import KernelError
from kernels.python.lib import KernelsMissingError
from kernels.python.pager import PagerDriver, PagerLayout
from services.common.errors import ConfigError

log = logging.getLogger(__name__)

Asked = Literal["auto", "engine", "gather"]
MARGIN = 1.03  # times as fast as the copy engine, or it is not worth its multiprocessors
BUDGET_S = 0.05
_WORDS = {"engine": "copied by the copy engine", "gather": "gathered by the multiprocessors"}


@dataclass(frozen=True)
class CopyWay:
    """What was chosen, and why.

    Attributes:
        way: who moves the bytes.
        reason: for people.
        rates: GB/s of the engine and of a gather; None where they were not measured.
        driver: what a pager is made with; None: the CUDA driver's own calls.
    """

    way: Literal["engine", "gather"]
    reason: str
    rates: tuple[float, float] | None = None
    driver: PagerDriver | None = field(default=None, repr=False, compare=False)

    def stats(self) -> dict[str, Any]:
        """JSON-ready."""
        told: dict[str, Any] = {"copy_way": self.way, "copy_reason": self.reason}
        if self.rates is not None:
            told |= {"copy_engine_gb_s": round(self.rates[0], 2), "copy_gather_gb_s": round(self.rates[1], 2)}
        return told


def choose(asked: Asked, layout: PagerLayout, offsets: NDArray[np.int64], compute_stream: Callable[[], int]) -> CopyWay:
    """Chooses for a pager that is about to be made of `layout`. Measures, which overwrites slots and waits for the device.

    Args:
        asked: GLM53_EC_COPY.
        layout: the pager's.
        offsets: int64 [layers, parts], where a record's parts begin.
        compute_stream: handle of the stream that decode steps run on.

    Raises:
        ConfigError: a gather was asked for and cannot run here.
    """
    chosen = _choose(asked, layout, offsets, compute_stream)
    rates = "" if chosen.rates is None else f"; {chosen.rates[0]:.1f} GB/s copied, {chosen.rates[1]:.1f} GB/s gathered"
    log.info("missing experts are %s (%s%s)", _WORDS[chosen.way], chosen.reason, rates)
    return chosen


def _choose(asked: Asked, layout: PagerLayout, offsets: NDArray[np.int64], compute_stream: Callable[[], int]) -> CopyWay:
    if asked == "engine":
        return CopyWay("engine", "asked for")
    if layout.num_slots in (0, layout.num_layers * layout.experts_per_layer):
        return CopyWay("engine", "no step copies an expert: " + ("every one has a slot" if layout.num_slots else "there are no slots"))
    if problem := why_not():
        return _without(asked, problem)
    try:
        driver = pager.gather_driver(cuda_expert.gather_function())
        torch.cuda.synchronize()
        # About half of what one stream picks of a layer is missing.
        group = max(1, layout.top_k // 2)
        found = pager.copy_rates(layout, offsets, driver, compute_stream=compute_stream(), group=group, budget_s=BUDGET_S)
    except KernelError as error:
        return _without(asked, str(error))
    rates = (found[0] / 1e9, found[1] / 1e9)
    if asked == "gather":
        return CopyWay("gather", "asked for", rates, driver)
    if rates[1] >= MARGIN * rates[0]:
        return CopyWay("gather", "auto: measured faster than the copy engine", rates, driver)
    return CopyWay("engine", f"auto: a gather is not {100 * (MARGIN - 1):.0f} % faster", rates)


def _without(asked: Asked, problem: str) -> CopyWay:
    if asked == "gather":
        raise ConfigError(f"GLM53_EC_COPY=gather cannot be served: {problem}. Use auto or engine", param="GLM53_EC_COPY")
    return CopyWay("engine", f"auto: {problem}")


def check(asked: Asked) -> None:
    """Refuses, before anything slow, a gather that this installation or GPU does not have.

    Raises:
        ConfigError: says what is missing.
    """
    if asked == "gather" and (problem := why_not()):
        _without(asked, problem)


def why_not() -> str:
    """Why the current GPU cannot gather, or ""."""
    major, minor = torch.cuda.get_device_capability()
    try:
        return cuda_expert.why_not_on(f"{major}{minor}")
    except KernelsMissingError as error:
        return str(error)


def make_stream(device: torch.device, asked: Asked) -> Any:
    """The stream that records are copied on.

    Where it may run kernels it has another priority than the compute stream, and with that a queue of its own in the hardware: behind the
    wait of a step in the same queue a gather would never begin.
    """
    return torch.cuda.Stream(device) if asked == "engine" else torch.cuda.Stream(device, priority=-1)
