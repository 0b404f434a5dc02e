"""Several training processes, one a GPU, as torch.distributed.run starts them; alone, every call does nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DEADLINE = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This process's number among `count` equal ones; `cpu_group` carries what needs no GPU."""

    rank: int = 0
    count: int = 1
    cpu_group: Any = None

    @staticmethod
    def announced() -> Ranks:
        """What RANK and WORLD_SIZE say, before the group is joined: processes that are forked later share nothing of it."""
        return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    @staticmethod
    def from_environment(device: str) -> Ranks:
        """Join the group that RANK, WORLD_SIZE and LOCAL_RANK describe; without them, alone."""
        if Ranks.announced().count == 1:
            return Ranks()
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_DEADLINE)
        return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_DEADLINE))

    def agree(self, value: float) -> float:
        """The first process's value, in all of them. The GPUs are not waited for."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0, group=self.cpu_group)
        return float(shared)

    def average(self, tensors: list[Tensor]) -> None:
        """Replace tensors (same order in every process) by their mean over the processes: one exchange per dtype."""
        if self.count == 1:
            return
        for dtype in {t.dtype: None for t in tensors}:
            same = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in same])
            dist.all_reduce(flat)
            flat /= self.count
            parts = flat.split([t.numel() for t in same])
            torch._foreach_copy_(same, [part.view_as(t) for part, t in zip(parts, same, strict=True)])
