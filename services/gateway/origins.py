"""The web pages that GLM53_CORS_ORIGINS allows.

A browser's Origin header is compared as it stands: an entry that no browser sends would be taken, and would allow nobody.
"""

from __future__ import annotations

import re
import urllib.parse

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_HOST = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_NEED = "a browser's Origin is scheme://host or scheme://host:port, e.g. https://chat.example.com; * allows every page"


def allowed_origins(setting: str) -> list[str]:
    """The entries of a comma list.

    Raises:
        ValueError: an entry that no browser sends; says what was probably meant.
    """
    entries = [entry.strip() for entry in setting.split(",")]
    for entry in filter(None, entries):
        # "null" is what pages without an origin send, those of files for one.
        if entry in ("*", "null") or (sent := _as_sent(entry)) == entry:
            continue
        meant = f"did you mean {sent}? " if sent else ""
        raise ValueError(f"{entry!r} allows no page: {meant}{_NEED}")
    return [entry for entry in entries if entry]


def _as_sent(entry: str) -> str:
    """What a browser sends from a page there, "" when the entry names none."""
    try:
        url = urllib.parse.urlsplit(entry)
        scheme, port = url.scheme.lower(), url.port
        host = (url.netloc.rpartition("@")[2] if port is None else url.netloc.rpartition("@")[2].rpartition(":")[0]).rstrip(":").lower()
        host = host if host.isascii() else host.encode("idna").decode()
    except ValueError:
        return ""
    if not _SCHEME.fullmatch(scheme) or not _HOST.fullmatch(host):
        return ""
    return f"{scheme}://{host}" + (f":{port}" if port is not None and port != _DEFAULT_PORTS.get(scheme) else "")
