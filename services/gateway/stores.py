"""What outlives a request for a while: stored responses, and answers under an idempotency key."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from services.gateway.shared.link import RedisLink
from services.gateway.shared.store import Store, store_for


@dataclass(frozen=True)
class Stores:
    """One store for each use."""

    responses: Store
    idempotency: Store

    @classmethod
    def of(cls, link: RedisLink | None) -> Stores:
        """In Redis where there is one, in this process's memory otherwise."""
        return cls(store_for(link, "response"), store_for(link, "idempotency"))


def stores_of(request: Request) -> Stores:
    """The stores that the app was made with."""
    return request.app.state.stores  # type: ignore[no-any-return]
