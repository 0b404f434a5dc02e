"""Idempotency-Key: the same request sent twice is answered once. For answers that are not streamed.

The first request claims the key; the same request again waits for its answer or gets the kept one; another request under the same key
is refused. Kept by each gateway for itself, or by all together where there is Redis; best effort when a gateway dies in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from services.common.errors import InvalidRequest
from services.gateway.accept import services_of
from services.gateway.access.keys import ApiKey
from services.gateway.beside import by_size
from services.gateway.errors import IdempotencyConflict
from services.gateway.http_head import header_of
from services.gateway.stores import stores_of

HEADER = "Idempotency-Key"
_HEADER_NAME = HEADER.lower().encode()
_USABLE = re.compile(r"[\x21-\x7e]{1,255}\Z")
_KEPT_S = 24 * 3600.0
_POLL_S = 0.05
# How long a repeated request waits for the first one's answer.
_WAIT_S = 120.0


async def once(request: Request, body: dict[str, Any], answer: Callable[[], Awaitable[Response]]) -> Response:
    """Answers a request, or gives the answer that the same request under the same key has got.

    Args:
        request: its header decides whether there is a key.
        body: what makes two requests the same, besides their URL.
        answer: makes the answer; an error is not kept.

    Raises:
        IdempotencyConflict: the key belongs to another request, or the first one does not end.
    """
    given = header_of(request.scope, _HEADER_NAME)
    if given is None or body.get("stream") is True:
        return await answer()
    if not _USABLE.match(given):
        raise InvalidRequest(f"{HEADER} must be 1 to 255 printable ASCII characters without spaces.", param=HEADER)
    key: ApiKey = request.state.key
    store = stores_of(request).idempotency
    name = f"{key.id}:{given}"
    digest = await by_size(_digest, request.url.path, body)
    claim = json.dumps({"digest": digest}).encode()
    deadline = time.monotonic() + _WAIT_S
    while not await store.add(name, claim, services_of(request).settings.request_timeout_s):
        kept = await store.get(name)
        if kept is None:
            # The first one failed, or its time is over: this one takes its place.
            continue
        found = json.loads(kept)
        if found["digest"] != digest:
            raise IdempotencyConflict(f"This {HEADER} was used for another request.", param=HEADER)
        if "answer" in found:
            return JSONResponse(found["answer"], headers={"Idempotent-Replayed": "true"})
        if time.monotonic() > deadline:
            raise IdempotencyConflict(f"The first request with this {HEADER} is still running.", param=HEADER)
        await asyncio.sleep(_POLL_S)
    try:
        response = await answer()
        kept_answer = json.dumps({"digest": digest, "answer": json.loads(bytes(response.body))}).encode()
        if not await store.put(name, kept_answer, _KEPT_S):
            # Too large to keep: nobody shall wait for it.
            await store.delete(name)
    except BaseException:
        await store.delete(name)
        raise
    return response


def _digest(path: str, body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()
