"""Which methods a URL has, and which URL was meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import Scope

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
# Of the server as a whole.
ANY = frozenset({"GET", "HEAD", "OPTIONS", "POST", "DELETE"})
# A base URL with a /v1 too few or too many is near enough; another endpoint of the same server is not.
_NEAR = 0.8
_MOST_CHARS = 64  # of a path that is compared


def allowed(app: FastAPI, scope: Scope) -> list[str]:
    """What may be asked of the scope's path, HEAD included; empty where there is nothing."""
    found = []
    for method in _METHODS:
        asked = {**scope, "method": method}
        if any(route.matches(asked)[0] is Match.FULL for route in app.router.routes):
            found += ["GET", "HEAD"] if method == "GET" else [method]
    return found


def nearest(known: Sequence[str], path: str) -> str:
    """The end of the message for a URL that does not exist: the one that may be meant, else where all are listed."""
    close = difflib.get_close_matches(path[:_MOST_CHARS], known, n=1, cutoff=_NEAR)
    return f": did you mean {close[0]}?" if close else "; GET /openapi.json lists what there is."
