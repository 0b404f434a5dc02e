"""The part of the GPU kernel that a machine without a GPU can run: how a lane finds its weights in a tile."""

from __future__ import annotations

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = ROOT / "kernels"


def build_and_run(folder: pathlib.Path, include: pathlib.Path) -> subprocess.CompletedProcess[str]:
    program = folder / "tiles"
    options = ["-std=c++17", "-O1", "-mavx2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    includes = [f"-I{include}", f"-I{KERNELS}", f"-I{KERNELS / 'include'}"]
    command = ["c++", *options, *includes, str(KERNELS / "tests" / "int_expert_tiles.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    return built if built.returncode else subprocess.run([str(program)], capture_output=True, text=True, check=False)


def test_every_lane_finds_its_weights(tmp_path: pathlib.Path) -> None:
    """For K = 2, 3 and 4 the products of all lanes are those of the rows and columns that the tensor core's fragments stand for."""
    result = build_and_run(tmp_path, KERNELS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "ok\n"


def test_a_wrong_shift_is_found(tmp_path: pathlib.Path) -> None:
    """With one window of the device header moved by a bit, the program says where."""
    text = (KERNELS / "cuda" / "int_expert_tiles.cuh").read_text()
    wrong = text.replace("powers.v[16 - shift]", "powers.v[15 - shift]")
    assert wrong != text
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "int_expert_tiles.cuh").write_text(wrong)
    result = build_and_run(tmp_path, tmp_path)
    assert result.returncode == 1
    assert result.stdout.startswith("K = 3, lane group 0")
