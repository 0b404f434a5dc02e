"""A worker without a model, for the gateway's own cost: real gRPC, the shipped tokenizer, tokens at a steady pace.

Every token's bytes are the time at which it was sent (microseconds of the monotonic clock, which all processes of a machine share), so
that a client can tell how long it was on its way. Run as `python -m bench.null_worker --rate 50`; prints its address.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bench import report
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc

CHECKPOINT = report.ROOT / "models" / "tiny" / "checkpoint"
MODEL = "null"


def stamp() -> bytes:
    """The time as a token's bytes."""
    return b"%d " % (time.monotonic_ns() // 1000)


class NullWorker(pb_grpc.WorkerServicer):  # type: ignore[misc]
    """Answers what the gateway needs.

    Args:
        rate: tokens per second of each stream.
    """

    def __init__(self, rate: float) -> None:
        self._interval_s = 1 / rate
        self._tokenizer = (CHECKPOINT / "tokenizer.json").read_bytes()
        self._template = (CHECKPOINT / "chat_template.jinja").read_text()
        self._sha256 = hashlib.sha256(self._tokenizer + self._template.encode()).hexdigest()

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:  # noqa: N802, ARG002
        return pb.InfoResponse(
            state=pb.SERVICE_STATE_READY,
            load_progress=1.0,
            model_name=MODEL,
            checkpoint_hash="0" * 16,
            vocab_size=2000,
            max_context=100_000,
            max_streams=1000,
            instance_id="null",
            mode=pb.MODE_FAST,
        )

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:  # noqa: N802, ARG002
        if request.known_sha256 == self._sha256:
            return pb.GetTokenizerResponse(sha256=self._sha256)
        return pb.GetTokenizerResponse(sha256=self._sha256, tokenizer_json=self._tokenizer, chat_template=self._template)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:  # noqa: N802, ARG002
        yield pb.GenerateEvent(admitted=pb.Admitted())
        due = time.monotonic()
        count = request.sampling.max_tokens
        for _ in range(count):
            yield pb.GenerateEvent(tokens=pb.Tokens(tokens=[pb.Token(id=300, piece=stamp())]))
            due += self._interval_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        yield pb.GenerateEvent(
            finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, prompt_tokens=len(request.prompt_token_ids), completion_tokens=count)
        )


async def serve(rate: float) -> None:
    """Listens until the process is ended."""
    server = grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(NullWorker(rate), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=50.0)
    asyncio.run(serve(parser.parse_args().rate))
