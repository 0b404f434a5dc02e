"""What a model takes of host memory and VRAM, and whether this machine has it: decided from file headers, before anything slow begins.

The sizes of key-value cache and recurrent states are those of exllamav3 1.5.1's cache layers. Activations are not in the plan: what is left
free of VRAM after the warm-up, less the reserve, becomes slots. Where slots lend memory to long prefills, activations are part of what is
left: a prefill has it while it runs.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels.python import segments
from kernels.python.expert import ExpertShape
from services.common import memory, shm_room
from services.common.errors import ConfigError
from services.gpu_worker.checkpoint import TEXT_PREFIX, Checkpoint
from services.gpu_worker.model_config import TextConfig
from services.gpu_worker.settings import GpuWorkerSettings

MIB, GIB = 1 << 20, 1 << 30
LEAST_VRAM_MIB = 23_000
# CUDA's context, torch, exllamav3, Python and cpu_expert in host memory, beside the records and the embedding. All of them took 3.24 GiB at
# full size (docs/results/gpu_full_size.json), the embedding 1.2 of it: what is planned must not be less than what is taken.
HOST_BYTES = 3 * GIB
_KDA_STATE_BYTES, _HALF = 4, 2  # fp32 state; fp16 or bf16 everything else


@dataclass(frozen=True)
class Need:
    """What the model takes, in bytes.

    Attributes:
        arena: records of all routed experts, in shared memory, pinned.
        host: the embedding, which exllamav3 keeps there, and the processes themselves.
        weights: everything else of the text model, in VRAM.
        cache: keys and values of GLM53_CACHE_TOKENS tokens.
        states: recurrent states of GLM53_MAX_STREAMS streams.
        reserve: VRAM that slots leave free.
        slot: one expert in VRAM.
        records: experts.
        kept: host memory for states of earlier prompts; 0 where not one fits into GLM53_PREFIX_CACHE_MB.
        elastic: VRAM of slots that may be lent to a long prefill.
    """

    arena: int
    host: int
    weights: int
    cache: int
    states: int
    reserve: int
    slot: int
    records: int
    kept: int = 0
    elastic: int = 0

    @property
    def vram(self) -> int:
        """Without slots."""
        return self.weights + self.cache + self.states + self.reserve


@dataclass(frozen=True)
class Machine:
    """What there is, in bytes.

    Attributes:
        vram_total, vram_free: of the GPU.
        memory: what this process can still get of host memory.
        shm: free in the file system of shared memory.
        memlock: limit on locked memory; None for no limit.
        arena_there: bytes of an arena that an earlier worker left; they are taken over or given back first.
        shm_dir: where shared memory is.
    """

    vram_total: int
    vram_free: int
    memory: int
    shm: int
    memlock: int | None
    arena_there: int = 0
    shm_dir: str = "/dev/shm"


def need_of(checkpoint: Checkpoint, shapes: Sequence[ExpertShape], settings: GpuWorkerSettings) -> Need:
    """What a checkpoint takes with these settings. Only headers are looked at."""
    config = checkpoint.config
    stride = max(shape.record_bytes for shape in shapes)
    records = len(shapes) * config.n_routed_experts
    embedding = TEXT_PREFIX + "embed_tokens.weight"
    in_vram = [name for name in checkpoint.files.names if _on_gpu(name, config) and name != embedding]
    return Need(
        arena=stride * records,
        host=HOST_BYTES + checkpoint.files.entry(embedding).num_bytes,
        weights=sum(checkpoint.files.entry(name).num_bytes for name in in_vram),
        cache=cache_bytes(config, settings.cache_tokens),
        states=state_bytes(config, settings.max_streams),
        reserve=int(settings.ec_reserve_gb * GIB),
        slot=stride,
        records=records,
        kept=settings.prefix_cache_mb * MIB if state_bytes(config, 1) <= settings.prefix_cache_mb * MIB else 0,
        elastic=int(settings.ec_elastic_gb * GIB),
    )


def _on_gpu(name: str, config: TextConfig) -> bool:
    """True for a tensor of the text model that is no routed expert's; no vision tower and no prediction head is loaded."""
    if not name.startswith(TEXT_PREFIX):
        return name.startswith("lm_head.")
    layer = name.removeprefix(TEXT_PREFIX + "layers.").partition(".")[0]
    return ".mlp.experts." not in name and not (layer.isdigit() and int(layer) >= config.num_hidden_layers)


def cache_bytes(config: TextConfig, tokens: int) -> int:
    """Latents, indexer keys with their gates, and pooled keys of every layer with attention, fp16."""
    layers = sum(kind != "linear_attention" for kind in config.layer_types)
    per_token = config.kv_lora_rank + 2 * config.index_head_dim + config.index_head_dim / config.index_kpool
    return int(layers * tokens * per_token * _HALF)


def state_bytes(config: TextConfig, streams: int) -> int:
    """State and convolution window of every linear-attention layer and stream."""
    layers = sum(kind == "linear_attention" for kind in config.layer_types)
    heads, dim = config.linear_num_heads, config.linear_head_dim
    return layers * streams * (heads * dim * dim * _KDA_STATE_BYTES + 3 * heads * dim * config.linear_conv_kernel_dim * _HALF)


