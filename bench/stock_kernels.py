"""exllamav3's own CPU expert kernels as denominators: fetched as wheels, compiled outside the repository, called with our records.

Nothing of theirs is part of this repository. The kernel is compiled from its wheel with the flags that exllamav3 itself uses (-Ofast),
against bench/stock/include, a small stand-in for the few PyTorch types that it names. A library takes its best instruction set when it
is loaded, so every tier is a copy of the file, loaded with EXL3_MOE_CPU_MAX_ISA set.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python.expert import ExpertShape

VERSIONS = ("1.5.1", "1.6.5")
TIERS = ("scalar", "avx2", "bw", "vnni", "vbmi")  # in the order of the libraries' own numbers
SHIM = pathlib.Path(__file__).parent / "stock"
SOURCE = "exllamav3/exllamav3_ext/cpu"
COMPILE_TIMEOUT_S = 1800
_OFFSETS = ("gate_trellis", "up_trellis", "down_trellis", "gate_suh", "gate_svh", "up_suh", "up_svh", "down_suh", "down_svh")

Call = Callable[[], None]


def library(version: str, folder: pathlib.Path) -> pathlib.Path:
    """The compiled kernel of one version, made in `folder` when it is not there yet (a wheel lying there is used, else pip fetches it)."""
    path = folder / f"stock-{version}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"exllamav3-{version}-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"exllamav3=={version}"]
        subprocess.run(command, check=True, timeout=600)
    source = folder / version
    with zipfile.ZipFile(wheel) as archive:
        for name in ("moe_mul1.cpp", "moe_mul1.h"):
            archive.extract(f"{SOURCE}/{name}", source)
    objects = [folder / f"{version}-kernel.o", folder / f"{version}-binding.o"]
    flags = ["-std=c++17", "-Ofast", "-fPIC", "-fvisibility=hidden", "-w", f"-I{SHIM / 'include'}", f"-I{source / SOURCE}"]
    for file, target in zip((source / SOURCE / "moe_mul1.cpp", SHIM / "stock_c.cpp"), objects, strict=True):
        subprocess.run(["g++", *flags, "-c", str(file), "-o", str(target)], check=True, timeout=COMPILE_TIMEOUT_S)
    # Linked without -Ofast: with it the library would make the process flush subnormal numbers.
    subprocess.run(["g++", "-shared", "-o", str(path), *map(str, objects), "-lpthread"], check=True, timeout=600)
    return path


class StockKernel:
    """One version at one tier, with its copy of the records in the layout that the tier wants."""

    def __init__(
        self,
        path: pathlib.Path,
        version: str,
        tier: str,
        shape: ExpertShape,
        records: npt.NDArray[np.uint8],
        layouts: dict[str, npt.NDArray[np.uint8]],
    ) -> None:
        """records: uint8 [experts, record_bytes], native. layouts: repacked copies that several kernels share; filled here.

        Raises ValueError when the host's best tier is below `tier`.
        """
        self.name = f"stock {version} {tier}"
        copy = path.with_name(f"{path.stem}-{tier}-{os.getpid()}.so")
        shutil.copyfile(path, copy)
        os.environ["EXL3_MOE_CPU_MAX_ISA"] = tier
        try:
            self._library = ctypes.CDLL(str(copy))
        finally:
            copy.unlink()
        number = ctypes.c_int
        self._library.stock_make_layer.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[number] * 4, ctypes.c_void_p, ctypes.c_double, number]
        self._library.stock_make_layer.restype = ctypes.c_int64
        self._library.stock_forward.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 4, *[number] * 3]
        self._library.stock_error.restype = ctypes.c_char_p
        found = TIERS[self._library.stock_tier()]
        if found != tier:
            raise ValueError(f"{self.name}: the host's best tier is {found}")
        layout = {"avx2": "planar pairs" if version >= "1.6" else "native", "scalar": "native"}.get(tier, "bands")
        if layout != "native" and layout not in layouts:
            layouts[layout] = repacked(shape, records, layout)
        self._records = records if layout == "native" else layouts[layout]
        offsets = np.array([getattr(shape, name) for name in _OFFSETS], np.int64)
        self._handle = self._library.stock_make_layer(
            self._records.ctypes.data, shape.record_bytes, len(records), shape.hidden, shape.inter, shape.k_up, offsets.ctypes.data,
            shape.act_limit, int(layout != "native"),
        )  # fmt: skip
        if self._handle < 0:
            raise ValueError(f"{self.name}: {self._library.stock_error().decode()}")

    def prepare(self, experts: Sequence[int], x: npt.NDArray[np.float16], out: npt.NDArray[np.float32], threads: int) -> Call:
        """A call that evaluates some experts for all rows of x, each with weight 1: out fp32 [rows, hidden] is their sum."""
        rows, top_k = x.shape[0], len(experts)
        sel, weights = np.tile(np.array(experts, np.int32), (rows, 1)), np.ones((rows, top_k), np.float16)

        def call() -> None:
            pointers = (x.ctypes.data, sel.ctypes.data, weights.ctypes.data, out.ctypes.data)
            if self._library.stock_forward(self._handle, *pointers, rows, top_k, threads) != 0:
                raise ValueError(f"{self.name}: {self._library.stock_error().decode()}")

        return call


def repacked(shape: ExpertShape, records: npt.NDArray[np.uint8], layout: str) -> npt.NDArray[np.uint8]:
    """Records with trellis parts in a stock layout, as moe_mul1.h states it.

    bands: tile (kt, nt) at (nt / 8) * tiles_k * 8 + kt * 8 + nt % 8.
    planar pairs: the same with 2 in the place of 8, and dword w of a tile at 8 * (w % K) + w / K.
    """
    group = 2 if layout == "planar pairs" else 8
    packed = shape.empty_records(len(records))
    seen: dict[bytes, int] = {}
    for i, record in enumerate(records):
        key = record[:64].tobytes()
        if key in seen:  # the benchmark repeats a few experts
            packed[i] = packed[seen[key]]
            continue
        seen[key] = i
        packed[i] = record
        for name in ("gate_trellis", "up_trellis", "down_trellis"):
            tiles = shape.view(record, name)
            tiles_k, tiles_n, halfwords = tiles.shape
            words: npt.NDArray[Any] = tiles.view(np.uint32).reshape(tiles_k, tiles_n // group, group, halfwords // 2)
            if group == 2:
                words = words.reshape(*words.shape[:3], 8, halfwords // 16).swapaxes(3, 4)
            ordered = np.ascontiguousarray(words.swapaxes(0, 1))
            shape.view(packed[i], name)[...] = ordered.reshape(-1).view(np.uint16).reshape(tiles.shape)
    return packed
