"""`python -m services.common.probe URL`: asks a health endpoint once. Exit code 0 for a 2xx answer, else 1 with the reason.

For containers' health checks: it needs no shell, no curl and, so that it costs little every few seconds, nothing but the standard library.
"""

from __future__ import annotations

import http.client
import sys
import urllib.parse
from collections.abc import Sequence

TIMEOUT_S = 4.0
_SHOWN_BYTES = 300


def probe(url: str, timeout_s: float = TIMEOUT_S) -> tuple[bool, str]:
    """(healthy, what the service said). Never goes through a proxy, never follows a redirect."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return False, f"{url!r} is no http:// address"
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        text = answer.read(_SHOWN_BYTES).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return False, f"{url}: {error}"
    finally:
        connection.close()
    return 200 <= answer.status < 300, f"{answer.status} {text}"


def main(argv: Sequence[str]) -> int:
    """Probes the one address given."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m services.common.probe http://host:port/path\n")
        return 2
    healthy, said = probe(argv[0])
    sys.stdout.write(f"{said}\n")
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
