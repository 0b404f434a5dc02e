"""A worker in this process: the real service, engine and tiers on a real gRPC socket, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.sdk.trace import TracerProvider

from services.common.errors import Glm53Error
from services.common.grpc_status import error_of
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc
from services.gpu_worker.backends import cpu
from services.gpu_worker.loop import EngineLoop
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.worker import Worker

PROMPT = [11, 402, 77, 1900, 5]
_numbers = itertools.count()


@dataclass
class Answer:
    """What one Generate stream brought."""

    events: list[pb.GenerateEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[pb.Token]:
        """All tokens in order."""
        return [token for event in self.events for token in event.tokens.tokens]

    @property
    def ids(self) -> list[int]:
        """Their ids."""
        return [token.id for token in self.tokens]

    @property
    def text(self) -> bytes:
        """Their bytes."""
        return b"".join(token.piece for token in self.tokens)

    @property
    def finished(self) -> pb.Finished:
        """The terminal event; there is exactly one and it is the last."""
        assert [event.WhichOneof("event") for event in self.events].count("finished") == 1
        assert self.events[-1].HasField("finished")
        return self.events[-1].finished


class RunningWorker:
    """Starts a worker and waits until it is READY."""

    def __init__(self, *, load: bool = True, traces: TracerProvider | None = None, **settings: Any) -> None:
        self.settings = GpuWorkerSettings.load({}, **{"worker_address": "127.0.0.1:0", "expert_backend": "in_process", **settings})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.worker: Worker = self.run(self._make(traces))
        self._server = self.run(self.worker.listen())
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.worker.port}")
        self.stub = pb_grpc.WorkerStub(self.channel)
        self._closed = False
        if load:
            try:
                self.run(self.worker.load(), timeout_s=120)
            except BaseException:
                self.close()
                raise

    async def _make(self, traces: TracerProvider | None) -> Worker:
        return Worker(self.settings, cpu.load, traces)

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
        """Runs a coroutine on the worker's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    @property
    def engine(self) -> EngineLoop:
        """The engine behind the service."""
        assert self.worker.service.serving is not None
        return self.worker.service.serving.engine

    def request(self, prompt: list[int] | None = None, **fields: Any) -> pb.GenerateRequest:
        """A greedy request of 8 tokens; `fields` are sampling fields, or fields of the request itself."""
        own = {name: fields.pop(name) for name in list(fields) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
        sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": -1, **fields}
        values = {"request_id": f"test-{next(_numbers)}", "prompt_token_ids": PROMPT if prompt is None else prompt, **own}
        return pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), **values)

    def start(self, request: pb.GenerateRequest) -> Any:
        """Opens a stream."""
        return self.stub.Generate(request, timeout=60)

    def generate(self, prompt: list[int] | None = None, **fields: Any) -> Answer:
        """Runs one request to its end."""
        return self.collect(self.start(self.request(prompt, **fields)))

    def collect(self, stream: Any) -> Answer:
        """Reads a stream to its end.

        Raises:
            Glm53Error: what the worker answered instead.
        """
        answer = Answer()
        try:
            for event in stream:
                answer.events.append(event)
        except grpc.RpcError as error:
            raise error_of(error) from None
        return answer

    def refused(self, request: pb.GenerateRequest) -> tuple[Glm53Error, list[pb.GenerateEvent]]:
        """The error that a request gets, and the events that came before it."""
        events: list[pb.GenerateEvent] = []
        try:
            events.extend(self.start(request))
        except grpc.RpcError as error:
            return error_of(error), events
        raise AssertionError("the request was served")

    def together(self, requests: list[pb.GenerateRequest]) -> list[Answer]:
        """Runs requests at the same time."""
        answers: list[Answer | None] = [None] * len(requests)

        def one(i: int) -> None:
            answers[i] = self.collect(self.start(requests[i]))

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [answer for answer in answers if answer is not None]

    def wait_idle(self) -> None:
        """Waits until no request lives and every stream is given back."""
        until(lambda: self.engine.num_live == 0 and self.engine.backend.streams_free == self.settings.max_streams, "the engine is idle")
        assert self.engine.fatal is None

    def close(self) -> None:
        """Stops the worker."""
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        self.run(self.worker.shut_down(self._server), timeout_s=60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Waits for a condition, or fails naming it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.005)
