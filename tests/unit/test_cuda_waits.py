"""The counter of waiting driver calls: over a stand-in for the driver, found the ways in which the runtime and we find it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import cuda_waits

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process with the counter preloaded; `driver` is the stand-in.
PROGRAM = """
import ctypes, json, sys, threading
from tests.support.cuda_waits import Waits
waits = Waits()
libc = ctypes.CDLL(None)
libc.dlopen.restype = libc.dlsym.restype = ctypes.c_void_p
libc.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
driver = ctypes.CDLL(sys.argv[1])
handle = libc.dlopen(sys.argv[1].encode(), 2)
before = waits.hooked

def symbol(name, *types):
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(libc.dlsym(handle, name.encode()))

P, U = ctypes.c_void_p, ctypes.c_uint64
get = symbol("cuGetProcAddress_v2", ctypes.c_char_p, P, ctypes.c_int, U, P)

def proc(name, *types):
    out = P()
    assert get(name.encode(), ctypes.addressof(out), 13000, 0, None) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(out.value)

again = proc("cuGetProcAddress", ctypes.c_char_p, P, ctypes.c_int, U, P)
out = P()
again(b"cuStreamSynchronize", ctypes.addressof(out), 13000, 0, None)
sync_by_proc = ctypes.CFUNCTYPE(ctypes.c_int, P)(out.value)
sync_by_name = symbol("cuStreamSynchronize", P)
allocate, copy = symbol("cuMemAlloc_v2", P, U), proc("cuMemcpyDtoH", P, U, U)
launch = proc("cuLaunchKernel")
hooked = waits.hooked
sync_by_proc(1)
waits.open()
assert sync_by_proc(10) == sync_by_name(100) == 0
where = P()
assert allocate(ctypes.addressof(where), 4096) == 0
assert where.value == 4096
assert copy(0, 3, 5) == 7
launch()
other = threading.Thread(target=sync_by_proc, args=(1000,))
other.start(); other.join()
counted = waits.close()
sync_by_proc(10000)
driver.fake_ran.restype = ctypes.c_long
print(json.dumps({
    "hooked": hooked, "before": before, "counted": counted, "calls": waits.calls(), "others": waits.counts(others=True),
    "ran": [driver.fake_ran(i) for i in range(4)],
    "strlen": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(libc.dlsym(None, b"strlen"))(b"abc"),
}))
"""

RUNTIME = """
import ctypes, json, sys
from tests.support.cuda_waits import Waits
waits = Waits()
runtime = ctypes.CDLL(sys.argv[1])
count = ctypes.c_int()
code = runtime.cudaGetDeviceCount(ctypes.byref(count))
print(json.dumps({"code": code, "hooked": waits.hooked}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("waits")
    driver = cuda_waits.build(folder, "fake_cuda")
    target = folder / "libcuda.so.1"
    driver.rename(target)
    return cuda_waits.build(folder), target


def run(program: str, library: Path, *words: str, **env: str) -> dict[str, Any]:
    full = {**os.environ, "LD_PRELOAD": str(library), **env}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=ROOT, env=full, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_waiting_calls_are_counted_by_kind_and_thread(built: tuple[Path, Path]) -> None:
    """Found by name, through cuGetProcAddress, and through the one that it gives; results and arguments pass; others stay uncounted."""
    seen = run(PROGRAM, built[0], str(built[1]))
    assert seen["before"] == 0
    assert seen["hooked"] == 4
    assert seen["counted"] == {"waits": 2, "memory": 1, "copies": 1, "code": 0}
    assert seen["calls"] == ["cuStreamSynchronize", "cuStreamSynchronize", "cuMemAlloc", "cuMemcpyDtoH"]
    assert seen["others"] == {"waits": 1, "memory": 0, "copies": 0, "code": 0}
    assert seen["ran"] == [11_111, 1, 8, 1]
    assert seen["strlen"] == 3


def runtime_library() -> Path | None:
    places = [Path("/usr/local/cuda/lib64"), *Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/lib")]
    return next((file for place in places for file in sorted(place.glob("libcudart.so.1[23]"))), None)


@pytest.mark.skipif(runtime_library() is None, reason="no CUDA runtime library here")
def test_the_real_runtime_asks_through_the_counter(built: tuple[Path, Path]) -> None:
    """NVIDIA's own libcudart finds the driver's functions by dlsym and cuGetProcAddress: its synchronise calls would be seen."""
    seen = run(RUNTIME, built[0], str(runtime_library()), LD_LIBRARY_PATH=str(built[1].parent))
    assert seen["hooked"] >= 10


def test_without_the_preload_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of nothing must not look like no waits."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with pytest.raises(RuntimeError, match="LD_PRELOAD does not name"):
        cuda_waits.Waits()
