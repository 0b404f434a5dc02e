"""Which methods a URL has."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import Scope

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
# Of the server as a whole.
ANY = frozenset({"GET", "HEAD", "OPTIONS", "POST", "DELETE"})


def allowed(app: FastAPI, scope: Scope) -> list[str]:
    """What may be asked of the scope's path, HEAD included; empty where there is nothing."""
    found = []
    for method in _METHODS:
        asked = {**scope, "method": method}
        if any(route.matches(asked)[0] is Match.FULL for route in app.router.routes):
            found += ["GET", "HEAD"] if method == "GET" else [method]
    return found
