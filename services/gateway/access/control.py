"""The door: a key that may do what is asked, and its limits. Everything else lies behind it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import Glm53Error
from services.gateway.access.admission import AccessPolicy, admission_var
from services.gateway.access.keys import ANYONE, MAX_KEY_CHARS, ApiKey
from services.gateway.access.ledger import UsageLedger
from services.gateway.error_shapes import response_for
from services.gateway.errors import AuthenticationFailed, PermissionDenied, http_of
from services.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# For probes and scrapers, which have no keys. /metrics has counts only, by no key.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
ADMIN_PATHS = ("/stats", "/server_info", "/get_server_info", "/admin/")

KeyFinder = Callable[[str], Awaitable[ApiKey | None]]


class AccessControl:
    """ASGI middleware.

    Args:
        app: what lies behind.
        keys: finds the entry of a key; None where no keys are asked for.
        policy: limits.
        metrics: counts refusals.
        ledger: gets a line for every request that used tokens; None where nobody wants one.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyFinder | None,
        policy: AccessPolicy,
        metrics: GatewayMetrics,
        ledger: UsageLedger | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._policy = policy
        self._metrics = metrics
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            path = scope["path"]
            if scope["method"] == "OPTIONS":
                # What may be asked is no secret, and browsers ask without a key.
                await self._app(scope, receive, send)
                return
            key = ANYONE if self._keys is None or path in OPEN_PATHS else await self._key_of(scope, self._keys)
            if path.startswith(ADMIN_PATHS) and not key.admin:
                raise PermissionDenied(f"The key {key.id!r} is no admin key.")
            scope["state"]["key"] = key
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            admission = self._policy.enter(key, scope["state"]["request_id"])
        except Glm53Error as error:
            await self._refuse(error, scope, receive, send)
            return

        scope["state"]["admission"] = admission

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and admission.standings:
                MutableHeaders(scope=message).update(admission.headers())
            await send(message)

        token = admission_var.set(admission)
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            admission_var.reset(token)
            self._policy.leave(admission)
            self._policy.settle_later(admission)
            if self._ledger is not None:
                self._ledger.note(admission, path)

    async def _key_of(self, scope: Scope, keys: KeyFinder) -> ApiKey:
        given = _presented(Headers(scope=scope))
        if given is None:
            raise AuthenticationFailed("This server needs an API key: send Authorization: Bearer <key>.")
        found = await keys(given) if len(given) <= MAX_KEY_CHARS else None
        if found is None:
            raise AuthenticationFailed("This server does not know this API key.")
        return found

    async def _refuse(self, error: Glm53Error, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.refusals.labels(error.code).inc()
        response = response_for(scope["path"], error)
        if http_of(error).status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        log.info("refused: %s", error.message)
        await response(scope, receive, send)


def _presented(headers: Headers) -> str | None:
    """The key that a request carries, as OpenAI's clients send it or as Anthropic's do."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key", "").strip() or None
