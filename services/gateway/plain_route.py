"""A URL whose endpoint reads its request and makes its response itself.

FastAPI's own routes look for parameters and a body to check first: a fifth of what it costs to refuse a request, and these endpoints use
none of it.
"""

from __future__ import annotations

from starlette.routing import Match, Route
from starlette.types import Scope


class PlainRoute(Route):
    """As Starlette has it; tells the app which route it is, as FastAPI's routes do."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """How well a request fits."""
        match, child = super().matches(scope)
        if match is not Match.NONE:
            child["route"] = self
        return match, child
