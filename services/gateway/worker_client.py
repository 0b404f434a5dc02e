"""The worker as the gateway sees it: a protocol, and its implementation over gRPC.

The connection is made lazily and re-made by itself, so a gateway may start before its worker and lives on when the worker is
restarted. A started generation is never tried again: its tokens may already have been sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import grpc

from services.common import errors, trace_context
from services.common.grpc_status import error_of, has_error
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc
from services.gateway.parser import Vocabulary
from services.gateway.prompt import ChatTemplate
from services.gateway.tokenizer import PromptTokenizer

log = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    # A tokenizer of a large model is some 20 MB.
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.max_send_message_length", 256 * 1024 * 1024),
    ("grpc.enable_retries", 0),
    # A restarted worker is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # So is one that has come back under another address, as containers do: gRPC's own patience between two look-ups is half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)


@dataclass(frozen=True)
class Pings:
    """How a worker's process that is frozen, or whose host is gone, is told from one that is busy, while calls to it run.

    A ping is answered by gRPC's own threads, whatever Python, the engine or the device are at. When an answer is missing the connection
    is given up, and every call on it ends as it does when the process dies: `interval_s + timeout_s` after its last sign of life at most.

    Attributes:
        interval_s: seconds without anything received until a ping is sent.
        timeout_s: seconds that its answer may take.
    """

    interval_s: float = 10.0
    timeout_s: float = 30.0

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """Of a gRPC channel."""
        interval_ms, timeout_ms = int(self.interval_s * 1000), int(self.timeout_s * 1000)
        return (
            ("grpc.keepalive_time_ms", interval_ms),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            # gRPC's pings for its estimate of the bandwidth go before ours, with a patience of their own.
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            # A stream in a long prefill is silent in both directions.
            ("grpc.http2.max_pings_without_data", 0),
        )


# Scoring waits in the worker's queue and reads a whole prompt.
_SCORE_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Language:
    """Everything that turns messages into tokens and tokens into messages, of one checkpoint.

    Attributes:
        sha256: names tokenizer and template.
    """

    sha256: str
    tokenizer: PromptTokenizer
    template: ChatTemplate
    vocabulary: Vocabulary


class WorkerClient(Protocol):
    """What the gateway asks of a worker. Every method raises `Glm53Error`."""

    async def info(self) -> pb.InfoResponse:
        """What the worker serves and whether it is ready."""

    async def language(self) -> Language:
        """Tokenizer and template, fetched once per SHA-256."""

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> AsyncIterator[pb.GenerateEvent]:
        """Runs one generation; closing the iterator cancels it."""

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        """Log-probabilities of given tokens."""

    async def cancel(self, request_id: str) -> bool:
        """Cancels a job; False when the worker has none of this id."""

    async def stats(self) -> pb.StatsResponse:
        """The engine's counters."""

    async def close(self) -> None:
        """Lets the connection go."""


class GrpcWorkerClient:
    """`WorkerClient` over grpc.aio.

    Args:
        address: host:port or unix:/path.
        timeout_s: for everything that is not a generation.
        pings: how long a worker may be frozen.
    """

    def __init__(self, address: str, timeout_s: float, pings: Pings = Pings()) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._options = (*_CHANNEL_OPTIONS, *pings.options)
        self._channel: grpc.aio.Channel | None = None
        self._methods: pb_grpc.WorkerStub | None = None
        self._language: Language | None = None
        self._language_lock = asyncio.Lock()

    def _stub(self) -> pb_grpc.WorkerStub:
        if self._methods is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
            self._methods = pb_grpc.WorkerStub(self._channel)
        return self._methods

    async def info(self) -> pb.InfoResponse:
        """What the worker serves and whether it is ready."""
        try:
            answer: pb.InfoResponse = await self._stub().Info(pb.InfoRequest(), timeout=self._timeout_s)
            return answer
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        """Log-probabilities of given tokens."""
        try:
            answer: pb.ScoreResponse = await self._stub().Score(request, timeout=_SCORE_TIMEOUT_S, metadata=trace_context.outgoing())
            return answer
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None

    async def stats(self) -> pb.StatsResponse:
        """The engine's counters."""
        try:
            answer: pb.StatsResponse = await self._stub().Stats(pb.StatsRequest(), timeout=self._timeout_s)
            return answer
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None

    async def cancel(self, request_id: str) -> bool:
        """Cancels a job; False when the worker has none of this id."""
        try:
            answer: pb.CancelResponse = await self._stub().Cancel(pb.CancelRequest(request_id=request_id), timeout=self._timeout_s)
            return answer.found
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None

    async def language(self) -> Language:
        """Tokenizer and template, fetched once per SHA-256."""
        async with self._language_lock:
            known = self._language.sha256 if self._language else ""
            try:
                answer = await self._stub().GetTokenizer(pb.GetTokenizerRequest(known_sha256=known), timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from None
            if self._language is None or answer.sha256 != known:
                # Seconds for a large vocabulary: not on the event loop.
                self._language = await asyncio.to_thread(_language_of, answer)
                log.info("tokenizer loaded", extra={"sha256": answer.sha256[:12]})
            return self._language

    async def generate(self, request: pb.GenerateRequest, timeout_s: float) -> AsyncIterator[pb.GenerateEvent]:
        """Runs one generation; closing the iterator cancels it."""
        call = self._stub().Generate(request, timeout=timeout_s, metadata=trace_context.outgoing())
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED and not has_error(error):
                raise _broken_off() from None
            raise error_of(error) from None
        except asyncio.CancelledError:
            if call.cancelled() and not _being_cancelled():
                raise _broken_off() from None
            raise
        finally:
            call.cancel()

    async def close(self) -> None:
        """Lets the connection go."""
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = self._methods = None


def _broken_off() -> errors.NotReady:
    """A generation that somebody asked to cancel ends with a finish reason: a bare CANCELLED is a worker that goes away."""
    return errors.NotReady("the worker broke off the generation", retry_after_s=1.0)


def _being_cancelled() -> bool:
    """True when somebody cancels our own task, rather than the call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _language_of(answer: pb.GetTokenizerResponse) -> Language:
    tokenizer = PromptTokenizer(answer.tokenizer_json)
    template = ChatTemplate(answer.chat_template, tokenizer)
    return Language(answer.sha256, tokenizer, template, Vocabulary.of(tokenizer))
