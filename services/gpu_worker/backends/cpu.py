"""The backend of a machine without a GPU: the dense model and the worker's own expert lane on the CPU, the tier engine in between.

The tiers are real: slots are private copies that the worker computes from, and in `fast` mode at least one miss per layer step goes to the
cpu_expert process. Only the device differs from a GPU build.
"""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from kernels.python import host, segments, text_ops
from kernels.python._layout import ABI_VERSION
from kernels.python.arena import Arena
from kernels.python.errors import KernelError, ShmInUse, ShmNoSpace, TierTimeout
from kernels.python.expert import ExpertShape, kernel_info
from kernels.python.region import Region
from kernels.python.tier import TierEngine
from services.common import memory, own_file, shm_room
from services.common.errors import ConfigError
from services.gpu_worker.backends import arena_check, arena_fill, cpu_arena, cpu_weights
from services.gpu_worker.backends.arena_check import ArenaCheck
from services.gpu_worker.backends.base import BackendInfo, BackendLostError, Logits, Snapshot, Stream, VerifyReport, prefill_apart
from services.gpu_worker.backends.cpu_model import CpuTextModel, RoutedExperts
from services.gpu_worker.backends.cpu_state import StateShape, StreamState
from services.gpu_worker.backends.exl3 import heat_file
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.model_config import TextConfig
from services.gpu_worker.settings import GpuWorkerSettings

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 16_384
Note = Callable[[float, str], None]


@dataclass
class Tiers:
    """What the backend holds for the routed experts."""

    engine: TierEngine
    arena: Arena
    region: Region | None
    check: ArenaCheck | None = None  # of a re-attached arena

    def close(self, *, unlink: bool) -> None:
        """Ends the engine. The arena's name stays unless `unlink`: a restarted worker takes it over."""
        if self.check is not None:
            self.check.close()
        self.engine.close()
        if self.region is not None:
            self.region.unlink()
            self.region.close()
        if unlink:
            self.arena.unlink()
        self.arena.close()


