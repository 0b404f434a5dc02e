"""Patch `pool_words`: a decode step of several streams does not wait for the device where a pool of compressed keys is full.

There exllamav3 makes a tensor of one number on the device for each stream and attention layer, from a list: torch copies that from pageable
memory, and the host waits until the device has come so far. Here the number travels with the launch that writes it. The tensor is the same.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from services.gpu_worker.patches.replace import Replacements

NAME = "pool_words"


class Torch(types.ModuleType):
    """torch as one module of exllamav3's sees it, with another `tensor`.

    Args:
        real: torch.
    """

    def __init__(self, real: Any) -> None:
        super().__init__(real.__name__)
        # Everything by a look into a dict, as of a module; so this class has no names of its own but those that torch cannot have.
        self.__dict__.update(real.__dict__)
        self.glm53_real = real
        self.tensor = functools.partial(tensor, real)

    def __getattr__(self, name: str) -> Any:
        """What torch makes when it is first asked for."""
        return getattr(self.__dict__["glm53_real"], name)


def tensor(torch: Any, data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Any:
    """torch.tensor; a list of one number for a device is written by a kernel that has the number as an argument."""
    one = isinstance(data, list) and len(data) == 1 and type(data[0]) is int
    if one and dtype is not None and getattr(device, "type", "cpu") == "cuda" and not more:
        return torch.full((1,), data[0], dtype=dtype, device=device)
    return torch.tensor(data, dtype=dtype, device=device, **more)


def install(replacements: Replacements, module: Any) -> None:
    """Puts it into exllamav3's module of compressed attention (`modules.mla_attn`)."""
    replacements.set(module, "torch", Torch(module.torch))
