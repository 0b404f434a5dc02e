"""GLM53_CORS_ORIGINS: what browsers send is taken, what none of them sends is refused."""

from __future__ import annotations

import re

import pytest

from services.common.errors import ConfigError
from services.gateway.origins import allowed_origins
from services.gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("", []),
        ("*", ["*"]),
        ("null", ["null"]),
        ("https://a.example.com", ["https://a.example.com"]),
        ("https://a.example.com, http://localhost:5173,", ["https://a.example.com", "http://localhost:5173"]),
        ("http://[::1]:8080", ["http://[::1]:8080"]),
        ("http://[::1]", ["http://[::1]"]),
        ("http://127.0.0.1:3000", ["http://127.0.0.1:3000"]),
        ("https://xn--bcher-kva.example", ["https://xn--bcher-kva.example"]),
        ("chrome-extension://abcdefgh", ["chrome-extension://abcdefgh"]),
    ],
)
def test_what_a_browser_sends_is_taken(setting: str, allowed: list[str]) -> None:
    """Scheme and host, a port that is not the scheme's own, *, null, and other schemes than the web's."""
    assert allowed_origins(setting) == allowed
    assert GatewaySettings.load({"GLM53_CORS_ORIGINS": setting}).cors_origins == setting


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        ("https://a.example.com/path", "https://a.example.com"),
        ("https://a.example.com/", "https://a.example.com"),
        ("https://a.example.com?x=1", "https://a.example.com"),
        ("https://A.Example.com", "https://a.example.com"),
        ("HTTPS://a.example.com", "https://a.example.com"),
        ("https://a.example.com:443", "https://a.example.com"),
        ("http://a.example.com:80", "http://a.example.com"),
        ("http://a.example.com:", "http://a.example.com"),
        ("https://user:word@a.example.com:8443", "https://a.example.com:8443"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("foo", ""),
        ("a.example.com", ""),
        ("a.example.com:8080", ""),
        ("//a.example.com", ""),
        ("https://", ""),
        ("https://*.example.com", ""),
        ("https://a.example.com:99999", ""),
        ("https://a.example.com:port", ""),
        ("https://a b.example.com", ""),
        ("http://[::1", ""),
        ("https://a.example.com https://b.example.com", ""),
    ],
)
def test_what_no_browser_sends_is_refused_with_what_was_meant(entry: str, meant: str) -> None:
    """It would be taken, and allow nobody; alone or beside a good one."""
    for setting in (entry, f"https://good.example.com, {entry}"):
        with pytest.raises(
            ConfigError, match="^GLM53_CORS_ORIGINS: .*" + re.escape(repr(entry)) + " allows no page: .*scheme://host"
        ) as caught:
            GatewaySettings.load({"GLM53_CORS_ORIGINS": setting})
        assert (f"did you mean {meant}?" in caught.value.message) is bool(meant)
    if meant:
        assert allowed_origins(meant) == [meant]