class CpuBackend:
    """`Backend` on the CPU.

    Args:
        model: the forward pass.
        shape: sizes of a stream's state.
        info: the facts.
        tiers: the routed experts, or None when `model` got its experts elsewhere (tests).
    """

    def __init__(self, model: CpuTextModel, shape: StateShape, info: BackendInfo, tiers: Tiers | None) -> None:
        self.info = info
        self._model = model
        self._shape = shape
        self._tiers = tiers
        self._open: dict[int, StreamState] = {}

    @property
    def progress(self) -> int:
        """Layers computed."""
        return self._model.progress

    @property
    def streams_free(self) -> int:
        """Streams that can be opened."""
        return self.info.max_streams - len(self._open)

    @property
    def memory_tokens(self) -> tuple[int, int]:
        """(tokens held, tokens reserved)."""
        streams = self._open.values()
        return sum(s.length for s in streams), sum(s.capacity for s in streams)

    def fits(self, num_tokens: int) -> bool:
        """True while streams are free: each has memory of its own, which grows with it."""
        del num_tokens
        return self.streams_free > 0

    def open_stream(self, snapshot: Snapshot | None = None) -> StreamState:
        """Opens an empty stream, or one that continues a snapshot."""
        if self.streams_free <= 0:
            raise RuntimeError(f"all {self.info.max_streams} streams are open")
        state = StreamState(self._shape) if snapshot is None else cast("StreamState", snapshot).copy()
        self._open[id(state)] = state
        return state

    def extend(self, stream: Stream, num_tokens: int) -> bool:
        """True: passes make room themselves."""
        del stream, num_tokens
        return True

    def snapshot(self, stream: Stream) -> StreamState:
        """A copy of the stream's state."""
        return cast("StreamState", stream).copy()

    def close_stream(self, stream: Stream) -> None:
        """Gives the stream's memory back."""
        del self._open[id(stream)]

    def prefill(self, stream: Stream, token_ids: Sequence[int], *, all_logits: bool) -> Logits:
        """Appends a chunk of prompt."""
        return self._forward([stream], [token_ids], prefill=True, all_logits=all_logits)

    def prefill_joined(
        self, stream: Stream, token_ids: Sequence[int], tail: Sequence[int], *, keep: bool
    ) -> tuple[Logits, Snapshot | None]:
        """Appends a chunk of prompt and the tail behind it, in two passes: nothing is staged for them."""
        return prefill_apart(self, stream, token_ids, tail, keep=keep)

    def decode(self, streams: Sequence[Stream], token_ids: Sequence[int]) -> Logits:
        """Appends one token to each stream."""
        return self._forward(streams, [[token] for token in token_ids], prefill=False, all_logits=False)

    def _forward(self, streams: Sequence[Stream], token_ids: Sequence[Sequence[int]], *, prefill: bool, all_logits: bool) -> Logits:
        states = cast("Sequence[StreamState]", streams)
        if self._tiers is not None and self._tiers.check is not None:
            self._tiers.check.refuse_lost()
        try:
            return self._model.forward(states, token_ids, prefill=prefill, all_logits=all_logits)
        except TierTimeout as error:
            raise BackendLostError(f"the tier engine does not answer: {error}") from error

    def check_idle(self) -> None:
        """Raises RuntimeError when a stream is still open although none should be."""
        if self._open:
            raise RuntimeError(f"{len(self._open)} streams are open although no request runs: their memory leaked")

    def stats(self) -> dict[str, Any]:
        """The tier engine's counters, and those of the check of a re-attached arena."""
        if self._tiers is None:
            return {}
        return arena_check.count_in(self._tiers.engine.stats(), self._tiers.check)

    def verify(self) -> VerifyReport:
        """Re-reads every record and slot."""
        if self._tiers is None:
            return VerifyReport(0, 0, 0, 0)
        report = self._tiers.engine.verify()
        return VerifyReport(report["records"], len(report["bad_records"]), report["slots"], len(report["bad_slots"]))

    def close(self) -> None:
        """Ends threads; the arena stays for the next worker, `glm53 serve` removes it at the end."""
        if self._tiers is not None:
            self._tiers.close(unlink=False)
            self._tiers = None


def load(settings: GpuWorkerSettings, checkpoint: Checkpoint, note: Note, device_reason: str = "asked for") -> CpuBackend:
    """Loads a checkpoint, records first.

    Args:
        settings: the worker's settings.
        checkpoint: opened.
        note: called with a fraction 0..1 and what is being loaded.
        device_reason: why the CPU computes.

    Raises:
        CheckpointError: names tensor and file.
        ConfigError: a setting does not fit the checkpoint or the machine.
    """
    mode, mode_reason = resolve_mode(settings.mode)
    max_context = resolve_context(settings.context_tokens, checkpoint.config)
    check_heat_file(settings.heat_file)
    note(0.0, "checking the experts")
    shapes = cpu_arena.expert_shapes(checkpoint)
    arena, arena_reason = open_arena(settings, checkpoint, shapes, lambda f, what: note(0.1 + 0.5 * f, what))
    weights = cpu_weights.load(checkpoint, lambda f, what: note(0.6 + 0.3 * f, what))
    note(0.9, "starting the tier engine")
    tiers = _tiers(settings, checkpoint.config, arena, mode)
    if arena.reattached:
        tiers.check = arena_check.of_checkpoint(arena, checkpoint, shapes, tiers.engine.repair)
        tiers.check.start()
    kernel, stats = kernel_info(), tiers.engine.stats()
    info = BackendInfo(
        vocab_size=checkpoint.config.vocab_size,
        max_context=max_context,
        max_streams=settings.max_streams,
        device="cpu",
        device_reason=f"{device_reason}; dense operations use {text_ops.isa()}",
        mode=mode,
        mode_reason=mode_reason,
        kernel_variant=str(stats["kernel"]),
        kernel_reason=str(stats["kernel_reason"]),
        arithmetic_version=kernel.arithmetic_version,
        abi_version=ABI_VERSION,
        arena=arena_reason,
    )
    model = CpuTextModel(weights, tiers.engine, max(settings.chunk_size, settings.max_streams))
    return CpuBackend(model, StateShape.of(weights, max_context), info, tiers)


