"""The layout is written once, in expert_abi.h; everything else is generated from it or checked against it."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import pytest

from kernels.python import _layout, shm_lib

ROOT = pathlib.Path(__file__).parents[2]
INCLUDE = ROOT / "kernels" / "include"


def compile_and_run(source: pathlib.Path, out: pathlib.Path, include: pathlib.Path = INCLUDE) -> subprocess.CompletedProcess[str]:
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{include}", str(source), str(include / "expert_abi.c"), "-o", str(out)]
    built = subprocess.run(command, capture_output=True, text=True)
    return built if built.returncode else subprocess.run([str(out)], capture_output=True, text=True)


def test_the_generated_layout_is_up_to_date(tmp_path: pathlib.Path) -> None:
    """The committed Python layout is what the header gives now."""
    printed = compile_and_run(ROOT / "kernels" / "tests" / "emit_layout.c", tmp_path / "emit")
    assert printed.returncode == 0, printed.stderr
    committed = (ROOT / "kernels" / "python" / "_layout.py").read_text()
    assert printed.stdout == committed, "run build/kernels/emit_layout > kernels/python/_layout.py"


def test_ctypes_agrees_with_the_compiler() -> None:
    """Every size and offset of the Python mirror equals the compiler's, and the library has the same hash."""
    for struct, fields in _layout.EXPECTED.items():
        for name, (offset, size) in fields.items():
            found = (0, ctypes.sizeof(struct)) if name == "" else (getattr(struct, name).offset, getattr(struct, name).size)
            assert found == (offset, size), f"{struct.__name__}.{name}"
    assert shm_lib.load().abi_layout_hash() == _layout.LAYOUT_HASH


def test_the_header_is_c11(tmp_path: pathlib.Path) -> None:
    """The public headers compile as C, and the layout functions hold their promises there."""
    result = compile_and_run(ROOT / "kernels" / "tests" / "abi_as_c.c", tmp_path / "abi")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FIELD(AbiWord, epoch)", "FIELD(AbiWord, epoch) FIELD(AbiWord, extra)"),
        ("ARRAY(uint8_t, checkpoint_hash, 32)", "ARRAY(uint8_t, checkpoint_hash, 16)"),
        ("FIELD(uint32_t, num_rows)", "FIELD(uint64_t, num_rows)"),
        ("ARRAY(uint8_t, pad, 60)", "ARRAY(uint8_t, pad, 28)"),
    ],
)
def test_a_drifted_layout_does_not_compile(tmp_path: pathlib.Path, old: str, new: str) -> None:
    """Adding, shrinking or widening a field stops the build at a static assertion."""
    for name in ("expert_abi.h", "expert_abi.c", "moe_expert.h"):
        shutil.copy(INCLUDE / name, tmp_path / name)
    text = (tmp_path / "expert_abi.h").read_text()
    assert text.count(old) == 1
    (tmp_path / "expert_abi.h").write_text(text.replace(old, new))
    command = ["cc", "-std=c11", f"-I{tmp_path}", "-c", str(tmp_path / "expert_abi.c"), "-o", str(tmp_path / "abi.o")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode != 0
    assert "static assertion failed" in built.stderr


def test_swapping_two_fields_changes_the_hash(tmp_path: pathlib.Path) -> None:
    """A drift that keeps all sizes is caught by the layout hash at the handshake."""
    for name in ("expert_abi.h", "expert_abi.c", "moe_expert.h"):
        shutil.copy(INCLUDE / name, tmp_path / name)
    header = tmp_path / "expert_abi.h"
    text = header.read_text()
    swapped = text.replace("FIELD(AbiWord, epoch)", "FIELD(AbiWord, @)").replace("FIELD(AbiWord, abort_epoch)", "FIELD(AbiWord, epoch)")
    header.write_text(swapped.replace("FIELD(AbiWord, @)", "FIELD(AbiWord, abort_epoch)"))
    printed = compile_and_run(ROOT / "kernels" / "tests" / "emit_layout.c", tmp_path / "emit", include=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert f"LAYOUT_HASH = 0x{_layout.LAYOUT_HASH:016X}" not in printed.stdout


def test_the_headers_are_cxx17_and_cuda(tmp_path: pathlib.Path) -> None:
    """The same text compiles as C++17 and, where nvcc is installed, as CUDA."""
    includes = "".join(f'#include "{name}"\n' for name in ("expert_abi.h", "expert_region.h", "expert_tier.h"))
    source = tmp_path / "unit.cpp"
    source.write_text(f"{includes}int main() {{ return sizeof(AbiJob) == 64 ? 0 : 1; }}\n")
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", "-c", str(source), "-o", str(tmp_path / "unit.o")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed: checked as C++17 only")
    cuda = tmp_path / "unit.cu"
    cuda.write_text(f"{includes}__global__ void read(const AbiJob* job, uint64_t* seq) {{ *seq = job->seq; }}\n")
    built = subprocess.run([nvcc, f"-I{INCLUDE}", "-c", str(cuda), "-o", str(tmp_path / "cuda.o")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
