"""The score panel's arithmetic; that it gives 1 and 0 for `exact` against `fast` is tested with real servers in tests/e2e."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest

from bench import score_panel


def position(**top: float) -> dict[str, Any]:
    return {"token": 1, "logprob": -1.0, "top": {int(name[1:]): math.log(p) for name, p in top.items()}}


def test_equal_sides_are_equal() -> None:
    """Top-1 of 1 and a KL of exactly 0."""
    side = [[position(t1=0.7, t2=0.2), position(t3=0.5, t4=0.25)]]
    rows, summary = score_panel.compare(side, side)
    assert summary == {"prompts": 1, "positions": 2, "top1": 1.0, "kl_mean": 0.0, "kl_max": 0.0, "equal": True}
    assert rows[0]["perplexity"] == pytest.approx(math.e)


def test_a_difference_is_measured() -> None:
    """By hand: two listed tokens and the rest as a third."""
    a, b = position(t1=0.6, t2=0.3), position(t1=0.3, t2=0.6)
    expected = 0.6 * math.log(2) + 0.3 * math.log(0.5)
    assert score_panel.kl(a["top"], b["top"]) == pytest.approx(expected)
    _, summary = score_panel.compare([[a], [a]], [[b], [a]])
    assert summary["top1"] == 0.5
    assert summary["kl_max"] == pytest.approx(expected)
    assert summary["kl_mean"] == pytest.approx(expected / 2)
    assert summary["equal"] is False


def test_tokens_that_one_side_does_not_list_count_with_the_rest() -> None:
    """KL stays finite and positive."""
    assert 0 < score_panel.kl({1: math.log(0.5), 2: math.log(0.4)}, {1: math.log(0.4), 3: math.log(0.5)}) < 1


def test_sides_of_different_length_are_refused() -> None:
    """A lost position would shift all that follow."""
    with pytest.raises(ValueError, match="prompt 0: 1 positions on one side, 2 on the other"):
        score_panel.compare([[position(t1=0.5)]], [[position(t1=0.5), position(t1=0.5)]])


def test_settings_of_a_side() -> None:
    """Several, separated by commas; anything else is refused."""
    assert score_panel.parse_env("GLM53_MODE=fast,GLM53_EC_MAX_SLOTS=1") == {"GLM53_MODE": "fast", "GLM53_EC_MAX_SLOTS": "1"}
    for wrong in ("fast", "MODE=fast", "GLM53_MODE"):
        with pytest.raises(argparse.ArgumentTypeError):
            score_panel.parse_env(wrong)
