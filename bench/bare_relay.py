"""The least that can stand between HTTP and the worker: FastAPI, grpc.aio and one `data:` line an event. No parser, no checks, no limits.

What the gateway costs is told next to it. Run as `python -m bench.bare_relay WORKER PORT`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator

import grpc
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc


def create_app(worker: str) -> FastAPI:
    """The relay."""
    app = FastAPI()
    numbers = itertools.count()
    stubs: list[pb_grpc.WorkerStub] = []

    async def events(body: dict[str, object]) -> AsyncIterator[bytes]:
        if not stubs:
            stubs.append(pb_grpc.WorkerStub(grpc.aio.insecure_channel(worker)))
        sampling = pb.SamplingParams(max_tokens=body["max_tokens"])
        request = pb.GenerateRequest(request_id=f"relay-{next(numbers)}", prompt_token_ids=[300] * 8, sampling=sampling)
        async for event in stubs[0].Generate(request):
            for token in event.tokens.tokens:
                chunk = {"choices": [{"index": 0, "delta": {"content": token.piece.decode()}, "finish_reason": None}]}
                yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = json.loads(await request.body())
        if body.get("temperature", 0) < 0:
            return JSONResponse({"error": {"message": "temperature must be at least 0"}}, 400)
        return StreamingResponse(events(body), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


if __name__ == "__main__":
    config = uvicorn.Config(create_app(sys.argv[1]), port=int(sys.argv[2]), http="h11", access_log=False, log_level="critical")
    asyncio.run(uvicorn.Server(config).serve())
