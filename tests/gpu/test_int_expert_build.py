"""The GPU kernels' library on a machine without a GPU: it is built where nvcc is, loads, and says what it cannot do."""

from __future__ import annotations

import sys

import pytest

from kernels.python import cuda_expert
from kernels.python.exl3 import Codebook
from kernels.python.expert import ExpertShape
from tools import build_kernels

built = pytest.mark.skipif(not cuda_expert.is_built(), reason="libglm53_cuda.so is not built: no nvcc, or nobody asked for it")


def test_the_library_is_built_where_nvcc_is() -> None:
    """`make test` has compiled the GPU kernels for every architecture that was chosen, and says so when it could not."""
    reason = build_kernels.skipped(build_kernels.read(build_kernels.CUDA_BUILT) or "none", build_kernels.find_nvcc())
    if reason is not None:
        pytest.skip(f"the GPU kernels are skipped: {reason}")
    built = build_kernels.read(build_kernels.CUDA_BUILT)
    assert built is not None
    assert cuda_expert.is_built()
    assert cuda_expert.architectures() == list(build_kernels.CUDA_ARCHITECTURES if built == "all" else built.split(","))


@pytest.mark.parametrize(
    ("asked", "recorded", "built", "wanted", "choice"),
    [
        (None, None, None, False, "none"),
        (None, None, None, True, "all"),
        (None, None, "all", False, "all"),
        (None, "90", None, True, "90"),
        (None, "none", "all", True, "none"),
        ("86,90", "none", "all", False, "86,90"),
    ],
)
def test_what_is_built(asked: str | None, recorded: str | None, built: str | None, wanted: bool, choice: str) -> None:
    """A word of the user counts most and stays; else the tests and a GPU want everything, and what is built is kept."""
    assert build_kernels.choose(asked, recorded, built, wanted) == choice


@pytest.mark.parametrize(
    ("choice", "nvcc", "options"),
    [
        ("all", None, ["-DGLM53_CUDA=OFF"]),
        ("none", "/n/nvcc", ["-DGLM53_CUDA=OFF"]),
        ("all", "/n/nvcc", ["-DGLM53_CUDA=ON", "-DGLM53_CUDA_ARCHITECTURES=86;89;90;120", "-DCMAKE_CUDA_COMPILER=/n/nvcc"]),
        ("86,90", "/n/nvcc", ["-DGLM53_CUDA=ON", "-DGLM53_CUDA_ARCHITECTURES=86;90", "-DCMAKE_CUDA_COMPILER=/n/nvcc"]),
    ],
)
def test_what_cmake_is_told(choice: str, nvcc: str | None, options: list[str]) -> None:
    """No nvcc means no GPU kernels; a choice of architectures is passed on."""
    assert build_kernels.cuda_options(choice, nvcc) == options


def test_serving_builds_no_test_program() -> None:
    """Only the libraries that are loaded; the tests build everything, and a folder that has test programs is known by its cache."""
    assert build_kernels.targets("none", test=False) == ["--target", "glm53_kernels"]
    assert build_kernels.targets("90", test=False) == ["--target", "glm53_kernels", "glm53_cuda"]
    assert build_kernels.targets("90", test=True) == []
    assert not build_kernels.has_tests(None)
    assert not build_kernels.has_tests("GLM53_NATIVE_TESTS:BOOL=OFF\n")
    assert build_kernels.has_tests("//doc\nGLM53_NATIVE_TESTS:BOOL=ON\n")


def test_a_long_build_tells_how_far_it_is() -> None:
    """A line every few seconds, nothing for a quick one; what was said is kept for when it fails."""
    lines = ["-- words\n", *(f"[{number}/40] Building CXX object x.o\n" for number in range(1, 41))]
    for each_s, expected in ((1.0, 13), (0.01, 0)):
        now = iter(range(1000))
        told: list[str] = []
        said = build_kernels.progress(lines, told.append, lambda now=now, each_s=each_s: next(now) * each_s)
        assert said == "".join(lines)
        assert bool(told) == bool(expected)
        assert all(line.endswith(" of 40 files") for line in told)


def test_a_failed_build_shows_its_output(capfd: pytest.CaptureFixture[str]) -> None:
    """With the compiler's words, and its exit code."""
    assert build_kernels.run([sys.executable, "-c", "import sys; print('error: x', file=sys.stderr); sys.exit(3)"]) == 3
    assert "error: x" in capfd.readouterr().err


def test_an_unknown_architecture_is_refused() -> None:
    """The message names it and what there is."""
    with pytest.raises(SystemExit, match=r"--cuda 90,75: 75 is not one of 86, 89, 90, 120, all, none"):
        build_kernels.cuda_options("90,75", "/n/nvcc")


@built
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ExpertShape.create(256, 128, 3, codebook=Codebook.MCG), "codebook 1: the GPU kernel has MUL1"),
        (ExpertShape.create(256, 128, (3, 3, 5)), "k_down = 5 bits per weight: the GPU kernel has 2, 3 and 4"),
        (ExpertShape.create(256, 128, (1, 3, 3)), "k_gate = 1"),
        (ExpertShape.create(256, 128, 6, gateless=True), "k_up = 6"),
    ],
)
def test_a_shape_that_a_gpu_cannot_run_is_named(shape: ExpertShape, message: str) -> None:
    """`why_not` says which field is at fault, so that the caller can say why it falls back."""
    reason = cuda_expert.why_not(shape)
    assert reason is not None
    assert message in reason


@built
def test_a_shape_that_a_gpu_runs_has_no_reason_against_it() -> None:
    """K = 2, 3, 4 in any mixture, with and without a gate."""
    for bits in (2, 3, 4, (2, 3, 4)):
        for gateless in (False, True):
            assert cuda_expert.why_not(ExpertShape.create(256, 384, bits, gateless=gateless)) is None


@built
@pytest.mark.parametrize(
    ("copies", "size", "said"),
    [
        ([], 16, "a gather of nothing"),
        ([(16, 16)], 0, "a gather of nothing"),
        ([(16, 16), (16, 0)], 16, r"copies\[1\] has no address"),
        ([(24, 16)], 16, r"copies\[0\] is not 16-byte aligned"),
        ([(16, 20)], 16, r"copies\[0\] is not 16-byte aligned"),
    ],
)
def test_a_gather_that_cannot_be_is_refused_by_name(copies: list[tuple[int, int]], size: int, said: str) -> None:
    """Before a device is asked for."""
    with pytest.raises(ValueError, match=said):
        cuda_expert.gather(copies, size)


@built
def test_why_a_gpu_is_not_served_is_said() -> None:
    """By what the library was built for."""
    assert cuda_expert.why_not_on(cuda_expert.architectures()[0]) == ""
    assert "this GPU has 75" in cuda_expert.why_not_on("75")


@built
def test_too_many_picks_are_refused_before_a_device_is_asked_for() -> None:
    """The limit is named."""
    with pytest.raises(ValueError, match=r"max_picks = 129 is not in 1\.\.128"):
        cuda_expert.CudaExperts(ExpertShape.create(256, 128, 3), 129)
