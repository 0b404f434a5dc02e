"""What the gateway knows about its worker right now: asked every second, so that health checks and requests cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from services.common.errors import CheckpointError, Glm53Error, NotReady
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.worker_client import Language, WorkerClient

log = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0
_LOADING_INTERVAL_S = 0.25
# A tokenizer that cannot be used is large, and does not get better soon.
_BROKEN_INTERVAL_S = 5.0
# A health check that finds an older answer asks anew.
_FRESH_S = 0.25

_WORDS = {
    pb.SERVICE_STATE_STARTING: "starting",
    pb.SERVICE_STATE_LOADING: "loading",
    pb.SERVICE_STATE_READY: "ready",
    pb.SERVICE_STATE_DRAINING: "draining",
    pb.SERVICE_STATE_FAILED: "failed",
}


class WorkerWatch:
    """The worker's state, as of the last question.

    Args:
        client: the worker.
    """

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self._info: pb.InfoResponse | None = None
        self._language: Language | None = None
        self._problem: Glm53Error | None = NotReady("the worker has not answered yet")
        self._instance = ""
        self._told_ready: bool | None = None
        self._began_at = self._asked_at = 0.0
        self._lock = asyncio.Lock()

    @property
    def info(self) -> pb.InfoResponse | None:
        """The last answer, None while the worker does not answer."""
        return self._info

    @property
    def is_ready(self) -> bool:
        """True when a request would be taken."""
        return self._language is not None and self._info is not None and self._info.state == pb.SERVICE_STATE_READY

    async def run(self) -> None:
        """Asks for ever."""
        while True:
            try:
                await self.refresh()
            except Exception:
                # Whatever a worker answers, the next question is asked.
                log.exception("the worker's answer could not be used")
            broken = isinstance(self._problem, CheckpointError)
            await asyncio.sleep(_BROKEN_INTERVAL_S if broken else _WATCH_INTERVAL_S if self.is_ready else _LOADING_INTERVAL_S)

    def generation_failed(self, error: Glm53Error) -> None:
        """A generation ended with an error: when that is the worker's absence, what was known of it counts no more."""
        if isinstance(error, NotReady):
            self._info, self._problem = None, error
            self._tell()

    async def refresh(self, max_age_s: float = 0.0) -> None:
        """Asks once, unless the last answer is at most so old; a worker that does not answer is a state, not an error.

        All who wait while a question is open share the next one: a worker that hangs costs each of them two waits at most.
        """
        came_at = time.monotonic()
        async with self._lock:
            now = time.monotonic()
            if self._began_at > came_at or now - self._asked_at < max_age_s:
                return
            self._began_at = now
            try:
                info = await self._client.info()
                if info.state == pb.SERVICE_STATE_READY and (self._language is None or info.instance_id != self._instance):
                    self._language = await self._client.language()
                    self._instance = info.instance_id
                if self._language is not None:
                    self._language.tokenizer.serve(info.max_context)
                self._info, self._problem = info, None
            except Glm53Error as error:
                self._info, self._problem = None, error
            self._asked_at = time.monotonic()
            self._tell()

    def _tell(self) -> None:
        """Logs that the worker takes requests, or takes none any more, whoever has noticed it first."""
        if self.is_ready == self._told_ready:
            return
        first, self._told_ready = self._told_ready is None, self.is_ready
        if self._problem is None:
            log.info("the worker is %s", self.state)
            return
        why = ": ".join([self._problem.message, *getattr(self._problem, "__notes__", ())])
        if first:
            log.info("waiting for the worker: %s", why)  # as it is when both start
        else:
            log.warning("requests are refused: %s", why)

    async def named(self) -> pb.InfoResponse:
        """Facts about a worker that has read its checkpoint, so that the model has a name.

        Raises:
            NotReady: it does not answer, or has not come so far.
        """
        info = await self.known()
        if not info.model_name:
            await self.refresh()
            info = await self.known()
        if not info.model_name:
            raise self._loading(info)
        return info

    async def known(self) -> pb.InfoResponse:
        """Facts about the worker, loading or not.

        Raises:
            NotReady: it does not answer.
        """
        if self._info is None:
            await self.refresh()
        return self._last()

    def _last(self) -> pb.InfoResponse:
        if self._info is None:
            reason = self._problem.message if self._problem else "unknown reason"
            told = f"T{reason[1:].rstrip('.')}." if reason.startswith("the worker ") else f"The worker is not available: {reason}"
            raise NotReady(told, retry_after_s=2.0)
        return self._info

    async def ready(self) -> tuple[pb.InfoResponse, Language]:
        """Facts and language of a worker that takes requests.

        Raises:
            NotReady: it is loading, draining or gone.
        """
        if not self.is_ready:
            await self.refresh()
        info = self._last()
        if self._language is None or info.state != pb.SERVICE_STATE_READY:
            raise self._loading(info)
        return info, self._language

    def _loading(self, info: pb.InfoResponse) -> NotReady:
        detail = f" ({info.load_progress:.0%}, {info.load_step})" if info.load_step else ""
        return NotReady(f"The model is not ready: the worker is {self.state}{detail}.", retry_after_s=2.0)

    @property
    def state(self) -> str:
        """The worker's state in a word."""
        return "unreachable" if self._info is None else _WORDS.get(self._info.state, "unknown")

    async def fresh_report(self) -> dict[str, Any]:
        """`report`, of a worker that was asked just now."""
        await self.refresh(_FRESH_S)
        return self.report()

    def report(self) -> dict[str, Any]:
        """The body of /health, less what only the gateway knows."""
        body: dict[str, Any] = {"worker": self.state}
        if self._info is not None:
            body |= {
                "model": self._info.model_name,
                "progress": round(1.0 if self.is_ready else self._info.load_progress, 4),
                "step": self._info.load_step,
                "mode": pb.Mode.Name(self._info.mode).removeprefix("MODE_").lower().replace("_", "-"),
                "mode_reason": self._info.mode_reason,
                "device": self._info.device,
            }
        if self._problem is not None:
            body["reason"] = self._problem.message
        if isinstance(self._problem, CheckpointError):
            body["broken"] = True  # waiting does not help
        return body


async def stop(task: asyncio.Task[None]) -> None:
    """Ends a background task and waits for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
