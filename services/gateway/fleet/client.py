"""Several workers as one `WorkerClient`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from services.common.errors import Glm53Error, NotReady, QueueFull
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.fleet.members import Member, Members
from services.gateway.fleet.metrics import merged
from services.gateway.worker_client import Language

T = TypeVar("T")


class FleetClient:
    """Spreads requests over workers that serve the same checkpoint.

    A request that a worker could not take, because it is gone or full, goes to another one; a generation that has begun is never
    begun again.

    Args:
        members: the workers; closed with the client.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self._leader: Member | None = None
        self._jobs: dict[str, Member] = {}

    async def info(self) -> pb.InfoResponse:
        """What the fleet serves: one worker's facts, with the streams and queue places of all that are ready.

        Raises:
            NotReady: no worker answers.
        """
        await self.members.start()
        leader = self._lead()
        assert leader.info is not None
        answer = pb.InfoResponse()
        answer.CopyFrom(leader.info)
        ready = [member.info for member in self.members.ready if member.info is not None]
        if ready:
            answer.max_streams = sum(info.max_streams for info in ready)
            answer.max_queued = sum(info.max_queued for info in ready)
        return answer

    async def language(self) -> Language:
        """Tokenizer and template, the same for all."""
        return await self._lead().client.language()

    async def generate(self, request: pb.GenerateRequest, timeout_s: float) -> AsyncIterator[pb.GenerateEvent]:
        """Runs one generation; closing the iterator cancels it."""
        tried: list[Member] = []
        refusal: Glm53Error | None = None
        while True:
            try:
                member = self.members.choose(request.prompt_token_ids, tried)
            except NotReady as error:
                raise refusal or error from None
            tried.append(member)
            began = False
            events = member.client.generate(request, timeout_s)
            member.running += 1
            self._jobs[request.request_id] = member
            try:
                async for event in events:
                    began = True
                    yield event
                return
            except (NotReady, QueueFull) as error:
                if isinstance(error, NotReady):
                    member.lost(error)
                if began:
                    raise
                refusal = _sooner(refusal, error)
            finally:
                member.running -= 1
                self._jobs.pop(request.request_id, None)
                await events.aclose()  # type: ignore[attr-defined]

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        """Log-probabilities of given tokens."""
        return await self._any(request.token_ids, lambda member: member.client.score(request))

    async def cancel(self, request_id: str) -> bool:
        """Cancels a job, wherever it runs; False when no worker has one of this id."""
        member = self._jobs.get(request_id)
        if member is not None:
            return await member.client.cancel(request_id)
        for candidate in self.members.ready:
            try:
                if await candidate.client.cancel(request_id):
                    return True
            except NotReady as error:
                candidate.lost(error)
        return False

    async def stats(self) -> pb.StatsResponse:
        """Counters of all workers that answer: the first one's document with the others beside it, and one Prometheus text."""
        await self.members.start()
        documents, texts = {}, {}
        for member in self.members.ready:
            try:
                answer = await member.client.stats()
            except Glm53Error:
                continue
            documents[member.address], texts[member.address] = json.loads(answer.json or "{}"), answer.prometheus_text
        if not documents:
            raise NotReady("no worker takes requests", retry_after_s=2.0)
        first = next(iter(documents.values()))
        running = {member.address: member.running for member in self.members.all}
        return pb.StatsResponse(json=json.dumps({**first, "workers": documents, "running": running}), prometheus_text=merged(texts))

    async def close(self) -> None:
        """Lets the connections go."""
        await self.members.close()

    def _lead(self) -> Member:
        """The worker that speaks for all: the same one as long as it answers."""
        ready = self.members.ready
        if self._leader in ready:
            assert self._leader is not None
            return self._leader
        answering = ready or [member for member in self.members.all if member.info is not None and not member.leaving]
        if not answering:
            known = ", ".join(f"{member.address}: {member.problem.message}" for member in self.members.all)
            raise NotReady(f"no worker answers ({known or 'no address is known'})", retry_after_s=2.0)
        self._leader = answering[0]
        return self._leader

    async def _any(self, prompt: Sequence[int], call: Callable[[Member], Awaitable[T]]) -> T:
        tried: list[Member] = []
        refusal: Glm53Error | None = None
        while True:
            try:
                member = self.members.choose(prompt, tried)
            except NotReady as error:
                raise refusal or error from None
            tried.append(member)
            member.running += 1
            try:
                return await call(member)
            except (NotReady, QueueFull) as error:
                if isinstance(error, NotReady):
                    member.lost(error)
                refusal = _sooner(refusal, error)
            finally:
                member.running -= 1


def _sooner(before: Glm53Error | None, error: Glm53Error) -> Glm53Error:
    """The refusal that lets the client come back earlier; a full queue says more than an absent worker."""
    if before is None or (isinstance(error, QueueFull) and not isinstance(before, QueueFull)):
        return error
    if isinstance(before, QueueFull) and not isinstance(error, QueueFull):
        return before
    return min(before, error, key=lambda refusal: refusal.retry_after_s or 0.0)
