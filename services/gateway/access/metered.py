"""The worker behind the keys' limits: every generation is charged, carries its key's id and priority, and is settled."""

from __future__ import annotations

from collections.abc import AsyncIterator

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.access.admission import Admission, admission_var, expected_tokens
from services.gateway.access.cancels import LiveRequests
from services.gateway.access.keys import ANYONE
from services.gateway.errors import ModelNotAllowed
from services.gateway.worker_client import Language, WorkerClient

# The worker's queue counts an answer for as much in advance.
EXPECTED_ANSWER_TOKENS = 256


class MeteredClient:
    """A `WorkerClient` in front of another; the key is that of the request which the current task works for.

    Attributes:
        live: what runs, by request.
    """

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self.live = LiveRequests()
        self._model = ""

    async def info(self) -> pb.InfoResponse:
        """What the worker serves and whether it is ready."""
        answer = await self._client.info()
        self._model = answer.model_name
        return answer

    async def language(self) -> Language:
        """Tokenizer and template."""
        return await self._client.language()

    async def stats(self) -> pb.StatsResponse:
        """The engine's counters."""
        return await self._client.stats()

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        """Log-probabilities of given tokens; charged as a prompt without an answer."""
        admission = admission_var.get()
        if admission is not None:
            self._check_model(admission)
            await admission.charge(len(request.token_ids))
            admission.used(len(request.token_ids))
        return await self._client.score(request)

    async def cancel(self, request_id: str) -> bool:
        """Cancels a job; False when the worker has none of this id."""
        return await self._client.cancel(request_id)

    async def close(self) -> None:
        """Lets the connection go."""
        await self._client.close()

    async def generate(self, request: pb.GenerateRequest, timeout_s: float) -> AsyncIterator[pb.GenerateEvent]:
        """Runs one generation; closing the iterator cancels it.

        Raises:
            RateLimited: before the worker hears of it.
            ModelNotAllowed: the key may not use the model.
        """
        admission = admission_var.get()
        if admission is None:
            async for event in self._client.generate(request, timeout_s):
                yield event
            return
        # Without keys nobody knows who asks: the worker then keeps no share of its queue from anybody.
        request.key_id = "" if admission.key is ANYONE else admission.key.id
        request.priority = admission.key.priority_of(request.priority)  # type: ignore[assignment]
        self._check_model(admission)
        await admission.charge(expected_tokens(request.prompt_token_ids, request.sampling.max_tokens, EXPECTED_ANSWER_TOKENS))
        taken = 0
        self.live.add(admission.request_id, admission.key.id, request.request_id)
        events = self._client.generate(request, timeout_s)
        try:
            async for event in events:
                kind = event.WhichOneof("event")
                if kind == "tokens":
                    taken += len(event.tokens.tokens)
                elif kind == "admitted":
                    taken += len(request.prompt_token_ids)
                elif kind == "finished":
                    taken = event.finished.prompt_tokens + event.finished.completion_tokens
                    admission.finished.append(event.finished)
                yield event
        finally:
            # A request that was cut off has cost what was computed for it.
            admission.used(taken)
            self.live.remove(admission.request_id, request.request_id)
            await events.aclose()  # type: ignore[attr-defined]

    def _check_model(self, admission: Admission) -> None:
        if not admission.key.may_use(self._model):
            raise ModelNotAllowed(f"The key {admission.key.id!r} may not use the model {self._model!r}.", param="model")
