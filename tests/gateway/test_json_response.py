"""JSON on its way out: compact, UTF-8, and whatever clients may have sent."""

from __future__ import annotations

import json

import pytest

from services.gateway.json_response import JsonResponse, json_bytes


@pytest.mark.parametrize(
    "value",
    [{"a": [1, 2.5, None, True, 'é 你 😀 \u2028 " \\ \n']}, {"seed": 2**64, "low": -(2**70)}, {"1": {"": []}}, "text", 1e308, -0.0],
)
def test_what_goes_out_comes_back(value: object) -> None:
    """Also numbers beyond 64 bits, which the fast encoder refuses."""
    sent = json_bytes(value)
    assert json.loads(sent) == value
    assert b", " not in sent
    assert JsonResponse(value).body == sent


def test_characters_go_out_as_they_are() -> None:
    """Not as escapes: Chinese text would take twice the bytes."""
    assert json_bytes({"a": "你"}) == '{"a":"你"}'.encode()


def test_half_a_character_has_no_encoding() -> None:
    """It must have been replaced before."""
    with pytest.raises(UnicodeEncodeError):
        json_bytes({"a": "\ud83d"})