def kept_states(state: int, prefix_cache_mb: int) -> str:
    """How many states of earlier prompts GLM53_PREFIX_CACHE_MB holds, in words.

    Args:
        state: bytes of one.
    """
    each = f"one takes {state / MIB:.1f} MiB"
    if not prefix_cache_mb:
        return f"kept states: none (GLM53_PREFIX_CACHE_MB=0; {each})"
    if state > prefix_cache_mb * MIB:
        return f"kept states: none, GLM53_PREFIX_CACHE_MB={prefix_cache_mb} is less than one ({each}): every turn computes its whole prompt"
    count = f"at most {prefix_cache_mb * MIB // state}" if state else "as many as there are pages"
    return f"kept states: {count} (GLM53_PREFIX_CACHE_MB={prefix_cache_mb}; {each})"


def read_machine(settings: GpuWorkerSettings, vram_free: int, vram_total: int) -> Machine:
    """This machine now."""
    seen = memory.read()
    shm = os.statvfs(settings.shm_dir)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        there = os.stat(segments.arena_path(settings.shm_dir, settings.instance)).st_size
    except OSError:
        there = 0
    return Machine(
        vram_total,
        vram_free,
        min(seen.host_available, seen.limit - seen.used) if seen.capped else seen.host_available,
        shm.f_bavail * shm.f_frsize,
        None if soft in (resource.RLIM_INFINITY, -1) else soft,
        there,
        settings.shm_dir,
    )


def lines(need: Need, machine: Machine) -> Iterator[str]:
    """The plan for people, one fact a line."""
    fit = max(0, (machine.vram_free - need.vram) // need.slot)
    slots = min(fit, need.records)
    yield (
        f"host memory: {_gib(need.arena)} records of {need.records} experts (pinned), {_gib(need.host)} beside them, "
        f"{_gib(need.kept)} for kept states; "
        f"{_gib(machine.memory + machine.arena_there)} can be had, {_gib(machine.shm + machine.arena_there)} of it in shared memory"
    )
    yield (
        f"VRAM: {_gib(need.weights)} weights, {_gib(need.cache)} key-value cache, {_gib(need.states)} recurrent states, "
        f"{_gib(need.reserve)} reserve; {_gib(machine.vram_free)} of {_gib(machine.vram_total)} are free"
    )
    yield f"slots: at most {slots} of {need.records} experts, {need.slot / MIB:.1f} MiB each, {_activations(need, slots)}"


def _activations(need: Need, slots: int) -> str:
    """Where the activations of a prefill find room."""
    if not need.elastic or slots >= need.records:
        return "before activations"
    return f"of which a long prefill is lent what it needs, at most {_gib(min(need.elastic, slots * need.slot))} (GLM53_EC_ELASTIC_GB)"


def refuse(need: Need, machine: Machine, *, forced: bool) -> None:
    """Raises when the machine cannot hold the plan.

    Args:
        forced: GLM53_FORCE_VRAM: a small GPU is tried.

    Raises:
        ConfigError: names what is short, both figures, and what to change; the plan is part of the message.
    """
    problem, param = _problem(need, machine, forced=forced)
    if problem:
        raise ConfigError("; ".join([problem, *(f"plan: {line}" for line in lines(need, machine))]), param=param)


def _problem(need: Need, machine: Machine, *, forced: bool) -> tuple[str, str]:
    memory_there, shm = machine.memory + machine.arena_there, machine.shm + machine.arena_there
    total_mib = machine.vram_total // MIB
    if total_mib < LEAST_VRAM_MIB and not forced:
        return (
            f"the GPU has {total_mib} MiB of VRAM, {LEAST_VRAM_MIB} are needed: use a larger one, or try with GLM53_FORCE_VRAM=1",
            "GLM53_FORCE_VRAM",
        )
    if need.vram + need.slot > machine.vram_free:
        return (
            f"{_gib(machine.vram_free)} of VRAM are free, {_gib(need.vram + need.slot)} are needed with a single expert: end what else "
            "uses the GPU, or lower GLM53_CACHE_TOKENS, GLM53_MAX_STREAMS or GLM53_EC_RESERVE_GB",
            "GLM53_CACHE_TOKENS",
        )
    if need.arena > shm:
        found = shm_room.too_small(machine.shm_dir, shm, need.arena)
        return f"{found}. {shm_room.how_to_enlarge(machine.shm_dir, need.arena).rstrip('.')}", "GLM53_SHM_DIR"
    if need.arena + need.host + need.kept > memory_there:
        return (
            f"{_gib(memory_there)} of host memory can be had, {_gib(need.arena + need.host + need.kept)} are needed: free memory, "
            "raise the limit, or lower GLM53_PREFIX_CACHE_MB",
            "GLM53_SHM_DIR",
        )
    return "", ""


def memlock_warning(need: Need, machine: Machine) -> str:
    """What to say about the limit on locked memory, or "". Whether a driver's pins count to it differs between systems: no refusal."""
    if machine.memlock is None or machine.memlock >= need.arena:
        return ""
    return (
        f"the limit on locked memory is {_gib(machine.memlock)}, {_gib(need.arena)} are about to be pinned: if the driver refuses, "
        "raise it (ulimit -l unlimited; ulimits: memlock: -1 in compose; LimitMEMLOCK=infinity in a unit)"
    )


def _gib(number: int) -> str:
    return f"{number / GIB:.2f} GiB" if number < 100 * GIB else f"{number / GIB:.1f} GiB"
