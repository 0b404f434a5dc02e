"""A worker for tests: real gRPC, scripted tokens instead of a model."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.common.errors import Glm53Error
from services.common.grpc_status import ERROR_METADATA_KEY, status_of
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc
from services.common.trace_context import incoming
from tests.gateway.language import CHAT_TEMPLATE, TOKENIZER_JSON, encode, piece, tokens_of

Step = Any


@dataclass(frozen=True)
class Wait:
    """The worker is silent for so long."""

    seconds: float


@dataclass(frozen=True)
class Prefill:
    """The worker reads the prompt for so long and reports progress every few milliseconds."""

    seconds: float


@dataclass(frozen=True)
class Forever:
    """The worker never says anything more; ends only by cancellation."""


@dataclass(frozen=True)
class Fail:
    """The worker raises this error."""

    error: Glm53Error


@dataclass(frozen=True)
class Die:
    """The worker's connection breaks, as when its process is killed."""


@dataclass(frozen=True)
class Say:
    """Tokens of a text in which control tokens count as such, `per_event` in each event."""

    text: str
    per_event: int = 1
    logprobs: bool = False


@dataclass(frozen=True)
class Pieces:
    """Raw (id, bytes) tokens, one event each."""

    tokens: Sequence[tuple[int, bytes]]


@dataclass(frozen=True)
class Finish:
    """The last event."""

    reason: int = pb.FINISH_REASON_STOP
    cached: int = 0
    stop_string: str = ""
    stop_token_id: int = 0


@dataclass
class Script:
    """What the worker does with the next requests."""

    steps: Sequence[Step] = (Say("Hello"), Finish())
    admit: bool = True


@dataclass
class FakeWorker(pb_grpc.WorkerServicer):
    """Answers every RPC that the gateway uses and remembers what it was asked."""

    script: Script = field(default_factory=Script)
    script_for: Callable[[pb.GenerateRequest], Script] | None = None
    state: int = pb.SERVICE_STATE_READY
    max_context: int = 1000
    supports_grammar: bool = False
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    scored: list[pb.ScoreRequest] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cancel_asked: set[str] = field(default_factory=set)
    wake: dict[str, asyncio.Event] = field(default_factory=dict)
    tokenizer_calls: list[str] = field(default_factory=list)
    instance_id: str = "one"
    checkpoint_hash: str = "abcdef0123456789"
    frozen: bool = False
    chat_template: str = CHAT_TEMPLATE
    address: str = "127.0.0.1:0"
    server: Any = None

    async def start(self) -> str:
        """Listens; returns the address."""
        self.server = grpc.aio.server()
        pb_grpc.add_WorkerServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(self.address)
        await self.server.start()
        self.address = f"127.0.0.1:{port}"
        return self.address

    async def stop(self) -> None:
        """Breaks every connection."""
        await self.server.stop(None)

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        while self.frozen:
            await asyncio.sleep(0.01)
        ready = self.state == pb.SERVICE_STATE_READY
        return pb.InfoResponse(
            state=self.state,
            load_progress=1.0 if ready else 0.4,
            load_step="" if ready else "experts",
            model_name="" if self.state == pb.SERVICE_STATE_LOADING else "tiny",
            checkpoint_hash=self.checkpoint_hash,
            vocab_size=2560,
            max_context=self.max_context,
            mode=pb.MODE_FAST,
            device="cpu",
            supports_grammar=self.supports_grammar,
            created_unix_s=1_700_000_000,
            instance_id=self.instance_id,
        )

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        self.tokenizer_calls.append(request.known_sha256)
        sha256 = hashlib.sha256(TOKENIZER_JSON + self.chat_template.encode()).hexdigest()
        if request.known_sha256 == sha256:
            return pb.GetTokenizerResponse(sha256=sha256)
        return pb.GetTokenizerResponse(sha256=sha256, tokenizer_json=TOKENIZER_JSON, chat_template=self.chat_template)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        while self.frozen:
            await asyncio.sleep(0.01)
        body = {"engine": {"running": len(self.live)}, "expert_cache": [{"slots": 3}]}
        return pb.StatsResponse(json=json.dumps(body), prometheus_text=b"# TYPE glm53_slots gauge\nglm53_slots 3\n")

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        found = request.request_id in self.live
        if found:
            self.cancel_asked.add(request.request_id)
            self.wake.setdefault(request.request_id, asyncio.Event()).set()
        return pb.CancelResponse(found=found)

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        self.scored.append(request)
        self.traces.append(incoming(context.invocation_metadata()))
        return pb.ScoreResponse(tokens=_prompt_tokens(request.token_ids, request.top)[request.first_scored :])

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        self.requests.append(request)
        self.traces.append(incoming(context.invocation_metadata()))
        self.live.add(request.request_id)
        script = self.script_for(request) if self.script_for else self.script
        said = 0
        complete = False
        try:
            if script.admit:
                yield pb.GenerateEvent(admitted=pb.Admitted())
            if request.prompt_logprobs:
                tokens = _prompt_tokens(request.prompt_token_ids, max(0, request.sampling.logprobs, request.prompt_top))
                for part in (tokens[:2], tokens[2:]):
                    yield pb.GenerateEvent(prefill=pb.PrefillProgress(total_tokens=len(tokens), prompt_tokens=part))
            for step in script.steps:
                if isinstance(step, Fail):
                    metadata = ((ERROR_METADATA_KEY, step.error.to_json().encode()),)
                    await context.abort(status_of(step.error), step.error.message, trailing_metadata=metadata)
                elif isinstance(step, Die):
                    asyncio.get_running_loop().create_task(self.server.stop(None))
                    await asyncio.Event().wait()
                elif isinstance(step, Wait):
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, Prefill):
                    for done in range(int(step.seconds / 0.005)):
                        yield pb.GenerateEvent(prefill=pb.PrefillProgress(done_tokens=done, total_tokens=1000))
                        await asyncio.sleep(0.005)
                elif isinstance(step, Forever):
                    await self.wake.setdefault(request.request_id, asyncio.Event()).wait()
                    yield _finished(request, Finish(pb.FINISH_REASON_CANCELLED), said)
                elif isinstance(step, Finish):
                    yield _finished(request, step, said)
                else:
                    for event in _events(step, request):
                        said += len(event.tokens)
                        yield pb.GenerateEvent(tokens=event)
            complete = True
        finally:
            # Cancelled while it waits or while an event is on its way: the generator ends before its script.
            if not complete:
                self.cancelled.append(request.request_id)
            self.live.discard(request.request_id)
            self.ended.append(request.request_id)


