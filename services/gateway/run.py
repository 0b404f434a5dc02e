"""From a job to an HTTP response: the one place where generations run, streaming or not."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import Request
from starlette.responses import Response

from services.common.errors import Glm53Error
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.answers import Answer
from services.gateway.choices import Choices, Open
from services.gateway.generation import until_disconnect
from services.gateway.json_response import JsonResponse
from services.gateway.services import Job, Scoring, Services
from services.gateway.sse import EventStreamResponse, StreamPlan
from services.gateway.worker_client import WorkerClient

# How long a stream's headers wait for the worker to take or refuse the request: refusals become statuses, not events.
_VERDICT_S = 1.0
_DEFAULT_AT_ONCE = 8


async def respond(
    request: Request, services: Services, job: Job, *, stream: bool, finishing: Callable[[], Awaitable[None]] | None = None
) -> Response:
    """Runs a job; it ends with its client.

    Args:
        finishing: awaited when the answer is whole, before the client gets its end.
    """
    choices = open_choices(services, job)
    ended = _Ended(services, choices, job.answer, stream)
    if not stream:
        await _complete(request, choices, job.answer, ended)
        if finishing is not None:
            await finishing()
        return JsonResponse(job.answer.response())
    try:
        await until_disconnect(request.receive, choices.verdict(_VERDICT_S))
    except BaseException as error:
        await choices.close()
        ended(error if isinstance(error, Glm53Error) else None)
        raise
    return EventStreamResponse(StreamPlan(choices, job.answer, services.settings.keepalive_s, ended, finishing))


async def complete(request: Request, services: Services, job: Job) -> Answer:
    """Runs a job to its end without streaming.

    Raises:
        Glm53Error: the worker's, or that the client went away.
    """
    choices = open_choices(services, job)
    await _complete(request, choices, job.answer, _Ended(services, choices, job.answer, streamed=False))
    return job.answer


def open_choices(services: Services, job: Job) -> Choices:
    """The job's generations; they begin when they are read."""
    sources: list[Open] = [
        functools.partial(_scored, services.client, request)
        if isinstance(request, Scoring)
        else functools.partial(services.client.generate, request, services.settings.request_timeout_s)
        for request in job.requests
    ]
    info = services.watch.info
    at_once = (info.max_streams if info is not None else 0) or _DEFAULT_AT_ONCE
    choices = Choices(sources, at_once, services.watch.generation_failed, job.params)
    services.traffic.add(choices)
    return choices


class _Ended:
    """What is done once when a job has ended, however it did."""

    def __init__(self, services: Services, choices: Choices, answer: Answer, streamed: bool) -> None:
        self._services = services
        self._choices = choices
        self._answer = answer
        self._streamed = streamed

    def __call__(self, error: Glm53Error | None) -> None:
        self._services.traffic.remove(self._choices)
        self._services.metrics.generation_ended(self._choices, self._answer, error, streamed=self._streamed)


async def _complete(request: Request, choices: Choices, answer: Answer, ended: _Ended) -> None:
    try:
        await until_disconnect(request.receive, collect(choices, answer))
    except BaseException as error:
        await choices.close()
        ended(error if isinstance(error, Glm53Error) else None)
        raise
    await choices.close()
    ended(None)


async def collect(choices: Choices, answer: Answer) -> None:
    """The same path as streaming, without sending the chunks."""
    answer.begin()
    left = len(choices)
    while left:
        index, event = await choices.next_event()
        kind = event.WhichOneof("event")
        if kind == "tokens":
            answer.take(index, event.tokens.tokens)
        elif kind == "prefill" and event.prefill.prompt_tokens:
            answer.prompt(index, event.prefill.prompt_tokens)
        elif kind == "finished":
            answer.finish(index, event.finished)
            left -= 1


async def _scored(client: WorkerClient, scoring: Scoring) -> AsyncIterator[pb.GenerateEvent]:
    """A teacher-forced scoring as a generation of no tokens."""
    total = len(scoring.request.token_ids)
    # A single token follows nothing: there is nothing to ask for.
    scored = (await client.score(scoring.request)).tokens if total > 1 else []
    tokens = [scoring.first, *scored]
    yield pb.GenerateEvent(prefill=pb.PrefillProgress(done_tokens=total, total_tokens=total, prompt_tokens=tokens))
    yield pb.GenerateEvent(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, prompt_tokens=total))