def load_without_tiers(
    checkpoint: Checkpoint, experts: RoutedExperts, *, max_context: int, max_streams: int, chunk_size: int
) -> CpuBackend:
    """The same model with experts from elsewhere: no shared memory, no other process."""
    weights = cpu_weights.load(checkpoint, lambda _fraction, _what: None)
    kernel = kernel_info()
    info = BackendInfo(
        checkpoint.config.vocab_size,
        max_context,
        max_streams,
        device="cpu",
        device_reason="no tiers",
        mode="exact",
        mode_reason="no tiers",
        kernel_variant=kernel.variant,
        kernel_reason=kernel.reason,
        arithmetic_version=kernel.arithmetic_version,
        abi_version=0,
        arena="none",
    )
    model = CpuTextModel(weights, experts, max(chunk_size, max_streams))
    return CpuBackend(model, StateShape.of(weights, max_context), info, None)


def resolve_mode(mode: str) -> tuple[Literal["fast", "exact"], str]:
    """The mode that is served, and why.

    Raises:
        ConfigError: a mode that this build does not have.
    """
    if mode == "auto":
        return "fast", "auto: all records fit into memory"
    if mode in ("fast", "exact"):
        return cast('Literal["fast", "exact"]', mode), "asked for"
    raise ConfigError(f"GLM53_MODE={mode} is not in this version: use auto, fast or exact", param="GLM53_MODE")


def resolve_context(asked: int, config: TextConfig) -> int:
    """Most tokens of a stream.

    Raises:
        ConfigError: more than the model has, or than its attention covers without selecting keys.
    """
    limit, name = min((config.max_position_embeddings, "max_position_embeddings"), (config.index_topk, "index_topk"))
    if asked > limit:
        raise ConfigError(
            f"GLM53_CONTEXT_TOKENS={asked} is more than the checkpoint's {name} {limit}: lower it", param="GLM53_CONTEXT_TOKENS"
        )
    return asked or min(DEFAULT_CONTEXT, limit)


def open_arena(settings: GpuWorkerSettings, checkpoint: Checkpoint, shapes: list[ExpertShape], note: Note) -> tuple[Arena, str]:
    """The arena with every record in it, and how it came about.

    Records that an earlier worker of the same checkpoint left are taken over as they are: their tensors were checked when they were read.
    """
    path = segments.arena_path(settings.shm_dir, settings.instance)
    left = os.path.exists(path)
    if not left:
        cpu_arena.check_experts(checkpoint)
    try:
        # All of the arena's pages are taken when it is made.
        with host.memory_on(settings.ct_numa_node) as placed:
            arena = Arena.attach_or_create(path, shapes, checkpoint.config.n_routed_experts, checkpoint.hash)
    except host.NoSuchNodeError as error:
        raise ConfigError(f"GLM53_CT_NUMA_NODE={settings.ct_numa_node}: {error}", param="GLM53_CT_NUMA_NODE") from error
    except ShmNoSpace as error:
        raise _too_small(settings, records_bytes(shapes, checkpoint.config)) from error
    except ShmInUse as error:
        raise ConfigError(f"another worker serves instance {settings.instance!r}: {error}", param="GLM53_INSTANCE") from error
    except (KernelError, OSError) as error:
        raise ConfigError(f"GLM53_SHM_DIR={settings.shm_dir} cannot hold the expert records: {error}", param="GLM53_SHM_DIR") from error
    if placed:
        log.info("GLM53_CT_NUMA_NODE=%d: %s", settings.ct_numa_node, placed)
    if arena.reattached:
        return arena, "re-attached: the records of an earlier worker are still in shared memory"
    try:
        if left:
            cpu_arena.check_experts(checkpoint)
        arena_fill.fill(checkpoint, shapes, arena, note, threads=settings.load_threads, keep_cached=_files_fit(arena))
        arena.seal()
    except BaseException:
        # A half-filled arena has no name yet; closing gives its memory back.
        arena.close()
        raise
    return arena, f"loaded: {arena.note}" if arena.note else "loaded: no records in shared memory"