def _prompt_tokens(ids: Sequence[int], top: int) -> list[pb.Token]:
    """Prompt tokens; that at position i has the log-probability -i/4 and the rank i + 7, the first one neither."""
    tokens = []
    for position, number in enumerate(ids):
        token = pb.Token(id=number, piece=piece(number))
        if position:
            token.logprob, token.rank = -position / 4, position + 7
            token.top.extend(pb.TokenLogprob(token_id=rank, logprob=-rank, piece=piece(rank)) for rank in range(top))
        tokens.append(token)
    return tokens


def _finished(request: pb.GenerateRequest, step: Finish, said: int) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        finished=pb.Finished(
            reason=step.reason,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=said + (step.reason == pb.FINISH_REASON_STOP),
            cached_tokens=step.cached,
            stop_string=step.stop_string,
            stop_token_id=step.stop_token_id,
        )
    )


def _events(step: Step, request: pb.GenerateRequest) -> list[pb.Tokens]:
    if isinstance(step, Pieces):
        return [pb.Tokens(tokens=[pb.Token(id=number, piece=piece)]) for number, piece in step.tokens]
    tokens = [pb.Token(id=number, piece=piece) for number, piece in tokens_of(step.text)]
    wanted = request.sampling.logprobs
    if wanted >= 0:
        for token in tokens:
            token.logprob = -0.5
            for rank in range(wanted):
                other = encode("ab"[rank % 2])[0]
                token.top.append(
                    pb.TokenLogprob(token_id=other, logprob=float("-inf") if rank else -0.5, piece=b"ab"[rank % 2 : rank % 2 + 1])
                )
    return [pb.Tokens(tokens=tokens[i : i + step.per_event]) for i in range(0, len(tokens), step.per_event)]
