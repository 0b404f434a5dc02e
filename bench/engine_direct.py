"""The engine without the services around it: no HTTP and no gRPC; the CPU lane, if any, is a cpu_expert process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench import report
from services.gateway.prompt import ChatTemplate, Thinking
from services.gateway.tokenizer import PromptTokenizer
from services.gpu_worker.backends import cpu
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.detok import TokenTable
from services.gpu_worker.loop import EngineLimits, EngineLoop
from services.gpu_worker.metrics import EngineMetrics
from services.gpu_worker.request import Event, Failed, Finished, Request, RequestSpec, SamplingParams, Tokens
from services.gpu_worker.settings import GpuWorkerSettings

TIMEOUT_S = 300.0


class Collector:
    """An event sink that keeps everything and tells when the request has ended."""

    def __init__(self) -> None:
        self.text = b""
        self.tokens = 0
        self.ended = threading.Event()
        self.failure: Exception | None = None

    @property
    def full(self) -> bool:
        """A collector always keeps up."""
        return False

    def put(self, event: Event) -> None:
        """Takes one event."""
        if isinstance(event, Tokens):
            self.tokens += len(event.tokens)
            self.text += b"".join(token.piece for token in event.tokens if not token.special)
        elif isinstance(event, Failed):
            self.failure = event.error
            self.ended.set()
        elif isinstance(event, Finished):
            self.ended.set()

    def stalled_s(self, now: float) -> float:
        """Nothing ever waits."""
        del now
        return 0.0


@dataclass(frozen=True)
class Direct:
    """One generation: seconds from submit to the end, and the text without tags."""

    seconds: float
    text: str


class DirectBackend:
    """The CPU backend, its checkpoint and its tokenizer.

    Mode `exact` with experts in process is the fastest way to call the engine on this device: no lane but the caller's own thread.

    Args:
        lane: mode `fast` with a cpu_expert process instead, as `glm53 serve` has it.
    """

    def __init__(self, *, lane: bool = False) -> None:
        self._shm = tempfile.TemporaryDirectory(prefix="glm53-direct-", dir="/dev/shm")
        place = {"GLM53_INSTANCE": "direct", "GLM53_SHM_DIR": self._shm.name}
        how = ("fast", "shm") if lane else ("exact", "in_process")
        self.settings = GpuWorkerSettings.load({"GLM53_MODE": how[0], "GLM53_EXPERT_BACKEND": how[1], **place})
        self.checkpoint = Checkpoint(Path(self.settings.model_dir))
        self.backend = cpu.load(self.settings, self.checkpoint, lambda _fraction, _what: None)
        self._cpu_expert = _cpu_expert(place) if lane else None
        if lane:
            self._wait_for_lane()

    def _wait_for_lane(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.backend.stats()["lane"]["state"] != "UP":
            if time.monotonic() > deadline:
                self.close()
                raise SystemExit("cpu_expert did not attach")
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the backend and cpu_expert, and removes the arena."""
        if self._cpu_expert is not None:
            self._cpu_expert.terminate()
            self._cpu_expert.wait(30)
        self.backend.close()
        self._shm.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _cpu_expert(place: dict[str, str]) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GLM53_")}
    env = {**clean, **place, "GLM53_LOG_LEVEL": "warning"}
    return subprocess.Popen([sys.executable, "-m", "services.cpu_expert"], cwd=report.ROOT, env=env)


class DirectEngine:
    """The engine loop over `DirectBackend`, in a thread as in the worker. `lane` as there."""

    def __init__(self, *, lane: bool = False) -> None:
        self._direct = DirectBackend(lane=lane)
        checkpoint, settings = self._direct.checkpoint, self._direct.settings
        tokens = TokenTable.from_file(checkpoint.path / "tokenizer.json", checkpoint.config.vocab_size)
        tokenizer = PromptTokenizer((checkpoint.path / "tokenizer.json").read_bytes())
        self._template = ChatTemplate((checkpoint.path / "chat_template.jinja").read_text(), tokenizer)
        limits = EngineLimits(settings.max_queued, settings.chunk_size)
        eos = frozenset(checkpoint.config.eos_token_ids)
        self._engine = EngineLoop(self._direct.backend, tokens, eos, limits, EngineMetrics())
        self._thread = threading.Thread(target=self._engine.run_forever, daemon=True)
        self._thread.start()
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._engine.stop()
        self._thread.join(10)
        self._direct.close()

    def generate(self, messages: list[dict[str, Any]], tokens: int) -> Direct:
        """Greedy generation of exactly `tokens` tokens."""
        prompt = self._template.prompt(messages, [], Thinking("max"))
        self._number += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        sink = Collector()
        began = time.monotonic()
        self._engine.submit(Request(RequestSpec(f"direct-{self._number}", tuple(prompt.token_ids), sampling), sink))
        if not sink.ended.wait(TIMEOUT_S) or sink.failure is not None or sink.tokens != tokens:
            raise SystemExit(f"the engine called directly failed: {sink.failure or sink.tokens}")
        return Direct(time.monotonic() - began, sink.text.decode(errors="replace"))