def records_bytes(shapes: Sequence[ExpertShape], config: TextConfig) -> int:
    """What all expert records take in shared memory."""
    return sum(int(shape.record_bytes) for shape in shapes) * config.n_routed_experts


def _too_small(settings: GpuWorkerSettings, need_bytes: int, there_bytes: int = 0) -> ConfigError:
    """The refusal; `there_bytes` of what is needed are taken already."""
    room = os.statvfs(settings.shm_dir)
    found = shm_room.too_small(settings.shm_dir, room.f_bavail * room.f_frsize + there_bytes, need_bytes)
    return ConfigError(f"GLM53_SHM_DIR: {found}. {shm_room.how_to_enlarge(settings.shm_dir, need_bytes)}", param="GLM53_SHM_DIR")


def _files_fit(arena: Arena) -> bool:
    """True when the system can keep the files' pages too, for the next start; the arena's own memory is taken already."""
    return memory.read().host_available > arena.total_bytes


def _tiers(settings: GpuWorkerSettings, config: TextConfig, arena: Arena, mode: Literal["fast", "exact"]) -> Tiers:
    shared = settings.expert_backend == "shm" and mode == "fast"
    region = None
    if shared:
        try:
            region = Region.create(segments.ctl_path(settings.shm_dir, settings.instance), arena, top_k=config.num_experts_per_tok)
        except ShmNoSpace as error:
            raise _too_small(settings, arena.total_bytes, arena.total_bytes) from error
        except KernelError as error:
            raise ConfigError(f"GLM53_SHM_DIR={settings.shm_dir} cannot hold the control region: {error}", param="GLM53_SHM_DIR") from error
    try:
        engine = TierEngine(
            arena,
            region,
            mode=mode,
            num_slots=settings.ec_max_slots or None,
            backend=settings.expert_backend,
            variant=settings.ct_isa,
            threads=settings.backend_threads,
            admit_after=settings.ec_admit_after,
            ct_timeout_ms=settings.ct_timeout_ms,
            heat_file=settings.heat_file or None,
            ct_a_us=settings.ct_a,
            ct_b_us=settings.ct_b,
            ct_tzc_us=settings.ct_tzc,
        )
    except ValueError as error:
        raise ConfigError(f"the tier engine refuses its settings: {error}", param="GLM53_EC_MAX_SLOTS") from error
    if note := engine.stats()["heat_note"]:
        log.warning("the cache starts cold: %s", note)
    return Tiers(engine, arena, region)


def check_heat_file(name: str) -> None:
    """Refuses a place where heat could never be saved, or where something else lies; a file that is not there yet is fine.

    Raises:
        ConfigError: says what is wrong with the place, or what lies there.
    """
    if not name:
        return
    path = pathlib.Path(name)
    folder = pathlib.Path(os.path.realpath(path)).parent  # of what a link leads to: that is what is replaced
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = "a folder" if path.is_dir() else "in a folder that does not exist or cannot be written"
        raise ConfigError(f"GLM53_HEAT_FILE={name} is {problem}: name a file in a folder of this user", param="GLM53_HEAT_FILE")
    own_file.refuse_another("GLM53_HEAT_FILE", path, heat_file.is_heat, heat_file.KIND)
