"""Cancelling a request by its id: one's own, or anybody's with an admin key, whichever gateway runs it."""

from __future__ import annotations

import logging
from typing import Any

from services.common.errors import Glm53Error
from services.gateway.access.keys import ApiKey
from services.gateway.shared.bus import Bus
from services.gateway.shared.link import SharedStateDown
from services.gateway.worker_client import WorkerClient

log = logging.getLogger(__name__)

# Ids of answers begin with what they are the answer of.
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
_MAX_ID_CHARS = 200


def request_id_of(answer_id: str) -> str:
    """The request's id that an answer's id was made from; an id of another form is returned as it is."""
    for prefix in _PREFIXES:
        if answer_id.startswith(prefix):
            return answer_id.removeprefix(prefix)
    return answer_id


class LiveRequests:
    """Which jobs of the worker belong to which request of which key, in this gateway."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[str, set[str]]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, request_id: str, key_id: str, job_id: str) -> None:
        """A job runs."""
        self._jobs.setdefault(request_id, (key_id, set()))[1].add(job_id)

    def remove(self, request_id: str, job_id: str) -> None:
        """A job has ended."""
        entry = self._jobs.get(request_id)
        if entry is not None:
            entry[1].discard(job_id)
            if not entry[1]:
                del self._jobs[request_id]

    def jobs_of(self, request_id: str, key_id: str | None) -> list[str]:
        """The jobs of a request, if the key asked for it; `key_id` None may see everybody's."""
        owner, jobs = self._jobs.get(request_id, ("", set[str]()))
        return sorted(jobs) if key_id is None or key_id == owner else []


class Canceller:
    """Cancels requests here, in the worker and through the bus.

    Args:
        live: what runs here.
        client: the worker.
        bus: reaches the other gateways; None when there are none.
    """

    def __init__(self, live: LiveRequests, client: WorkerClient, bus: Bus | None) -> None:
        self._live = live
        self._client = client
        self._bus = bus
        if bus is not None:
            bus.on("cancel", self._heard)

    async def cancel(self, answer_id: str, key: ApiKey) -> bool:
        """Cancels a request that the key may cancel.

        Args:
            answer_id: the answer's id, or the request's.
            key: whose request it must be; an admin's may cancel any.

        Returns:
            True when it ran here or in the worker, or other gateways were told; False when nobody could know it.
        """
        request_id = request_id_of(answer_id)[:_MAX_ID_CHARS]
        owner = None if key.admin else key.id
        if await self._cancel_here(request_id, owner):
            return True
        # The worker knows its jobs by their ids, but not who may cancel them.
        if key.admin and await self._client.cancel(request_id):
            return True
        if self._bus is None:
            return False
        try:
            return await self._bus.send("cancel", id=request_id, key_id=owner) > 1
        except SharedStateDown:
            return False

    async def _heard(self, message: dict[str, Any]) -> None:
        key_id = message["key_id"]
        await self._cancel_here(str(message["id"]), None if key_id is None else str(key_id))

    async def _cancel_here(self, request_id: str, key_id: str | None) -> bool:
        found = False
        for job_id in self._live.jobs_of(request_id, key_id):
            try:
                found = await self._client.cancel(job_id) or found
            except Glm53Error as error:
                log.warning("a job could not be cancelled: %s", error.message)
        return found
