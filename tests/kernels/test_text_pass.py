"""A pass that is written down once: the same bits as the calls one by one, and failures that come out where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.python import text_ops, text_pass
from kernels.python.text_pass import Op, TextPass

HIDDEN, WIDE, ROWS = 64, 128, 3


def _segments(rows: int) -> text_pass.Segments:
    empty = np.zeros((0, 1), np.uint64)
    return text_pass.Segments(np.array([rows], np.int64), np.zeros(1, np.int64), empty, empty, empty)


def _no_experts(*_args: object) -> None:
    raise AssertionError("no experts were asked for")


def test_a_pass_gives_the_bits_of_its_calls() -> None:
    """norm, linear and SwiGLU over several rows, against the functions called one by one."""
    rng = np.random.default_rng(1)
    x, norm = rng.standard_normal((ROWS, HIDDEN), np.float32), rng.standard_normal(HIDDEN, np.float32)
    panels = text_ops.pack(rng.standard_normal((HIDDEN, 2 * WIDE), np.float32))
    alone = [np.zeros(shape, np.float32) for shape in ((ROWS, HIDDEN), (ROWS, 2 * WIDE), (ROWS, WIDE))]
    passed = [np.zeros_like(array) for array in alone]
    ops, (a, b, c) = text_ops.functions(), (text_ops.address(array) for array in alone)
    ops.text_rms_norm(text_ops.address(x), HIDDEN, text_ops.address(norm), 1e-5, HIDDEN, a, HIDDEN, ROWS)
    ops.text_linear(a, HIDDEN, text_ops.address(panels), HIDDEN, 2 * WIDE, b, 2 * WIDE, ROWS)
    ops.text_swiglu(b, WIDE, 7, c, ROWS)

    whole = TextPass(text_pass.from_python(_no_experts))
    a, b, c = (text_ops.address(array) for array in passed)
    whole.add(Op.RMS_NORM, text_ops.address(x), HIDDEN, text_ops.address(norm), 1e-5, HIDDEN, a, HIDDEN)
    whole.add(Op.LINEAR, a, HIDDEN, text_ops.address(panels), HIDDEN, 2 * WIDE, b, 2 * WIDE)
    whole.add(Op.SWIGLU, b, WIDE, 7, c)
    whole.run(_segments(ROWS), prefill=False)
    assert whole.progress == 3
    for one, other in zip(alone, passed, strict=True):
        assert one.any()
        assert one.tobytes() == other.tobytes()


def test_what_the_experts_raise_comes_out_of_the_pass() -> None:
    """The pass ends where its experts fail: what stands behind them does not run."""
    seen: list[tuple[int, int, int, bool]] = []

    def experts(layer: int, rows: int, top_k: int, x: int, sel: int, weights: int, prefill: bool, out: int) -> None:
        seen.append((layer, rows, top_k, prefill))
        if layer == 5:
            raise ValueError("layer 5 is gone")

    whole = TextPass(text_pass.from_python(experts))
    for layer in (4, 5, 6):
        whole.add(Op.EXPERTS, layer, 2, None, None, None, None)
    with pytest.raises(ValueError, match="layer 5 is gone"):
        whole.run(_segments(ROWS), prefill=True)
    assert seen == [(4, ROWS, 2, True), (5, ROWS, 2, True)]
    assert whole.progress == 1


def test_a_call_with_the_wrong_number_of_arguments_is_refused() -> None:
    """It would read what nobody wrote."""
    whole = TextPass(text_pass.from_python(_no_experts))
    with pytest.raises(ValueError, match="shorter"):
        whole.add(Op.SWIGLU, 0, 8)


def test_a_pass_that_has_run_takes_no_more_calls() -> None:
    """The native table was made."""
    whole = TextPass(text_pass.from_python(_no_experts))
    whole.run(_segments(1), prefill=False)
    with pytest.raises(RuntimeError, match="fixed"):
        whole.add(Op.EXPERTS, 0, 1, None, None, None, None)
