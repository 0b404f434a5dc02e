"""Cancelling a request by its id: one's own, or anybody's with an admin key, whichever gateway runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
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
# How long other gateways have to say whether they ran a request.
_ANSWER_S = 2.0


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


class _Question:
    """What the other gateways say to one cancel."""

    def __init__(self) -> None:
        self._answers = 0
        self._asked: int | None = None
        self.found = False
        self.settled = asyncio.Event()

    def asked(self, count: int) -> None:
        """So many gateways were told."""
        self._asked = count
        self._look()

    def answered(self, found: bool) -> None:
        """One of them has looked."""
        self._answers += 1
        self.found = self.found or found
        self._look()

    def _look(self) -> None:
        if self.found or (self._asked is not None and self._answers >= self._asked):
            self.settled.set()


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
        self._questions: dict[str, _Question] = {}
        if bus is not None:
            bus.on("cancel", self._heard)
            bus.on("cancelled", self._answered)

    async def cancel(self, answer_id: str, key: ApiKey) -> bool:
        """Cancels a request that the key may cancel.

        Args:
            answer_id: the answer's id, or the request's.
            key: whose request it must be; an admin's may cancel any.

        Returns:
            True when it ran here, in the worker or at another gateway; False when none of them knows it as the key's.
        """
        request_id = request_id_of(answer_id)[:_MAX_ID_CHARS]
        owner = None if key.admin else key.id
        if await self._cancel_here(request_id, owner):
            return True
        # The worker knows its jobs by their ids, but not who may cancel them.
        if key.admin and await self._client.cancel(request_id):
            return True
        return self._bus is not None and await self._elsewhere(self._bus, request_id, owner)

    async def _elsewhere(self, bus: Bus, request_id: str, owner: str | None) -> bool:
        """Asks all gateways, this one included: each says whether the request was its own."""
        name, question = secrets.token_hex(8), _Question()
        self._questions[name] = question
        try:
            question.asked(await bus.send("cancel", id=request_id, key_id=owner, question=name))
            async with asyncio.timeout(_ANSWER_S):
                await question.settled.wait()
        except (SharedStateDown, TimeoutError):
            log.debug("not every gateway has answered to a cancel")
        finally:
            del self._questions[name]
        return question.found

    async def _heard(self, message: dict[str, Any]) -> None:
        key_id = message["key_id"]
        found = await self._cancel_here(str(message["id"]), None if key_id is None else str(key_id))
        if self._bus is not None:
            with contextlib.suppress(SharedStateDown):
                await self._bus.send("cancelled", question=message["question"], found=found)

    async def _answered(self, message: dict[str, Any]) -> None:
        question = self._questions.get(str(message["question"]))
        if question is not None:
            question.answered(bool(message["found"]))

    async def _cancel_here(self, request_id: str, key_id: str | None) -> bool:
        found = False
        for job_id in self._live.jobs_of(request_id, key_id):
            try:
                found = await self._client.cancel(job_id) or found
            except Glm53Error as error:
                log.warning("a job could not be cancelled: %s", error.message)
        return found
